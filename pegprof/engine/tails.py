"""Jaxpr -> tails: where each gradient is formed, and what follows.

In: a flat Jaxpr, the outputs that are gradients, the inputs that depend on the example.
Out: the tails. A tail starts at contractions of two values that depend on the example, or at another step that makes a
gradient larger than what it is made of, and follows them to the gradients through steps that bring in nothing more
from the example. Everything else is the body.

    s (T×D), r (T×E)  ──>  [ dot_general, transpose ]  ──>  g (D×E)
    └── inputs: the frontier    └── equations                └── outputs

A value is *free* when all its uses are gradients, or steps whose results are free. The backward pass as a whole only
ever reaches gradients; what ends a tail is a step that multiplies by something else of the example, an activation.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pegprof.engine.facts import known
from pegprof.engine.jaxpr import (
    Atom,
    ClosedJaxpr,
    Env,
    Jaxpr,
    JaxprEqn,
    Literal,
    Primitive,
    Var,
    barrier_p,
    dtype_of,
    primitives,
    pvary_p,
    shape_of,
    source_of,
    split_p,
)

p = primitives

ADDITIVE: frozenset[Primitive] = frozenset(
    {p.add_jaxvals_p, p.add_p, p.sub_p, p.concatenate_p, p.select_n_p, p.scatter_add_p, p.dynamic_update_slice_p}
)
"""Steps that may take in a second value of the example, which then is one more input of the tail."""

RESHAPING: frozenset[Primitive] = frozenset(
    {
        p.transpose_p,
        p.reshape_p,
        p.squeeze_p,
        p.broadcast_in_dim_p,
        p.rev_p,
        p.copy_p,
        p.convert_element_type_p,
        p.reduce_sum_p,
        pvary_p,
    }
)
"""Steps that only move entries, as long as they neither drop, add up nor repeat any: see ``only_moves_entries``."""

SUMS: frozenset[Primitive] = frozenset({p.add_jaxvals_p, p.add_p, p.sub_p, p.concatenate_p})
"""Steps that are linear in all their operands together."""

LINEAR: frozenset[Primitive] = frozenset(
    {
        *RESHAPING,
        *SUMS,
        p.neg_p,
        p.mul_p,
        p.div_p,
        p.dot_general_p,
        p.conv_general_dilated_p,
        p.pad_p,
        p.slice_p,
        p.dynamic_slice_p,
        p.gather_p,
        p.cumsum_p,
        p.reduce_window_sum_p,
        p.real_p,
        p.imag_p,
        split_p,
    }
)
"""Steps that may be linear in a tail's values: see ``is_linear_in``."""

_BILINEAR: frozenset[Primitive] = frozenset({p.mul_p, p.dot_general_p, p.conv_general_dilated_p})
_LINEAR_IN_THE_FIRST: frozenset[Primitive] = frozenset({p.div_p, p.pad_p, p.dynamic_slice_p, p.gather_p})

CONTRACTIONS: frozenset[Primitive] = frozenset({p.dot_general_p, p.conv_general_dilated_p, p.jit_p})
"""Products that sum; a ``jit`` that is left in a flat Jaxpr is a sum over a loop that ``hoist`` took out of it."""

