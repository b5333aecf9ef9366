"""Jaxpr -> Jaxpr: take contractions that form gradients out of loops and branches, where a site cannot be.

What it computes stays the same. Three cases, all in the backward pass:

- **A sum over a loop.** A weight that every step of a scan uses has its gradient added up in the carry,
  c ← c + tail(frontier_t). A statistic needs the sum before it is squared, so the carry goes, the frontier of each
  step becomes an output of the scan, and the contraction runs after the loop, over time as well. With a linear tail,
  Σ_t tail(start(f_t)) = tail(Σ_t start(f_t)).
- **Stacked gradients that something follows.** A scan over layers stacks one gradient a layer. If it only moves entries
  on its way to the parameter, the statistic is taken inside the loop (``sites.py``); else (a norm of the stacked
  weights, say) the frontier is stacked and the tail runs after the loop, for all layers.
- **A branch.** A cond that gives gradients beside other values is split in two, so that the half with the gradients
  can run for one example at a time.
"""

import collections
import dataclasses
import functools
import itertools
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
    Var,
    bind,
    primitives,
    prune,
    start,
    trace,
    with_outputs,
    zeros_like,
)
from pegprof.engine.tails import (
    Loop,
    Tail,
    blocked_variables,
    example_dependent,
    find_tails,
    is_linear_in,
    moved_from,
    size,
    variables,
    zeros_of,
)


