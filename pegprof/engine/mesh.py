"""Statistics of a batch that is sharded over a mesh: every device runs its own examples, then summaries are merged.

The engine runs inside a ``jax.shard_map`` over the axes that the batch is sharded over. So its loops, chunks and
microbatches stay within a device, and what crosses devices is one reduction of the accumulators at the end. The other
axes of the mesh, along which parameters may be sharded, are left to XLA.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pegprof.engine.accumulators import Accumulator, Summary
from pegprof.engine.checks.arguments import batch_size
from pegprof.engine.jaxpr import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    collective_axes,
    explicit_sharding,
    source_line,
    sub_jaxprs,
)
from pegprof.engine.options import Options
from pegprof.errors import PegprofError, first_line, nearest

DATA_AXES = ("replica", "data", "batch", "dp", "fsdp")
"""Under ``jit`` an array does not tell how it is sharded. Then axes of the mesh with these names are the batch's."""

Local = tuple[Any, Any, list[list[Summary]]]  # mean value, aux of all examples, summaries of each parameter


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """The part of a sharded batch that one device has.

    Args:
      axes: of the mesh, that the batch's leading axis is sharded over, major first.
      devices: along these axes: into how many parts the batch is cut.
      mesh: a ``Mesh``; None if it is the one in context.
      manual: whether the caller is itself inside a ``shard_map`` over these axes.
    """

    axes: tuple[str, ...]
    devices: int
    mesh: Any = None
    manual: bool = False

    def check(self, B: int) -> None:
        """Refuse a batch that its devices do not divide."""
        if B % self.devices:
            raise PegprofError(
                f"a batch of {B} examples cannot be sharded over {_axes(self.axes)}: "
                f"their {self.devices} devices do not divide it",
                hint=f"choose a batch that is a multiple of {self.devices}",
            )

    def numbers(self, count: int) -> jax.Array:
        """The numbers of this device's ``count`` examples in the whole batch; for the inside of the ``shard_map``."""
        return jax.lax.axis_index(self.axes) * count + jnp.arange(count)


def _axes(axes: Sequence[str]) -> str:
    return f"the mesh axis {axes[0]}" if len(axes) == 1 else f"the mesh axes {', '.join(axes)}"


def find_share(args: Sequence[Any], options: Options) -> Share | None:
    """How the batch is sharded: as ``batch_axes`` says, or as its arrays do; None if it is not."""
    named = options.batch_axes
    context = jax.sharding.get_abstract_mesh()
    mesh = context if not context.empty else named.mesh if isinstance(named, jax.NamedSharding) else _mesh_of(args)
    if mesh is None and named is None:
        return None
    if mesh is None:
        raise PegprofError(
            f"batch_axes={named!r}, but there is no mesh",
            hint="call it under jax.set_mesh(mesh), with arrays that are sharded, or with a jax.NamedSharding",
        )
    manual = frozenset(context.manual_axes)
    if named is None:
        leaves = jax.tree.leaves([args[i] for i in options.of(args).batch])
        axes = _find_axes(leaves, mesh, is_inside=bool(manual))
    else:
        axes = _leading(named) if isinstance(named, jax.NamedSharding) else _as_tuple(named)
    _check_axes(axes, mesh, manual)
    is_inside = bool(manual.intersection(axes))
    devices = math.prod(mesh.shape[axis] for axis in axes)
    if devices == 1 and not is_inside:
        return None
    return Share(axes=axes, devices=devices, mesh=mesh if context.empty else None, manual=is_inside)


def _check_axes(axes: Sequence[str], mesh: Any, manual: frozenset[str]) -> None:
    """Refuse axes that the mesh does not have, or of which a ``shard_map`` around has some."""
    for axis in axes:
        if axis not in mesh.axis_names:
            listed = f"the mesh has {', '.join(mesh.axis_names)}"
            raise PegprofError(f"unknown mesh axis {axis!r}: {listed}", hint=nearest(axis, mesh.axis_names))
    inside = manual.intersection(axes)
    if inside and len(inside) < len(axes):
        raise PegprofError(
            f"of the batch axes {', '.join(axes)} only {', '.join(sorted(inside))} are axes of the shard_map around",
            hint="name axes of the shard_map alone, or call it outside",
        )


def _leading(sharding: jax.NamedSharding) -> tuple[str, ...]:
    """The axes that the leading axis of an array is sharded over."""
    return _as_tuple(sharding.spec[0]) if len(sharding.spec) and sharding.spec[0] else ()


def _as_tuple(axes: Any) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)


def _mesh_of(args: Sequence[Any]) -> Any:
    """The mesh that some argument lies on: a concrete one, or one whose type has explicit axes."""
    meshes = (sharding.mesh for x in jax.tree.leaves(args) if (sharding := sharding_of(x)) is not None)
    return next((mesh for mesh in meshes if mesh.size > 1), None)


