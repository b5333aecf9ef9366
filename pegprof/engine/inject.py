"""``grad_stats``: runs the body for the whole batch and the planned tails in its midst.

The program of one example runs under one ``jax.vmap``. Each site in it is a ``jax.custom_batching.custom_vmap``
function: for one example it would be the plain tail; its batching rule sees the frontiers of all B examples and returns
their quantities, *unbatched*. Where a site sits, in a scan or not, is then jax's business.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pegprof.engine.jaxpr import Env, evaluate, start
from pegprof.engine.plan import Plan, PlanRow
from pegprof.engine.planner import find_sites, plan_sites
from pegprof.engine.quantities import Values, in_chunks, is_per_example, of_same
from pegprof.engine.sites import Cut, EarlyPart, InnerLoop, Site
from pegprof.engine.statistics import MEAN, Quantity, Statistic, quantities_of, resolve
from pegprof.engine.strategies import STRATEGIES, Frontier, late
from pegprof.engine.strategies.base import bind_wide, run_wide
from pegprof.engine.strategies.late import LATE, Halves
from pegprof.engine.trace import Loss, Roles, Trace, trace_example
from pegprof.errors import PegprofError, nearest

Stats = Sequence[str | Statistic] | str | Statistic


def grad_stats(
    loss: Loss,
    stats: Stats = ("mean", "second_moment"),
    *,
    argnums: int | tuple[int, ...] = 0,
    batch_argnums: int | tuple[int, ...] = 1,
    keep_batch_dim: bool = True,
    has_aux: bool = False,
    prng_argnum: int | None = None,
    microbatch_size: int | None = None,
    backend: str | None = None,
    plan: Plan | None = None,
    memory_budget: int | None = None,
) -> Callable[..., dict[str, Any]]:
    """A function that computes statistics of the per-example gradients of a loss.

    With g_i the gradient of ``loss(params, batch[i:i+1])``, the statistic ``second_moment`` is (1/B) Σ_i g_i², entry by
    entry, and so on: see ``pegprof.engine.statistics.STATISTICS`` for all of them.

    Args:
      loss: ``loss(params, batch) -> scalar``, a mean over the leading axis of every leaf of ``batch``.
      stats: names of statistics, or ``Statistic`` objects.
      argnums: which arguments are parameters; as for ``jax.grad``. Here and below, -1 is the last argument.
      batch_argnums: which arguments have a leading axis of examples.
      keep_batch_dim: whether the loss sees an example as a batch of one, or, if False, without that axis.
      has_aux: whether the loss returns ``(value, aux)``; see ``value_and_grad_stats`` for the aux.
      prng_argnum: an argument that is a PRNG key, to be split by example. Any other key is the same for all.
      microbatch_size: how many examples run at a time; None lets the planner decide, B is all at once.
      backend: what the program will be compiled for, if that is not the backend that is here.
      plan: what to do instead of planning, from ``make_plan`` for the same loss, shapes and statistics.
      memory_budget: bytes that the planner should stay within, by its own estimate, by running fewer at a time.

    Returns:
      A function of the loss's arguments that returns ``{name: tree}``: trees like the parameters, in float32 at least,
      except for ``norm``, one array [B], and ``norm_by_param``, a tree of [B]. It works under ``jit`` and is best
      called there.

    >>> import jax.numpy as jnp
    >>> def loss(w, x):
    ...     return jnp.mean(x @ w)
    >>> grad_stats(loss, ("mean", "variance"))(jnp.zeros(2), jnp.array([[1.0, 0.0], [3.0, 0.0]]))
    {'mean': Array([2., 0.], dtype=float32), 'variance': Array([2., 0.], dtype=float32)}
    """
    both = value_and_grad_stats(
        loss,
        stats,
        argnums=argnums,
        batch_argnums=batch_argnums,
        keep_batch_dim=keep_batch_dim,
        has_aux=has_aux,
        prng_argnum=prng_argnum,
        microbatch_size=microbatch_size,
        backend=backend,
        plan=plan,
        memory_budget=memory_budget,
    )
    return lambda *args: both(*args)[1]


def value_and_grad_stats(
    loss: Loss,
    stats: Stats = ("mean", "second_moment"),
    *,
    argnums: int | tuple[int, ...] = 0,
    batch_argnums: int | tuple[int, ...] = 1,
    keep_batch_dim: bool = True,
    has_aux: bool = False,
    prng_argnum: int | None = None,
    microbatch_size: int | None = None,
    backend: str | None = None,
    plan: Plan | None = None,
    memory_budget: int | None = None,
) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """As ``grad_stats``, with the value of the loss: the mean over the examples.

    Returns:
      A function that returns ``(value, stats)``, or ``((value, aux), stats)`` with ``has_aux``, where each leaf of
      ``aux`` has a leading axis of B.
    """
    roles = Roles(
        argnums=argnums,
        batch_argnums=batch_argnums,
        keep_batch_dim=keep_batch_dim,
        has_aux=has_aux,
        prng_argnum=prng_argnum,
    )
    wanted = resolve(stats)

    def fn(*args: Any) -> tuple[Any, dict[str, Any]]:
        trace = trace_example(loss, args, roles)
        cut = find_sites(trace)
        made = plan_sites(
            trace, cut, wanted, microbatch_size=microbatch_size, backend=backend, memory_budget=memory_budget
        )
        quantities = quantities_of(wanted)
        followed = _checked(plan, made, cut, quantities) if plan else made
        value, aux, values = _run(trace, cut, followed, quantities, args)
        found = {stat.name: _finish(stat, values, trace) for stat in wanted}
        return ((value, aux) if has_aux else value), found

    return fn


def _checked(given: Plan, own: Plan, cut: Cut, quantities: Sequence[Quantity]) -> Plan:
    """A plan from outside, if it is one for this program and these statistics: any other may give wrong numbers."""
    if set(given.stats) != set(own.stats):
        raise _misfit(f"the plan is for {', '.join(given.stats)}, but asked for is {', '.join(own.stats)}")
    alone = given.one_at_a_time or own.one_at_a_time
    if alone and given.microbatch_size != 1:
        raise _misfit(f"the plan runs {given.microbatch_size} examples at a time, but here it is one: {alone}")
    for row in own.rows:
        _check_row(given.row(row.parameter), row.shape)
    for site in cut.sites():
        for name in site.names:
            strategy = given.row(name).strategy
            if strategy not in STRATEGIES or not STRATEGIES[strategy].fits(site.tail, quantities):
                what = f"the plan's strategy {strategy} does not fit the gradient of {name}"
                raise _misfit(f"{what} and the statistics {', '.join(own.stats)}", where=name)
    return given


def _check_row(row: PlanRow, shape: tuple[int, ...]) -> None:
    if row.strategy not in STRATEGIES and row.strategy != "constant":
        raise PegprofError(
            f"the plan names an unknown strategy {row.strategy!r}", hint=nearest(row.strategy, STRATEGIES)
        )
    if row.shape != shape:
        raise _misfit(
            f"the plan is for a parameter {row.parameter} of shape {row.shape}, but here it is {shape}",
            where=row.parameter,
        )


def _misfit(what: str, where: str = "") -> PegprofError:
    hint = "make the plan anew with make_plan, for this loss, these shapes and these statistics"
    return PegprofError(what, where=where, hint=hint)


def _run(
    trace: Trace, cut: Cut, plan: Plan, quantities: Sequence[Quantity], args: Sequence[Any]
) -> tuple[Any, Any, list[Values]]:
    """The mean value, the aux of all examples and the quantities of each parameter's gradients."""
    inputs = trace.inputs(args)
    examples = [x for x, own in zip(inputs, trace.depends, strict=True) if own]

    def with_examples(examples: Sequence[Any]) -> list[Any]:
        own = iter(examples)
        return [next(own) if depends else x for x, depends in zip(inputs, trace.depends, strict=True)]

    def of_some(examples: list[Any], n: int) -> tuple[list[Values], Any]:
        axes = [0 if own else None for own in trace.depends]
        out_axes = (0, 0, [{q.name: 0 if is_per_example(q.name) else None for q in quantities} for _ in trace.names])
        batched = jax.vmap(
            lambda *inputs: _run_example(trace, cut, plan, quantities, inputs), axes, out_axes, axis_size=n
        )
        losses, aux, values = batched(*with_examples(examples))
        return _merged_and_joined(jnp.mean(losses), aux, values)

    def of_one(examples: list[Any], n: int) -> tuple[list[Values], Any]:
        outputs = evaluate(trace.closed, with_examples([x[0] for x in examples]))
        loss, aux, gradients = trace.split_outputs(outputs)
        merged, (aux, norms) = _merged_and_joined(loss, aux, [of_same(quantities, g) for g in gradients])
        return merged, jax.tree.map(lambda x: jnp.asarray(x)[None], (aux, norms))

    (loss, *merged), (aux, joined) = in_chunks(
        of_one if plan.one_at_a_time else of_some, examples, trace.B, plan.microbatch_size
    )
    aux = jax.tree.unflatten(trace.aux_tree, aux)
    return loss[MEAN.name], aux, [{**a, **b} for a, b in zip(merged, joined, strict=True)]


