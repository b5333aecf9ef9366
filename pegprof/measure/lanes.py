"""The words of a race between methods: its terms, and a method in it."""

import dataclasses
from collections.abc import Mapping, Sequence

from pegprof.result.history import Runs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Terms:
    """What is to be timed, beside what the settings say.

    Args:
      batch: that was asked for.
      batches: the same and its halvings.
      peak_bytes: what each method needs at the batch asked for, by XLA.
      example_s: what one example should take, all methods together; None if nobody knows.
      tolerance: how far the statistics of two methods may be apart; None checks nothing.
      check_examples: whether to see if they interact though nothing looks like it.
      measure_peaks: whether there can be processes in which a method is alone.
      processes: how many times all processes are started, at most.
      processes_until_s: on the monotonic clock; by then the last process ends, unless it is one of the first three.
    """

    batch: int
    batches: Sequence[int]
    peak_bytes: Mapping[str, int]
    example_s: float | None
    tolerance: float | None
    check_examples: bool
    measure_peaks: bool
    processes: int = 1
    processes_until_s: float | None = None


@dataclasses.dataclass(kw_only=True)
class Lane:
    """A method in the race: what the log says of its ``runs``, and how many of them it has in a round."""

    method: str
    runs: Runs
    repeats: int = 1
    nonfinite: str = ""  # what of its statistics is no finite number, in words
    racing: bool = True
    resting: bool = False  # it has had its rounds of this process

    @property
    def next_s(self) -> float:
        """What its next run should take."""
        return self.runs.samples[-1].time_s if self.runs.samples else self.runs.first_s or 0.0
