"""Learning rates and seeds: sweeps, the best of a sweep, and what can be said of two means."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pegprof.experiments.base import Verdict

WORST = 10.0
"""The loss, in nats, that stands for anything above it and for what is no number. Who knows nothing has 5.5 at most."""

STANDARD_ERRORS = 2  # by how many two means must differ to count as different


def bound(loss: float) -> float:
    """A loss that can be averaged and written to JSON, also where training failed."""
    return min(loss, WORST) if math.isfinite(loss) else WORST


def by_rate(rows: Iterable[Mapping[str, Any]], value: str = "held_out_loss", **wanted: Any) -> dict[float, list[float]]:
    """The values of the seeds by learning rate, of the rows whose settings are as wanted."""
    found: dict[float, list[float]] = {}
    for row in rows:
        if all(row.get(key) == wish for key, wish in wanted.items()):
            found.setdefault(row["rate"], []).append(row[value])
    return dict(sorted(found.items()))


def best(losses: Mapping[float, Sequence[float]]) -> tuple[float, Sequence[float]] | None:
    """The learning rate with the lowest mean loss, and its losses."""
    return min(losses.items(), key=lambda item: statistics.fmean(item[1])) if losses else None


def is_ahead(first: Sequence[float], second: Sequence[float]) -> Verdict:
    """Whether the first losses are the lower ones, on average and beyond chance. One seed has no spread: no verdict."""
    gap = statistics.fmean(second) - statistics.fmean(first)
    both = (first, second)
    if any(len(values) < 2 for values in both):
        return "does not show"
    doubt = STANDARD_ERRORS * sum(statistics.variance(values) / len(values) for values in both) ** 0.5
    return "does not show" if abs(gap) <= doubt else "agrees" if gap > 0 else "disagrees"


def words(values: Sequence[float]) -> str:
    """Mean and standard deviation of the seeds."""
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{spread}"


def words_at(found: tuple[float, Sequence[float]], tried: Iterable[float] = ()) -> str:
    """The same, with the learning rate; and a warning if that is at an end of those that were tried.

    >>> words_at((0.01, [1.0, 1.0]), tried=[0.001, 0.01])
    '1.000 ± 0.000 (η = 0.01, the largest tried, 2 seeds)'
    """
    rate, values = found
    return f"{words(values)} ({words_of_rate(rate, tried)}, {len(values)} seeds)"


def words_of_rate(rate: float, tried: Iterable[float]) -> str:
    rates = sorted(tried) or [rate]
    ends = {rates[-1]: ", the largest tried", rates[0]: ", the smallest tried"} if len(rates) > 1 else {}
    return f"η = {rate:g}{ends.get(rate, '')}"
