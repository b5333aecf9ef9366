"""Rounds, over processes: in a round every method runs, and after some rounds all processes are started anew.

    get ready ──> rounds ──> enough? ──> new processes ──> rounds ──> enough? ──> ...

What drifts (other work, heat) so hits all methods of a round alike, and the ratio of two of them leaves it out. What a
process keeps for as long as it lives is averaged over processes. Several timings, such as two revisions of a model,
take part in the same rounds.
"""

import itertools
import math
import time
from collections.abc import Callable, Sequence

from pegprof.measure.progress import Talk
from pegprof.measure.timing import Timing
from pegprof.result.settings import MIN_RUNS

# In each process, if the number of rounds was not asked for:
MIN_ROUNDS = 5  # unless they are slow;
STEADY = 0.01  # more until the ratios are that certain,
ENOUGH_S = 5.0  # but for no longer than that: more processes then tell more than more rounds,
MAX_ROUNDS = 50  # and no more than these;
WITHOUT_SLOW_S = 1.0  # but at least so long for the others, once the slow ones rest

REWARM_S = 0.25  # what takes longer has no use for warm caches, and no time for runs that do not count
START_S = 5.0  # by guess, until a process has been started anew
LEAST_PROCESSES = 3  # that no wish for speed keeps from beginning


def _never() -> bool:
    return False


def run_together(timings: Sequence[Timing], *, talk: Talk, enough: Callable[[], bool] = _never) -> None:
    """Runs timings to their end, in the same rounds. All of them have the same terms as to rounds and processes.

    Args:
      timings: which.
      talk: is told what is going on.
      enough: is asked after each process whether there need not be another one.
    """
    try:
        for timing in timings:
            timing.get_ready()
        _Rounds(timings, talk=talk, enough=enough).run()
        for timing in timings:
            timing.finish()
    finally:
        for timing in timings:
            timing.close()


class _Rounds:
    def __init__(self, timings: Sequence[Timing], *, talk: Talk, enough: Callable[[], bool]):
        self._timings, self._talk, self._enough = timings, talk, enough
        self._terms, self._settings = timings[0].terms, timings[0].settings
        self._planned = self._terms.processes

    def run(self) -> None:
        if not self._are_racing():
            return
        rewarm = max(timing.slowest_s for timing in self._timings) < REWARM_S
        for timing in self._timings:
            timing.plan_rounds(rewarm=rewarm)
        for process in itertools.count():
            begin_s = time.monotonic()
            self._say(process)
            if process:
                for timing in self._timings:
                    timing.renew(process)
            self._warm_up(process)
            self._run_process(process)
            took_s = time.monotonic() - begin_s + (0.0 if process else START_S)
            if process == 1:
                self._plan(took_s)
            if not self._goes_on(process + 1, took_s):
                return

    def _plan(self, took_s: float) -> None:
        """After two processes it is known how many there will be time for; the first look comes after the third."""
        until_s = self._terms.processes_until_s
        left_s = min(self._left_s(), math.inf if until_s is None else until_s - time.monotonic())
        self._planned = min(self._planned, max(LEAST_PROCESSES, 2 + int(max(left_s, 0.0) / max(took_s, 1e-9))))
        for timing in self._timings:
            timing.plan_processes(self._planned)

    def _goes_on(self, done: int, took_s: float) -> bool:
        """Whether there is another process, after so many, of which the last took so long."""
        if done >= self._planned or took_s > self._left_s() or not self._are_racing():
            return False
        return not self._enough()

    def _warm_up(self, process: int) -> None:
        """The first runs have been one."""
        for number in range(self._settings.warmup - 1):
            if (1 + self._settings.least_runs) * self._round_s() <= self._left_s():
                self._run_round(process, number, counts=False)

    def _run_process(self, process: int) -> None:
        """Rounds until there are enough, or until the next would pass the limit; every sample is kept."""
        until_s, least = time.monotonic() + self._enough_s, self._least_rounds()
        for number in itertools.count(1):
            enough = self._has_enough(process, number - 1, until_s, least)
            if enough or not self._are_racing() or self._round_s() > self._left_s():
                return
            self._run_round(process, number)
            if number == least and not self._settings.runs and self._rest_slow():
                until_s = max(until_s, time.monotonic() + WITHOUT_SLOW_S)

    def _rest_slow(self) -> bool:
        rested = [timing.rest_slow() for timing in self._timings]
        return any(rested)

    def _has_enough(self, process: int, rounds: int, until_s: float, least: int) -> bool:
        if self._settings.runs:
            return rounds + (0 if self._settings.warmup else 1) >= self._settings.runs  # the first run counts
        if rounds < least:
            return False
        return self._uncertainty(process) < STEADY or time.monotonic() >= until_s or rounds >= MAX_ROUNDS

    @property
    def _enough_s(self) -> float:
        return ENOUGH_S * len(self._timings)

    def _least_rounds(self) -> int:
        return MIN_RUNS if MIN_ROUNDS * self._round_s() > self._enough_s else MIN_ROUNDS

    def _uncertainty(self, process: int) -> float:
        return max(timing.uncertainty(process) for timing in self._timings)

    def _run_round(self, process: int, number: int, *, counts: bool = True) -> None:
        """Methods of a timing follow each other, so that they are compared with a ``grad`` of the same moment."""
        turn = number % len(self._timings)
        for timing in [*self._timings[turn:], *self._timings[:turn]]:
            timing.run_round(process, number, counts=counts)

    def _say(self, process: int) -> None:
        batch = next(timing.racing()[0].runs.time_batch for timing in self._timings if timing.racing())
        of = f", process {process + 1} of at most {self._planned}" if self._terms.processes > 1 else ""
        self._talk.doing(f"timing at batch {batch}{of}", expected_s=self._expected_s(), kind="process")

    def _expected_s(self) -> float:
        """What the rounds of a process should take in all."""
        round_s, extra = self._round_s(), max(self._settings.warmup - 1, 0)
        worth_s = max(self._least_rounds() * round_s, min(MAX_ROUNDS * round_s, self._enough_s))
        counted_s = self._settings.runs * round_s if self._settings.runs else worth_s
        return min(extra * round_s + counted_s, self._left_s())

    def _are_racing(self) -> bool:
        """Whether each of the timings still has methods: one alone has nothing to be compared with."""
        return all(timing.racing() for timing in self._timings)

    def _round_s(self) -> float:
        return sum(timing.round_s() for timing in self._timings)

    def _left_s(self) -> float:
        return min(timing.left_s() for timing in self._timings)
