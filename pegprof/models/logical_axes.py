"""Logical axis names to the axes of a mesh: names as flax modules carry them in, a spec for each parameter out.

A name that is an axis of the mesh means itself; ``TABLE`` has the usual names of the field, as in T5X, MaxText and
flax's own examples. Any other name shards nothing. flax's rules do the rest: an axis of the mesh is taken once, by the
name that stands first in the table. A name whose axis does not divide the parameter's is passed over.
"""

from collections.abc import Sequence
from typing import Any

import jax
from flax import linen
from flax.linen import spmd

from pegprof.errors import PegprofError

TABLE: dict[str, str] = {
    **{axis: axis for axis in ("data", "fsdp", "model")},
    **dict.fromkeys(("tensor", "tp", "mdl"), "model"),
    **dict.fromkeys(
        ("vocab", "mlp", "exp", "experts", "heads", "q_heads", "kv_heads", "joined_kv", "qkv", "kv"), "model"
    ),
    "embed": "fsdp",
}
"""From a name to an axis of the mesh, the first to choose first."""


def spec_of(names: Sequence[Any] | None, shape: Sequence[int], mesh: Any) -> jax.P:
    """The spec of a parameter whose axes have these names.

    >>> mesh = jax.sharding.AbstractMesh((2, 4, 2), ("data", "fsdp", "model"))
    >>> spec_of(("embed", "heads", "kv"), (64, 8, 16), mesh), spec_of(("embed", "heads", "kv"), (64, 3, 16), mesh)
    (P('fsdp', 'model', None), P('fsdp', None, 'model'))
    """
    sizes = dict(zip(names or (), shape, strict=False))
    rules = [(name, axis) for name, axis in TABLE.items() if name in sizes and sizes[name] % mesh.shape[axis] == 0]
    spec = spmd.logical_to_mesh_axes(tuple(names or ()), rules)
    return jax.P() if spec is None else spec


def spec_parameters(names: Any, params: Any, mesh: Any) -> Any:
    """A tree of specs like ``params``, from one of names: of ``jax.P``, as flax's ``get_partition_spec`` gives them."""
    return jax.tree.map(
        lambda own, x: spec_of(own, x.shape, mesh), names, params, is_leaf=lambda x: isinstance(x, jax.P)
    )


def has_names(names: Any) -> bool:
    """Whether some parameter has names at all."""
    leaves = jax.tree.leaves(names, is_leaf=lambda x: isinstance(x, jax.P))
    return any(entry is not None for spec in leaves for entry in spec)


def unbox(tree: Any) -> Any:
    """The arrays without flax's boxes. flax's own ``unbox`` would also constrain them to a mesh in context."""

    def open_box(x: Any) -> Any:
        if isinstance(x, linen.Partitioned):
            return x.value
        return x.unbox() if isinstance(x, linen.meta.AxisMetadata) else x

    return jax.tree.map(open_box, tree, is_leaf=lambda x: isinstance(x, linen.meta.AxisMetadata))


def check_boxes(params: Any, *, where: str) -> None:
    """Refuse parameters in boxes that constrain them to a mesh, wherever a loss opens them.

    Raises:
      PegprofError: some are ``nn.Partitioned``. Inside of pegprof's ``shard_map`` JAX allows no such constraints.
    """
    boxes = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, linen.meta.AxisMetadata))
    if any(isinstance(box, linen.Partitioned) and not isinstance(box, linen.LogicallyPartitioned) for box in boxes):
        raise PegprofError(
            "init returns parameters in the boxes of nn.with_partitioning, which cannot be opened on a mesh",
            where=where,
            hint="use pegprof.from_flax, which opens them first; or return nn.meta.unbox(params), and say sharding=...",
        )


def boxed_specs(params: Any, mesh: Any) -> Any:
    """The specs of parameters that are in flax's boxes; None if none is. The tree is a prefix of ``params``."""
    names = linen.get_partition_spec(params)
    return spec_parameters(names, unbox(params), mesh) if has_names(names) else None
