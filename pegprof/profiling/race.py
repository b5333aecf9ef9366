"""The words of a race between methods: its terms, a method in it, and what came of one."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from pegprof.profiling.result import MIN_RUNS

FAR_APART = 0.1  # a measured peak that differs from XLA's figure by more than this share of it is worth a remark,
NEAR_BYTES = 32 * 2**20  # if it is by more than this


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peak:
    """A peak of memory that was measured, the batch that it is of, and XLA's own figure for the same program."""

    batch: int
    xla_bytes: int
    host_bytes: int | None = None
    device_bytes: int | None = None

    @property
    def measured_bytes(self) -> int:
        return (self.host_bytes if self.device_bytes is None else self.device_bytes) or 0

    @property
    def is_far_from_xla(self) -> bool:
        """Libraries that XLA calls may allocate memory that is not in its plan."""
        return abs(self.measured_bytes - self.xla_bytes) > max(FAR_APART * self.xla_bytes, NEAR_BYTES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed:
    """What came of running one method. Of ``failure``, ``refused`` and ``skipped`` at most one is there."""

    failure: str | None = None  # it crashed, or is wrong
    refused: str | None = None  # it did not fit
    skipped: str | None = None  # there was no time for it
    remarks: tuple[str, ...] = ()
    batch: int | None = None
    samples_s: tuple[float, ...] = ()
    max_rel_error: float | None = None
    peak: Peak | None = None

    @property
    def time_s(self) -> float | None:
        return statistics.median(self.samples_s) if self.samples_s else None

    @property
    def iqr_s(self) -> float | None:
        if len(self.samples_s) < 2:
            return None
        first, _, third = statistics.quantiles(self.samples_s, n=4, method="inclusive")
        return third - first


@dataclasses.dataclass(frozen=True, kw_only=True)
class Terms:
    """What is to be timed.

    Args:
      batches: the batch asked for and its halvings.
      peak_bytes: what each method needs at the batch asked for, by XLA.
      example_s: what one example should take, all methods together; None if nobody knows.
      warmup: runs of each method that do not count.
      runs: runs that count; None takes as many as are worth their time.
      tolerance: how far the statistics of two methods may be apart; None checks nothing.
      check_examples: whether to see if they interact though nothing looks like it.
      measure_peaks: whether there can be processes in which a method is alone.
    """

    batches: Sequence[int]
    peak_bytes: Mapping[str, int]
    example_s: float | None
    warmup: int
    runs: int | None
    tolerance: float | None
    check_examples: bool
    measure_peaks: bool

    @property
    def least_runs(self) -> int:
        """Fewer are not worth much; the batch is cut before the runs are."""
        return min(self.runs or MIN_RUNS, MIN_RUNS)


@dataclasses.dataclass(kw_only=True)
class Lane:
    """A method in the race. ``first_s`` and ``samples_s`` are times at ``batch``."""

    method: str
    batch: int | None = None
    first_s: float | None = None
    samples_s: list[float] = dataclasses.field(default_factory=list)
    max_rel_error: float | None = None
    nonfinite: str = ""  # what of its statistics is no finite number, in words
    peak: Peak | None = None
    ending: Mapping[str, str] = dataclasses.field(default_factory=dict)  # which of Timed's three, and why
    racing: bool = True
    remarks: list[str] = dataclasses.field(default_factory=list)

    @property
    def next_s(self) -> float:
        """What its next run should take."""
        return self.samples_s[-1] if self.samples_s else self.first_s or 0.0
