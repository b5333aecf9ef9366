"""Did a method become slower beside ``grad``, or does it only look so? Times in, an interval out.

The change is that of a ratio of medians, (m'/g') / (m/g) − 1, m the method's times and g those of ``grad`` in the same
run, before and after (primes). Its interval is scipy's bootstrap over the four samples. Times of one process go up
together and down together, so what is drawn again are blocks of neighbours, each by its median: single times would make
the interval far too narrow on a machine that is also doing something else.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

CONFIDENCE = 0.999
BLOCKS = 8  # at most, of a sample
FEWEST_BLOCKS = 5  # fewer than this say nothing about their spread
SEED = 0  # the same files give the same answer


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeChange:
    """The change of a ratio of times as a share of what it was, with its interval where one can be had."""

    change: float
    low: float | None = None
    high: float | None = None
    runs: int  # of the smallest of the four samples

    def is_significantly_over(self, limit: float) -> bool:
        return self.low is not None and self.low > limit

    def is_too_wide_for(self, limit: float) -> bool:
        """Whether a change by as much as the limit could hide in the interval."""
        return self.low is None or self.high is None or (self.high - self.low) / 2 > limit

    def runs_to_settle(self, limit: float) -> int:
        """About how many runs would tell on which side of the limit the change is: the width goes by 1/√runs."""
        if self.low is None or self.high is None:
            return max(2 * self.runs, BLOCKS)
        half, distance = (self.high - self.low) / 2, max(abs(self.change - limit), limit / 4)
        return max(self.runs + 1, math.ceil(self.runs * (half / distance) ** 2))


def change_of_ratio(
    before: tuple[Sequence[float], Sequence[float]], after: tuple[Sequence[float], Sequence[float]]
) -> TimeChange:
    """How a method's time changed beside that of ``grad``.

    Args:
      before: the times of ``grad`` and of the method, in the order in which they were taken.
      after: the same of the other run.
    """
    import numpy as np
    from scipy import stats

    samples = (*before, *after)
    runs = min(map(len, samples))
    blocks = [np.log(_block_medians(times_s)) for times_s in samples]
    change = math.expm1(_log_change(*(np.median(np.log(times_s)) for times_s in samples)))
    if min(map(len, blocks)) < FEWEST_BLOCKS:
        return TimeChange(change=change, runs=runs)
    interval = stats.bootstrap(
        blocks,
        lambda *drawn, axis=-1: _log_change(*(np.median(each, axis=axis) for each in drawn)),
        vectorized=True,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(SEED),
    ).confidence_interval
    return TimeChange(change=change, low=math.expm1(interval.low), high=math.expm1(interval.high), runs=runs)


def _log_change(grad: Any, method: Any, grad_after: Any, method_after: Any) -> Any:
    """Of logarithms, single ones or arrays of them."""
    return (method_after - grad_after) - (method - grad)


def _block_medians(times_s: Sequence[float]) -> list[float]:
    """The medians of neighbours, of about as many in each block."""
    import numpy as np

    count = min(BLOCKS, len(times_s))
    return [float(np.median(block)) for block in np.array_split(np.asarray(times_s), count)]
