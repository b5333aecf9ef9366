"""The table of methods: the ways to compute statistics of per-example gradients on a whole program.

Each makes ``fn(params, batch) -> {statistic: pytree}`` for a Problem. ``vmap`` and ``microbatch`` are what a careful
user would write with JAX and optax alone: bare examples where the loss takes them, batches of one otherwise,
statistics taken from each gradient in float32 at least.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from optax import microbatching

import pegprof
from pegprof.engine.plan import Plan
from pegprof.engine.statistics import CENTRED, Centred, Moment, Quantity, SquareNorm, Statistic, finish, quantities_of
from pegprof.errors import PegprofError, nearest
from pegprof.problem import Problem

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
    step: str | None = None  # the optimizer whose whole step is run, by name; ``programs.py`` makes it


@dataclasses.dataclass(frozen=True, kw_only=True)
class About:
    """What a reader must know of a method's program to judge its numbers."""

    note: str = ""
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
        needed = quantities_of(options.stats).values()
        quantities = {q.name: jax.tree.map(lambda g, q=q: _reduce(q, _widen(g)), grads) for q in needed}
        return _finish(options.stats, quantities, params, batch)

    return fn


def _make_microbatch(problem: Problem, options: Options) -> StatsFn:
    needed = quantities_of(options.stats).values()
    entries = [q for q in needed if not isinstance(q, SquareNorm)]
    norms = [q for q in needed if isinstance(q, SquareNorm)]

    def fn(params: Params, batch: Batch) -> dict[str, Any]:
        opened, close_keys = _open_keys(batch)
        quantities, aux = microbatching.micro_grad(
            lambda params, opened: problem.loss(params, close_keys(opened)),
            keep_batch_dim=problem.keep_batch_dim,
            microbatch_size=min(options.microbatch_size, _batch_size(batch)),
            accumulator={q.name: _ACCUMULATORS[type(q)] for q in entries},
            transform_fn=lambda grad: {q.name: jax.tree.map(_entry_fn(q), grad) for q in entries},
            metrics_fn=lambda grad: {q.name: jax.tree.map(lambda g: jnp.sum(_widen(g) ** 2), grad) for q in norms},
        )(params, opened)
        quantities |= aux.metrics
        if CENTRED.name in quantities:
            quantities[CENTRED.name] = _map_centres(lambda centre: centre.square, quantities[CENTRED.name])
        return _finish(options.stats, quantities, params, batch)

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
    return pegprof.grad_stats(
        problem.loss,
        options.stats,
        keep_batch_dim=problem.keep_batch_dim,
        backend=options.backend,
        memory_budget=options.memory_budget,
        microbatch_size=options.surgery_size,
    )


def _about_vmap(problem: Problem, options: Options, B: int) -> About:
    return About(note="over batches of one" if problem.keep_batch_dim else "over bare examples")


def _about_microbatch(problem: Problem, options: Options, B: int) -> About:
    size, examples = options.microbatch_size, _about_vmap(problem, options, B).note
    return About(note=f"{size} at a time, {examples}", microbatch_size=size)


def plan_surgery(problem: Problem, options: Options, B: int) -> Plan:
    """What surgery does; nothing is compiled."""
    return pegprof.make_plan(
        problem.loss,
        problem.abstract_params(),
        problem.abstract_batch(B),
        stats=options.stats,
        keep_batch_dim=problem.keep_batch_dim,
        backend=options.backend,
        memory_budget=options.memory_budget,
        microbatch_size=options.surgery_size,
    )


def _about_surgery(problem: Problem, options: Options, B: int) -> About:
    plan = plan_surgery(problem, options, B)
    return About(
        note=f"one at a time: {plan.one_at_a_time}" if plan.one_at_a_time else _pace_note(plan.microbatch_size, B),
        microbatch_size=plan.microbatch_size,
        materialised_parameters=len(plan.materialised),
        plan=plan,
    )


def _pace_note(size: int, B: int) -> str:
    return f"{size} at a time" if size < B else ""


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


def _entry_fn(quantity: Quantity) -> Callable[[jax.Array], jax.Array]:
    """What is accumulated of one example's gradient."""
    return lambda g: quantity.phi(_widen(g)) if isinstance(quantity, Moment) else _widen(g)


def _reduce(quantity: Quantity, g_Bx: jax.Array) -> jax.Array:
    """A quantity of one parameter from its B gradients."""
    match quantity:
        case Moment(phi=phi):
            return jnp.mean(phi(g_Bx), axis=0)
        case Centred():
            return jnp.var(g_Bx, axis=0)
        case SquareNorm():
            return jnp.sum(g_Bx**2, axis=tuple(range(1, g_Bx.ndim)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Centre:
    """The mean of some gradients and the mean of their squared distances from it."""

    mean: jax.Array
    square: jax.Array


def _merge_centres(old: _Centre, new: _Centre, chunks_so_far: jax.Array) -> _Centre:
    # Chan's formula for chunks of equal size; it loses no digits, as mean of squares minus square of mean would.
    share = 1 / (chunks_so_far + 1)
    apart = new.mean - old.mean
    return _Centre(
        mean=old.mean + share * apart,
        square=(1 - share) * old.square + share * new.square + share * (1 - share) * apart**2,
    )


def _map_centres(fn: Callable[..., Any], *trees: Any) -> Any:
    return jax.tree.map(fn, *trees, is_leaf=lambda node: isinstance(node, _Centre))


_ACCUMULATORS: Mapping[type, Any] = {
    Moment: microbatching.AccumulationType.MEAN,
    Centred: microbatching.Accumulator(
        init=lambda centres: jax.tree.map(jnp.zeros_like, centres),
        update=lambda old, new, i: _map_centres(lambda a, b: _merge_centres(a, b, i), old, new),
        finalize=lambda centres: centres,
        aggregate=lambda g_Bx: jax.tree.map(lambda g: _Centre(mean=jnp.mean(g, 0), square=jnp.var(g, 0)), g_Bx),
    ),
}


def _finish(stats: Sequence[Statistic], quantities: Mapping[str, Any], params: Params, batch: Batch) -> dict[str, Any]:
    """From quantities, each a tree like the parameters, to statistics."""
    B, structure, named = _batch_size(batch), jax.tree.structure(params), quantities_of(stats)
    by_name = {name: jax.tree.leaves(tree) for name, tree in quantities.items()}
    finished = {}
    for stat in stats:
        if stat.scope == "model":
            names = [named[q].name for q in stat.needs]
            totals = {name: jnp.sum(jnp.stack(by_name[name]), axis=0) for name in names}
            finished[stat.name] = finish(stat, totals, named, B)
        else:
            by_leaf = [dict(zip(by_name, leaves, strict=True)) for leaves in zip(*by_name.values(), strict=True)]
            finished[stat.name] = jax.tree.unflatten(structure, [finish(stat, leaf, named, B) for leaf in by_leaf])
    return finished