def sharding_of(x: Any) -> jax.NamedSharding | None:
    """How an argument is sharded, if it tells: under ``jit`` its type does where a mesh has explicit axes."""
    sharding = explicit_sharding(x) if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    return sharding if isinstance(sharding, jax.NamedSharding) else None


def _find_axes(leaves: Sequence[Any], mesh: Any, *, is_inside: bool) -> tuple[str, ...]:
    """The axes of the batch: as its arrays are sharded, or, where these do not tell, by the names of the mesh's axes.

    Inside a ``shard_map`` of the caller's the examples are its device's own.
    """
    for x in leaves:
        sharding = sharding_of(x)
        if sharding is not None and (axes := _leading(sharding)):
            return axes
    if is_inside or not all(isinstance(x, jax.core.Tracer) for x in leaves):
        return ()
    B, *_ = (*jnp.shape(leaves[0]), 1) if leaves else (1,)  # a batch without examples is refused later, in words
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    axes = ()
    for axis in (a for a in DATA_AXES if kinds.get(a) is jax.sharding.AxisType.Auto):
        if B % math.prod(mesh.shape[a] for a in (*axes, axis)) == 0:
            axes += (axis,)
    return axes


def run_sharded(
    share: Share | None,
    of_device: Callable[..., Local],
    args: Sequence[Any],
    options: Options,
    accumulators: Sequence[Accumulator],
) -> Local:
    """``of_device`` on every device's own examples, with summaries of the whole batch."""
    if share is None:
        return of_device(*args)
    options = options.of(args)
    params = jax.tree.leaves([args[i] for i in options.params])
    layouts = [Layout()] * len(params) if share.manual else _layouts(args, options, share)

    def merged(*args: Any) -> Local:
        value, aux, summaries = of_device(*args)
        count = batch_size(args, options)
        across = [
            [layout.merge(a, x, count, share.axes) for a, x in zip(accumulators, of_one, strict=True)]
            for layout, of_one in zip(layouts, summaries, strict=True)
        ]
        return jax.lax.pmean(value, share.axes), aux, across

    if share.manual:
        return merged(*args)
    own, whole = jax.P(share.axes), jax.P()
    kept = [
        [own if a.per_example else layout.spec if a.entrywise else whole for a in accumulators] for layout in layouts
    ]
    sharded = _on_every_device(share, merged, args, options, out_specs=(whole, own, kept))

    @jax.jit  # without it, a shard_map over some axes of a mesh takes no arrays that are sharded over the others
    def placed(*args: Any) -> Local:
        value, aux, summaries = sharded(*args)
        return value, aux, [layout.place(x, accumulators) for layout, x in zip(layouts, summaries, strict=True)]

    return placed(*args)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How a parameter is sharded, and so what is kept of its gradients.

    Args:
      sharding: the parameter's; None if nothing tells.
      is_explicit: whether its type says so.
      scattered: the batch's axes that each dimension is sharded over. A device needs only its own slice of what is
        kept, so summaries are scattered over these axes as they are reduced: half of what an all-reduce sends.
    """

    sharding: jax.NamedSharding | None = None
    is_explicit: bool = False
    scattered: tuple[tuple[str, ...], ...] = ()

    @property
    def spec(self) -> jax.P:
        """Of an entrywise summary that leaves the ``shard_map``."""
        return jax.P(*(axes or None for axes in self.scattered))

    def merge(self, accumulator: Accumulator, summary: Summary, count: Any, axes: Sequence[str]) -> Summary:
        """The summary of all devices along ``axes``, or this device's slice; each has that of ``count`` examples."""
        done: list[str] = []
        for dimension, over in enumerate(self.scattered if accumulator.entrywise else ()):
            if over:
                summary = accumulator.merge_scattered(summary, count, over, dimension)
                count *= math.prod(jax.lax.axis_size(axis) for axis in over)
                done += over
        left = [axis for axis in axes if axis not in done]
        return accumulator.merge_across(summary, count, left) if left else summary

    def place(self, summaries: Sequence[Summary], accumulators: Sequence[Accumulator]) -> list[Summary]:
        """Entrywise summaries sharded as the parameter is, over the other axes of the mesh too."""

        def place(x: jax.Array) -> jax.Array:
            if self.sharding is None:
                return x
            move = jax.sharding.reshard if self.is_explicit else jax.lax.with_sharding_constraint
            return move(x, self.sharding)

        return [jax.tree.map(place, x) if a.entrywise else x for a, x in zip(accumulators, summaries, strict=True)]


def _layouts(args: Sequence[Any], options: Options, share: Share) -> list[Layout]:
    """Of each parameter: as ``param_shardings`` says, or as its array does."""
    params = [args[i] for i in options.params]
    leaves = jax.tree.leaves(params)
    told = _told_shardings(params, options, share) or [sharding_of(x) for x in leaves]
    return [_layout(x, sharding, share) for x, sharding in zip(leaves, told, strict=True)]


