"""Jaxpr -> tails: where each gradient is formed, and what follows.

In: a flat Jaxpr, the outputs that are gradients, the inputs that depend on the example.
Out: the tails. A tail starts at a contraction of two values that depend on the example, or at another step that makes a
gradient larger than what it is made of. It follows these to the gradients, through steps that bring in nothing more
from the example. Everything else is the body.

    s (T×D), r (T×E)  ──>  [ dot_general, transpose ]  ──>  g (D×E)
    └── inputs: the frontier    └── equations                └── outputs

The whole backward pass reaches nothing but gradients. What ends a tail, going backwards, is a step that multiplies by
something else of the example: an activation.
"""

import collections
import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pegprof.engine.facts import facts_of, is_zero, known, permutes
from pegprof.engine.jaxpr import (
    Atom,
    ClosedJaxpr,
    Env,
    Jaxpr,
    JaxprEqn,
    Literal,
    Rule,
    Var,
    barrier_p,
    bind,
    dtype_of,
    primitives,
    pvary_p,
    size_of,
    source_of,
    variables,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tail:
    """Equations that form gradients, the values that they take in, and the gradients that come out."""

    equations: tuple[JaxprEqn, ...]
    starts: tuple[JaxprEqn, ...]
    inputs: tuple[Var, ...]
    outputs: tuple[Atom, ...]
    depends: tuple[bool, ...]  # for each input: may it depend on the example

    prelude: tuple[JaxprEqn, ...] = ()  # recomputes operands of the equations from the inputs
    grows: bool = False  # with no equations: whether the body made the gradients larger than what they are made from
    zeros: frozenset[Var] = frozenset()  # the inputs that are known to be all zeros

    def starts_with(self, eqn: JaxprEqn) -> bool:
        return any(eqn is start for start in self.starts)

    def run(self, *inputs: Any, rule: Rule = bind) -> list[Any]:
        """The gradients of one example; the equations after the prelude are applied by ``rule``."""
        env = Env()
        env.write(self.inputs, inputs)
        env.run(self.prelude)
        env.run(self.equations, rule)
        return env.read(self.outputs)

    def part_that_makes(self, atoms: Sequence[Atom]) -> "Tail":
        """The part of the tail that makes some values. They are its outputs, and it takes in nothing else."""
        equations = leading_to(self.equations, atoms)
        made = {v for eqn in equations for v in eqn.outvars}
        taken = [v for v in variables([*(v for eqn in equations for v in eqn.invars), *atoms]) if v not in made]
        prelude = leading_to(self.prelude, taken)
        needed = {*taken, *(v for eqn in prelude for v in variables(eqn.invars))}
        inputs = [(v, depends) for v, depends in zip(self.inputs, self.depends, strict=True) if v in needed]
        return dataclasses.replace(
            self,
            equations=tuple(equations),
            starts=tuple(eqn for eqn in equations if self.starts_with(eqn)),
            inputs=tuple(v for v, _ in inputs),
            outputs=tuple(atoms),
            depends=tuple(depends for _, depends in inputs),
            prelude=tuple(prelude),
        )


def leading_to(equations: Sequence[JaxprEqn], atoms: Iterable[Atom]) -> list[JaxprEqn]:
    """The equations that some values come from, in order."""
    needed: set[Atom] = set(variables(atoms))
    found = []
    for eqn in reversed(equations):
        if needed.intersection(eqn.outvars):
            needed.update(variables(eqn.invars))
            found.append(eqn)
    return found[::-1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """A scan equation, its parts named."""

    eqn: JaxprEqn
    body: ClosedJaxpr
    num_consts: int
    num_carry: int
    depends: tuple[bool, ...]  # for each input of the body: may it depend on the example

    @classmethod
    def of(cls, eqn: JaxprEqn, dependent: set[Var]) -> "Loop":
        consts, carry = eqn.params["num_consts"], eqn.params["num_carry"]
        takes = [not isinstance(v, Literal) and v in dependent for v in eqn.invars]
        return cls(
            eqn=eqn,
            body=eqn.params["jaxpr"],
            num_consts=consts,
            num_carry=carry,
            # What a carry starts from says nothing of what it becomes: one input of the example may reach them all.
            depends=(*takes[:consts], *[any(takes)] * carry, *takes[consts + carry :]),
        )

    @property
    def length(self) -> int:
        return self.eqn.params["length"]

    def split_inputs(self, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Constants, initial carries and scanned inputs."""
        at, end = self.num_consts, self.num_consts + self.num_carry
        return list(values[:at]), list(values[at:end]), list(values[end:])

    def scan(self, step: Callable[[Any, Any], Any], init: Any, xs: Any) -> Any:
        params = {name: self.eqn.params[name] for name in ("length", "reverse", "unroll")}
        with source_of(self.eqn):
            return jax.lax.scan(step, init, xs, **params)


def example_dependent(jaxpr: Jaxpr, depends: Sequence[bool]) -> set[Var]:
    """The variables that may differ between examples, given which inputs do."""
    found = {v for v, d in zip(jaxpr.invars, depends, strict=True) if d}
    for eqn in jaxpr.eqns:
        if eqn.primitive is barrier_p:  # it holds its operands together, but mixes none with another
            found.update(
                out for v, out in zip(eqn.invars, eqn.outvars, strict=True) if isinstance(v, Var) and v in found
            )
        elif any(v in found for v in variables(eqn.invars)):
            found.update(eqn.outvars)
    return found


def count_uses(jaxpr: Jaxpr) -> collections.Counter[Var]:
    """How often each variable is read, by equations and as an output."""
    uses = collections.Counter(v for eqn in jaxpr.eqns for v in variables(eqn.invars))
    uses.update(variables(jaxpr.outvars))
    return uses


def makers(equations: Iterable[JaxprEqn]) -> dict[Var, JaxprEqn]:
    """The equation that makes each variable."""
    return {v: eqn for eqn in equations for v in eqn.outvars}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Permuted:
    """A gradient that is another variable with its entries permuted: ``output = steps(source)``."""

    output: int
    source: Var
    steps: tuple[JaxprEqn, ...]


def find_permuted(jaxpr: Jaxpr, gradients: Iterable[int]) -> list[Permuted]:
    """Each gradient's origin: back over steps that only permute entries, as long as nothing else uses them."""
    made_by, uses = makers(jaxpr.eqns), count_uses(jaxpr)
    found = []
    for i in gradients:
        source: Atom = jaxpr.outvars[i]
        steps: list[JaxprEqn] = []
        while not isinstance(source, Literal) and uses[source] == 1 and source in made_by:
            eqn = made_by[source]
            if not permutes(eqn) or isinstance(eqn.invars[0], Literal):
                found.append(Permuted(output=i, source=source, steps=tuple(reversed(steps))))
                break
            steps.append(eqn)
            source = eqn.invars[0]
    return found


def find_tails(jaxpr: Jaxpr, gradients: Collection[int], depends: Sequence[bool]) -> list[Tail]:
    """The tails of a flat Jaxpr whose outputs at the positions ``gradients`` are gradients."""
    dependent = example_dependent(jaxpr, depends)
    outside = outside_tails(jaxpr, gradients, dependent)
    members = _tail_equations(jaxpr, outside, dependent)
    outputs = {v for i in gradients for v in variables([jaxpr.outvars[i]])}
    zeros = zeros_of(jaxpr)
    tails = [_make_tail(group, outputs, dependent, zeros) for group in _connected(jaxpr, members)]
    # A kernel that nobody needs may be left, where JAX does not know how to remove it: it forms no gradient.
    return [tail for tail in tails if tail.outputs]


def zeros_of(jaxpr: Jaxpr) -> set[Var]:
    """The variables that are arrays of zeros, whatever the inputs."""
    zeros: set[Var] = set()
    for eqn in jaxpr.eqns:
        if known(eqn) in (primitives.broadcast_in_dim_p, pvary_p):
            (x,) = eqn.invars
            if is_zero(x) or (isinstance(x, Var) and x in zeros):
                zeros.update(eqn.outvars)
    return zeros


def outside_tails(jaxpr: Jaxpr, gradients: Collection[int], dependent: set[Var]) -> set[Var]:
    """The variables that no tail may make: something else than gradients comes of them, or a step is not a tail's."""
    outside = {v for i, out in enumerate(jaxpr.outvars) if i not in gradients for v in variables([out])}
    for eqn in reversed(jaxpr.eqns):
        if not _may_join_tail(eqn, outside) or not _brings_in_nothing(eqn, dependent):
            outside.update(variables(eqn.invars))
    return outside


def _may_join_tail(eqn: JaxprEqn, outside: set[Var]) -> bool:
    is_loop = eqn.primitive in (primitives.scan_p, primitives.while_p)
    return not (eqn.effects or is_loop or any(v in outside for v in eqn.outvars))


def _brings_in_nothing(eqn: JaxprEqn, dependent: set[Var]) -> bool:
    """Whether an equation takes nothing of the example but the value it continues, and indices, masks and keys."""
    factors = {v for v in variables(eqn.invars) if v in dependent and is_number(v)}
    return len(factors) <= 1 or facts_of(eqn).joins


def is_number(atom: Atom) -> bool:
    """Whether a value is one that gradients are made of: not an index, a mask or a key."""
    return bool(jnp.issubdtype(dtype_of(atom), jnp.inexact))


def grows(eqn: JaxprEqn, dependent: set[Var], outputs: Iterable[Var]) -> bool:
    """Whether some of an equation's results are larger than all it takes from the example.

    A broadcast is not: XLA never stores its result.
    """
    taken = {v for v in variables(eqn.invars) if v in dependent}
    larger = sum(map(size_of, outputs)) > sum(map(size_of, taken))
    return larger and eqn.primitive is not primitives.broadcast_in_dim_p


def _is_start(eqn: JaxprEqn, dependent: set[Var]) -> bool:
    taken = [v for v in variables(eqn.invars) if v in dependent]
    if facts_of(eqn).contracts:
        return len(taken) >= 2
    return bool(taken) and grows(eqn, dependent, eqn.outvars)  # a lookup's scatter-add, a slice's padding, a cond


def _tail_equations(jaxpr: Jaxpr, outside: set[Var], dependent: set[Var]) -> dict[int, bool]:
    """Positions of the equations in tails, and whether each is a start."""
    members: dict[int, bool] = {}
    made: set[Var] = set()
    for i, eqn in enumerate(jaxpr.eqns):
        if not _may_join_tail(eqn, outside):
            continue
        follows = any(v in made for v in variables(eqn.invars))
        if follows or _is_start(eqn, dependent):
            members[i] = not follows
            made.update(eqn.outvars)
    return members


def _connected(jaxpr: Jaxpr, members: dict[int, bool]) -> list[list[tuple[JaxprEqn, bool]]]:
    """Tail equations grouped by the values they share: gradients of one contraction belong together."""
    group_of: dict[Var, int] = {}
    groups: dict[int, list[int]] = {}
    for i in members:
        eqn = jaxpr.eqns[i]
        merged = [i]
        for g in {group_of[v] for v in variables(eqn.invars) if v in group_of}:
            merged += groups.pop(g)
        groups[i] = sorted(merged)
        group_of.update((v, i) for j in merged for v in jaxpr.eqns[j].outvars)
    return [[(jaxpr.eqns[i], members[i]) for i in group] for group in groups.values()]


def _make_tail(group: list[tuple[JaxprEqn, bool]], gradients: set[Var], dependent: set[Var], zeros: set[Var]) -> Tail:
    equations = tuple(eqn for eqn, _ in group)
    made = dict.fromkeys(v for eqn in equations for v in eqn.outvars)
    inputs = tuple(dict.fromkeys(v for eqn in equations for v in variables(eqn.invars) if v not in made))
    return Tail(
        equations=equations,
        starts=tuple(eqn for eqn, starts in group if starts),
        inputs=inputs,
        outputs=tuple(v for v in made if v in gradients),
        depends=tuple(v in dependent for v in inputs),
        zeros=frozenset(zeros.intersection(inputs)),
    )
