"""Jaxpr -> Jaxpr: tails leave the loops in which only a part of a gradient is formed.

In: a flat Jaxpr, the outputs that are gradients, the inputs that depend on the example. Out: the same program. A weight
that every step of a scan uses has its gradient added up in a carry. A statistic needs the sum before it is squared, so
a tail must form it after the loop. Each pass computes exactly what it is given; the order of four matters:

    stack_sums      c ← c + a_t, and nothing else comes of c    ->  a_t is stacked; c + Σ_t a_t follows the loop
    hoist_bodies    a loop within the loop                      ->  the same passes, on the loop's body
    move_tails_out  a_t = tail(f_t)                             ->  f_t is stacked; the tail follows the loop
    sum_in_loop     Σ_t a_t follows the loop, no tail forms it  ->  c ← c + a_t
"""

import dataclasses
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pegprof.engine import dtypes, tails
from pegprof.engine.facts import facts_of, is_linear_in, is_zero, known
from pegprof.engine.jaxpr import (
    Atom,
    ClosedJaxpr,
    Env,
    Jaxpr,
    JaxprEqn,
    Rule,
    Var,
    bind,
    dtype_of,
    evaluate,
    primitives,
    prune,
    shape_of,
    start,
    trace,
    variables,
    with_outputs,
    zeros_like,
)
from pegprof.engine.passes.widen import bind_wide
from pegprof.engine.tails import Loop, Tail, count_uses


def hoist(
    closed: ClosedJaxpr, *, gradients: Collection[int], parts: Collection[int] = (), depends: Sequence[bool]
) -> ClosedJaxpr:
    """The same program with every tail where a site can stand.

    ``gradients`` are positions of outputs. So are ``parts``: parts of gradients, which something outside goes on with.
    """
    formed = {*gradients, *parts}
    closed = drop_constant_carries(closed)
    closed = split_branches(closed, gradients=formed, depends=depends)
    closed = stack_sums(closed, gradients=formed, depends=depends)
    closed = hoist_bodies(closed, gradients=gradients, parts=parts, depends=depends)
    closed = move_tails_out(closed, gradients=gradients, parts=parts, depends=depends)
    return sum_in_loop(closed, gradients=formed, depends=depends)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scan:
    """A scan with those of its outputs from which only gradients come, by position. Its body has the same positions."""

    loop: Loop
    carries: list[int]
    gradients: set[int]  # stacked outputs that are gradients, but for the order of the entries
    parts: set[int]  # other stacked outputs
    sums: dict[int, JaxprEqn]  # the parts that are only summed over the steps, and the equation that does

    def formed_by(self, tail: Tail) -> list[int]:
        """Which of the outputs a tail of the body forms."""
        return [i for i in sorted(self.gradients | self.parts) if self.loop.body.jaxpr.outvars[i] in tail.outputs]


def find_scans(
    closed: ClosedJaxpr, gradients: Collection[int], parts: Collection[int], depends: Sequence[bool]
) -> Iterator[Scan]:
    """The scans of a program. The arguments are those of ``hoist``."""
    jaxpr, uses = closed.jaxpr, count_uses(closed.jaxpr)
    dependent = tails.example_dependent(jaxpr, depends)
    outside = tails.outside_tails(jaxpr, {*gradients, *parts}, dependent)
    whole = {permuted.source for permuted in tails.find_permuted(jaxpr, gradients)}
    sums = [eqn for eqn in jaxpr.eqns if known(eqn) is primitives.reduce_sum_p and eqn.params["axes"] == (0,)]
    summed_by = {v: eqn for eqn in sums for v in variables(eqn.invars) if uses[v] == 1}
    for eqn in jaxpr.eqns:
        if known(eqn) is primitives.scan_p:
            formed = {i: v for i, v in enumerate(eqn.outvars) if v not in outside}
            stacked = {i: v for i, v in formed.items() if i >= eqn.params["num_carry"]}
            own = {i for i, v in stacked.items() if v in whole and v not in summed_by}
            yield Scan(
                loop=Loop.of(eqn, dependent),
                carries=[i for i in formed if i not in stacked],
                gradients=own,
                parts=stacked.keys() - own,
                sums={i: summed_by[v] for i, v in stacked.items() if v in summed_by},
            )


