"""Programs in, ratios of their times out: every program once a round, again and again, in one process.

What drifts (other work, heat) so hits all alike, and a ratio is always of two runs of the same round. The order changes
from round to round, because what ran before leaves the caches in its own state.
"""

import dataclasses
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

TOO_SLOW = 60.0  # times the reference at the first run: not worth the rounds
SHARE = 2.0  # a program slower than this many references runs in some rounds only, so that it takes no more time
MIN_ROUNDS, MAX_ROUNDS = 6, 60

Run = Callable[[], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A compiled function with its arguments."""

    run: Run
    compile_s: float  # tracing included
    temp_bytes: int


def compile_program(fn: Callable[..., Any], *args: Any) -> Program:
    """Compile from nothing: what an earlier program has traced is forgotten, so that compile times compare."""
    jax.clear_caches()
    start_s = time.perf_counter()
    compiled = jax.jit(fn).lower(*args).compile()
    compile_s = time.perf_counter() - start_s
    memory: Any = compiled.memory_analysis()
    return Program(
        run=lambda: jax.block_until_ready(compiled(*args)),
        compile_s=compile_s,
        temp_bytes=int(memory.temp_size_in_bytes),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """One program's times. A repeat's ratio is the median over its rounds, and the median repeat is what counts."""

    ratios: tuple[float, ...]  # to the reference, one a repeat
    times_s: tuple[float, ...]  # medians, one a repeat
    runs: int  # in all repeats

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def time_s(self) -> float:
        return statistics.median(self.times_s)


def time_once(run: Run) -> float:
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


def warm_time(run: Run, times: int = 3) -> float:
    """The least of some runs, after one that does not count."""
    run()
    return min(time_once(run) for _ in range(times))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """How many rounds a repeat has, and in every which of them a program runs."""

    rounds: int
    every: Mapping[str, int]


def make_schedule(warm_s: Mapping[str, float], reference: str, *, rounds: int | None, seconds: float) -> Schedule:
    """As many rounds as asked for, or as fit into ``seconds``; slow programs run in few of them, but in one at least.

    >>> make_schedule({"grad": 1.0, "vmap": 8.0}, "grad", rounds=20, seconds=1)
    Schedule(rounds=20, every={'grad': 1, 'vmap': 4})
    """
    every = {name: max(1, round(s / (SHARE * warm_s[reference]))) for name, s in warm_s.items()}
    round_s = sum(s / every[name] for name, s in warm_s.items())
    chosen = rounds or min(MAX_ROUNDS, max(MIN_ROUNDS, int(seconds / round_s)))
    return Schedule(rounds=chosen, every={name: min(chosen, n) for name, n in every.items()})


def race(
    programs: Mapping[str, Program], reference: str, *, rounds: int | None, seconds: float, repeats: int
) -> dict[str, Timing]:
    """Warm programs up and time them against one of them, in as many rounds as ``make_schedule`` says."""
    runs = {name: program.run for name, program in programs.items()}
    for run in runs.values():
        run()
    warm_s = {name: time_once(run) for name, run in runs.items()}
    return time_rounds(runs, reference, make_schedule(warm_s, reference, rounds=rounds, seconds=seconds), repeats)


def time_rounds(runs: Mapping[str, Run], reference: str, schedule: Schedule, repeats: int) -> dict[str, Timing]:
    """Time warm programs against a reference."""
    order = random.Random(0)
    done = [_time_repeat(runs, reference, schedule, order) for _ in range(repeats)]
    return {
        name: Timing(
            ratios=tuple(statistics.median(ratio for _, ratio in repeat[name]) for repeat in done),
            times_s=tuple(statistics.median(time_s for time_s, _ in repeat[name]) for repeat in done),
            runs=sum(len(repeat[name]) for repeat in done),
        )
        for name in runs
    }


def _time_repeat(
    runs: Mapping[str, Run], reference: str, schedule: Schedule, order: random.Random
) -> dict[str, list[tuple[float, float]]]:
    """The time of each run and its ratio to the reference of its round."""
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for number in range(schedule.rounds):
        turn = [name for name in runs if number % schedule.every[name] == 0]
        order.shuffle(turn)
        times_s = {name: time_once(runs[name]) for name in turn}
        for name, time_s in times_s.items():
            samples[name].append((time_s, time_s / times_s[reference]))
    return samples


def geometric_mean(values: Sequence[float]) -> float | None:
    """
    >>> geometric_mean([0.5, 2.0]), geometric_mean([])
    (1.0, None)
    """
    return math.exp(statistics.fmean(map(math.log, values))) if values else None
