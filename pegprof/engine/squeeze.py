"""Jaxpr -> Jaxpr: hold every value without its axes of size one.

An example that comes as a batch of one drags an axis of size one through the whole program. Under ``vmap`` it stays
beside the batch axis: in a gather or scatter as one more window axis, for which XLA falls back to flattening it all,
at several times the memory (a vocabulary's gradient, most of all). Here each equation is applied to arrays without
such axes: by a rule where there is one, else by putting them back, applying it, and taking them away again.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pegprof.engine.facts import known
from pegprof.engine.jaxpr import (
    Atom,
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    bind,
    primitives,
    prune,
    pvary_p,
    shape_of,
    start,
    trace,
)

p = primitives


def squeeze(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same program, with the same inputs and outputs, without axes of size one in between."""

    def run(*args: Any) -> list[Any]:
        env = start(closed, [_squeezed(x) for x in args])
        env.update({v: _squeezed(x) for v, x in zip(closed.jaxpr.constvars, closed.consts, strict=True)})
        env.run(closed.jaxpr.eqns, _apply)
        outputs = zip(env.read(closed.jaxpr.outvars), closed.jaxpr.outvars, strict=True)
        return [_expanded(x, shape_of(v)) for x, v in outputs]

    return prune(trace(run, closed.in_avals))


def _squeezed(x: Any) -> Any:
    ones = [axis for axis, n in enumerate(jnp.shape(x)) if n == 1]
    return jax.lax.squeeze(x, ones) if ones else x


def _expanded(x: Any, shape: tuple[int, ...]) -> Any:
    return x if jnp.shape(x) == shape else jax.lax.expand_dims(x, [i for i, n in enumerate(shape) if n == 1])


