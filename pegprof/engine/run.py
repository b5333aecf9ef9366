"""``grad_stats``: runs the body for the whole batch, with the planned sites in its midst.

The program of one example runs under one ``jax.vmap``. Each site in it is a ``jax.custom_batching.custom_vmap``
function, one for each of its stages. For one example it would be the plain tail. Its batching rule sees the frontiers
of all B examples and returns summaries, *unbatched*. Where a site sits, in a scan or not, is then JAX's business.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from pegprof.engine.accumulators import MEAN, Accumulator, PerExample, Summary, in_chunks
from pegprof.engine.checks.arguments import Loss, check_batch
from pegprof.engine.checks.plan import check_plan
from pegprof.engine.dtypes import widen
from pegprof.engine.jaxpr import Env, start, vary, varying_axes
from pegprof.engine.kernels.switch import chip_for
from pegprof.engine.mesh import Local, Share, check_collectives, find_share, run_sharded
from pegprof.engine.options import OptionArgs, Options, takes_options
from pegprof.engine.plan import Plan
from pegprof.engine.planner import find_sites, plan_sites
from pegprof.engine.rules import find_strategy
from pegprof.engine.rules.folds import LOOP
from pegprof.engine.sites import Cut, InnerLoop, Site
from pegprof.engine.stages import Frontier, Stage, Summaries, place
from pegprof.engine.statistics import Statistic, accumulators_of, finish, resolve
from pegprof.engine.structures import permute
from pegprof.engine.trace import Trace, trace_example

Stats = Sequence[str | Statistic] | str | Statistic


@takes_options(OptionArgs)
def grad_stats(
    loss: Loss, stats: Stats = ("mean", "second_moment"), **options: Unpack[OptionArgs]
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
      plan: a plan to follow, from ``make_plan`` for the same loss, shapes and statistics.
      memory_budget: bytes that the planner should stay within, by its own estimate, by running fewer at a time.
      batch_axes: the mesh axes that the batch is sharded over, or its ``jax.NamedSharding``; None finds them, as below.
        Whatever above counts examples or bytes is then for one device.
      param_shardings: how the parameters are sharded, a ``jax.P`` or ``jax.NamedSharding`` for each or for subtrees;
        None reads it from arrays that tell. Statistics of a parameter that is sharded over axes of the batch (FSDP)
        are scattered as they are reduced. Where nothing tells, every device gets all of them.

    On a mesh every device runs its own examples, and what is kept of them is reduced once. The axes are those that the
    batch's arrays are sharded over, where these tell: concrete arrays do, and so do explicit axes. Under ``jit`` with
    automatic axes they do not; then the axes of the mesh in context (``jax.set_mesh``) are taken that are called
    ``replica``, ``data``, ``batch``, ``dp`` or ``fsdp``. Inside a ``shard_map`` a device's examples are a batch of its
    own, unless ``batch_axes`` names axes of that: then all devices along these have one batch together.

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
    both = value_and_grad_stats(loss, stats, **options)
    return lambda *args: both(*args)[1]


@takes_options(OptionArgs)
def value_and_grad_stats(
    loss: Loss, stats: Stats = ("mean", "second_moment"), **options: Unpack[OptionArgs]
) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """As ``grad_stats``, with the value of the loss: the mean over the examples.

    Returns:
      A function that returns ``(value, stats)``, or ``((value, aux), stats)`` with ``has_aux``, where each leaf of
      ``aux`` has a leading axis of B.
    """
    accumulate = _make_accumulate(loss, resolve(stats), Options(**options))

    def fn(*args: Any) -> tuple[Any, dict[str, Any]]:
        value, aux, kept = accumulate(*args)
        return ((value, aux) if options.get("has_aux") else value), kept.finish()

    return fn


@takes_options(OptionArgs)
def accumulate_stats(
    loss: Loss, stats: Stats = ("mean", "second_moment"), **options: Unpack[OptionArgs]
) -> Callable[..., "Accumulated"]:
    """As ``grad_stats``, before the last step: what is kept of a batch, to be merged with that of other batches.

    Returns:
      A function of the loss's arguments that returns ``Accumulated``. Merging gives the statistics of all the examples
      together, over microbatches, steps, devices or hosts. It is a pytree.

    >>> import jax.numpy as jnp
    >>> kept = accumulate_stats(lambda w, x: jnp.mean(x @ w), "variance")
    >>> w, x = jnp.zeros(1), jnp.array([[1.0], [2.0], [6.0]])
    >>> kept(w, x[:1]).merge(kept(w, x[1:])).finish()
    {'variance': Array([7.], dtype=float32)}
    """
    accumulate = _make_accumulate(loss, resolve(stats), Options(**options), partial=True)
    return lambda *args: accumulate(*args)[2]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Accumulated:
    """What is kept of the gradients of ``count`` examples, for some statistics."""

    count: Any
    summaries: list[list[Summary]]  # for each parameter, for each accumulator
    stats: tuple[Statistic, ...] = dataclasses.field(metadata={"static": True})
    tree: Any = dataclasses.field(metadata={"static": True})  # of the parameters

    def merge(self, other: "Accumulated") -> "Accumulated":
        """What is kept of the examples of both."""
        accumulators = accumulators_of(self.stats)
        merged = [
            [k.merge(x, self.count, y, other.count) for k, x, y in zip(accumulators, a, b, strict=True)]
            for a, b in zip(self.summaries, other.summaries, strict=True)
        ]
        return dataclasses.replace(self, count=self.count + other.count, summaries=merged)

    def finish(self) -> dict[str, Any]:
        """The statistics, as ``grad_stats`` returns them."""
        accumulators = accumulators_of(self.stats)
        found = {stat.name: finish(stat, accumulators, self.summaries, self.count) for stat in self.stats}
        return {
            stat.name: found[stat.name][0] if stat.scope == "model" else jax.tree.unflatten(self.tree, found[stat.name])
            for stat in self.stats
        }


def _make_accumulate(
    loss: Loss, stats: tuple[Statistic, ...], options: Options, *, partial: bool = False
) -> Callable[..., tuple[Any, Any, Accumulated]]:
    """A function from the loss's arguments to the mean value, the aux of all examples, and what is kept."""
    accumulators = accumulators_of(stats)

    def accumulate(*args: Any) -> tuple[Any, Any, Accumulated]:
        share = find_share(args, options)
        traces: list[Trace] = []

        def of_device(*args: Any) -> Local:
            inputs, trace = _trace_varying(loss, args, options)
            check_collectives(trace.closed)
            traces.append(trace)
            cut = find_sites(trace, accumulators)
            # What is merged with other batches may be undefined for this one.
            wanted = [dataclasses.replace(s, minimum_batch=1) for s in stats] if partial or share else stats
            plan = check_plan(options.plan, trace, cut, wanted) if options.plan else plan_sites(trace, cut, wanted)
            return _run(trace, cut, plan, accumulators, inputs, share)

        value, aux, summaries = run_sharded(share, of_device, args, options, accumulators)
        B = traces[0].B * (share.devices if share else 1)
        if share and not partial:
            check_batch(B, stats, None)
        count = jnp.asarray(B) if partial else B
        return value, aux, Accumulated(count=count, summaries=summaries, stats=stats, tree=traces[0].gradients_tree)

    return accumulate


