"""``check_moment``: tries a user's function of gradients on a few numbers, and refuses it if it is not elementwise.

A function that looks at several entries, such as g / ‖g‖, would give answers that depend on how a gradient is cut up. A
``factor`` that is no factor of its function would give wrong numbers for rank-one gradients.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pegprof.engine.accumulators import Accumulator, Elementwise, Moment
from pegprof.errors import PegprofError, first_line

_NUMBERS = (0.7137, -1.3291, 0.0, 2.1173, -0.4519, 1.0461)
"""Of both signs, zero among them, in no order: what a function must map one by one."""


def check_accumulator(accumulator: Accumulator, *, statistic: str, of_model: bool) -> None:
    """Refuse an accumulator that a user's statistic cannot be finished from."""
    if isinstance(accumulator, Moment):
        check_moment(accumulator)
    if of_model and not (accumulator.per_example and accumulator.takes_parts):
        raise PegprofError(
            f"the statistic {statistic!r} is of the whole model, but {accumulator} does not add up over parameters",
            where=statistic,
            hint='use the scope "entry" or "parameter", or a PerExample accumulator that is additive',
        )


@functools.lru_cache
def check_moment(moment: Moment) -> None:
    """Refuse a moment whose ``phi`` is not elementwise, or whose ``factor`` is not a factor of it."""
    try:
        _check_elementwise(moment)
        _check_factor(moment)
    except _TRACED:  # it depends on what is being traced, and cannot be tried here
        return


_TRACED = (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError)


def _check_elementwise(moment: Moment) -> None:
    together = _tried(moment, moment.phi, np.asarray(_NUMBERS))
    alone = [_tried(moment, moment.phi, np.asarray([x])) for x in _NUMBERS]
    in_rows = _tried(moment, moment.phi, np.asarray(_NUMBERS).reshape(2, 3))
    for x, here, row, own in zip(_NUMBERS, together, in_rows.ravel(), np.ravel(alone), strict=True):
        for found in (here, row):
            if not _agree(found, own):
                raise PegprofError(
                    f"the function of the statistic {moment.name!r} is not elementwise: it gives {own:.6g} for "
                    f"{x} alone, and {found:.6g} beside other numbers",
                    where=moment.name,
                    hint="it must map each entry of a gradient by itself; for norms, ask for norm or norm_by_param",
                )


def _check_factor(moment: Moment) -> None:
    if moment.factor is None:
        return
    products = _tried(moment, moment.phi, np.multiply.outer(_NUMBERS, _NUMBERS))
    factors = _tried(moment, moment.factor, np.asarray(_NUMBERS))
    for (i, x), (j, y) in itertools.product(enumerate(_NUMBERS), repeat=2):
        if not _agree(products[i, j], factors[i] * factors[j]):
            raise PegprofError(
                f"the factor of the statistic {moment.name!r} is none: phi({x} · {y}) is {products[i, j]:.6g}, "
                f"factor({x}) · factor({y}) is {factors[i] * factors[j]:.6g}",
                where=moment.name,
                hint="leave factor out: it makes rank-one gradients cheaper, and changes no value",
            )


def _tried(moment: Moment, fn: Elementwise, x: np.ndarray) -> np.ndarray:
    """What a function gives for numbers, now, whatever is being traced."""
    try:
        with jax.ensure_compile_time_eval(), jax.debug_nans(False), np.errstate(all="ignore"):
            y = np.asarray(fn(jnp.asarray(x, jnp.result_type(float))))
    except _TRACED:
        raise
    except Exception as error:  # whatever a user's function says
        what = f"a function of the statistic {moment.name!r} fails for an array of shape {x.shape}: {first_line(error)}"
        raise PegprofError(what, where=moment.name, hint="it must map arrays of any shape, entry by entry") from error
    if y.shape != x.shape:
        raise PegprofError(
            f"a function of the statistic {moment.name!r} gives shape {y.shape} for an array of shape {x.shape}",
            where=moment.name,
            hint="it must map each entry of a gradient to one number",
        )
    return y


def _agree(a: Any, b: Any) -> bool:
    with np.errstate(all="ignore"):
        return bool(np.isclose(a, b, rtol=1e-4, atol=1e-30, equal_nan=True))