def _apply(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    primitive = known(eqn)
    if primitive is p.scan_p:
        eqn = eqn.replace(params={**eqn.params, "jaxpr": squeeze(eqn.params["jaxpr"])})
    elif primitive in _RULES and (outputs := _RULES[primitive](eqn, values)) is not None:
        return outputs
    full = [x if isinstance(v, Literal) else _expanded(x, shape_of(v)) for x, v in zip(values, eqn.invars, strict=True)]
    return [_squeezed(x) for x in bind(eqn, full)]


def _elementwise(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Operands have the shape of the result, or are numbers, or are of size one where it is not: those axes stay."""
    long = _long(shape_of(eqn.outvars[0]))

    def operand(x: Any, v: Atom) -> Any:
        shape = shape_of(v)
        return x if shape == () else jax.lax.reshape(x, [shape[axis] for axis in long])

    return bind(eqn, [operand(x, v) for x, v in zip(values, eqn.invars, strict=True)])


ELEMENTWISE = frozenset(
    {
        *(p.add_p, p.add_jaxvals_p, p.sub_p, p.mul_p, p.div_p, p.neg_p, p.max_p, p.min_p, p.pow_p, p.integer_pow_p),
        *(p.exp_p, p.exp2_p, p.expm1_p, p.log_p, p.log1p_p, p.sqrt_p, p.rsqrt_p, p.cbrt_p, p.square_p, p.abs_p),
        *(p.sin_p, p.cos_p, p.tan_p, p.tanh_p, p.logistic_p, p.erf_p, p.erfc_p, p.erf_inv_p, p.sign_p, p.floor_p),
        *(p.ceil_p, p.round_p, p.eq_p, p.ne_p, p.lt_p, p.le_p, p.gt_p, p.ge_p, p.and_p, p.or_p, p.xor_p, p.not_p),
        *(p.select_n_p, p.clamp_p, p.convert_element_type_p, p.stop_gradient_p, p.copy_p, p.is_finite_p, p.rem_p),
        *(p.real_p, p.imag_p, p.conj_p, p.complex_p),
    }
)


def _long(shape: Sequence[int]) -> list[int]:
    """The axes that stay."""
    return [axis for axis, n in enumerate(shape) if n != 1]


def _kept(axes: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Axes of a shape, those of size one left out, as positions among those that stay."""
    position = {axis: i for i, axis in enumerate(_long(shape))}
    return tuple(position[axis] for axis in axes if axis in position)


def _only_shape(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any] | None:
    return [jax.lax.reshape(values[0], [n for n in shape_of(eqn.outvars[0]) if n != 1])] if len(values) == 1 else None


def _broadcast(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any] | None:
    shape, taken = shape_of(eqn.outvars[0]), shape_of(eqn.invars[0])
    if len(values) > 1:
        return None
    axes = [axis for n, axis in zip(taken, eqn.params["broadcast_dimensions"], strict=True) if n != 1]
    return [jax.lax.broadcast_in_dim(values[0], [n for n in shape if n != 1], _kept(axes, shape))]


def _slice(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any] | None:
    axes = _long(shape_of(eqn.invars[0]))
    if 0 in shape_of(eqn.outvars[0]):  # what is left of an axis of size one may be nothing
        return None
    first, last, stride = (eqn.params[name] for name in ("start_indices", "limit_indices", "strides"))
    narrow = {
        "start_indices": tuple(first[axis] for axis in axes),
        "limit_indices": tuple(last[axis] for axis in axes),
        "strides": tuple(stride[axis] for axis in axes) if stride else None,
    }
    return [_squeezed(x) for x in bind(eqn, values, **narrow)]


def _transpose(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    return [jax.lax.transpose(values[0], _kept(eqn.params["permutation"], shape_of(eqn.invars[0])))]


def _reduce(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    axes = _kept(eqn.params["axes"], shape_of(eqn.invars[0]))
    return bind(eqn, values, axes=axes) if axes else list(values)


def _dot(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    numbers = tuple(
        tuple(_kept(axes, shape_of(v)) for axes, v in zip(pair, eqn.invars, strict=True))
        for pair in eqn.params["dimension_numbers"]
    )
    return bind(eqn, values, dimension_numbers=numbers)


def _gather(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """A lookup. Its result has the axes of the positions looked up and those of the window that is taken at each."""
    operand, indices = eqn.invars
    numbers = eqn.params["dimension_numbers"]
    kept = _Lookup.narrowed(
        shape_of(operand),
        shape_of(indices),
        windows=numbers.offset_dims,
        collapsed=numbers.collapsed_slice_dims,
        indexed=numbers.start_index_map,
        batched=(numbers.operand_batching_dims, numbers.start_indices_batching_dims),
    )
    narrow = numbers._replace(
        offset_dims=kept.windows,
        collapsed_slice_dims=kept.of_operand(numbers.collapsed_slice_dims),
        start_index_map=kept.of_operand(numbers.start_index_map),
        operand_batching_dims=kept.of_operand(numbers.operand_batching_dims),
        start_indices_batching_dims=kept.of_indices(numbers.start_indices_batching_dims),
    )
    sizes = tuple(eqn.params["slice_sizes"][axis] for axis in kept.operand_axes)
    taken = kept.reshaped(values[0], values[1], eqn)
    return [_squeezed(x) for x in bind(eqn, taken, dimension_numbers=narrow, slice_sizes=sizes)]


def _scatter(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """The transpose of a lookup: the updates are what a lookup's result is."""
    operand, indices, updates = eqn.invars
    numbers = eqn.params["dimension_numbers"]
    kept = _Lookup.narrowed(
        shape_of(operand),
        shape_of(indices),
        windows=numbers.update_window_dims,
        collapsed=numbers.inserted_window_dims,
        indexed=numbers.scatter_dims_to_operand_dims,
        batched=(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims),
    )
    narrow = numbers._replace(
        update_window_dims=kept.windows,
        inserted_window_dims=kept.of_operand(numbers.inserted_window_dims),
        scatter_dims_to_operand_dims=kept.of_operand(numbers.scatter_dims_to_operand_dims),
        operand_batching_dims=kept.of_operand(numbers.operand_batching_dims),
        scatter_indices_batching_dims=kept.of_indices(numbers.scatter_indices_batching_dims),
    )
    new = jax.lax.reshape(values[2], [shape_of(updates)[axis] for axis in kept.result_axes])
    taken = [*kept.reshaped(values[0], values[1], eqn), new]
    return [_squeezed(x) for x in bind(eqn, taken, dimension_numbers=narrow)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Lookup:
    """The axes that a lookup keeps: of the operand, of the indices, of the result; and which of those are windows.

    An axis of size one goes if nothing is looked up along it: a window's, a batch's, or one of the positions, unless it
    is the last of these: XLA knows a lookup of one entry in each row (a label's, in a loss) by that axis.
    """

    operand_axes: list[int]
    indices_axes: list[int]
    result_axes: list[int]
    windows: tuple[int, ...]

    @classmethod
    def narrowed(
        cls,
        operand: Sequence[int],
        indices: Sequence[int],
        *,
        windows: Sequence[int],
        collapsed: Sequence[int],
        indexed: Sequence[int],
        batched: tuple[Sequence[int], Sequence[int]],
    ) -> "_Lookup":
        window_axes = [axis for axis in range(len(operand)) if axis not in collapsed and axis not in batched[0]]
        positions = range(len(indices) - 1)
        result = len(window_axes) + len(positions)
        position_axes = [axis for axis in range(result) if axis not in windows]
        operand_gone = {axis for axis in (*window_axes, *batched[0]) if operand[axis] == 1 and axis not in indexed}
        indices_gone = {axis for axis in positions if indices[axis] == 1}
        own = [axis for axis in positions if axis not in batched[1]]
        if own and indices_gone.issuperset(own):
            indices_gone.discard(own[-1])
        gone = {at for at, axis in zip(windows, window_axes, strict=True) if axis in operand_gone}
        gone |= {at for at, axis in zip(position_axes, positions, strict=True) if axis in indices_gone}
        result_axes = [axis for axis in range(result) if axis not in gone]
        return cls(
            operand_axes=[axis for axis in range(len(operand)) if axis not in operand_gone],
            indices_axes=[axis for axis in range(len(indices)) if axis not in indices_gone],
            result_axes=result_axes,
            windows=tuple(result_axes.index(axis) for axis in windows if axis not in gone),
        )

    def of_operand(self, axes: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.operand_axes.index(axis) for axis in axes if axis in self.operand_axes)

    def of_indices(self, axes: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.indices_axes.index(axis) for axis in axes if axis in self.indices_axes)

    def reshaped(self, operand: Any, indices: Any, eqn: JaxprEqn) -> list[Any]:
        axes = (self.operand_axes, self.indices_axes)
        shapes = [[shape_of(v)[axis] for axis in kept] for v, kept in zip(eqn.invars, axes, strict=False)]
        return [jax.lax.reshape(x, shape) for x, shape in zip((operand, indices), shapes, strict=True)]


Rule = Callable[[JaxprEqn, Sequence[Any]], list[Any] | None]

_RULES: dict[Any, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys((p.reshape_p, p.squeeze_p), _only_shape),
    **dict.fromkeys((p.reduce_sum_p, p.reduce_max_p, p.reduce_min_p, p.reduce_and_p, p.reduce_or_p), _reduce),
    p.broadcast_in_dim_p: _broadcast,
    p.slice_p: _slice,
    p.transpose_p: _transpose,
    p.dot_general_p: _dot,
    p.gather_p: _gather,
    p.scatter_add_p: _scatter,
    pvary_p: bind,
}
