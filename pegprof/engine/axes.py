"""How an equation applies to operands without their axes of size one, and how a permutation is undone.

A squeeze rule takes an equation and values whose axes of size one are gone, and returns the results without theirs; or
None where it does not apply. ``passes/squeeze.py`` says why they should go. The facts of a primitive name its rule.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pegprof.engine.jaxpr import Atom, JaxprEqn, bind, shape_of

Rule = Callable[[JaxprEqn, Sequence[Any]], list[Any] | None]


def squeezed(x: Any) -> Any:
    ones = [axis for axis, n in enumerate(jnp.shape(x)) if n == 1]
    return jax.lax.squeeze(x, ones) if ones else x


def expanded(x: Any, shape: tuple[int, ...]) -> Any:
    return x if jnp.shape(x) == shape else jax.lax.expand_dims(x, [i for i, n in enumerate(shape) if n == 1])


def _long(shape: Sequence[int]) -> list[int]:
    """The axes that stay."""
    return [axis for axis, n in enumerate(shape) if n != 1]


def _renumbered(axes: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Axes of a shape as positions among those that stay; axes of size one are left out."""
    position = {axis: i for i, axis in enumerate(_long(shape))}
    return tuple(position[axis] for axis in axes if axis in position)


def elementwise(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Operands have the shape of the result, or are scalars, or have size one where it has not: those axes stay."""
    long = _long(shape_of(eqn.outvars[0]))

    def operand(x: Any, v: Atom) -> Any:
        shape = shape_of(v)
        return x if shape == () else jax.lax.reshape(x, [shape[axis] for axis in long])

    return bind(eqn, [operand(x, v) for x, v in zip(values, eqn.invars, strict=True)])


def reshape(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any] | None:
    return [jax.lax.reshape(values[0], [n for n in shape_of(eqn.outvars[0]) if n != 1])] if len(values) == 1 else None


def broadcast(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any] | None:
    shape, taken = shape_of(eqn.outvars[0]), shape_of(eqn.invars[0])
    if len(values) > 1:
        return None
    axes = [axis for n, axis in zip(taken, eqn.params["broadcast_dimensions"], strict=True) if n != 1]
    return [jax.lax.broadcast_in_dim(values[0], [n for n in shape if n != 1], _renumbered(axes, shape))]


def slice_(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any] | None:
    axes = _long(shape_of(eqn.invars[0]))
    if 0 in shape_of(eqn.outvars[0]):  # nothing may be left of an axis of size one
        return None
    first, last, stride = (eqn.params[name] for name in ("start_indices", "limit_indices", "strides"))
    narrow = {
        "start_indices": tuple(first[axis] for axis in axes),
        "limit_indices": tuple(last[axis] for axis in axes),
        "strides": tuple(stride[axis] for axis in axes) if stride else None,
    }
    return [squeezed(x) for x in bind(eqn, values, **narrow)]


def transpose(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    return [jax.lax.transpose(values[0], _renumbered(eqn.params["permutation"], shape_of(eqn.invars[0])))]


def reduce(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    axes = _renumbered(eqn.params["axes"], shape_of(eqn.invars[0]))
    return bind(eqn, values, axes=axes) if axes else list(values)


def dot_general(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    numbers = tuple(
        tuple(_renumbered(axes, shape_of(v)) for axes, v in zip(pair, eqn.invars, strict=True))
        for pair in eqn.params["dimension_numbers"]
    )
    return bind(eqn, values, dimension_numbers=numbers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lookup:
    """The axes of a gather, or of the scatter that is its transpose: JAX's two spellings made one.

    ``windows`` are the axes of the result (of the updates, for a scatter) that belong to the window taken at each
    position. The other axes of the result are the positions, in the order of the indices' axes but the last.
    """

    operand: tuple[int, ...]  # shapes
    indices: tuple[int, ...]
    result: tuple[int, ...]
    slices: tuple[int, ...]  # the size of a window along each axis of the operand
    windows: tuple[int, ...]
    collapsed: tuple[int, ...]
    indexed: tuple[int, ...]
    operand_batch: tuple[int, ...]
    indices_batch: tuple[int, ...]

    def squeezed(self) -> "Lookup":
        """Without axes of size one along which nothing is looked up.

        One axis of positions stays beside batch axes: XLA recognises a lookup of one entry in each row, as in a loss,
        by that axis.
        """
        for axis in self._window_axes():
            if self.operand[axis] == 1 and axis not in self.indexed:
                return self._without_window(axis).squeezed()
        positions = range(len(self.indices) - 1)
        own = [axis for axis in positions if axis not in self.indices_batch]
        for axis in positions:
            if self.indices[axis] == 1 and own != [axis]:
                return self._without_position(axis).squeezed()
        return self

    def _window_axes(self) -> list[int]:
        """For each window axis of the result, its axis of the operand."""
        return [a for a in range(len(self.operand)) if a not in self.collapsed and a not in self.operand_batch]

    def _without_window(self, axis: int) -> "Lookup":
        """Without an axis of the operand that is in the window; the result loses an axis too."""
        gone = self.windows[self._window_axes().index(axis)]
        return self._without_operand_axis(axis)._without_result_axis(gone)

    def _without_position(self, axis: int) -> "Lookup":
        """Without an axis of positions, and the operand's batch axis that goes with it, if there is one."""
        gone = [a for a in range(len(self.result)) if a not in self.windows][axis]
        pairs = dict(zip(self.indices_batch, self.operand_batch, strict=True))
        lookup = self._without_operand_axis(pairs[axis]) if axis in pairs else self
        lookup = dataclasses.replace(
            lookup, indices=_dropped(self.indices, axis), indices_batch=_shifted(self.indices_batch, axis)
        )
        return lookup._without_result_axis(gone)

    def _without_operand_axis(self, axis: int) -> "Lookup":
        return dataclasses.replace(
            self,
            operand=_dropped(self.operand, axis),
            slices=_dropped(self.slices, axis),
            collapsed=_shifted(self.collapsed, axis),
            indexed=_shifted(self.indexed, axis),
            operand_batch=_shifted(self.operand_batch, axis),
        )

    def _without_result_axis(self, axis: int) -> "Lookup":
        return dataclasses.replace(self, result=_dropped(self.result, axis), windows=_shifted(self.windows, axis))


def _dropped(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :])


