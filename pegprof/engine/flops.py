"""A closed Jaxpr in, the number of floating-point operations out.

Counted on the Jaxpr because XLA's own ``cost_analysis`` takes the body of a scan once, whatever its length.
Matrix products and convolutions are exact: a multiplication and an addition for each pair of numbers that meet, padding
and dilation left out. Everything else is one operation an element, of the result for an elementwise primitive, of the
operand for a reduction: that includes ``exp`` and, far too low, matrix factorisations. What only moves data is free.

Of a ``cond`` the dearest branch counts. A ``while`` loop's body counts once, because its trips are not known.
"""

import math
from collections.abc import Callable

import numpy as np

from pegprof.engine.jaxpr import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, primitives, sub_jaxprs


def count_flops(closed_jaxpr: ClosedJaxpr) -> int:
    """The floating-point operations of one call; see the module for what is exact.

    >>> import jax, jax.numpy as jnp
    >>> x = jnp.ones((2, 3))
    >>> count_flops(jax.make_jaxpr(lambda x: x @ x.T)(x))
    24
    """
    return _of_jaxpr(closed_jaxpr.jaxpr)


def _of_jaxpr(jaxpr: Jaxpr) -> int:
    return sum(count_equation_flops(eqn) for eqn in jaxpr.eqns)


def count_equation_flops(eqn: JaxprEqn) -> int:
    """The floating-point operations of one equation."""
    if rule := _RULES.get(eqn.primitive):
        return rule(eqn)
    bodies = list(sub_jaxprs(eqn))
    return sum(_of_jaxpr(body) for body in bodies) if bodies else _result_size(eqn)


def _shape(var: Var | Literal) -> tuple[int, ...]:
    return getattr(var.aval, "shape", ())  # a token has none


def _free(eqn: JaxprEqn) -> int:
    return 0


def _result_size(eqn: JaxprEqn) -> int:
    return sum(math.prod(_shape(var)) for var in eqn.outvars)


def _operand_size(eqn: JaxprEqn) -> int:
    return math.prod(_shape(eqn.invars[0]))


def _update_size(eqn: JaxprEqn) -> int:
    return math.prod(_shape(eqn.invars[2]))


def _dot_general(eqn: JaxprEqn) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    lhs = _shape(eqn.invars[0])
    return 2 * _result_size(eqn) * math.prod(lhs[axis] for axis in contracted)


def _convolution(eqn: JaxprEqn) -> int:
    lhs, rhs, out = (_shape(var) for var in (*eqn.invars, *eqn.outvars))
    numbers = eqn.params["dimension_numbers"]
    (out_batch, out_feature, *out_space), (_, in_feature, *rhs_space) = numbers.out_spec, numbers.rhs_spec
    windows = zip(
        (lhs[axis] for axis in numbers.lhs_spec[2:]),
        (rhs[axis] for axis in rhs_space),
        (out[axis] for axis in out_space),
        eqn.params["window_strides"],
        (low for low, _ in eqn.params["padding"]),
        eqn.params["lhs_dilation"],
        eqn.params["rhs_dilation"],
        strict=True,
    )
    meetings = math.prod(_meetings(*window) for window in windows)
    return 2 * out[out_batch] * out[out_feature] * rhs[in_feature] * meetings


def _meetings(size: int, taps: int, outputs: int, stride: int, low: int, dilation: int, tap_dilation: int) -> int:
    """Along one axis: how many (output, tap) pairs land on a real input, not on padding or a dilation's hole."""
    at = np.arange(outputs)[:, None] * stride + np.arange(taps)[None, :] * tap_dilation - low
    return int(np.count_nonzero((at >= 0) & (at <= (size - 1) * dilation) & (at % dilation == 0)))


def _scan(eqn: JaxprEqn) -> int:
    return eqn.params["length"] * sum(_of_jaxpr(body) for body in sub_jaxprs(eqn))


def _cond(eqn: JaxprEqn) -> int:
    return max(_of_jaxpr(branch) for branch in sub_jaxprs(eqn))


p = primitives
_MOVES_DATA = (
    *(p.broadcast_in_dim_p, p.reshape_p, p.squeeze_p, p.transpose_p, p.rev_p, p.copy_p, p.convert_element_type_p),
    *(p.bitcast_convert_type_p, p.stop_gradient_p, p.name_p, p.device_put_p, p.sharding_constraint_p, p.iota_p),
    *(p.concatenate_p, p.pad_p, p.slice_p, p.gather_p, p.scatter_p, p.dynamic_slice_p, p.dynamic_update_slice_p),
)
_REDUCES = (
    *(p.reduce_sum_p, p.reduce_max_p, p.reduce_min_p, p.reduce_prod_p, p.reduce_and_p, p.reduce_or_p, p.reduce_xor_p),
    *(p.reduce_p, p.argmax_p, p.argmin_p, p.sort_p, p.top_k_p),
)
_RULES: dict[object, Callable[[JaxprEqn], int]] = {
    **dict.fromkeys(_MOVES_DATA, _free),
    **dict.fromkeys(_REDUCES, _operand_size),
    **dict.fromkeys((p.scatter_add_p, p.scatter_mul_p, p.scatter_min_p, p.scatter_max_p), _update_size),
    p.dot_general_p: _dot_general,
    p.conv_general_dilated_p: _convolution,
    p.scan_p: _scan,
    p.cond_p: _cond,
}