def hoist(
    closed: ClosedJaxpr, *, gradients: Collection[int], parts: Collection[int] = (), depends: Sequence[bool]
) -> ClosedJaxpr:
    """The same program with every tail where a site can stand.

    Args:
      closed: a flat program.
      gradients: positions of the outputs that are gradients.
      parts: positions of the outputs that are parts of gradients: something outside adds them up or goes on with them.
      depends: of each input, whether it depends on the example.
    """
    jaxpr = closed.jaxpr
    dependent = example_dependent(jaxpr, depends)
    blocked = blocked_variables(jaxpr, {*gradients, *parts}, dependent)
    whole = {moved.source for moved in moved_from(jaxpr, gradients)}
    zeros = zeros_of(jaxpr)

    def rule(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
        free = [v not in blocked for v in eqn.outvars]
        if known(eqn) is primitives.scan_p and any(free):
            from_zero = [not isinstance(v, Literal) and v in zeros for v in eqn.invars]
            return _hoist_scan(Loop.of(eqn, dependent), values, from_zero, free, [v in whole for v in eqn.outvars])
        if known(eqn) is primitives.cond_p and any(free) and not all(free) and _grows(eqn, free, dependent):
            return _split_cond(eqn, values, free)
        return bind(eqn, values)

    def run(*args: Any) -> list[Any]:
        env = start(closed, args)
        env.run(jaxpr.eqns, rule)
        return env.read(jaxpr.outvars)

    return prune(trace(run, closed.in_avals))


def _hoist_scan(
    loop: Loop, values: Sequence[Any], from_zero: Sequence[bool], free: Sequence[bool], whole: Sequence[bool]
) -> list[Any]:
    """A scan without the contractions that form gradients it must not reduce, and these contractions after it.

    Args:
      loop: the scan.
      values: its inputs.
      from_zero: of each input, whether it is known to be zeros.
      free: of each output, whether only gradients come of it.
      whole: of each output, whether it is a gradient but for the order of its entries.
    """
    body = _open_body(loop, free, whole)
    consts, init, xs = loop.split_inputs(values)
    _, init_from_zero, _ = loop.split_inputs(from_zero)
    kept, sums, stacks, emitted = _run_what_stays(loop, body, consts, init, xs)

    env = start(body.closed, [*consts, *[None] * loop.num_carry, *xs])
    env.write(body.emitted, emitted)
    varying = {*body.emitted, *body.closed.jaxpr.invars[loop.num_consts :]}
    summed, mapped, length = Env(), Env(), loop.eqn.params["length"]
    for tail in body.tails:
        if tail.forms_any(v for terms in body.summands.values() for v in terms):
            summed.write(tail.outputs, _sum_over_loop(tail, env, varying, length))
        if tail.forms_any(body.stacked):
            mapped.write(tail.outputs, _map_over_loop(tail, env, varying, length))
    mapped.write(body.staying(body.stacked), stacks)

    carry = dict(kept)
    for k, terms in body.summands.items():
        added = summed.read(v for v in terms if body.moves(v))
        if k in sums or not init_from_zero[k]:
            added = [sums.get(k, init[k]), *added]
        carry[k] = functools.reduce(jnp.add, added)
    return [*(carry[k] for k in range(loop.num_carry)), *mapped.read(body.stacked)]


def _run_what_stays(
    loop: Loop, body: "OpenBody", consts: Sequence[Any], init: Sequence[Any], xs: Sequence[Any]
) -> tuple[dict[int, Any], dict[int, Any], list[Any], list[Any]]:
    """The loop without the tails: the carries kept, the sums that stay sums, the stacked outputs, the frontiers."""
    moved = {id(eqn) for tail in body.tails for eqn in tail.equations}
    inside = [eqn for eqn in body.closed.jaxpr.eqns if id(eqn) not in moved]
    summands = {k: staying for k, terms in body.summands.items() if (staying := body.staying(terms))}

    def step(carry: Any, x: Any) -> Any:
        kept, sums = carry
        slots = [kept.get(k) for k in range(loop.num_carry)]  # nothing reads a carry that only adds up
        env = start(body.closed, [*consts, *slots, *x])
        env.run(inside)
        kept = dict(zip(body.kept, env.read(body.kept.values()), strict=True))
        sums = {k: sum(env.read(terms), start=sums[k]) for k, terms in summands.items()}
        return (kept, sums), (env.read(body.staying(body.stacked)), env.read(body.emitted))

    before = {k: init[k] for k in body.kept}, {k: init[k] for k in summands}
    (kept, sums), (stacks, emitted) = loop.scan(step, before, xs)
    return kept, sums, stacks, emitted


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenBody:
    """A scan's body without the carries that only add up gradients: what they add is put out instead.

    ``tails`` are those that leave the loop; all else stays.
    """

    closed: ClosedJaxpr
    kept: dict[int, Atom]  # the new value of each carry that stays
    stacked: list[Atom]
    summands: dict[int, list[Atom]]  # what a step adds to each other carry
    tails: list[Tail]

    emitted: list[Var]  # the inputs of these tails that only the loop knows

    def moves(self, atom: Atom) -> bool:
        """Whether an output is formed after the loop."""
        return any(tail.forms_any([atom]) for tail in self.tails)

    def staying(self, atoms: Iterable[Atom]) -> list[Atom]:
        return [atom for atom in atoms if not self.moves(atom)]


def _open_body(loop: Loop, free: Sequence[bool], whole: Sequence[bool]) -> OpenBody:
    jaxpr, n = loop.body.jaxpr, loop.num_carry
    summands = {k: terms for k in range(n) if free[k] and (terms := _summands(jaxpr, loop.num_consts + k, k))}
    kept = [k for k in range(n) if k not in summands]
    outputs = [*(jaxpr.outvars[k] for k in kept), *jaxpr.outvars[n:], *itertools.chain(*summands.values())]
    stacked = range(len(kept), len(kept) + len(jaxpr.outvars) - n)
    gradients = {i for i, f, w in zip(stacked, free[n:], whole[n:], strict=True) if f and w}
    parts = {i for i, f, w in zip(stacked, free[n:], whole[n:], strict=True) if f and not w}
    parts.update(range(stacked.stop, len(outputs)))

    closed = with_outputs(loop.body, outputs)
    closed = hoist(closed, gradients=gradients, parts=parts, depends=loop.depends)
    outputs = closed.jaxpr.outvars
    formed_outside = {v for i in parts for v in variables([outputs[i]])}
    tails = find_tails(closed.jaxpr, gradients | parts, loop.depends)
    tails = [tail for tail in tails if formed_outside.intersection(tail.outputs)]
    consts, _, xs = loop.split_inputs(closed.jaxpr.invars)
    known_outside = {*closed.jaxpr.constvars, *consts, *xs}
    terms = iter(outputs[stacked.stop :])
    return OpenBody(
        closed=closed,
        kept=dict(zip(kept, outputs, strict=False)),
        stacked=outputs[stacked.start : stacked.stop],
        summands={k: [next(terms) for _ in old] for k, old in summands.items()},
        tails=tails,
        emitted=list(dict.fromkeys(v for tail in tails for v in tail.inputs if v not in known_outside)),
    )


def _summands(jaxpr: Jaxpr, carry_in: int, carry_out: int) -> list[Atom] | None:
    """What a step adds to a carry that it does nothing else with: c' = (c + a) + b gives [a, b]."""
    made_by = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    uses = collections.Counter(v for eqn in jaxpr.eqns for v in variables(eqn.invars))
    uses.update(variables(jaxpr.outvars))
    carry = jaxpr.invars[carry_in]
    if uses[carry] != 1:
        return None

    def terms(atom: Atom) -> list[Atom] | None:
        """The other summands of a chain of additions that the carry is part of."""
        if atom is carry:
            return []
        if isinstance(atom, Literal) or atom not in made_by or uses[atom] != 1:
            return None
        eqn = made_by[atom]
        if known(eqn) not in (primitives.add_jaxvals_p, primitives.add_p):
            return None
        for here, other in (eqn.invars, reversed(eqn.invars)):
            if (found := terms(here)) is not None:
                return [*found, other]
        return None

    return terms(jaxpr.outvars[carry_out])


def _map_over_loop(tail: Tail, env: Env, varying: set[Var], length: int) -> list[Any]:
    """A tail for every step of a loop: its outputs stacked."""
    axes = [0 if v in varying else None for v in tail.inputs]
    return jax.vmap(tail.run, in_axes=axes, axis_size=length)(*env.read(tail.inputs))


def _sum_over_loop(tail: Tail, env: Env, varying: set[Var], length: int) -> list[Any]:
    """The sum of a tail's outputs over the steps of a loop."""
    if not _commutes_with_sum(tail, varying):
        return _add_up(tail.run, env.read(tail.inputs), [v in varying for v in tail.inputs], length)
    local = Env()
    local.write(tail.inputs, env.read(tail.inputs))
    for eqn in tail.equations:
        if tail.starts_with(eqn):
            local.write(eqn.outvars, _sum_of_start(eqn, local, varying, length))
        else:
            local.run([eqn])
    return local.read(tail.outputs)


def _commutes_with_sum(tail: Tail, varying: set[Var]) -> bool:
    """Whether all that follows the starts is linear in them, and the same at every step of the loop."""
    made = {v for eqn in tail.equations for v in eqn.outvars}

    def commutes(eqn: JaxprEqn) -> bool:
        return is_linear_in(eqn, made) and not varying.intersection(variables(eqn.invars)) - made

    return all(tail.starts_with(eqn) or commutes(eqn) for eqn in tail.equations)


def _sum_of_start(eqn: JaxprEqn, env: Env, varying: set[Var], length: int) -> list[Any]:
    """A start's sum over the loop; for a product of matrices, time is one more axis to contract."""
    values = env.read(eqn.invars)
    varies = [not isinstance(v, Literal) and v in varying for v in eqn.invars]
    if known(eqn) is not primitives.dot_general_p or not any(varies):
        return _add_up(lambda *values: bind(eqn, values), values, varies, length)
    if not all(varies):
        return bind(eqn, [jnp.sum(x, axis=0) if v else x for x, v in zip(values, varies, strict=True)])
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]

    def shift(axes: Iterable[int]) -> tuple[int, ...]:
        return tuple(axis + 1 for axis in axes)

    contract = ((0, *shift(lhs_contract)), (0, *shift(rhs_contract)))
    return bind(eqn, values, dimension_numbers=(contract, (shift(lhs_batch), shift(rhs_batch))))


