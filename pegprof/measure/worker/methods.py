"""The table of methods: the ways to compute statistics of per-example gradients on a whole program.

Each makes ``fn(params, batch) -> {statistic: pytree}`` for a Problem. ``vmap`` and ``microbatch`` are what a careful
user would write with JAX and optax alone: bare examples where the loss takes them, batches of one otherwise,
statistics taken from each gradient in float32 at least.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from optax import microbatching

import pegprof
from pegprof.engine.accumulators import Accumulator, Moment
from pegprof.engine.plan import Plan
from pegprof.engine.statistics import Statistic, accumulators_of, finish
from pegprof.errors import PegprofError, nearest
from pegprof.models.problem import Problem

Params = Any
Batch = Any
StatsFn = Callable[[Params, Batch], dict[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What a method needs to know beside the problem."""

    stats: tuple[Statistic, ...]
    microbatch_size: int
    backend: str
    memory_budget: int | None = None  # what surgery's planner stays within, by running fewer examples at a time
    surgery_size: int | None = None  # how many those are, where it is not the planner's choice
    kernels: bool = True  # whether surgery may use fused kernels
    step: str | None = None  # the optimizer whose whole step is run, by name; ``programs.py`` makes it
    batch_sharding: jax.NamedSharding | None = None  # on a mesh
    param_shardings: Any = None  # likewise, a tree like the parameters


@dataclasses.dataclass(frozen=True, kw_only=True)
class About:
    """What a reader must know of a method's program to judge its numbers."""

    notes: tuple[str, ...] = ()
    microbatch_size: int | None = None
    materialised_parameters: int | None = None
    plan: Plan | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """One entry of the table. ``about`` takes the batch size too; ``mean_alone`` has no other statistic to give."""

    name: str
    make: Callable[[Problem, Options], StatsFn]
    about: Callable[[Problem, Options, int], About] = lambda problem, options, B: About()
    microbatches: bool = False
    mean_alone: bool = False


def _make_grad(problem: Problem, options: Options) -> StatsFn:
    return lambda params, batch: {"mean": jax.grad(problem.loss)(params, batch)}


def _make_vmap(problem: Problem, options: Options) -> StatsFn:
    def grad_of_example(params: Params, example: Batch) -> Params:
        if problem.keep_batch_dim:
            example = jax.tree.map(lambda x: x[None], example)
        return jax.grad(problem.loss)(params, example)

    def fn(params: Params, batch: Batch) -> dict[str, Any]:
        grads = jax.vmap(grad_of_example, in_axes=(None, 0))(params, batch)
        kept = [jax.tree.map(lambda g, a=a: a.of_stack(_widen(g)), grads) for a in accumulators_of(options.stats)]
        return _finish(options.stats, kept, params, batch)

    return fn


def _make_microbatch(problem: Problem, options: Options) -> StatsFn:
    needed = dict(enumerate(accumulators_of(options.stats)))
    merged = {i: a for i, a in needed.items() if not a.per_example}
    alone = {i: a for i, a in needed.items() if a.per_example}

    def fn(params: Params, batch: Batch) -> dict[str, Any]:
        opened, close_keys = _open_keys(batch)
        size = min(options.microbatch_size, _batch_size(batch))
        kept, aux = microbatching.micro_grad(
            lambda params, opened: problem.loss(params, close_keys(opened)),
            keep_batch_dim=problem.keep_batch_dim,
            microbatch_size=size,
            accumulator={i: _optax_accumulator(a, params, size) for i, a in merged.items()},
            transform_fn=lambda grad: {i: jax.tree.map(_entry_fn(a), grad) for i, a in merged.items()},
            metrics_fn=lambda grad: {
                i: jax.tree.map(lambda g, a=a: a.of_one(_widen(g)), grad) for i, a in alone.items()
            },
        )(params, opened)
        kept |= aux.metrics
        return _finish(options.stats, [kept[i] for i in needed], params, batch)

    return fn