def _merged_and_joined(loss: Any, aux: list[Any], values: list[Values]) -> tuple[list[Values], Any]:
    """What chunks of examples merge, and what they put end to end."""
    merged = [{name: x for name, x in v.items() if not is_per_example(name)} for v in values]
    joined = [{name: x for name, x in v.items() if is_per_example(name)} for v in values]
    return [{MEAN.name: loss}, *merged], (aux, joined)


def _run_example(
    trace: Trace, cut: Cut, plan: Plan, quantities: Sequence[Quantity], inputs: Sequence[Any]
) -> tuple[Any, list[Any], list[Values]]:
    """The program of one example, with quantities in place of gradients; to be run under ``vmap``."""
    return trace.split_outputs(_run_cut(cut, plan, quantities, inputs))


def _run_cut(cut: Cut, plan: Plan, quantities: Sequence[Quantity], inputs: Sequence[Any]) -> list[Any]:
    """Evaluate a cut program; an output that is a gradient is given as its quantities."""
    env = start(cut.closed, inputs)
    formed = Env()  # the quantities of the gradients that sites and inner loops form
    early: dict[int, Any] = {}  # what the early parts of sites give, by the identity of the site
    for step in cut.steps:
        match step:
            case EarlyPart(site=site):
                if plan.row(site.names[0]).strategy == LATE.name:
                    early[id(site)] = _run_early_part(site, plan, quantities, env)
            case Site() if id(step) in early:
                formed.write(step.tail.outputs, [_run_late_part(step, quantities, early[id(step)], env)])
            case Site():
                formed.write(step.tail.outputs, _run_site(step, plan, quantities, env))
            case InnerLoop():
                _run_inner_loop(step, plan, quantities, env, formed)
            case eqn:
                env.run([eqn])

    def output(i: int, atom: Any) -> Any:
        if i not in cut.gradients:
            return env.read([atom])[0]
        origin = cut.gradients[i]
        if origin is None:
            return of_same(quantities, env.read([atom])[0])
        values = formed[origin.source]
        return {name: x if is_per_example(name) else _move(origin.chain, x) for name, x in values.items()}

    return [output(i, atom) for i, atom in enumerate(cut.closed.jaxpr.outvars)]