def _add_up(fn: Callable[..., list[Any]], values: Sequence[Any], varies: Sequence[bool], length: int) -> list[Any]:
    """The sum of a function over the steps of a loop, one step at a time, as one equation: a jit."""

    @jax.jit
    def sum_over_loop(*values: Any) -> list[Any]:
        def at_step(varying: Iterable[Any]) -> list[Any]:
            varying = iter(varying)
            return fn(*[next(varying) if v else x for x, v in zip(values, varies, strict=True)])

        def step(total: list[Any], varying: Any) -> Any:
            return [t + x for t, x in zip(total, at_step(varying), strict=True)], None

        stacks = [x for x, v in zip(values, varies, strict=True) if v]
        shapes = jax.eval_shape(at_step, [x[0] for x in stacks])
        return jax.lax.scan(step, [zeros_like(s) for s in shapes], stacks, length=length)[0]

    return sum_over_loop(*values)


def _grows(eqn: JaxprEqn, free: Sequence[bool], dependent: set[Var]) -> bool:
    """Whether the gradients that a cond gives are larger than all it takes from the example."""
    given = sum(size(v) for v, f in zip(eqn.outvars, free, strict=True) if f)
    return given > sum(size(v) for v in set(variables(eqn.invars)) & dependent)


def _split_cond(eqn: JaxprEqn, values: Sequence[Any], free: Sequence[bool]) -> list[Any]:
    def half(wanted: bool) -> list[Any]:
        branches = eqn.params["branches"]
        kept = [[v for v, f in zip(b.jaxpr.outvars, free, strict=True) if f is wanted] for b in branches]
        return bind(eqn, values, branches=tuple(map(with_outputs, branches, kept)))

    gradients, others = iter(half(True)), iter(half(False))
    return [next(gradients) if f else next(others) for f in free]