def _shifted(axes: Sequence[int], gone: int) -> tuple[int, ...]:
    """Axes renumbered after one of all is gone."""
    return tuple(axis - (axis > gone) for axis in axes if axis != gone)


def gather(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    numbers = eqn.params["dimension_numbers"]
    lookup = Lookup(
        operand=shape_of(eqn.invars[0]),
        indices=shape_of(eqn.invars[1]),
        result=shape_of(eqn.outvars[0]),
        slices=eqn.params["slice_sizes"],
        windows=numbers.offset_dims,
        collapsed=numbers.collapsed_slice_dims,
        indexed=numbers.start_index_map,
        operand_batch=numbers.operand_batching_dims,
        indices_batch=numbers.start_indices_batching_dims,
    ).squeezed()
    narrow = numbers._replace(
        offset_dims=lookup.windows,
        collapsed_slice_dims=lookup.collapsed,
        start_index_map=lookup.indexed,
        operand_batching_dims=lookup.operand_batch,
        start_indices_batching_dims=lookup.indices_batch,
    )
    taken = _reshaped(values, lookup.operand, lookup.indices)
    return [squeezed(x) for x in bind(eqn, taken, dimension_numbers=narrow, slice_sizes=lookup.slices)]


def scatter(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    numbers = eqn.params["dimension_numbers"]
    lookup = Lookup(
        operand=shape_of(eqn.invars[0]),
        indices=shape_of(eqn.invars[1]),
        result=shape_of(eqn.invars[2]),
        slices=shape_of(eqn.invars[0]),
        windows=numbers.update_window_dims,
        collapsed=numbers.inserted_window_dims,
        indexed=numbers.scatter_dims_to_operand_dims,
        operand_batch=numbers.operand_batching_dims,
        indices_batch=numbers.scatter_indices_batching_dims,
    ).squeezed()
    narrow = numbers._replace(
        update_window_dims=lookup.windows,
        inserted_window_dims=lookup.collapsed,
        scatter_dims_to_operand_dims=lookup.indexed,
        operand_batching_dims=lookup.operand_batch,
        scatter_indices_batching_dims=lookup.indices_batch,
    )
    taken = _reshaped(values, lookup.operand, lookup.indices, lookup.result)
    return [squeezed(x) for x in bind(eqn, taken, dimension_numbers=narrow)]


def _reshaped(values: Sequence[Any], *shapes: tuple[int, ...]) -> list[Any]:
    return [jax.lax.reshape(x, shape) for x, shape in zip(values, shapes, strict=True)]


def invert_reshape(eqn: JaxprEqn, x: Any) -> Any:
    return jax.lax.reshape(x, shape_of(eqn.invars[0]))


def invert_transpose(eqn: JaxprEqn, x: Any) -> Any:
    order: Sequence[int] = eqn.params["permutation"]
    return jax.lax.transpose(x, sorted(range(len(order)), key=lambda axis: order[axis]))
