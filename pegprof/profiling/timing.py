"""Methods against each other: are they right, how long do they take, how much memory do they really need?

    set up for the probe ──> first runs: memory, statistics compared ──> check the examples ──> the common batch
    ──> set up there, first runs: memory ──> rounds: each method once, again and again

What drifts (other work, heat) so hits all methods alike. A method that crashes, is wrong, does not fit or takes too
long is out of the race, with the reason; the others go on. ``timed`` tells at any time what has come of it so far.
"""

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pegprof.errors import PegprofError
from pegprof.profiling import budget
from pegprof.profiling.crew import Crew, NoRoom
from pegprof.profiling.process import ChildFailure, OutOfTime
from pegprof.profiling.progress import Talk
from pegprof.profiling.race import Lane, Peak, Terms, Timed
from pegprof.profiling.result import MIN_RUNS

MAX_RUNS = 50
ENOUGH_S = 10.0  # of rounds, when the number of runs was not asked for
SHORT_S = 0.1  # what takes less is run several times in a round, after a run that does not count:
MOST_IN_A_ROUND = 5  # in a training loop too it finds the caches as it left them
SAVE_EVERY_S = 1.0

# Who runs first is what the others are compared with. JAX's own ways are the plainest, and vmap can be slow beyond
# measure; grad has the mean only, and another one if examples interact.
FIRST, LAST = ("microbatch", "vmap"), ("grad",)

FIRST_RUN_SHARE = 0.5  # of the time left, that a first run may take
CHECK_SHARE = 0.1  # of the time left, that the check of the examples may take while nothing looks wrong
CHECK_SETUP_S = 5.0  # what that takes beside compiling and running
CHECK_PROGRAMS = 3  # of the batch, of one example at a time, and the engine's
EXAMPLES = 4  # that it looks at

UNVERIFIED = "not verified: no finite number to compare"