def _open_keys(batch: Batch) -> tuple[Batch, Callable[[Batch], Batch]]:
    """The batch with its random keys as numbers, since keys that are reshaped cannot be lowered, and the way back."""
    leaves, structure = jax.tree.flatten(batch)
    kinds = [jax.random.key_impl(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else None for x in leaves]
    opened = [x if kind is None else jax.random.key_data(x) for x, kind in zip(leaves, kinds, strict=True)]

    def close(opened: Batch) -> Batch:
        pairs = zip(jax.tree.leaves(opened), kinds, strict=True)
        closed = [x if kind is None else jax.random.wrap_key_data(x, impl=kind) for x, kind in pairs]
        return jax.tree.unflatten(structure, closed)

    return jax.tree.unflatten(structure, opened), close


def _make_surgery(problem: Problem, options: Options) -> StatsFn:
    compute = pegprof.grad_stats(
        problem.loss,
        options.stats,
        keep_batch_dim=problem.keep_batch_dim,
        backend=options.backend,
        memory_budget=options.memory_budget,
        microbatch_size=options.surgery_size,
        batch_axes=options.batch_sharding,
        param_shardings=options.param_shardings,
    )

    def fn(params: Params, batch: Batch) -> dict[str, Any]:
        with _kernels(options):
            return compute(params, batch)

    return fn


def _kernels(options: Options) -> contextlib.AbstractContextManager[None]:
    """Turns fused kernels off where they are not wanted; nobody turns them on."""
    return contextlib.nullcontext() if options.kernels else pegprof.kernels(False)


def _about_vmap(problem: Problem, options: Options, B: int) -> About:
    return About(notes=("over batches of one" if problem.keep_batch_dim else "over bare examples",))


def _about_microbatch(problem: Problem, options: Options, B: int) -> About:
    size, (examples,) = options.microbatch_size, _about_vmap(problem, options, B).notes
    return About(notes=(f"{size} at a time, {examples}",), microbatch_size=size)


def plan_surgery(problem: Problem, options: Options, B: int) -> Plan:
    """What surgery does; nothing is compiled."""
    with _kernels(options):
        return pegprof.make_plan(
            problem.loss,
            problem.abstract_params(),
            problem.abstract_batch(B),
            stats=options.stats,
            keep_batch_dim=problem.keep_batch_dim,
            backend=options.backend,
            memory_budget=options.memory_budget,
            microbatch_size=options.surgery_size,
            batch_axes=options.batch_sharding,
        )


def _about_surgery(problem: Problem, options: Options, B: int) -> About:
    plan = plan_surgery(problem, options, B)
    schedule = f"one at a time: {plan.one_at_a_time}" if plan.one_at_a_time else _schedule_note(plan)
    return About(
        notes=tuple(filter(None, [schedule, _kernel_note(plan), *plan.remarks])),
        microbatch_size=plan.microbatch_size,
        materialised_parameters=len(plan.materialised),
        plan=plan,
    )


def _kernel_note(plan: Plan) -> str:
    used = len(plan.kernel_sites)
    return f"kernels at {used} of {len(plan.sites)} sites" if used else ""


def _schedule_note(plan: Plan) -> str:
    each = " on each device" if plan.devices > 1 else ""
    return f"{plan.microbatch_size} at a time{each}" if plan.microbatch_size < plan.batch else ""


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(name="grad", make=_make_grad, mean_alone=True),
        Method(name="vmap", make=_make_vmap, about=_about_vmap),
        Method(name="microbatch", make=_make_microbatch, about=_about_microbatch, microbatches=True),
        Method(name="surgery", make=_make_surgery, about=_about_surgery),
    )
}


def resolve(names: Sequence[str]) -> tuple[Method, ...]:
    """Names, as a user gives them, to entries of the table."""
    for name in names:
        if name not in METHODS:
            raise PegprofError(f"unknown method {name!r}", hint=nearest(name, METHODS))
    return tuple(METHODS[name] for name in names)


def _batch_size(batch: Batch) -> int:
    return int(jax.tree.leaves(batch)[0].shape[0])


def _widen(g: jax.Array) -> jax.Array:
    return g.astype(jnp.promote_types(g.dtype, jnp.float32))


def _entry_fn(accumulator: Accumulator) -> Callable[[jax.Array], jax.Array]:
    """What is handed on of one example's gradient."""
    return lambda g: accumulator.phi(_widen(g)) if isinstance(accumulator, Moment) else _widen(g)


def _optax_accumulator(accumulator: Accumulator, params: Params, size: int) -> Any:
    """An accumulator as optax has them: from a stack of ``size`` gradients, merged with those before."""
    if isinstance(accumulator, Moment):
        return microbatching.AccumulationType.MEAN
    structure: Any = jax.tree.structure(params)

    def update(old: Any, new: Any, chunks_so_far: jax.Array) -> Any:
        pairs = zip(structure.flatten_up_to(old), structure.flatten_up_to(new), strict=True)
        return jax.tree.unflatten(structure, [accumulator.merge(a, chunks_so_far * size, b, size) for a, b in pairs])

    return microbatching.Accumulator(
        init=lambda kept: jax.tree.map(jnp.zeros_like, kept),
        update=update,
        finalize=lambda kept: kept,
        aggregate=lambda g_Bx: jax.tree.map(accumulator.of_stack, g_Bx),
    )


def _finish(stats: Sequence[Statistic], kept: Sequence[Any], params: Params, batch: Batch) -> dict[str, Any]:
    """From what each accumulator kept, a tree like the parameters, to statistics."""
    B, accumulators = _batch_size(batch), accumulators_of(stats)
    structure: Any = jax.tree.structure(params)
    leaves = list(zip(*(structure.flatten_up_to(tree) for tree in kept), strict=True))
    finished = {}
    for stat in stats:
        found = finish(stat, accumulators, leaves, B)
        finished[stat.name] = found[0] if stat.scope == "model" else jax.tree.unflatten(structure, found)
    return finished