def _move(chain: Sequence[Any], x: Any) -> Any:
    for eqn in chain:
        (x,) = bind_wide(eqn, [x])
    return x


def _run_inner_loop(inner: InnerLoop, plan: Plan, quantities: Sequence[Quantity], env: Env, formed: Env) -> None:
    """A scan whose stacked gradients become stacked quantities."""
    loop, n = inner.loop, inner.loop.num_carry
    consts, init, xs = loop.split_inputs(env.read(loop.eqn.invars))

    def step(carry: Any, x: Any) -> Any:
        outputs = _run_cut(inner.cut, plan, quantities, [*consts, *carry, *x])
        return outputs[:n], outputs[n:]

    carry, stacked = loop.scan(step, init, xs)
    env.write(loop.eqn.outvars[:n], carry)
    for i, (v, y) in enumerate(zip(loop.eqn.outvars[n:], stacked, strict=True), start=n):
        if i in inner.cut.gradients:  # the norm of a stack is that of its layers together
            formed[v] = {name: jnp.sum(x, axis=0) if is_per_example(name) else x for name, x in y.items()}
        else:
            env[v] = y


def _run_site(site: Site, plan: Plan, quantities: Sequence[Quantity], env: Env) -> list[Values]:
    """The quantities of the gradients that are formed at a site: of one example, or, batched, of all."""
    row = plan.row(site.names[0])
    strategy = STRATEGIES[row.strategy]
    tail = site.lean_tail if strategy.recomputes else site.tail

    @jax.custom_batching.custom_vmap
    def run(*inputs: Any) -> list[Values]:
        return [of_same(quantities, g) for g in run_wide(tail, inputs)]

    @run.def_vmap
    def _(axis_size: int, in_batched: Sequence[bool], *inputs: Any) -> tuple[list[Values], list[dict[str, bool]]]:
        frontier = Frontier(values=inputs, batched=in_batched, B=axis_size)
        values = strategy.run(tail, quantities, frontier, row.chunk)
        return values, [{name: is_per_example(name) for name in v} for v in values]

    inputs = env.read(tail.inputs)
    values = run(*inputs)
    if not strategy.recomputes:
        return values
    # XLA would put the tails last and hold every frontier until then. What comes next waits for this tail instead.
    values, inputs = jax.lax.optimization_barrier((values, inputs))
    env.write(tail.inputs, inputs)
    return values