_LOOPS: frozenset[Primitive] = frozenset({p.scan_p, p.while_p})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tail:
    """Equations that form gradients, the values that they take in, and the gradients that come out."""

    equations: tuple[JaxprEqn, ...]
    starts: tuple[JaxprEqn, ...]
    inputs: tuple[Var, ...]
    outputs: tuple[Var, ...]
    depends: tuple[bool, ...]  # of each input: may it depend on the example

    prelude: tuple[JaxprEqn, ...] = ()  # what recomputes operands of the equations from the inputs
    grows: bool = False  # with no equations: whether the body made the gradients larger than what they are made from
    zeros: frozenset[Var] = frozenset()  # the inputs that are known to be all zeros

    def makes(self, atom: Atom) -> bool:
        return any(atom is v for eqn in self.equations for v in eqn.outvars)

    def forms_any(self, atoms: Iterable[Atom]) -> bool:
        """Whether some of the atoms are its gradients."""
        return any(v is atom for atom in atoms for v in self.outputs)

    def starts_with(self, eqn: JaxprEqn) -> bool:
        return any(eqn is start for start in self.starts)

    def run(self, *inputs: Any) -> list[Any]:
        """The gradients of one example, as jax would compute them."""
        env = Env()
        env.write(self.inputs, inputs)
        env.run(self.equations)
        return env.read(self.outputs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """A scan equation, its parts named."""

    eqn: JaxprEqn
    body: ClosedJaxpr
    num_consts: int
    num_carry: int
    depends: tuple[bool, ...]  # of each input of the body: may it depend on the example

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

    def split_inputs(self, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        at, end = self.num_consts, self.num_consts + self.num_carry
        return list(values[:at]), list(values[at:end]), list(values[end:])

    def scan(self, step: Callable[[Any, Any], Any], init: Any, xs: Any) -> Any:
        params = {name: self.eqn.params[name] for name in ("length", "reverse", "unroll")}
        with source_of(self.eqn):
            return jax.lax.scan(step, init, xs, **params)


def size(atom: Atom) -> int:
    return math.prod(shape_of(atom))


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


def variables(atoms: Iterable[Atom]) -> list[Var]:
    return [v for v in atoms if not isinstance(v, Literal)]


def only_moves_entries(eqn: JaxprEqn) -> bool:
    """Whether an equation commutes with every elementwise function: each entry goes to one place, unchanged."""
    if known(eqn) not in RESHAPING:
        return False
    (before,), (after,) = eqn.invars, eqn.outvars
    if eqn.primitive is p.convert_element_type_p:
        return _keeps_values(dtype_of(before), dtype_of(after))
    return size(before) == size(after)


def _keeps_values(before: Any, after: Any) -> bool:
    """Whether a dtype has all the values of another. By hand: numpy's promotion knows no float8."""
    if before == after:
        return True
    if not (is_real(before) and is_real(after)):
        return False
    narrow, wide = jnp.finfo(before), jnp.finfo(after)
    return bool(wide.nmant >= narrow.nmant and wide.nexp >= narrow.nexp)


def is_real(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


def is_linear_in(eqn: JaxprEqn, made: Collection[Var]) -> bool:
    """Whether an equation is linear in what it takes of ``made``, its other operands being given; a sum, in all."""
    ours = [not isinstance(v, Literal) and v in made for v in eqn.invars]
    primitive = known(eqn)
    if primitive in _BILINEAR:
        return ours.count(True) == 1
    if primitive in _LINEAR_IN_THE_FIRST:
        pads_with_zero = primitive is not p.pad_p or _is_zero(eqn.invars[1])
        return ours[0] and not any(ours[1:]) and pads_with_zero
    if primitive is p.convert_element_type_p:
        return all(jnp.issubdtype(dtype_of(v), jnp.inexact) for v in (*eqn.invars, *eqn.outvars))
    return primitive in LINEAR and (primitive not in SUMS or all(ours))


def _is_zero(atom: Atom) -> bool:
    return isinstance(atom, Literal) and bool(atom.val == 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moved:
    """A gradient that is another variable with its entries moved: ``output = chain(source)``."""

    output: int
    source: Var
    chain: tuple[JaxprEqn, ...]


def moved_from(jaxpr: Jaxpr, gradients: Iterable[int]) -> list[Moved]:
    """Each gradient's origin: back over steps that only move entries, as long as nothing else uses them."""
    made_by = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    uses = collections.Counter(v for eqn in jaxpr.eqns for v in variables(eqn.invars))
    uses.update(variables(jaxpr.outvars))
    found = []
    for i in gradients:
        source: Atom = jaxpr.outvars[i]
        chain: list[JaxprEqn] = []
        while not isinstance(source, Literal) and uses[source] == 1 and source in made_by:
            eqn = made_by[source]
            if not only_moves_entries(eqn) or isinstance(eqn.invars[0], Literal):
                found.append(Moved(output=i, source=source, chain=tuple(reversed(chain))))
                break
            chain.append(eqn)
            source = eqn.invars[0]
    return found


def find_tails(jaxpr: Jaxpr, gradients: Collection[int], depends: Sequence[bool]) -> list[Tail]:
    """The tails of a flat Jaxpr whose outputs at the positions ``gradients`` are gradients."""
    dependent = example_dependent(jaxpr, depends)
    blocked = blocked_variables(jaxpr, gradients, dependent)
    members = _tail_equations(jaxpr, blocked, dependent)
    outputs = {v for i in gradients for v in variables([jaxpr.outvars[i]])}
    tails = [_make_tail(group, outputs, dependent) for group in _connected(jaxpr, members)]
    zeros = zeros_of(jaxpr)
    # A kernel that nobody needs may be left, where JAX does not know how to remove it: it forms no gradient.
    return [
        dataclasses.replace(tail, zeros=frozenset(zeros.intersection(tail.inputs))) for tail in tails if tail.outputs
    ]


def zeros_of(jaxpr: Jaxpr) -> set[Var]:
    """The variables that are arrays of zeros, whatever the inputs."""
    zeros: set[Var] = set()
    for eqn in jaxpr.eqns:
        if known(eqn) in (p.broadcast_in_dim_p, pvary_p):
            (x,) = eqn.invars
            if _is_zero(x) or (isinstance(x, Var) and x in zeros):
                zeros.update(eqn.outvars)
    return zeros


def blocked_variables(jaxpr: Jaxpr, gradients: Collection[int], dependent: set[Var]) -> set[Var]:
    """The variables that are not free: something else than gradients comes of them, or more of the example goes in."""
    blocked = {v for i, out in enumerate(jaxpr.outvars) if i not in gradients for v in variables([out])}
    for eqn in reversed(jaxpr.eqns):
        if not _is_free(eqn, blocked) or not _is_step(eqn, dependent):
            blocked.update(variables(eqn.invars))
    return blocked


def _is_free(eqn: JaxprEqn, blocked: set[Var]) -> bool:
    return not (eqn.effects or eqn.primitive in _LOOPS or any(v in blocked for v in eqn.outvars))


def _is_step(eqn: JaxprEqn, dependent: set[Var]) -> bool:
    """Whether an equation brings in nothing of the example but the values it continues, and indices, masks and keys."""
    factors = {v for v in variables(eqn.invars) if v in dependent and is_number(v)}
    return len(factors) <= 1 or known(eqn) in ADDITIVE


def is_number(atom: Atom) -> bool:
    """Whether a value is one that gradients are made of: not an index, a mask or a key."""
    return bool(jnp.issubdtype(dtype_of(atom), jnp.inexact))


def grows(eqn: JaxprEqn, dependent: set[Var]) -> bool:
    """Whether what an equation makes is larger than all it takes from the example."""
    taken = {v for v in variables(eqn.invars) if v in dependent}
    return sum(map(size, eqn.outvars)) > sum(map(size, taken))


def _is_start(eqn: JaxprEqn, dependent: set[Var]) -> bool:
    taken = [v for v in variables(eqn.invars) if v in dependent]
    if known(eqn) in CONTRACTIONS:
        return len(taken) >= 2
    # Also a lookup's scatter-add, a slice's padding, a cond: what it makes is larger than what it is made of. A
    # broadcast is not: XLA never stores what it makes.
    return bool(taken) and eqn.primitive is not p.broadcast_in_dim_p and grows(eqn, dependent)


def _tail_equations(jaxpr: Jaxpr, blocked: set[Var], dependent: set[Var]) -> dict[int, bool]:
    """Positions of the equations in tails, and whether each is a start."""
    members: dict[int, bool] = {}
    made: set[Var] = set()
    for i, eqn in enumerate(jaxpr.eqns):
        if not _is_free(eqn, blocked):
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


def _make_tail(group: list[tuple[JaxprEqn, bool]], gradients: set[Var], dependent: set[Var]) -> Tail:
    equations = tuple(eqn for eqn, _ in group)
    made = {v for eqn in equations for v in eqn.outvars}
    inputs = tuple(dict.fromkeys(v for eqn in equations for v in variables(eqn.invars) if v not in made))
    return Tail(
        equations=equations,
        starts=tuple(eqn for eqn, starts in group if starts),
        inputs=inputs,
        outputs=tuple(v for v in dict.fromkeys(v for eqn in equations for v in eqn.outvars) if v in gradients),
        depends=tuple(v in dependent for v in inputs),
    )