class Timing:
    """One race.

    Args:
      terms: what it is about.
      crew: runs the methods.
      talk: is told what is going on.
      changed: is called now and then when there is something new.
    """

    def __init__(self, terms: Terms, *, crew: Crew, talk: Talk, changed: Callable[[], None]):
        self._terms, self._crew, self._talk, self._changed = terms, crew, talk, changed
        others = [method for method in crew.methods if method not in (*FIRST, *LAST)]
        self._lanes = [Lane(method=method) for method in (*FIRST, *others, *LAST) if method in crew.methods]
        self._saved_s = time.monotonic()
        self._over = False

    def run(self) -> None:
        try:
            probe = budget.choose_probe(
                self._terms.batches, example_s=self._terms.example_s, left_s=self._crew.left_s()
            )
            self._set_up(probe)
            self._run_first(compare=self._terms.tolerance is not None)
            if self._terms.tolerance is not None:
                self._warn_of_nonfinite()
                self._check_examples(probe)
            self._go_to_common_batch(probe)
            self._run_rounds()
            self._over = True
            if self._crew.shared and self._terms.measure_peaks:
                self._measure_peaks()
        finally:
            self._crew.close()

    def timed(self) -> dict[str, Timed]:
        """What has come of it, by method."""
        return {lane.method: self._timed(lane) for lane in self._lanes}

    def _timed(self, lane: Lane) -> Timed:
        samples_s, remarks = list(lane.samples_s), list(lane.remarks)
        short = len(samples_s) < self._terms.least_runs
        if lane.first_s is not None and (short or not self._terms.warmup):
            samples_s.insert(0, lane.first_s)
        if samples_s and self._over and not lane.ending.keys() & {"failure", "refused"}:
            remarks += self._remarks_on_number(len(samples_s), short)
        ending = dict(lane.ending)
        if samples_s and "skipped" in ending:
            remarks.append(ending.pop("skipped"))
        return Timed(
            **ending,
            remarks=tuple(remarks),
            batch=lane.batch if samples_s else None,
            samples_s=tuple(samples_s),
            max_rel_error=lane.max_rel_error,
            peak=lane.peak,
        )

    def _remarks_on_number(self, runs: int, short: bool) -> list[str]:
        """What to say of as many runs as there are, if that is not what was wanted."""
        if short and self._terms.warmup:
            few = "its first run, not warmed up, counts" if runs > 1 else "one run, not warmed up"
            return [f"{few}: the time limit allowed no more"]
        if self._terms.runs and runs < self._terms.runs:
            return [f"{runs} runs: the time limit allowed no more"]
        return []

    # Who is in the race.

    def _racing(self) -> list[Lane]:
        return [lane for lane in self._lanes if lane.racing]

    def _end(self, lane: Lane, **ending: str) -> None:
        """A method is out of the race, and why, unless more is known against it."""
        lane.racing, lane.ending = False, lane.ending or ending
        self._crew.drop(lane.method)
        self._tell_changed()

    def _end_by(self, lane: Lane, error: Exception) -> None:
        match error:
            case OutOfTime():
                self._end(lane, skipped="stopped: it took longer than the time limit allows")
            case NoRoom():
                program = self._crew.programs.get(lane.method)
                what = f"batch {program.batch}" if program else "making the parameters"
                self._end(lane, refused=f"not run: {what} {error}")
            case ChildFailure():
                self._say_output(lane.method, error)
                self._end(lane, failure=error.reason)
            case PegprofError():
                self._end(lane, failure=error.what)
            case _:
                raise error

    def _say_output(self, who: str, failure: ChildFailure) -> None:
        if failure.output:
            self._talk(f"{who} said:\n{last_lines(failure.output)}")

    def _tell_changed(self) -> None:
        if time.monotonic() - self._saved_s > SAVE_EVERY_S:
            self._changed()
            self._saved_s = time.monotonic()

    # The stages.

    def _set_up(self, batch: int) -> None:
        self._talk.doing(f"making the parameters, and compiling for batch {batch}")
        try:
            failures = self._crew.set_up(batch)
        except (ChildFailure, NoRoom) as failure:
            self._end_all(dict.fromkeys(self._crew.methods, failure))
            return
        self._end_all(failures)

    def _end_all(self, failures: Mapping[str, Exception]) -> None:
        for lane in self._racing():
            if lane.method in failures:
                self._end_by(lane, failures[lane.method])

    def _run_first(self, *, compare: bool) -> None:
        """The first run of each method at the batch that it is compiled for."""
        reference: tuple[Lane, Any] | None = None
        for lane in self._racing():
            program = self._crew.programs[lane.method]
            self._talk.doing(f"running {lane.method} at batch {program.batch}", kind=f"a run at {program.batch}")
            try:
                answer = self._crew.run(
                    lane.method,
                    limit_s=FIRST_RUN_SHARE * self._crew.left_s(),
                    measure_peak=self._terms.measure_peaks and not self._crew.shared,
                    keep=compare and not reference and len(self._racing()) > 1,
                    compare_with=reference[1] if compare and reference else None,
                    find_nonfinite=compare,
                )
            except (ChildFailure, NoRoom, PegprofError) as error:
                self._end_by(lane, error)
                continue
            lane.batch, lane.first_s, lane.samples_s = program.batch, answer["times_s"][0], []
            self._keep_peak(lane, answer)
            if nonfinite := answer.get("nonfinite"):
                lane.nonfinite = nonfinite
                lane.remarks.append(nonfinite)
            if "kept" in answer:
                reference = lane, answer["kept"]
            if not_kept := answer.get("not_kept"):
                compare = False
                self._remark(f"statistics not compared: {not_kept}")
            if "max_rel_error" in answer and reference:
                self._judge_error(lane, answer["max_rel_error"], reference[0])
            self._tell_changed()
        if reference:
            self._crew.forget_statistics()

    def _warn_of_nonfinite(self) -> None:
        """Says aloud what is no finite number, and what could not be compared for that; each once, with all methods."""
        for remark in dict.fromkeys([*(lane.nonfinite for lane in self._lanes), UNVERIFIED]):
            methods = [lane.method for lane in self._lanes if remark in lane.remarks]
            if methods:
                self._talk(f"warning: {remark} ({', '.join(methods)})")

    def _remark(self, text: str) -> None:
        for lane in self._racing():
            lane.remarks.append(text)

    def _keep_peak(self, lane: Lane, answer: Mapping[str, Any]) -> None:
        """What was measured on a host is above what the process had: its arguments, which XLA counts too."""
        program, device_bytes = self._crew.programs[lane.method], answer.get("device_peak_bytes")
        if "host_bytes" in answer and self._crew.on_host:
            host_bytes = answer["host_bytes"] + program.argument_bytes
            lane.peak = Peak(batch=program.batch, xla_bytes=program.peak_bytes, host_bytes=host_bytes)
        elif device_bytes is not None:
            lane.peak = Peak(batch=program.batch, xla_bytes=program.peak_bytes, device_bytes=device_bytes)

    def _judge_error(self, lane: Lane, error: float | None, reference: Lane) -> None:
        """A method that is wrong is out of the race. ``grad`` stays: the others' times are compared with its own."""
        lane.max_rel_error = error
        assert self._terms.tolerance is not None
        if error is None and lane.nonfinite:
            lane.remarks.append(UNVERIFIED)
        if error is None or error <= self._terms.tolerance:
            return
        reason = _disagreement(lane, error, reference)
        if lane.method == "grad":
            lane.ending = {"failure": f"{reason}: the examples of a batch interact"}
        else:
            self._end(lane, failure=reason)

    def _check_examples(self, probe: int) -> None:
        """Whether examples interact, and whether the engine is right.

        It runs if ``grad`` differs, to say why; otherwise if it is cheap.
        What it would find is what ``grad`` and ``surgery`` differ by from the others, which has been looked at.
        """
        lanes = {lane.method: lane for lane in self._racing()}
        grad = lanes.get("grad")
        suspect = grad is not None and bool(grad.ending)
        if probe < 2 or not lanes or not (suspect or self._terms.check_examples):
            return
        slowest_s = max(lane.first_s or 0.0 for lane in lanes.values())
        cost_s = CHECK_SETUP_S + CHECK_PROGRAMS * (slowest_s + max(p.compile_s for p in self._crew.programs.values()))
        if cost_s > (1.0 if suspect else CHECK_SHARE) * self._crew.left_s():
            return
        self._talk.doing("checking that examples do not interact", expected_s=cost_s)
        try:
            answer = self._crew.check_examples(min(EXAMPLES, probe))
        except (ChildFailure, PegprofError, NoRoom) as failure:
            self._remark(f"examples not checked: {failure}")
            return
        if loss := answer.get("loss"):
            self._remark(loss)
            self._talk(f"warning: {loss}")
        if answer["ok"]:
            return
        self._talk(answer["text"])
        if answer["engine_fault"]:
            self._judge_engine(lanes, answer["engine_fault"])
        if not answer["cause"]:
            return
        cause = answer["cause"].replace("; ", ", ")  # a semicolon separates remarks
        words = f"the mean of the examples' gradients is not the gradient of the batch: {cause}"
        if grad:
            grad.ending = {"failure": words}
        else:
            self._remark(words)

    def _judge_engine(self, lanes: Mapping[str, Lane], fault: str) -> None:
        """The engine is wrong: ``surgery`` is out of the race, and ``grad`` is not to blame for differing from it."""
        surgery, grad = lanes.get("surgery"), lanes.get("grad")
        if surgery is None:
            return
        if grad and not {*FIRST} & lanes.keys():  # it was compared with surgery
            surgery.max_rel_error, grad.max_rel_error, grad.ending = grad.max_rel_error, None, {}
        self._end(surgery, failure=fault)

    def _go_to_common_batch(self, probe: int) -> None:
        """Chooses the batch, and compiles and runs once there, unless it is the probe."""
        batches = list(self._terms.batches)
        while self._racing():
            choice = self._choose(batches, probe)
            for lane in self._racing():
                if lane.method in choice.left_out:
                    self._end(lane, skipped="left out of the rounds: too slow for the time limit")
            if choice.batch == probe:
                return
            self._talk.doing(f"compiling for batch {choice.batch}")
            before = dict(self._crew.programs)
            self._end_all(self._crew.prepare(choice.batch))
            if all(self._has_room(lane.method, self._crew.programs[lane.method].peak_bytes) for lane in self._racing()):
                for lane in self._lanes:  # times of different batches shall not stand side by side
                    lane.batch = lane.first_s = lane.peak = None
                self._run_first(compare=False)
                return
            batches = [batch for batch in batches if batch < choice.batch]  # needs were not linear
            self._crew.programs = before

    def _choose(self, batches: Sequence[int], probe: int) -> budget.Choice:
        entrants = {
            lane.method: budget.Entrant(
                time_s=lane.first_s or 0.0,
                compile_s=self._crew.programs[lane.method].compile_s,
                probe_bytes=self._crew.programs[lane.method].peak_bytes,
                full_bytes=self._terms.peak_bytes[lane.method],
            )
            for lane in self._racing()
        }
        return budget.choose(
            entrants,
            batches,
            probe=probe,
            full=self._terms.batches[0],
            left_s=self._crew.left_s(),
            warmup=self._terms.warmup,
            runs=self._terms.runs,
            has_room=self._has_room,
        )

    def _has_room(self, method: str, peak_bytes: int) -> bool:
        """By XLA's figure, and as much above it as was measured at the probe."""
        peak = next(lane.peak for lane in self._lanes if lane.method == method)
        factor = peak.measured_bytes / peak.xla_bytes if peak and peak.is_far_from_xla else 1.0
        try:
            self._crew.require_room(method, int(max(1.0, factor) * peak_bytes))
        except NoRoom:
            return False
        return True

    def _run_rounds(self) -> None:
        """Rounds until there are enough, or until the next would pass the limit; every sample is kept."""
        lanes = self._racing()
        if not lanes:
            return
        self._talk.doing(f"timing at batch {lanes[0].batch}", expected_s=self._expected_s())
        for _ in range(self._terms.warmup - 1):
            if (1 + self._terms.least_runs) * self._round_s() <= self._crew.left_s():
                self._run_round(lanes)
        for lane in lanes:
            lane.samples_s = []
        start_s = time.monotonic()
        for number in itertools.count():
            lanes = [lane for lane in self._racing() if self._runs_to_come(lane)]
            enough = not self._terms.runs and number >= MIN_RUNS and time.monotonic() - start_s >= ENOUGH_S
            if not lanes or enough or self._round_s() > self._crew.left_s():
                return
            turn = number % len(lanes)  # another one is first each time: the last leaves the caches in its own state
            self._run_round(lanes[turn:] + lanes[:turn])

    def _runs_to_come(self, lane: Lane) -> int:
        first = 0 if self._terms.warmup else 1
        return max(0, (self._terms.runs or MAX_RUNS) - len(lane.samples_s) - first)

    def _run_round(self, lanes: Sequence[Lane]) -> None:
        """Each method once, or some times if it is quick."""
        for lane in lanes:
            quick = lane.next_s < SHORT_S
            times = min(int(SHORT_S / max(lane.next_s, 1e-9)), MOST_IN_A_ROUND, self._runs_to_come(lane))
            try:
                lane.samples_s += self._crew.run(lane.method, times=max(1, times), rewarm=quick)["times_s"]
            except (ChildFailure, NoRoom, PegprofError) as error:
                self._end_by(lane, error)
            self._tell_changed()

    def _round_s(self) -> float:
        return sum(lane.next_s for lane in self._racing())

    def _expected_s(self) -> float:
        """What the rounds should take in all."""
        round_s, extra = self._round_s(), max(self._terms.warmup - 1, 0)
        if self._terms.runs:
            counted_s = self._terms.runs * round_s
        else:
            counted_s = max(MIN_RUNS * round_s, min(MAX_RUNS * round_s, ENOUGH_S))
        return min(extra * round_s + counted_s, self._crew.left_s())

    def _measure_peaks(self) -> None:
        """Where all methods share a process, the peak of each is measured in one of its own."""
        for lane in self._racing():
            program = self._crew.programs[lane.method]
            needed_s = CHECK_SETUP_S + program.compile_s + lane.next_s
            if needed_s > self._crew.left_s():
                lane.remarks.append("its peak of memory was not measured: the time limit allowed no more")
                continue
            self._talk.doing(f"measuring the memory of {lane.method} at batch {program.batch}", expected_s=needed_s)
            try:
                self._keep_peak(lane, self._crew.run_afresh(lane.method))
            except (ChildFailure, NoRoom) as error:
                lane.remarks.append(f"its peak of memory was not measured: {error}")


def _disagreement(lane: Lane, error: float, reference: Lane) -> str:
    """Why the statistics of a method are not those of another, in words."""
    if math.isfinite(error):
        return f"its statistics differ from those of {reference.method} by {error:.1e} of their scale"
    if lane.nonfinite and reference.nonfinite:
        return f"its statistics and those of {reference.method} are NaN or infinite in different places"
    mine, others = ("NaN or infinite", "finite") if lane.nonfinite else ("finite", "NaN or infinite")
    return f"its statistics are {mine} where those of {reference.method} are {others}"


def last_lines(output: str, count: int = 15) -> str:
    """The end of what a child printed."""
    return "\n".join(output.splitlines()[-count:])
