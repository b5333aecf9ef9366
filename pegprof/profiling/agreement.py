"""Correct before fast: do two methods give the same statistics?

The error of a statistic is the largest difference in a parameter's entries, relative to the largest entry. A parameter
whose gradient is zero but for rounding (the bias of attention keys) has nothing to be relative to, so a parameter's
scale is never taken below a thousandth of the model's. Large parameters are compared in chunks: the memory is needed
for what is measured.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

# By the mantissa of the type that the gradients were computed in.
TOLERANCES = {"float64": 1e-6, "float32": 1e-3, "float16": 5e-2, "bfloat16": 1e-1}
SMALLEST_SCALE = 1e-3
CHUNK = 2**18  # entries: they stay in the cache

# Where a gradient is zero but for rounding, these are decided by that rounding: nothing is to be learnt entry by entry.
_DECIDED_BY_ROUNDING = {"sign_mean", "snr"}


def max_rel_error(stats: Mapping[str, Any], reference: Mapping[str, Any]) -> float | None:
    """The largest relative error over the statistics that both have; None if there are none to compare.

    >>> max_rel_error({"mean": np.array([1.0, 2.0])}, {"mean": np.array([1.0, 2.5])})
    0.2
    """
    shared = [name for name in stats if name in reference and name not in _DECIDED_BY_ROUNDING]
    return max((_error(stats[name], reference[name]) for name in shared), default=None)


def _error(tree: Any, reference: Any) -> float:
    pairs = [
        (np.asarray(a), np.asarray(b)) for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(reference), strict=True)
    ]
    scales = [_largest(b) for _, b in pairs]
    smallest = max(SMALLEST_SCALE * max(scales), float(np.finfo(np.float32).tiny))
    return max(_difference(a, b) / max(scale, smallest) for (a, b), scale in zip(pairs, scales, strict=True))


def _largest(x: np.ndarray) -> float:
    return max((float(np.max(np.abs(x), initial=0.0, where=np.isfinite(x))) for (x,) in _chunks(x)), default=0.0)


def _difference(a: np.ndarray, b: np.ndarray) -> float:
    return max((_difference_of_chunks(*chunks) for chunks in _chunks(a, b)), default=0.0)


def _difference_of_chunks(a: np.ndarray, b: np.ndarray) -> float:
    """Not-a-number against not-a-number is no difference; against a number it is an infinite one."""
    with np.errstate(invalid="ignore"):
        apart = np.abs(a - b)
    if np.all(np.isfinite(apart)):
        return float(np.max(apart))
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return float(np.max(np.where(same, 0.0, np.where(np.isnan(apart), np.inf, apart))))


def _chunks(*arrays: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    flat = [array.reshape(-1) for array in arrays]
    for start in range(0, flat[0].size, CHUNK):
        yield tuple(_widen(array[start : start + CHUNK]) for array in flat)


def _widen(x: np.ndarray) -> np.ndarray:
    """The difference of two numbers in bfloat16 is not a number in bfloat16."""
    return x.astype(np.promote_types(x.dtype, np.float32), copy=False)