def _run_early_part(site: Site, plan: Plan, quantities: Sequence[Quantity], env: Env) -> tuple[Values, Any]:
    """The first half of a site that is parted in two: quantities, and what is kept of each example for the second."""
    halves, chunk = Halves.of(site.lean_tail), plan.row(site.names[0]).chunk

    @jax.custom_batching.custom_vmap
    def run(*inputs: Any) -> tuple[Values, Any]:
        return late.run_early_of_one(halves, quantities, inputs)

    @run.def_vmap
    def _(axis_size: int, in_batched: Sequence[bool], *inputs: Any) -> tuple[Any, Any]:
        frontier = Frontier(values=inputs, batched=in_batched, B=axis_size)
        values, rows = late.run_early(halves, quantities, frontier, chunk)
        return (values, rows), ({name: is_per_example(name) for name in values}, True)

    inputs = env.read(halves.early.inputs)
    results, inputs = jax.lax.optimization_barrier((run(*inputs), inputs))  # as in _run_site
    env.write(halves.early.inputs, inputs)
    return results


def _run_late_part(site: Site, quantities: Sequence[Quantity], early: tuple[Values, Any], env: Env) -> Values:
    """The second half."""
    halves = Halves.of(site.lean_tail)

    @jax.custom_batching.custom_vmap
    def run(early: Values, rows: Any, *inputs: Any) -> Values:
        return late.run_late_of_one(halves, quantities, early, rows, inputs)

    @run.def_vmap
    def _(axis_size: int, in_batched: Sequence[Any], early: Values, rows: Any, *inputs: Any) -> tuple[Any, Any]:
        of_early, of_rows, *of_inputs = in_batched
        early = {
            name: x if of_early[name] == is_per_example(name) else _repeat(x, axis_size) for name, x in early.items()
        }
        rows = rows if of_rows else _repeat(rows, axis_size)
        frontier = Frontier(values=inputs, batched=of_inputs, B=axis_size)
        values = late.run_late(halves, quantities, early, rows, frontier)
        return values, {name: is_per_example(name) for name in values}

    return run(*early, *env.read(halves.late.inputs))


def _repeat(x: Any, n: int) -> Any:
    return jnp.broadcast_to(x, (n, *jnp.shape(x)))


def _finish(stat: Statistic, values: list[Values], trace: Trace) -> Any:
    """A statistic from the quantities of each parameter, in the shape that the statistic has."""
    if stat.scope == "model":
        none = jnp.zeros(trace.B)  # where there are no parameters
        total = {q.name: sum(v[q.name] for v in values) if values else none for q in stat.needs}
        return stat.finish(total, trace.B)
    return jax.tree.unflatten(trace.gradients_tree, [stat.finish(v, trace.B) for v in values])
