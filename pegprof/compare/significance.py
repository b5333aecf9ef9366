"""Did a method become slower beside ``grad``, or does it only look so? Samples in, an interval out.

Rounds of one process are not independent: a process keeps the speed that it started with. What is independent are
processes, so the test is over processes (``result/samples.py`` has the centres c):

    change    d = mean of c after − mean of c before                      all in logarithms
    interval  d ± t · √(s²/n + s'²/n'),  t Student's quantile             Welch's, of unequal spreads

A side with one process has no spread to see. It is taken to be the other side's, but no less than 5%
(``UNSEEN_SPREAD``); where both have one, 5% or the spread of the rounds. The interval is then a wide one.

A gate looks again after each further process, until the interval is on one side of the limit. Each look may be wrong,
so the level is shared out: after n of at most N processes the looks so far may spend LEVEL · (n/N)², and look n takes
what is new of that. Adding levels up is always an upper bound, whatever the looks have in common.
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Literal

from pegprof.result.samples import Sample, centres, log_ratios

LEVEL = 0.02
"""How often a change of exactly the limit may be called larger, over all looks; and how often smaller."""
FIRST_LOOK = 3  # processes: fewer say nothing about their spread
LEAST_SPREAD = 0.005  # of processes. Fewer than ten can agree by chance better than that
UNSEEN_SPREAD = 0.05
MOST_PROCESSES = 500  # that are worth advising

Times = tuple[Sequence[Sample], Sequence[Sample]]
"""Of ``grad`` and of a method, in the same run."""
Position = Literal["above", "below", "across"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """One run: a centre for each process, and how far these are apart."""

    centres: tuple[float, ...]
    rounds_spread: float  # of the rounds of a process

    @property
    def processes(self) -> int:
        return len(self.centres)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.centres)

    @property
    def spread(self) -> float | None:
        """The standard deviation over processes; None of one."""
        return max(_standard_deviation(self.centres), LEAST_SPREAD) if self.processes > 1 else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeChange:
    """The change of a ratio of times as a share of what it was, and the interval that it is in."""

    before: Side
    after: Side
    low: float
    high: float

    @property
    def change(self) -> float:
        return math.expm1(self.after.mean - self.before.mean)

    def position(self, limit: float) -> Position:
        """On which side of a limit the interval lies; nothing else decides."""
        return "above" if self.low > limit else "below" if self.high < limit else "across"

    def processes_to_settle(self, limit: float, *, both: bool) -> int | None:
        """About how many processes would put the interval on one side of the limit, if nothing else changes.

        Args:
          limit: as a share.
          both: whether the run before is measured again, too.

        Returns:
          None if no number of processes would.
        """
        distance = abs(math.log1p(self.change) - math.log1p(limit))
        distance = max(distance, math.log1p(limit) / 4)  # a change of just the limit would take for ever
        numbers = range(max(self.after.processes + 1, FIRST_LOOK), MOST_PROCESSES + 1)
        return next((n for n in numbers if self._half_width_with(n, both=both) < distance), None)

    def _half_width_with(self, processes: int, *, both: bool) -> float:
        before, after = _spreads(self.before, self.after)
        counts = (processes if both else self.before.processes, processes)
        return _half_width((before, after), counts, level=level_of_look(processes, processes))


def change_of_ratio(before: Times, after: Times, *, planned: int | None = None) -> TimeChange | None:
    """How a method's time changed beside that of ``grad``; None if one of the runs has no round with both.

    Args:
      before: the samples of ``grad`` and of the method.
      after: the same of the other run.
      planned: after how many processes there is a last look at ``after``; None if this look is the only one.
    """
    sides = [_side(*times) for times in (before, after)]
    if not all(side.processes for side in sides):
        return None
    level = LEVEL if planned is None else level_of_look(sides[1].processes, planned)
    half = _half_width(_spreads(*sides), (sides[0].processes, sides[1].processes), level=level)
    middle = sides[1].mean - sides[0].mean
    return TimeChange(before=sides[0], after=sides[1], low=math.expm1(middle - half), high=math.expm1(middle + half))


def level_of_look(processes: int, planned: int) -> float:
    """What a look after so many of the planned processes may spend of ``LEVEL``; all looks together spend no more.

    >>> looks = [level_of_look(n, 8) for n in range(FIRST_LOOK, 9)]
    >>> round(sum(looks), 6) == LEVEL
    True
    """
    planned = max(processes, planned)
    spent = ((processes - 1) / planned) ** 2 if processes > FIRST_LOOK else 0.0
    return LEVEL * ((processes / planned) ** 2 - spent)


def _side(grad: Sequence[Sample], method: Sequence[Sample]) -> Side:
    ratios = log_ratios(method, grad)
    spreads = [_standard_deviation(each) for each in ratios.values() if len(each) > 1]
    return Side(centres=tuple(centres(ratios)), rounds_spread=max(spreads, default=0.0))


def _spreads(before: Side, after: Side) -> tuple[float, float]:
    """Of both sides."""
    seen = [side.spread for side in (before, after) if side.spread is not None]
    unseen = max([UNSEEN_SPREAD, *(seen or (before.rounds_spread, after.rounds_spread))])
    return before.spread or unseen, after.spread or unseen


def _half_width(spreads: tuple[float, float], counts: tuple[int, int], *, level: float) -> float:
    """Half the width of the interval. One process has as many degrees of freedom as the spread it is given."""
    from scipy import special

    parts = [spread**2 / n for spread, n in zip(spreads, counts, strict=True)]
    seen = max(counts) - 1.0
    if seen == 0:  # a spread that is taken for granted
        return float(math.sqrt(sum(parts)) * special.ndtri(1 - level))
    terms = [part**2 / (n - 1 if n > 1 else seen) for part, n in zip(parts, counts, strict=True)]
    return float(math.sqrt(sum(parts)) * special.stdtrit(sum(parts) ** 2 / sum(terms), 1 - level))


def _standard_deviation(values: Sequence[float]) -> float:
    """``statistics.stdev`` is exact to the last bit, and takes a hundred times as long."""
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
