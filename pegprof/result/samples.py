"""Times of single rounds, and how a method's are compared with those of ``grad``.

In a round every method runs, one after the other, each in its own process. What slows the machine down for a while so
hits a method and ``grad`` alike, and their ratio within a round leaves it out:

    ratio of a round    log(time of the method) − log(time of grad), both in that round
    centre of a process the median of these over the process's rounds

Of six rounds two may be disturbed, and the median stays where it is; that of pairs of rounds (Hodges and Lehmann) does
not. A process also has a speed of its own, by where its memory lies. It stays for as long as the process lives, so more
rounds do not average it out: only more processes do.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One method's time in one round: the median of its runs there, if it was quick enough for several.

    Args:
      process: how many times all processes had been started anew before.
      round: of that process. 0 is the first run, which counts only if there was no warm-up, or no time for more.
      time_s: the time of one run.
    """

    process: int
    round: int
    time_s: float


def log_ratios(samples: Sequence[Sample], grad: Sequence[Sample]) -> dict[int, list[float]]:
    """The ratios to ``grad`` of the rounds that both have, as logarithms, by process.

    >>> one = [Sample(process=0, round=1, time_s=2.0), Sample(process=0, round=2, time_s=4.0)]
    >>> log_ratios(one, one[:1])
    {0: [0.0]}
    """
    beside = {(sample.process, sample.round): sample.time_s for sample in grad}
    found: dict[int, list[float]] = {}
    for sample in samples:
        grad_s = beside.get((sample.process, sample.round))
        if grad_s is not None and min(sample.time_s, grad_s) > 0:
            found.setdefault(sample.process, []).append(math.log(sample.time_s / grad_s))
    return found


def centres(ratios: Mapping[int, Sequence[float]]) -> list[float]:
    """One number a process."""
    return [statistics.median(of_process) for of_process in ratios.values()]


def standard_error(values: Sequence[float]) -> float:
    """How far their median may be off, by the distance between their quartiles; infinite of too few."""
    if len(values) < 4:
        return math.inf
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return 1.25 * (high - low) / 1.35 / math.sqrt(len(values))  # of a normal distribution, the quartiles 1.35 σ apart


def ratio_to_grad(samples: Sequence[Sample], grad: Sequence[Sample]) -> float | None:
    """A method's time as a ratio to that of ``grad``: the geometric mean over the processes' centres.

    Where they never ran in the same round, as with a method that was left out after its first run, it is the ratio of
    the two medians.
    """
    if not samples or not grad:
        return None
    if found := centres(log_ratios(samples, grad)):
        return math.exp(statistics.fmean(found))
    grad_s = median_time_s(grad)
    return median_time_s(samples) / grad_s if grad_s else None


def median_time_s(samples: Sequence[Sample]) -> float:
    return statistics.median(sample.time_s for sample in samples)


def count_processes(samples: Sequence[Sample]) -> int:
    return len({sample.process for sample in samples})


def shape_of(samples: Sequence[Sample]) -> str:
    """How many rounds in how many processes, in words.

    >>> shape_of([Sample(process=p, round=r, time_s=1.0) for p in range(4) for r in range(6)])
    '4 processes × 6 rounds'
    >>> shape_of([Sample(process=0, round=r, time_s=1.0) for r in range(3)])
    '1 process × 3 rounds'
    """
    rounds: dict[int, int] = {}
    for sample in samples:
        rounds[sample.process] = rounds.get(sample.process, 0) + 1
    fewest, most = min(rounds.values(), default=0), max(rounds.values(), default=0)
    number = str(most) if fewest == most else f"{fewest} to {most}"
    return f"{len(rounds)} process{'' if len(rounds) == 1 else 'es'} × {number} round{'' if most == 1 else 's'}"


def from_times(by_method: Mapping[str, Sequence[float]]) -> dict[str, tuple[Sample, ...]]:
    """What schema 2 kept of a batch, times alone, as samples of one process.

    Where all methods have as many times, the nth is that of round n. Otherwise quick methods ran more often than
    others, and nobody knows which times belong together: then no two methods share a round.
    """
    together = len({len(times_s) for times_s in by_method.values()}) == 1
    found, first = {}, 0
    for method, times_s in by_method.items():
        found[method] = tuple(Sample(process=0, round=first + i, time_s=t) for i, t in enumerate(times_s))
        first += 0 if together else len(times_s)
    return found
