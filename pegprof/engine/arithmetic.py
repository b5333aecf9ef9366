"""The floating-point operations of one equation, for the table of facts.

Matrix products and convolutions are exact: a multiplication and an addition for each pair of numbers that meet, with
padding and dilation left out.
"""

import math

import numpy as np

from pegprof.engine.jaxpr import JaxprEqn, shape_of, size_of


def free(eqn: JaxprEqn) -> int:
    return 0


def result_size(eqn: JaxprEqn) -> int:
    return sum(map(size_of, eqn.outvars))


def operand_size(eqn: JaxprEqn) -> int:
    return size_of(eqn.invars[0])


def update_size(eqn: JaxprEqn) -> int:
    return size_of(eqn.invars[2])


def contracted_size(eqn: JaxprEqn) -> int:
    """The number of terms that a ``dot_general`` adds up for each entry."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return math.prod(shape_of(eqn.invars[0])[axis] for axis in contracted)


def dot_general(eqn: JaxprEqn) -> int:
    return 2 * result_size(eqn) * contracted_size(eqn)


def convolution(eqn: JaxprEqn) -> int:
    lhs, rhs, out = (shape_of(var) for var in (*eqn.invars, *eqn.outvars))
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
