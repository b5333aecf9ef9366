"""``grad_stats``: runs the body for the whole batch and the planned tails in its midst.

The program of one example runs under one ``jax.vmap``. Each site in it is a ``jax.custom_batching.custom_vmap``
function: for one example it would be the plain tail; its batching rule sees the frontiers of all B examples and returns
their quantities, *unbatched*. Where a site sits, in a scan or not, is then jax's business.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pegprof.engine.jaxpr import Env, leading_axis, start, vary, varying_axes
from pegprof.engine.plan import Plan, PlanRow
from pegprof.engine.planner import find_sites, plan_sites
from pegprof.engine.quantities import Values, in_chunks, is_per_example, of_same
from pegprof.engine.sites import Cut, EarlyPart, InnerLoop, Site
from pegprof.engine.statistics import MEAN, Quantity, Statistic, finish, quantities_of, resolve
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
        inputs, trace = _trace_varying(loss, args, roles)
        cut = find_sites(trace)
        made = plan_sites(
            trace, cut, wanted, microbatch_size=microbatch_size, backend=backend, memory_budget=memory_budget
        )
        named = quantities_of(wanted)
        quantities = tuple(named.values())
        followed = _checked(plan, made, cut, quantities) if plan else made
        value, aux, values = _run(trace, cut, followed, quantities, inputs)
        found = {stat.name: _finish(stat, values, named, trace) for stat in wanted}
        return ((value, aux) if has_aux else value), found

    return fn


def _trace_varying(loss: Loss, args: Sequence[Any], roles: Roles) -> tuple[Sequence[Any], Trace]:
    """The trace of one example, and the arguments as it takes them: under a ``shard_map``, all differ by device.

    Where ``check_vma=True``, JAX adds up the gradient of a parameter that is the same on all devices over the devices.
    Per-example gradients must not be added up, so each device has parameters of its own.
    """
    axes = frozenset[str]().union(*(varying_axes(x) for x in jax.tree.leaves(args) if hasattr(x, "dtype")))
    args = _vary_all(args, axes)
    trace = trace_example(loss, args, roles)
    closed_over = varying_axes(trace.closed.out_avals[0]) - axes  # what the loss closes over may differ as well
    if closed_over:
        args = _vary_all(args, axes | closed_over)
        trace = trace_example(loss, args, roles)
    return args, trace


def _vary_all(args: Sequence[Any], axes: frozenset[str]) -> Sequence[Any]:
    return jax.tree.map(lambda x: vary(jnp.asarray(x), axes), tuple(args)) if axes else args


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

    def outputs_of(index: jax.Array | None, inputs: Sequence[Any]) -> tuple[Any, list[Any], list[Values]]:
        return trace.split_outputs(_Example(plan=plan, quantities=quantities, index=index).run(cut, inputs))

    def of_some(examples: list[Any], n: int) -> tuple[list[Values], Any]:
        axes = [0 if own else None for own in trace.depends]
        out_axes = (0, 0, [{q.name: 0 if is_per_example(q.name) else None for q in quantities} for _ in trace.names])
        batched = jax.vmap(outputs_of, (0, axes), out_axes, axis_size=n)
        losses, aux, values = batched(_numbered(n, examples), with_examples(examples))
        return _merged_and_joined(jnp.mean(losses), aux, values)

    def of_one(examples: list[Any], n: int) -> tuple[list[Values], Any]:
        loss, aux, values = outputs_of(None, with_examples([x[0] for x in examples]))
        merged, (aux, norms) = _merged_and_joined(loss, aux, values)
        return merged, jax.tree.map(lambda x: jnp.asarray(x)[None], (aux, norms))

    (loss, *merged), (aux, joined) = in_chunks(
        of_one if plan.one_at_a_time else of_some, examples, trace.B, plan.microbatch_size
    )
    aux = jax.tree.unflatten(trace.aux_tree, aux)
    return loss[MEAN.name], aux, [{**a, **b} for a, b in zip(merged, joined, strict=True)]


def _numbered(n: int, examples: Sequence[Any]) -> jax.Array:
    """The numbers of n examples, spread over the devices as these are where a mesh has explicit axes."""
    axes = {axis for x in examples if (axis := leading_axis(x)) is not None}
    return jax.sharding.reshard(jnp.arange(n), jax.P(axes.pop())) if axes else jnp.arange(n)


def _merged_and_joined(loss: Any, aux: list[Any], values: list[Values]) -> tuple[list[Values], Any]:
    """What chunks of examples merge, and what they put end to end."""
    merged = [{name: x for name, x in v.items() if not is_per_example(name)} for v in values]
    joined = [{name: x for name, x in v.items() if is_per_example(name)} for v in values]
    return [{MEAN.name: loss}, *merged], (aux, joined)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Example:
    """The program of one example with quantities in place of gradients, run under our ``vmap``.

    ``index`` is the example's number in the batch, None where one example runs without ``vmap``. Every site takes it,
    because our ``vmap`` batches it and no other does. A site whose other inputs are the same for all examples would
    else be batched by a caller's ``vmap``, and would average over the caller's axis.
    """

    plan: Plan
    quantities: Sequence[Quantity]
    index: jax.Array | None

    def run(self, cut: Cut, inputs: Sequence[Any]) -> list[Any]:
        """Evaluate a cut program; an output that is a gradient is given as its quantities."""
        env = start(cut.closed, inputs)
        formed = Env()  # the quantities of the gradients that sites and inner loops form
        early: dict[int, Any] = {}  # what the early parts of sites give, by the identity of the site
        for step in cut.steps:
            match step:
                case EarlyPart(site=site):
                    if self.plan.row(site.names[0]).strategy == LATE.name:
                        early[id(site)] = self.run_early_part(site, env)
                case Site() if id(step) in early:
                    formed.write(step.tail.outputs, [self.run_late_part(step, early[id(step)], env)])
                case Site():
                    formed.write(step.tail.outputs, self.run_site(step, env))
                case InnerLoop():
                    self.run_inner_loop(step, env, formed)
                case eqn:
                    env.run([eqn])

        def output(i: int, atom: Any) -> Any:
            if i not in cut.gradients:
                return env.read([atom])[0]
            origin = cut.gradients[i]
            if origin is None:
                return of_same(self.quantities, env.read([atom])[0])
            values = formed[origin.source]
            return {name: x if is_per_example(name) else _move(origin.chain, x) for name, x in values.items()}

        return [output(i, atom) for i, atom in enumerate(cut.closed.jaxpr.outvars)]

    def run_inner_loop(self, inner: InnerLoop, env: Env, formed: Env) -> None:
        """A scan whose stacked gradients become stacked quantities."""
        loop, n = inner.loop, inner.loop.num_carry
        consts, init, xs = loop.split_inputs(env.read(loop.eqn.invars))

        def step(carry: Any, x: Any) -> Any:
            outputs = self.run(inner.cut, [*consts, *carry, *x])
            return outputs[:n], outputs[n:]

        carry, stacked = loop.scan(step, init, xs)
        env.write(loop.eqn.outvars[:n], carry)
        for i, (v, y) in enumerate(zip(loop.eqn.outvars[n:], stacked, strict=True), start=n):
            if i in inner.cut.gradients:  # the norm of a stack is that of its layers together
                formed[v] = {name: jnp.sum(x, axis=0) if is_per_example(name) else x for name, x in y.items()}
            else:
                env[v] = y

    def run_site(self, site: Site, env: Env) -> list[Values]:
        """The quantities of the gradients that are formed at a site: of one example, or, batched, of all."""
        row = self.plan.row(site.names[0])
        strategy = STRATEGIES[row.strategy]
        tail = site.lean_tail if strategy.recomputes else site.tail

        def of_one(*inputs: Any) -> list[Values]:
            return [of_same(self.quantities, g) for g in run_wide(tail, inputs)]

        def of_all(frontier: Frontier) -> list[Values]:
            return strategy.run(tail, self.quantities, frontier, row.chunk)

        inputs = env.read(tail.inputs)
        values = self.reduce(of_one, of_all, _are_per_example, inputs)
        if not strategy.recomputes:
            return values
        # XLA would put the tails last and hold every frontier until then. What comes next waits for this tail instead.
        values, inputs = jax.lax.optimization_barrier((values, inputs))
        env.write(tail.inputs, inputs)
        return values

    def run_early_part(self, site: Site, env: Env) -> tuple[Values, Any]:
        """The first half of a site that is parted in two: quantities, and what is kept of each example."""
        halves, chunk = Halves.of(site.lean_tail), self.plan.row(site.names[0]).chunk

        def of_one(*inputs: Any) -> tuple[Values, Any]:
            return late.run_early_of_one(halves, self.quantities, inputs)

        def of_all(frontier: Frontier) -> tuple[Values, Any]:
            return late.run_early(halves, self.quantities, frontier, chunk)

        inputs = env.read(halves.early.inputs)
        results = self.reduce(of_one, of_all, lambda results: (_are_per_example(results[0]), True), inputs)
        results, inputs = jax.lax.optimization_barrier((results, inputs))  # as in run_site
        env.write(halves.early.inputs, inputs)
        return results

    def run_late_part(self, site: Site, early: tuple[Values, Any], env: Env) -> Values:
        """The second half."""
        halves = Halves.of(site.lean_tail)
        names = list(early[0])

        def of_one(rows: Any, *inputs: Any) -> Values:
            values, inputs = dict(zip(names, inputs, strict=False)), inputs[len(names) :]
            return late.run_late_of_one(halves, self.quantities, values, rows, inputs)

        def of_all(frontier: Frontier) -> Values:
            rows, *others = frontier.values
            inputs = Frontier(values=others[len(names) :], batched=frontier.batched[1 + len(names) :], B=frontier.B)
            return late.run_late(halves, self.quantities, dict(zip(names, others, strict=False)), rows, inputs)

        inputs = [early[1], *early[0].values(), *env.read(halves.late.inputs)]
        return self.reduce(of_one, of_all, _are_per_example, inputs)

    def reduce(
        self,
        of_one: Callable[..., Any],
        of_all: Callable[[Frontier], Any],
        per_example: Callable[[Any], Any],
        inputs: Sequence[Any],
    ) -> Any:
        """What ``of_one`` gives for one example's inputs; under our ``vmap``, what ``of_all`` gives for those of all.

        ``per_example`` says of each result of ``of_all`` whether it has a leading axis of examples.
        """
        if self.index is None:
            return of_one(*inputs)

        @jax.custom_batching.custom_vmap
        def run(index: jax.Array, *inputs: Any) -> Any:
            return of_one(*inputs)

        @run.def_vmap
        def _(axis_size: int, in_batched: Sequence[bool], index: jax.Array, *inputs: Any) -> tuple[Any, Any]:
            frontier = Frontier(values=inputs, batched=in_batched[1:], B=axis_size)
            if any(frontier.batched):
                results = of_all(frontier)
                return results, per_example(results)
            results = of_one(*inputs)
            batched = per_example(results)
            return jax.tree.map(lambda x, b: _repeat(x, axis_size) if b else x, results, batched), batched

        return run(self.index, *inputs)


def _are_per_example(values: Any) -> Any:
    """Of each quantity, whether there is one for each example."""
    if isinstance(values, list):
        return [_are_per_example(v) for v in values]
    return {name: is_per_example(name) for name in values}


def _move(chain: Sequence[Any], x: Any) -> Any:
    for eqn in chain:
        (x,) = bind_wide(eqn, [x])
    return x


def _repeat(x: Any, n: int) -> Any:
    return jnp.broadcast_to(x, (n, *jnp.shape(x)))


def _finish(stat: Statistic, values: list[Values], named: Mapping[Quantity, Quantity], trace: Trace) -> Any:
    """A statistic from the quantities of each parameter, in the shape that the statistic has."""
    if stat.scope == "model":
        none = jnp.zeros(trace.B)  # where there are no parameters
        names = [named[q].name for q in stat.needs]
        total = {name: sum(v[name] for v in values) if values else none for name in names}
        return finish(stat, total, named, trace.B)
    return jax.tree.unflatten(trace.gradients_tree, [finish(stat, v, named, trace.B) for v in values])
