"""Compiled programs in, samples of their times out: every program once a round, as in ``benchmarks/timing.py``.

A short program is called several times for one sample, each call queued behind the last. So the time that the host
takes to start a call is hidden behind the device's work, as it is in training.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

from benchmarks.timing import MAX_ROUNDS, MIN_ROUNDS, Run, Schedule, time_once, time_rounds

SAMPLE_S = 0.02
MOST_CALLS = 16  # results of all calls that wait are in memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Samples:
    """One program's times, each beside the reference of its round."""

    times_s: tuple[float, ...]
    ratios: tuple[float, ...]
    calls: int  # for one sample


def take_samples(
    calls: Mapping[str, Callable[[], Any]], reference: str, *, rounds: int | None, seconds: float
) -> dict[str, Samples]:
    """Times as many rounds as asked for, or as fit into ``seconds``. A call returns when it is queued."""
    warm_s = {name: _warm_time(call) for name, call in calls.items()}
    times = {name: max(1, min(MOST_CALLS, math.ceil(SAMPLE_S / s))) for name, s in warm_s.items()}
    round_s = sum(times[name] * s for name, s in warm_s.items())
    count = rounds or min(MAX_ROUNDS, max(MIN_ROUNDS, int(seconds / round_s)))
    runs = {name: _repeat(call, times[name]) for name, call in calls.items()}
    each_once = Schedule(rounds=1, every=dict.fromkeys(runs, 1))
    timed = time_rounds(runs, reference, each_once, count)  # a repeat of one round is one sample
    return {
        name: Samples(
            times_s=tuple(s / times[name] for s in found.times_s),
            ratios=tuple(ratio * times[reference] / times[name] for ratio in found.ratios),
            calls=times[name],
        )
        for name, found in timed.items()
    }


def _warm_time(call: Callable[[], Any]) -> float:
    run = _repeat(call, 1)
    run()
    return time_once(run)


def _repeat(call: Callable[[], Any], times: int) -> Run:
    def run() -> None:
        for _ in range(times):
            result = call()
        jax.block_until_ready(result)

    return run