def _told_shardings(params: Sequence[Any], options: Options, share: Share) -> list[jax.NamedSharding | None] | None:
    """The shardings that ``param_shardings`` gives, one for each leaf."""
    told = options.param_shardings
    if told is None:
        return None
    mesh = share.mesh or jax.sharding.get_abstract_mesh()
    wanted = params[0] if isinstance(options.argnums, int) else tuple(params)
    try:
        told = jax.tree.broadcast(told, wanted, is_leaf=_is_layout)
    except ValueError as error:
        what = f"param_shardings is no tree like the parameters: {first_line(error)}"
        raise PegprofError(what, hint="give a jax.P or a jax.NamedSharding for each, or for a subtree") from error
    found: list[Any] = []  # a None may be a layout, or a subtree of the parameters: their own leaves tell
    jax.tree.map(lambda _, layout: found.append(layout), wanted, told)
    return [jax.NamedSharding(mesh, x) if isinstance(x, jax.P) else x for x in found]


def _is_layout(x: Any) -> bool:
    return x is None or isinstance(x, jax.P | jax.NamedSharding)


def _layout(parameter: Any, sharding: jax.NamedSharding | None, share: Share) -> Layout:
    explicit = explicit_sharding(parameter)
    sharding = explicit or sharding
    if sharding is None:
        return Layout()
    of_dimension = [tuple(a for a in _as_tuple(entry or ()) if a in share.axes) for entry in sharding.spec]
    scattered = tuple(
        axes if size and size % math.prod(sharding.mesh.shape[a] for a in axes) == 0 else ()
        for axes, size in zip(of_dimension, jnp.shape(parameter), strict=False)
    )
    return Layout(sharding=sharding, is_explicit=explicit is not None, scattered=scattered if any(scattered) else ())


def on_one_device(share: Share, fn: Callable[..., Any], args: Sequence[Any], options: Options) -> Any:
    """What ``fn`` returns for the arguments of one device; it is traced, and may return anything."""
    if share.manual:
        return fn(*args)
    found: list[Any] = []

    def trace(*args: Any) -> None:
        found.append(fn(*args))

    jax.eval_shape(_on_every_device(share, trace, args, options.of(args), out_specs=None), *args)
    return found[0]


def _on_every_device(
    share: Share, fn: Callable[..., Any], args: Sequence[Any], options: Options, *, out_specs: Any
) -> Callable[..., Any]:
    """A function of arguments like these that runs ``fn`` on every device, with its own examples."""
    share.check(batch_size(args, options))
    sharded = jax.shard_map(
        fn,
        mesh=share.mesh,
        in_specs=tuple(jax.P(share.axes) if i in options.batch else jax.P() for i in range(len(args))),
        out_specs=out_specs,
        axis_names=set(share.axes),
        check_vma=False,  # nothing is added up over devices but what is merged in ``run_sharded``
    )
    return lambda *args: sharded(*_as_taken(share, args, options))


def automatic_axes() -> tuple[str, ...]:
    """The axes of the mesh in context over which XLA shards what runs here."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(a for a in mesh.axis_names if a not in mesh.manual_axes and mesh.shape[a] > 1)


def check_collectives(closed: ClosedJaxpr) -> None:
    """Refuse a loss that combines what the devices of a ``shard_map`` have.

    A device then has a part of an example's gradient, and a square of a part is no part of the square.
    """
    manual = frozenset(jax.sharding.get_abstract_mesh().manual_axes)
    for eqn in _equations(closed.jaxpr) if manual else ():
        if axes := collective_axes(eqn) & manual:
            raise PegprofError(
                f"the loss combines what devices have along {_axes(sorted(axes))}: {eqn.primitive.name} "
                f"({source_line(eqn)}). Each device would have a part of an example's gradient",
                hint="leave that axis to XLA: shard_map(..., axis_names=...) with the axes of the batch alone",
            )


def _equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in sub_jaxprs(eqn):
            yield from _equations(inner)


def _as_taken(share: Share, args: Sequence[Any], options: Options) -> list[Any]:
    """The arguments as the ``shard_map`` takes them. Where axes are explicit they must lie so; else XLA moves them."""

    def moved(x: Any, *, is_batch: bool) -> Any:
        sharding = explicit_sharding(x)
        if sharding is None or not any(sharding.spec):
            return x
        others = [_drop(entry, share.axes) for entry in sharding.spec]
        wanted = jax.P(share.axes, *others[1:]) if is_batch else jax.P(*others)
        return jax.sharding.reshard(x, jax.NamedSharding(sharding.mesh, wanted)) if wanted != sharding.spec else x

    return [jax.tree.map(lambda x, i=i: moved(x, is_batch=i in options.batch), arg) for i, arg in enumerate(args)]


def _drop(entry: Any, axes: Sequence[str]) -> Any:
    """An entry of a spec without some axes."""
    kept = tuple(a for a in _as_tuple(entry or ()) if a not in axes)
    return kept if len(kept) > 1 else next(iter(kept), None)