def _rewrite(closed: ClosedJaxpr, rules: Mapping[int, Rule]) -> ClosedJaxpr:
    """The same program with some equations, given by their ids, applied by rules of their own."""

    def rule(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
        return rules.get(id(eqn), bind)(eqn, values)

    return prune(trace(lambda *args: evaluate(closed, args, rule), closed.in_avals)) if rules else closed


def drop_constant_carries(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Make a carry that no step changes a constant of the loop: nothing of the example can reach it."""
    rules: dict[int, Rule] = {}
    for eqn in closed.jaxpr.eqns:
        if known(eqn) is primitives.scan_p:
            loop = Loop.of(eqn, set())
            _, carries, _ = loop.split_inputs(loop.body.jaxpr.invars)
            if any(v is out for v, out in zip(carries, loop.body.jaxpr.outvars, strict=False)):
                rules[id(eqn)] = functools.partial(_scan_with_totals, loop, [])
    return _rewrite(closed, rules)


def stack_sums(closed: ClosedJaxpr, *, gradients: Collection[int], depends: Sequence[bool]) -> ClosedJaxpr:
    """Stack what a carry only adds up, and add it up after the loop."""
    zeros = tails.zeros_of(closed.jaxpr)
    rules: dict[int, Rule] = {}
    for scan in find_scans(closed, gradients, (), depends):
        if summands := {k: terms for k in scan.carries if (terms := _summands(scan.loop, k))}:
            rules[id(scan.loop.eqn)] = functools.partial(_stack, scan.loop, summands, zeros)
    return _rewrite(closed, rules)


def _summands(loop: Loop, carry: int) -> list[Atom]:
    """What a step adds to a carry that it does nothing else with: c' = (c + a) + b gives [a, b]."""
    jaxpr = loop.body.jaxpr
    before = jaxpr.invars[loop.num_consts + carry]
    additions, after = _follow_additions(jaxpr, before)
    if after is not jaxpr.outvars[carry] or count_uses(jaxpr)[after] != 1:
        return []
    partial_sums = {before, *(eqn.outvars[0] for eqn in additions)}
    return [v for eqn in additions for v in eqn.invars if not isinstance(v, Var) or v not in partial_sums]


def _follow_additions(jaxpr: Jaxpr, v: Var) -> tuple[list[JaxprEqn], Var]:
    """The additions that a value goes through while nothing else takes it, and the sum that comes out.

    An addition that broadcasts the value ends it: the sum would have another shape.
    """
    uses = count_uses(jaxpr)
    added_by = {u: eqn for eqn in jaxpr.eqns if facts_of(eqn).adds for u in variables(eqn.invars)}
    additions: list[JaxprEqn] = []
    while uses[v] == 1 and v in added_by and shape_of(v) == shape_of(added_by[v].outvars[0]):
        additions.append(added_by[v])
        v = additions[-1].outvars[0]
    return additions, v


def _stack(
    loop: Loop, summands: Mapping[int, Sequence[Atom]], zeros: set[Var], eqn: JaxprEqn, values: Sequence[Any]
) -> list[Any]:
    """A scan whose carries ``summands`` stay as they start, so that pruning removes them, and the sums after it."""
    _, unchanged, _ = loop.split_inputs(loop.body.jaxpr.invars)
    outputs = [unchanged[k] if k in summands else v for k, v in enumerate(loop.body.jaxpr.outvars)]
    terms = [term for added in summands.values() for term in added]
    results = bind(eqn, values, jaxpr=with_outputs(loop.body, [*outputs, *terms]))
    sums = (jax.lax.reduce_sum(stack, (0,)) for stack in results[len(outputs) :])
    for k, added in summands.items():
        start_var, start_value = eqn.invars[loop.num_consts + k], values[loop.num_consts + k]
        from_zero = start_var in zeros if isinstance(start_var, Var) else is_zero(start_var)
        total = functools.reduce(jnp.add, [*([] if from_zero else [start_value]), *(next(sums) for _ in added)])
        results[k] = jnp.broadcast_to(total, shape_of(start_var))  # the additions may broadcast what they add
    return results[: len(outputs)]


def hoist_bodies(
    closed: ClosedJaxpr, *, gradients: Collection[int], parts: Collection[int] = (), depends: Sequence[bool]
) -> ClosedJaxpr:
    """Hoist in the bodies of loops, each with its own gradients and parts."""
    rules: dict[int, Rule] = {}
    for scan in find_scans(closed, gradients, parts, depends):
        body = hoist(scan.loop.body, gradients=scan.gradients, parts=scan.parts, depends=scan.loop.depends)
        if body is not scan.loop.body:
            rules[id(scan.loop.eqn)] = functools.partial(bind, jaxpr=body)
    return _rewrite(closed, rules)


def move_tails_out(
    closed: ClosedJaxpr, *, gradients: Collection[int], parts: Collection[int] = (), depends: Sequence[bool]
) -> ClosedJaxpr:
    """Run the tails that form parts of gradients after the loop, which stacks their inputs instead."""
    rules: dict[int, Rule] = {}
    for scan in find_scans(closed, gradients, parts, depends):
        found = tails.find_tails(scan.loop.body.jaxpr, scan.gradients | scan.parts, scan.loop.depends)
        if leaving := [tail for tail in found if scan.parts.intersection(scan.formed_by(tail))]:
            rules[id(scan.loop.eqn)] = functools.partial(_run_after, scan, leaving)
            moved = [i for tail in leaving for i in scan.formed_by(tail)]
            rules |= {id(scan.sums[i]): _add_given for i in moved if i in scan.sums}
    return _rewrite(closed, rules)


def _run_after(scan: Scan, leaving: Sequence[Tail], eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """A scan without some tails, and the tails after it. A sum takes the place of the stack that it adds up."""
    loop, body, n = scan.loop, scan.loop.body.jaxpr, scan.loop.num_carry
    # The loop gives, instead of what the tails form, what they take and only the loop knows.
    moved = {i for tail in leaving for i in scan.formed_by(tail)}
    staying = [i for i in range(len(body.outvars)) if i not in moved]
    outputs = [body.outvars[i] for i in staying]
    consts, _, xs = loop.split_inputs(body.invars)
    known_after = {*body.constvars, *consts, *xs, *variables(outputs[n:])}
    outputs += dict.fromkeys(v for tail in leaving for v in tail.inputs if v not in known_after)
    results = bind(eqn, values, jaxpr=with_outputs(loop.body, outputs))

    # Each tail runs on the stacks.
    env = start(loop.body, values)
    env.write(outputs[n:], results[n:])
    varying = {*xs, *variables(outputs[n:])}
    given = dict(zip(staying, results, strict=False))
    for tail in leaving:
        for over_loop, summed in ((_sum_over_loop, True), (_map_over_loop, False)):
            if at := [i for i in scan.formed_by(tail) if (i in scan.sums) is summed]:
                part = tail.part_that_makes([body.outvars[i] for i in at])
                given |= zip(at, over_loop(part, env, varying, loop.length), strict=True)
    return [given[i] for i in range(len(body.outvars))]


def _add_given(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Apply an addition to the operands that are given. A sum that is None is part of another.

    It leaves out a reduce_sum too: a scan gives the sum in the place of the stack.
    """
    given = [x for x in values if x is not None]
    return bind(eqn, given) if len(given) == 2 else given or [None]


def _map_over_loop(tail: Tail, env: Env, varying: set[Var], length: int) -> list[Any]:
    """A tail's outputs at every step of a loop, stacked."""
    axes = [0 if v in varying else None for v in tail.inputs]
    return jax.vmap(tail.run, in_axes=axes, axis_size=length)(*env.read(tail.inputs))


def _sum_over_loop(tail: Tail, env: Env, varying: set[Var], length: int) -> list[Any]:
    """A tail's outputs summed over the steps of a loop. If linear, Σ_t tail(start(f_t)) = tail(Σ_t start(f_t))."""
    if not _commutes_with_sum(tail, varying):
        return _add_up(tail, env, varying, length)
    env = Env(env)
    for eqn in tail.equations:
        if not tail.starts_with(eqn):
            env.run([eqn])
        elif known(eqn) is primitives.dot_general_p and varying.intersection(variables(eqn.invars)):
            env.write(eqn.outvars, _contract_over_loop(eqn, env, varying))
        else:
            env.write(eqn.outvars, _add_up(tail.part_that_makes(eqn.outvars), env, varying, length))
    return env.read(tail.outputs)


def _commutes_with_sum(tail: Tail, varying: set[Var]) -> bool:
    """Whether all that follows the starts is linear in them, and the same at every step of the loop."""
    made = tails.makers(tail.equations)
    following = [eqn for eqn in tail.equations if not tail.starts_with(eqn)]
    return all(is_linear_in(eqn, made) and varying.isdisjoint(variables(eqn.invars)) for eqn in following)


def _contract_over_loop(eqn: JaxprEqn, env: Env, varying: set[Var]) -> list[Any]:
    """A dot_general summed over the steps of a loop: time is one more axis to contract."""
    values = env.read(eqn.invars)
    varies = [isinstance(v, Var) and v in varying for v in eqn.invars]
    if not all(varies):
        return bind(eqn, [jnp.sum(x, axis=0) if v else x for x, v in zip(values, varies, strict=True)])
    contract, batch = (
        [tuple(axis + 1 for axis in axes) for axes in operands] for operands in eqn.params["dimension_numbers"]
    )
    return bind(eqn, values, dimension_numbers=(tuple((0, *axes) for axes in contract), tuple(batch)))


def _add_up(tail: Tail, env: Env, varying: set[Var], length: int) -> list[Any]:
    """A tail's outputs summed over the steps of a loop, one step at a time, so that all are never held at once.

    It is one equation, a jit, which adds up in float32 at least.
    """
    varies = [v in varying for v in tail.inputs]

    @jax.jit
    def sum_over_loop(*values: Any) -> list[Any]:
        def step(totals: list[Any], at_step: Iterable[Any]) -> tuple[list[Any], None]:
            own = iter(at_step)
            added = tail.run(*(next(own) if v else x for x, v in zip(values, varies, strict=True)), rule=bind_wide)
            return [total + x.astype(total.dtype) for total, x in zip(totals, added, strict=True)], None

        zeros = [zeros_like(v.aval, dtypes.wide_dtype(dtype_of(v))) for v in tail.outputs]
        return jax.lax.scan(step, zeros, [x for x, v in zip(values, varies, strict=True) if v], length=length)[0]

    totals = sum_over_loop(*env.read(tail.inputs))
    return [total.astype(dtype_of(v)) for total, v in zip(totals, tail.outputs, strict=True)]


def sum_in_loop(closed: ClosedJaxpr, *, gradients: Collection[int], depends: Sequence[bool]) -> ClosedJaxpr:
    """Add up in a carry what is stacked only to be summed. One carry will do for sums that are added to each other."""
    rules: dict[int, Rule] = {}
    for scan in find_scans(closed, gradients, (), depends):
        totals: dict[Var, list[int]] = {}
        for i, eqn in scan.sums.items():
            additions, total = _follow_additions(closed.jaxpr, eqn.outvars[0])
            totals.setdefault(total, []).append(i)
            rules |= {id(addition): _add_given for addition in (eqn, *additions)}
        if totals:
            rules[id(scan.loop.eqn)] = functools.partial(_scan_with_totals, scan.loop, list(totals.values()))
    return _rewrite(closed, rules)


def _scan_with_totals(loop: Loop, totals: Sequence[Sequence[int]], eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """A scan that adds up groups of outputs, each in one carry. The first of a group is the sum, the others are None.

    ``jax.lax.scan`` makes constants of the carries that no step changes.
    """
    consts, init, xs = loop.split_inputs(values)
    carries, summed = range(loop.num_carry), {i for total in totals for i in total}
    stacked = [i for i in range(loop.num_carry, len(eqn.outvars)) if i not in summed]

    def step(carry: Any, x: Any) -> Any:
        kept, sums = carry
        outputs = evaluate(loop.body, [*consts, *kept.values(), *x])
        sums = {first: sum((outputs[i] for i in (first, *others)), sums[first]) for first, *others in totals}
        return ({k: outputs[k] for k in carries}, sums), {i: outputs[i] for i in stacked}

    zeros = {first: zeros_like(loop.body.out_avals[first]) for first, *_ in totals}
    (kept, sums), stacks = loop.scan(step, (dict(zip(carries, init, strict=True)), zeros), xs)
    return [{**kept, **sums, **stacks}.get(i) for i in range(len(eqn.outvars))]


def split_branches(closed: ClosedJaxpr, *, gradients: Collection[int], depends: Sequence[bool]) -> ClosedJaxpr:
    """The same program with gradients in conds of their own, where they are larger than what they are made from.

    Such a cond starts a tail, so it can run for one example at a time.
    """
    jaxpr = closed.jaxpr
    dependent = tails.example_dependent(jaxpr, depends)
    outside = tails.outside_tails(jaxpr, gradients, dependent)

    def is_mixed(eqn: JaxprEqn) -> bool:
        formed = [v for v in eqn.outvars if v not in outside]
        some = known(eqn) is primitives.cond_p and 0 < len(formed) < len(eqn.outvars)
        return some and tails.grows(eqn, dependent, formed)

    def rule(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
        return _split(eqn, values, [v not in outside for v in eqn.outvars])

    return _rewrite(closed, {id(eqn): rule for eqn in jaxpr.eqns if is_mixed(eqn)})


def _split(eqn: JaxprEqn, values: Sequence[Any], is_gradient: Sequence[bool]) -> list[Any]:
    def half(wanted: bool) -> list[Any]:
        branches = eqn.params["branches"]
        kept = [[v for v, g in zip(b.jaxpr.outvars, is_gradient, strict=True) if g is wanted] for b in branches]
        return bind(eqn, values, branches=tuple(map(with_outputs, branches, kept)))

    gradients, others = iter(half(True)), iter(half(False))
    return [next(gradients if g else others) for g in is_gradient]
