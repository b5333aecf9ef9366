"""Rounds, over processes: in a round every method runs, and after some rounds all processes are started anew.

    get ready ──> rounds ──> enough? ──> new processes ──> rounds ──> enough? ──> ...

What drifts (other work, heat) so hits all methods of a round alike, and the ratio of two of them leaves it out. What a
process keeps for as long as it lives is averaged over processes. Several timings, such as two revisions of a model,
take part in the same rounds; on a device that can have but one process they take turns, a process each.
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
ENOUGH_S = 5.0  # but for no longer than that,
ENOUGH_OF_SEVERAL_S = 2.5  # or that, if there may be more processes: these then tell more than more rounds,
MAX_ROUNDS = 50  # and no more than these;
WITHOUT_SLOW_S = 1.0  # but at least so long for the others, once the slow ones rest

REWARM_S = 0.25  # what takes longer has no use for warm caches, and no time for runs that do not count
START_S = 5.0  # by guess, until a process has been started anew
LEAST_PROCESSES = 3  # that no wish for speed keeps from beginning


def _never() -> bool:
    return False


def run_together(
    timings: Sequence[Timing], *, talk: Talk, enough: Callable[[], bool] = _never, take_turns: bool = False
) -> None:
    """Runs timings to their end, in the same rounds. All of them have the same terms as to rounds and processes.

    Args:
      timings: which.
      talk: is told what is going on.
      enough: is asked after each process whether there need not be another one.
      take_turns: only one of them can have processes at a time.
    """
    take_turns = take_turns and len(timings) > 1
    try:
        for timing in timings:
            timing.get_ready()
            if take_turns:
                timing.make_way()
        _Rounds(timings, talk=talk, enough=enough, take_turns=take_turns).run()
        for timing in timings:
            timing.finish()
            if take_turns:
                timing.make_way()
    finally:
        for timing in timings:
            timing.close()


class _Rounds:
    def __init__(self, timings: Sequence[Timing], *, talk: Talk, enough: Callable[[], bool], take_turns: bool):
        self._timings, self._talk, self._enough, self._take_turns = timings, talk, enough, take_turns
        self._terms, self._settings = timings[0].terms, timings[0].settings
        self._planned = self._terms.processes
        self._enough_s = len(timings) * (ENOUGH_S if self._terms.processes == 1 else ENOUGH_OF_SEVERAL_S)

    def run(self) -> None:
        if not self._are_racing():
            return
        rewarm = max(timing.slowest_s for timing in self._timings) < REWARM_S
        for timing in self._timings:
            timing.plan_rounds(rewarm=rewarm)
        for process in itertools.count():
            begin_s = time.monotonic()
            self._say(process)
            for group in [[timing] for timing in self._timings] if self._take_turns else [self._timings]:
                self._run_process(group, process)
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

    def _run_process(self, timings: Sequence[Timing], process: int) -> None:
        """The rounds of one process of each of these timings."""
        for timing in timings:
            if process or self._take_turns:
                timing.renew(process)
        for number in range(self._settings.warmup - 1):  # the first runs have been one
            if (1 + self._settings.least_runs) * _round_s(timings) <= self._left_s():
                _run_round(timings, process, number, counts=False)
        self._run_rounds(timings, process)
        if self._take_turns:
            timings[0].make_way()

    def _run_rounds(self, timings: Sequence[Timing], process: int) -> None:
        """Rounds until there are enough, or until the next would pass the limit; every sample is kept."""
        until_s, least = time.monotonic() + self._enough_s, self._least_rounds(timings)
        for number in itertools.count(1):
            enough = self._has_enough(timings, process, number - 1, until_s, least)
            if enough or not self._are_racing() or _round_s(timings) > self._left_s():
                return
            _run_round(timings, process, number)
            if number == least and not self._settings.runs and _rest_slow(timings):
                until_s = max(until_s, time.monotonic() + WITHOUT_SLOW_S)

    def _has_enough(self, timings: Sequence[Timing], process: int, rounds: int, until_s: float, least: int) -> bool:
        if self._settings.runs:
            return rounds + (0 if self._settings.warmup else 1) >= self._settings.runs  # the first run counts
        if rounds < least:
            return False
        is_steady = max(timing.uncertainty(process) for timing in timings) < STEADY
        return is_steady or time.monotonic() >= until_s or rounds >= MAX_ROUNDS

    def _least_rounds(self, timings: Sequence[Timing]) -> int:
        return MIN_RUNS if MIN_ROUNDS * _round_s(timings) > self._enough_s else MIN_ROUNDS

    def _say(self, process: int) -> None:
        batch = next(timing.racing()[0].runs.time_batch for timing in self._timings if timing.racing())
        of = f", process {process + 1} of at most {self._planned}" if self._terms.processes > 1 else ""
        self._talk.doing(f"timing at batch {batch}{of}", expected_s=self._expected_s(), kind="process")

    def _expected_s(self) -> float:
        """What the rounds of a process should take in all."""
        round_s, extra = _round_s(self._timings), max(self._settings.warmup - 1, 0)
        worth_s = max(self._least_rounds(self._timings) * round_s, min(MAX_ROUNDS * round_s, self._enough_s))
        counted_s = self._settings.runs * round_s if self._settings.runs else worth_s
        return min(extra * round_s + counted_s, self._left_s())

    def _are_racing(self) -> bool:
        """Whether each of the timings still has methods: one alone has nothing to be compared with."""
        return all(timing.racing() for timing in self._timings)

    def _left_s(self) -> float:
        return min(timing.left_s() for timing in self._timings)


def _run_round(timings: Sequence[Timing], process: int, number: int, *, counts: bool = True) -> None:
    """Methods of a timing follow each other, so that they are compared with a ``grad`` of the same moment.

    Another timing is first when each method has been first once. If both changed in every round, the last method of a
    round would always be the first of the next: with two timings, one method of each would always find its caches warm.
    """
    methods = max(1, *(len(timing.racing()) for timing in timings))
    turn = number // methods % len(timings)
    for timing in [*timings[turn:], *timings[:turn]]:
        timing.run_round(process, number, counts=counts)


def _round_s(timings: Sequence[Timing]) -> float:
    return sum(timing.round_s() for timing in timings)


def _rest_slow(timings: Sequence[Timing]) -> bool:
    rested = [timing.rest_slow() for timing in timings]
    return any(rested)
