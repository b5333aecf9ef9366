"""Correct before fast: do two methods give the same statistics?

The error of a statistic is the largest difference in a parameter's entries, relative to the largest entry. A parameter
whose gradient is zero but for rounding (the bias of attention keys) has nothing to be relative to, so a parameter's
scale is never taken below a thousandth of the model's. Large parameters are compared in chunks: the memory is needed
for what is measured.

Where both have NaN, or the same infinity, they do not disagree; but such an entry verifies nothing, so it is no part of
the error, and ``find_nonfinite`` is what there is to say about it. NaN against a number is an infinite error.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
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
    """The largest relative error over the statistics that both have; None if there is no finite number to compare.

    >>> max_rel_error({"mean": np.array([1.0, 2.0])}, {"mean": np.array([1.0, 2.5])})
    0.2
    """
    shared = [name for name in stats if name in reference and name not in _DECIDED_BY_ROUNDING]
    errors = (_error(stats[name], reference[name]) for name in shared)
    return max((error for error in errors if error is not None), default=None)


def _error(tree: Any, reference: Any) -> float | None:
    pairs = [
        (np.asarray(a), np.asarray(b)) for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(reference), strict=True)
    ]
    scales = [_largest(b) for _, b in pairs]
    smallest = max(SMALLEST_SCALE * max(scales), float(np.finfo(np.float32).tiny))
    differences = [(_difference(a, b), scale) for (a, b), scale in zip(pairs, scales, strict=True)]
    return max((apart / max(scale, smallest) for apart, scale in differences if apart is not None), default=None)


NAMED = 3  # as many parameters are called by name


@dataclasses.dataclass(frozen=True, kw_only=True)
class NonFinite:
    """What of a method's statistics is no finite number: in which of the ``total`` parameters, or in which statistics
    that are not by parameter."""

    nan: bool
    infinite: bool
    parameters: Sequence[str] = ()
    total: int
    statistics: Sequence[str] = ()

    def __str__(self) -> str:
        what = " and ".join(["NaN"] * self.nan + ["infinite values"] * self.infinite)
        return f"{what} in {self._where()}"

    def _where(self) -> str:
        if not self.parameters:
            return " and ".join(self.statistics)
        if len(self.parameters) == self.total:
            return "the statistics" if self.total == 1 else f"the statistics of all {self.total} parameters"
        names = ", ".join([*self.parameters[:NAMED], *(["..."] if len(self.parameters) > NAMED else [])])
        return f"the statistics of {len(self.parameters)} of {self.total} parameters: {names}"


def find_nonfinite(stats: Mapping[str, Any], parameters: Sequence[str]) -> NonFinite | None:
    """Where statistics are NaN or infinite; None if they are nowhere.

    Args:
      stats: trees, by statistic; those with a leaf for each parameter are told by parameter.
      parameters: the names of the parameters.
    """
    nan = infinite = False
    found: dict[str, None] = {}
    others: dict[str, None] = {}
    for name, tree in stats.items():
        leaves = jax.tree.leaves(tree)
        by_parameter = len(leaves) == len(parameters)
        for i, leaf in enumerate(leaves if name not in _DECIDED_BY_ROUNDING else ()):
            has_nan, has_infinite = _look(np.asarray(leaf))
            nan, infinite = nan or has_nan, infinite or has_infinite
            if has_nan or has_infinite:
                (found if by_parameter else others)[parameters[i] if by_parameter else name] = None
    if not (nan or infinite):
        return None
    in_order = tuple(name for name in parameters if name in found)
    return NonFinite(nan=nan, infinite=infinite, parameters=in_order, total=len(parameters), statistics=tuple(others))


def _look(x: np.ndarray) -> tuple[bool, bool]:
    """Whether there is NaN, and whether there is an infinity."""
    nan = infinite = False
    for (chunk,) in _chunks(x):
        if not np.all(np.isfinite(chunk)):
            nan, infinite = nan or bool(np.any(np.isnan(chunk))), infinite or bool(np.any(np.isinf(chunk)))
    return nan, infinite


def _largest(x: np.ndarray) -> float:
    return max((float(np.max(np.abs(x), initial=0.0, where=np.isfinite(x))) for (x,) in _chunks(x)), default=0.0)


def _difference(a: np.ndarray, b: np.ndarray) -> float | None:
    differences = (_difference_of_chunks(*chunks) for chunks in _chunks(a, b))
    return max((apart for apart in differences if apart is not None), default=None)


def _difference_of_chunks(a: np.ndarray, b: np.ndarray) -> float | None:
    """The largest difference of entries, infinite if one of them is no number; None if all are the same non-numbers."""
    with np.errstate(invalid="ignore"):
        apart = np.abs(a - b)
    if np.all(np.isfinite(apart)):
        return float(np.max(apart))
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    compared = np.isfinite(a) | np.isfinite(b) | ~same
    if not np.any(compared):
        return None
    return float(np.max(np.where(same, 0.0, np.where(np.isnan(apart), np.inf, apart))))


def _chunks(*arrays: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    flat = [array.reshape(-1) for array in arrays]
    for start in range(0, flat[0].size, CHUNK):
        yield tuple(_widen(array[start : start + CHUNK]) for array in flat)


def _widen(x: np.ndarray) -> np.ndarray:
    """The difference of two numbers in bfloat16 is not a number in bfloat16."""
    return x.astype(np.promote_types(x.dtype, np.float32), copy=False)
