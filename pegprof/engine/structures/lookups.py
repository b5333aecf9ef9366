"""Lookups: the gradient of ``table[ids]`` is one example's T rows of D, added into zeros of V×D.

``Table`` is the shape of what is looked up in, with several indexed axes made one. ``ids_of`` and ``updates_of`` read
the rows of all examples from the operands of a scatter-add; ``add_up_equal`` leaves each row once.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from pegprof.engine.facts import known
from pegprof.engine.jaxpr import JaxprEqn, shape_of
from pegprof.engine.jaxpr import primitives as p


def adds_rows(eqn: JaxprEqn) -> bool:
    """Whether an equation adds whole rows of a table at given places: the transpose of a lookup."""
    if known(eqn) is not p.scatter_add_p:
        return False
    numbers = eqn.params["dimension_numbers"]
    table, updates = shape_of(eqn.invars[0]), shape_of(eqn.invars[2])
    indexed = numbers.scatter_dims_to_operand_dims
    row = [n for axis, n in enumerate(table) if axis not in indexed]
    return (
        set(numbers.inserted_window_dims) == set(indexed)
        and not numbers.operand_batching_dims
        and [updates[axis] for axis in numbers.update_window_dims] == row
        and math.prod(table[axis] for axis in indexed) < 2**31
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """The shape of what is looked up in, V×D: several indexed axes are one, and so are those of a row."""

    shape: tuple[int, ...]
    indexed: tuple[int, ...]

    @classmethod
    def of(cls, lookup: JaxprEqn) -> "Table":
        indexed = tuple(lookup.params["dimension_numbers"].scatter_dims_to_operand_dims)
        return cls(shape=shape_of(lookup.invars[0]), indexed=indexed)

    @property
    def bounds(self) -> tuple[int, ...]:
        return tuple(self.shape[axis] for axis in self.indexed)

    @property
    def row(self) -> tuple[int, ...]:
        return tuple(n for axis, n in enumerate(self.shape) if axis not in self.indexed)

    @property
    def V(self) -> int:
        return math.prod(self.bounds)

    @property
    def D(self) -> int:
        return math.prod(self.row)

    def flatten(self, x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, self.indexed, range(len(self.indexed))).reshape(self.V, self.D)

    def unflatten(self, x_VxD: jax.Array) -> jax.Array:
        return jnp.moveaxis(x_VxD.reshape(*self.bounds, *self.row), range(len(self.indexed)), self.indexed)


def ids_of(lookup: JaxprEqn, indices_BxPxK: Any, table: Table) -> jax.Array:
    """The rows that B examples look up, [B, T], as numbers below V; V itself where an index is out of bounds.

    XLA drops what is added out of bounds, whatever was promised; only the mode ``CLIP`` takes the nearest row.
    """
    B, *places, K = indices_BxPxK.shape
    indices = indices_BxPxK.reshape(B, math.prod(places), K)
    indices = indices.astype(jnp.promote_types(indices.dtype, jnp.int32))
    bounds = jnp.asarray(table.bounds, indices.dtype)[None, None, :]
    if lookup.params["mode"] == jax.lax.GatherScatterMode.CLIP:
        indices = jnp.clip(indices, 0, bounds - 1)
    valid = jnp.all((indices >= 0) & (indices < bounds), axis=2)
    strides = [math.prod(table.bounds[k + 1 :]) for k in range(K)]
    ids = sum(indices[:, :, k] * stride for k, stride in enumerate(strides))
    return jnp.where(valid, ids, table.V).astype(jnp.int32)


def updates_of(lookup: JaxprEqn, updates_Bx: jax.Array, table: Table) -> jax.Array:
    """What B examples add at those rows, [B, T, D]."""
    windows = [axis + 1 for axis in lookup.params["dimension_numbers"].update_window_dims]
    rows_last = jnp.moveaxis(updates_Bx, windows, range(-len(windows), 0))
    return rows_last.reshape(updates_Bx.shape[0], -1, table.D)


def add_up_equal(ids_BxT: jax.Array, updates_BxTxD: jax.Array, V: int) -> tuple[jax.Array, jax.Array]:
    """The rows that each example touches, once each, and what it adds there. A place that is left over has the id V.

    A stable sort puts equal ids side by side, the first of them first; all that is added goes to its place.
    """
    B, T, D = updates_BxTxD.shape
    place_BxT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None, :], (B, T))
    sorted_BxT, order_BxT = jax.lax.sort((ids_BxT, place_BxT), dimension=1, num_keys=1, is_stable=True)
    differs = sorted_BxT[:, 1:] != sorted_BxT[:, :-1]
    starts = jnp.concatenate([jnp.ones((B, 1), bool), differs], axis=1)
    start_BxT = jax.lax.cummax(jnp.where(starts, place_BxT, 0), axis=1)
    first_BxT = jnp.take_along_axis(order_BxT, start_BxT, axis=1)
    first_BxT = jnp.put_along_axis(place_BxT, order_BxT, first_BxT, axis=1, inplace=False)
    ids_BxT = jnp.where(first_BxT == place_BxT, ids_BxT, V)
    at = jnp.arange(B, dtype=jnp.int32)[:, None] * T + first_BxT
    rows = jnp.zeros((B * T, D), updates_BxTxD.dtype).at[at.ravel()].add(updates_BxTxD.reshape(B * T, D))
    return ids_BxT, jnp.where((ids_BxT < V)[:, :, None], rows.reshape(B, T, D), 0)