def _trace_varying(loss: Loss, args: Sequence[Any], options: Options) -> tuple[Sequence[Any], Trace]:
    """The trace of one example, and the arguments as it takes them: under a ``shard_map``, all differ by device.

    Where ``check_vma=True``, JAX adds up the gradient of a parameter that is the same on all devices over the devices.
    Per-example gradients must not be added up, so each device has parameters of its own.
    """
    axes = frozenset[str]().union(*(varying_axes(x) for x in jax.tree.leaves(args) if hasattr(x, "dtype")))
    args = _vary_all(args, axes)
    trace = trace_example(loss, args, options)
    closed_over = varying_axes(trace.closed.out_avals[0]) - axes  # what the loss closes over may differ as well
    if closed_over:
        args = _vary_all(args, axes | closed_over)
        trace = trace_example(loss, args, options)
    return args, trace


def _vary_all(args: Sequence[Any], axes: frozenset[str]) -> Sequence[Any]:
    return jax.tree.map(lambda x: vary(jnp.asarray(x), axes), tuple(args)) if axes else args


def _run(
    trace: Trace, cut: Cut, plan: Plan, accumulators: Sequence[Accumulator], args: Sequence[Any], share: Share | None
) -> Local:
    """The mean value, the aux of all examples and the summaries of each parameter's gradients."""
    inputs = trace.inputs(args, share)
    examples = [x for x, own in zip(inputs, trace.depends, strict=True) if own]
    # The value, the aux and the parameters, each with what is kept of it over chunks of examples.
    kinds = [MEAN, *[PerExample()] * trace.num_aux, *list(accumulators) * len(trace.names)]

    def with_examples(examples: Sequence[Any]) -> list[Any]:
        own = iter(examples)
        return [next(own) if depends else x for x, depends in zip(inputs, trace.depends, strict=True)]

    def outputs_of(index: jax.Array | None, inputs: Sequence[Any], n: int) -> tuple[Any, list[Any], Summaries]:
        example = _Example(plan=plan, accumulators=accumulators, index=index, batch=n)
        return trace.split_outputs(example.run(cut, inputs))

    def of_some(examples: list[Any], n: int) -> list[Summary]:
        axes = [0 if own else None for own in trace.depends]
        out_axes = (0, 0, [[0 if a.per_example else None for a in accumulators] for _ in trace.names])
        batched = jax.vmap(lambda index, inputs: outputs_of(index, inputs, n), (0, axes), out_axes, axis_size=n)
        losses, aux, summaries = batched(jnp.arange(n), with_examples(examples))
        return [jnp.mean(losses), *aux, *itertools.chain(*summaries)]

    def of_one(examples: list[Any], n: int) -> list[Summary]:
        loss, aux, summaries = outputs_of(None, with_examples([x[0] for x in examples]), 1)
        flat = [loss, *aux, *itertools.chain(*summaries)]
        return [
            jax.tree.map(lambda x: jnp.asarray(x)[None], x) if kind.per_example else x
            for kind, x in zip(kinds, flat, strict=True)
        ]

    of_chunk = of_one if plan.one_at_a_time else of_some
    loss, *rest = in_chunks(of_chunk, kinds, examples, trace.B, plan.microbatch_size)
    aux, flat = rest[: trace.num_aux], rest[trace.num_aux :]
    k = len(accumulators)
    summaries = [flat[i * k : (i + 1) * k] for i in range(len(trace.names))]
    return loss, jax.tree.unflatten(trace.aux_tree, aux), summaries


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Example:
    """The program of one example with summaries in place of gradients, run under our ``vmap``.

    ``index`` is the example's number among ``batch``, None where one example runs without ``vmap``. Every site takes
    it, because our ``vmap`` batches it and no other does. A site whose other inputs are the same for all examples would
    else be batched by a caller's ``vmap``, and would average over the caller's axis.
    """

    plan: Plan
    accumulators: Sequence[Accumulator]
    index: jax.Array | None
    batch: int

    def run(self, cut: Cut, inputs: Sequence[Any]) -> list[Any]:
        """Evaluate a cut program; an output that is a gradient is given as its summaries."""
        env = start(cut.closed, inputs)
        formed = Env()  # the summaries of the gradients that sites and inner loops form
        before: dict[str, Summaries] = {}  # what the stages of each site gave so far
        for step in place(cut, [stage for site in cut.own_sites for stage in self.stages_of(site)]):
            match step:
                case Stage(site=site):
                    before[site.key] = self.run_stage(step, before.get(site.key, []), env)
                    if step.is_last:
                        formed.write(site.outputs, before[site.key])
                case InnerLoop():
                    self.run_inner_loop(step, env, formed)
                case eqn:
                    env.run([eqn])

        def output(i: int, atom: Any) -> Any:
            if i not in cut.gradients:
                return env.read([atom])[0]
            origin = cut.gradients[i]
            if origin is None:
                return [a.of_equal(widen(env.read([atom])[0]), self.batch) for a in self.accumulators]
            pairs = zip(self.accumulators, formed[origin.source], strict=True)
            return [
                x if a.per_example or not origin.steps else jax.tree.map(lambda y: permute(origin.steps, y), x)
                for a, x in pairs
            ]

        return [output(i, atom) for i, atom in enumerate(cut.closed.jaxpr.outvars)]

    def stages_of(self, site: Site) -> Sequence[Stage]:
        if self.index is None:  # what runs one example at a time needs no strategy
            return LOOP.stages_at(site, self.accumulators, 1)
        row = self.plan.at(site.key)
        return find_strategy(row.strategy).stages_at(site, self.accumulators, row.chunk, chip_for(self.plan.backend))

    def run_inner_loop(self, inner: InnerLoop, env: Env, formed: Env) -> None:
        """A scan whose stacked gradients become stacked summaries."""
        loop, n = inner.loop, inner.loop.num_carry
        consts, init, xs = loop.split_inputs(env.read(loop.eqn.invars))

        def step(carry: Any, x: Any) -> Any:
            outputs = self.run(inner.cut, [*consts, *carry, *x])
            return outputs[:n], outputs[n:]

        carry, stacked = loop.scan(step, init, xs)
        env.write(loop.eqn.outvars[:n], carry)
        for i, (v, y) in enumerate(zip(loop.eqn.outvars[n:], stacked, strict=True), start=n):
            if i in inner.cut.gradients:  # what is additive over entries is that of the layers together
                pairs = zip(self.accumulators, y, strict=True)
                formed[v] = [jax.tree.map(lambda x: jnp.sum(x, axis=0), x) if a.per_example else x for a, x in pairs]
            else:
                env[v] = y

    def run_stage(self, stage: Stage, before: Summaries, env: Env) -> Summaries:
        """The summaries of a stage: of one example, or, batched, of all."""
        inputs = env.read(stage.tail.inputs)
        if self.index is None:
            return stage.run_one(before, inputs)

        @jax.custom_batching.custom_vmap
        def run(index: jax.Array, before: Summaries, *inputs: Any) -> Summaries:
            return stage.run_one(before, inputs)

        @run.def_vmap
        def _(axis_size: int, batched: Sequence[Any], index: Any, before: Any, *inputs: Any) -> tuple[Any, Any]:
            frontier = Frontier(tail=stage.tail, values=inputs, batched=batched[2:], B=axis_size)
            results = stage.run(frontier, before)
            return results, stage.per_example(results)

        results = run(self.index, before, *inputs)
        if stage.recomputes:
            # XLA would put the tails last and hold every frontier until then. What comes next waits for this instead.
            results, inputs = jax.lax.optimization_barrier((results, inputs))
            env.write(stage.tail.inputs, inputs)
        return results
