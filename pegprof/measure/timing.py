"""The methods of one model: are they right, how long do they take, how much memory do they really need?

    set up for the probe ──> first runs: memory, statistics compared ──> check the examples ──> the common batch
    ──> set up there, first runs: memory ──> rounds, which ``rounds.py`` asks for

A method that crashes, is wrong, does not fit or takes too long is out of the race, with the reason; the others go on.
Whatever comes of it goes into the log.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pegprof.errors import PegprofError
from pegprof.measure import schedule
from pegprof.measure.lanes import Lane, Terms
from pegprof.measure.process import ChildFailure, OutOfMemory, OutOfTime, Stopped
from pegprof.measure.progress import Talk
from pegprof.measure.protocol import Slot, Times
from pegprof.measure.runners import NoRoom, Runners
from pegprof.result import events
from pegprof.result.findings import Peak
from pegprof.result.log import Log
from pegprof.result.remarks import Kind, Remark
from pegprof.result.samples import log_ratios, standard_error

TURN_S = 0.15  # what takes less is run several times in a round, and the median counts,
MOST_IN_A_ROUND = 5
SLOW = 10  # times the turn of grad

# The first method to run is the reference for the others: one of JAX's own ways. grad has the mean only, and another
# one if examples interact. vmap can be slow beyond measure: where it is not the reference it runs last, and once.
REFERENCES, LAST = ("microbatch", "vmap"), ("grad", "vmap")

FIRST_RUN_SHARE = 0.5  # of the time left, that a first run may take
CHECK_SHARE = 0.1  # of the time left, that the check of the examples may take while nothing looks wrong
CHECK_SETUP_S = 5.0  # what that takes beside compiling and running
CHECK_PROGRAMS = 3  # of the batch, of one example at a time, and the engine's
EXAMPLES = 4  # that it looks at

Kept = tuple[Lane, Mapping[str, tuple[Slot, ...]]]
"""A method, and where in the file its statistics are."""

UNVERIFIED = Remark(kind="statistics", words="not verified: no finite number to compare")


class Timing:
    """One model's methods, whose processes are those of ``runners``.

    Args:
      terms: what is to be timed.
      log: is told what happens; its settings are those of the race.
      runners: runs the methods.
      talk: is told what is going on.
    """

    def __init__(self, terms: Terms, *, log: Log, runners: Runners, talk: Talk):
        self.terms, self._log, self._runners, self._talk = terms, log, runners, talk
        self._lanes = [
            Lane(method=method, runs=log.history.runs(terms.batch, method)) for method in _order(runners.methods)
        ]
        self.settings = log.history.asked
        self._rewarm = False

    def get_ready(self) -> None:
        """All that comes before the rounds: afterwards every method that is left has run once at the common batch."""
        probe = schedule.choose_probe(self.terms.batches, example_s=self.terms.example_s, left_s=self._runners.left_s())
        self._set_up(probe)
        self._run_first(compare=self.terms.tolerance is not None)
        if self.terms.tolerance is not None:
            self._warn_of_nonfinite()
            self._check_examples(probe)
        self._go_to_common_batch(probe)

    def finish(self) -> None:
        """All that comes after the rounds."""
        for lane in self._lanes:
            self._remark_on_number(lane)
        if self._runners.shared and self.terms.measure_peaks:
            self._measure_peaks()

    def make_way(self) -> None:
        """Leaves a device that can have but one process to others."""
        self._runners.make_way()

    def close(self) -> None:
        self._runners.close()

    def plan_processes(self, processes: int) -> None:
        """So many there is time for."""
        self._log.add(events.ProcessesPlanned(processes=processes))

    def _remark_on_number(self, lane: Lane) -> None:
        """Says that there were fewer runs than wanted, if so."""
        timed, counted = self._log.history.timed(self.terms.batch, lane.method), len(lane.runs.samples)
        if not timed.samples or timed.failure or timed.refused:
            return
        if counted < self.settings.least_runs and self.settings.warmup:
            few = "its first run, not warmed up, counts" if counted else "one run, not warmed up"
            self._remark(lane, "runs", f"{few}: the time limit allowed no more")
        elif self.settings.runs and len(timed.samples) < self.settings.runs:
            self._remark(lane, "runs", f"{len(timed.samples)} runs: the time limit allowed no more")

    # Who is in the race.

    def racing(self) -> list[Lane]:
        return [lane for lane in self._lanes if lane.racing]

    def _end(self, lane: Lane, status: events.Outcome, words: str) -> None:
        """A method is out of the race, and why, unless more is known against it."""
        lane.racing = False
        if lane.runs.ended is None:
            self._blame(lane, status, words)
        self._runners.drop(lane.method)

    def _blame(self, lane: Lane, status: events.Outcome, words: str) -> None:
        self._log.add(events.Ended(batch=self.terms.batch, method=lane.method, status=status, words=words))

    def _remark(self, lane: Lane, kind: Kind, words: str) -> None:
        self._log.add(self._remarked(lane, Remark(kind=kind, words=words)))

    def _remarked(self, lane: Lane, remark: Remark) -> events.Remarked:
        return events.Remarked(batch=self.terms.batch, method=lane.method, remark=remark)

    def _remark_on_all(self, kind: Kind, words: str) -> None:
        for lane in self.racing():
            self._remark(lane, kind, words)

    def _end_by(self, lane: Lane, error: Exception) -> None:
        match error:
            case OutOfTime():
                self._end(lane, "skipped", "stopped: it took longer than the time limit allows")
            case Stopped() | OutOfMemory():
                self._end(lane, "refused", error.reason)
            case NoRoom():
                program = self._runners.programs.get(lane.method)
                what = f"batch {program.batch}" if program else "making the parameters"
                self._end(lane, "refused", f"not run: {what} {error}")
            case ChildFailure():
                self._say_output(lane.method, error)
                self._end(lane, "failed", error.reason)
            case PegprofError():
                self._end(lane, "failed", error.what)
            case _:
                raise error

    def _say_output(self, who: str, failure: ChildFailure) -> None:
        if failure.output:
            self._talk(f"{who} said:\n{last_lines(failure.output)}")

    # The stages.

    def _set_up(self, batch: int) -> None:
        self._talk.doing(f"making the parameters, and compiling for batch {batch}")
        try:
            failures = self._runners.set_up(batch)
        except (ChildFailure, NoRoom) as failure:
            self._end_all(dict.fromkeys(self._runners.methods, failure))
            return
        self._end_all(failures)

    def _end_all(self, failures: Mapping[str, Exception]) -> None:
        for lane in self.racing():
            if lane.method in failures:
                self._end_by(lane, failures[lane.method])

    def _run_first(self, *, compare: bool) -> None:
        """The first run of each method at the batch that it is compiled for."""
        reference: Kept | None = None
        suspects: list[Lane] = []
        for lane in self.racing():
            if reference and suspects and lane.method == "vmap":
                reference, suspects = self._look_again(suspects, reference), []
                compare = reference is not None
            program = self._runners.programs[lane.method]
            self._talk.doing(f"running {lane.method} at batch {program.batch}", kind=f"a run at {program.batch}")
            try:
                answer = self._runners.run(
                    lane.method,
                    limit_s=FIRST_RUN_SHARE * self._runners.left_s(),
                    measure_peak=self.terms.measure_peaks and not self._runners.shared,
                    keep=compare and not reference and len(self.racing()) > 1,
                    compare_with=reference[1] if compare and reference else None,
                    find_nonfinite=compare,
                )
            except (ChildFailure, NoRoom, PegprofError) as error:
                self._end_by(lane, error)
                continue
            self._log.add(
                events.FirstRun(
                    batch=self.terms.batch,
                    method=lane.method,
                    time_batch=program.batch,
                    time_s=answer.times_s[0],
                )
            )
            self._keep_peak(lane, answer)
            if answer.nonfinite:
                lane.nonfinite = answer.nonfinite
                self._remark(lane, "statistics", answer.nonfinite)
            if answer.not_kept:
                compare = False
                self._remark_on_all("statistics", f"statistics not compared: {answer.not_kept}")
            if compare and reference and not self._agrees(lane, answer.max_rel_error):
                suspects.append(lane)
            if answer.kept is not None:
                reference = lane, answer.kept
        if reference and suspects:
            self._look_again(suspects, reference)
        if reference:
            self._runners.forget_statistics()

    def _warn_of_nonfinite(self) -> None:
        """Says aloud what is no finite number, and what could not be compared for that; each once, with all methods."""
        for words in dict.fromkeys([*(lane.nonfinite for lane in self._lanes), UNVERIFIED.words]):
            methods = [lane.method for lane in self._lanes if words in [each.words for each in lane.runs.remarks]]
            if methods:
                self._talk(f"warning: {words} ({', '.join(methods)})")

    def _keep_peak(self, lane: Lane, answer: Times) -> None:
        """What was measured on a host is above what the process had: its arguments, which XLA counts too."""
        program, device_bytes = self._runners.programs[lane.method], answer.device_peak_bytes
        if answer.host_bytes is not None and self._runners.on_host:
            host_bytes = answer.host_bytes + program.argument_bytes
            peak = Peak(batch=program.batch, xla_bytes=program.peak_bytes, host_bytes=host_bytes)
        elif device_bytes is not None:
            peak = Peak(batch=program.batch, xla_bytes=program.peak_bytes, device_bytes=device_bytes)
        else:
            return
        self._log.add(events.PeakMeasured(batch=self.terms.batch, method=lane.method, peak=peak))

    def _agrees(self, lane: Lane, error: float | None) -> bool:
        """Whether the statistics of a method are those of the reference, as far as there is a number to compare."""
        self._keep_error(lane, error)
        assert self.terms.tolerance is not None
        if error is None and lane.nonfinite:
            self._log.add(self._remarked(lane, UNVERIFIED))
        return error is None or error <= self.terms.tolerance

    def _keep_error(self, lane: Lane, error: float | None) -> None:
        self._log.add(events.Compared(batch=self.terms.batch, method=lane.method, max_rel_error=error))

    def _look_again(self, suspects: Sequence[Lane], first_reference: Kept) -> Kept | None:
        """Compares those that differ once more, with other parameters and data; returns the reference for these.

        Where a loss has a kink, such as a ReLU, an activation can be so near to it that rounding decides its gradient.
        That happens for one draw and not for the next. A method that is wrong is wrong for both.
        """
        self._talk.doing("comparing once more, with other parameters and data")
        reference, _ = first_reference
        errors = {lane.method: lane.runs.max_rel_error for lane in suspects}
        try:
            self._runners.draw_again(self.settings.seed + 1)
            kept = self._runners.run(reference.method, keep=True).kept
        except (ChildFailure, NoRoom, PegprofError):
            kept = None  # then the first comparison has to do
        for lane in suspects:
            first = errors[lane.method]
            assert first is not None
            second: float | None = None
            if kept and math.isfinite(first):
                try:
                    second = self._runners.run(lane.method, compare_with=kept).max_rel_error
                except (ChildFailure, NoRoom, PegprofError) as error:
                    self._end_by(lane, error)
                    continue
            if second is not None and self._agrees(lane, second):
                self._remark(
                    lane,
                    "statistics",
                    f"differs from {reference.method} by {first:.1e} for the first draw of parameters and data, and by "
                    f"{second:.1e} for another: rounding decides the gradient at a kink of the loss",
                )
            else:
                self._judge_error(lane, first, reference)
        return (reference, kept) if kept else None

    def _judge_error(self, lane: Lane, error: float, reference: Lane) -> None:
        """A method that is wrong is out of the race. ``grad`` stays: the others' times are compared with its own."""
        self._keep_error(lane, error)
        reason = _disagreement(lane, error, reference)
        if lane.method == "grad":
            self._blame(lane, "failed", f"{reason}: the examples of a batch interact")
        else:
            self._end(lane, "failed", reason)

    def _check_examples(self, probe: int) -> None:
        """Whether examples interact, and whether the engine is right.

        It runs if ``grad`` differs, to say why; otherwise if it is cheap, and if the methods have not shown it already.
        """
        lanes = {lane.method: lane for lane in self.racing()}
        grad = lanes.get("grad")
        suspect = grad is not None and grad.runs.ended is not None
        if probe < 2 or not lanes or not (suspect or self.terms.check_examples) or self._all_agree():
            return
        slowest_s = max(lane.runs.first_s or 0.0 for lane in lanes.values())
        cost_s = CHECK_SETUP_S + CHECK_PROGRAMS * (
            slowest_s + max(p.compile_s for p in self._runners.programs.values())
        )
        if cost_s > (1.0 if suspect else CHECK_SHARE) * self._runners.left_s():
            return
        self._talk.doing("checking that examples do not interact", expected_s=cost_s)
        try:
            answer = self._runners.check_examples(min(EXAMPLES, probe))
        except (ChildFailure, PegprofError, NoRoom) as failure:
            self._remark_on_all("examples", f"examples not checked: {failure}")
            return
        if answer.loss:
            self._remark_on_all("statistics", answer.loss)
            self._talk(f"warning: {answer.loss}")
        if answer.ok:
            return
        self._talk(answer.text)
        if answer.engine_fault:
            self._judge_engine(lanes, answer.engine_fault)
        if not answer.cause:
            return
        words = f"the mean of the examples' gradients is not the gradient of the batch: {answer.cause}"
        if grad:
            self._blame(grad, "failed", words)
        else:
            self._remark_on_all("examples", words)

    def _all_agree(self) -> bool:
        """Whether ``grad``, and all others, gave the mean of JAX's own gradients of single examples, in numbers."""
        reference, *others = self._lanes
        return (
            reference.method in REFERENCES
            and "grad" in [lane.method for lane in others]
            and all(lane.racing and not lane.runs.ended and not lane.nonfinite for lane in self._lanes)
            and all(lane.runs.max_rel_error is not None for lane in others)
        )

    def _judge_engine(self, lanes: Mapping[str, Lane], fault: str) -> None:
        """The engine is wrong: ``surgery`` is out of the race, and ``grad`` is not to blame for differing from it."""
        surgery, grad = lanes.get("surgery"), lanes.get("grad")
        if surgery is None:
            return
        if grad and not {*REFERENCES} & lanes.keys():  # it was compared with surgery
            self._keep_error(surgery, grad.runs.max_rel_error)
            self._log.add(events.Cleared(batch=self.terms.batch, method="grad"))
        self._end(surgery, "failed", fault)

    def _go_to_common_batch(self, probe: int) -> None:
        """Chooses the batch, and compiles and runs once there, unless it is the probe."""
        batches = list(self.terms.batches)
        while self.racing():
            choice = self._choose(batches, probe)
            for lane in self.racing():
                if lane.method in choice.left_out:
                    self._end(lane, "skipped", "left out of the rounds: too slow for the time limit")
            if choice.batch == probe:
                return
            self._talk.doing(f"compiling for batch {choice.batch}")
            before = dict(self._runners.programs)
            self._end_all(self._runners.prepare(choice.batch))
            if all(
                self._has_room(lane.method, self._runners.programs[lane.method].peak_bytes) for lane in self.racing()
            ):
                self._log.add(events.BatchChosen(batch=self.terms.batch, time_batch=choice.batch))
                self._run_first(compare=False)
                return
            batches = [batch for batch in batches if batch < choice.batch]  # needs were not linear
            self._runners.programs = before

    def _choose(self, batches: Sequence[int], probe: int) -> schedule.Choice:
        entrants = {
            lane.method: schedule.Entrant(
                time_s=lane.runs.first_s or 0.0,
                compile_s=self._runners.programs[lane.method].compile_s,
                probe_bytes=self._runners.programs[lane.method].peak_bytes,
                full_bytes=self.terms.peak_bytes[lane.method],
            )
            for lane in self.racing()
        }
        return schedule.choose(
            entrants,
            batches,
            probe=probe,
            full=self.terms.batches[0],
            left_s=self._runners.left_s(),
            warmup=self.settings.warmup,
            runs=self.settings.runs,
            has_room=self._has_room,
        )

    def _has_room(self, method: str, peak_bytes: int) -> bool:
        """By XLA's figure, and as much above it as was measured at the probe."""
        peak = next(lane.runs.peak for lane in self._lanes if lane.method == method)
        factor = peak.measured_bytes / peak.xla_bytes if peak and peak.is_far_from_xla else 1.0
        try:
            self._runners.require_room(method, int(max(1.0, factor) * peak_bytes))
        except NoRoom:
            return False
        return True

    # Rounds.

    @property
    def slowest_s(self) -> float:
        """What one run of the slowest method should take."""
        return max((lane.next_s for lane in self.racing()), default=0.0)

    def plan_rounds(self, *, rewarm: bool) -> None:
        """Decides how a round goes, once for all rounds, so that no two are different.

        Args:
          rewarm: whether every method has a run before those that count. Others have run meanwhile; in a training loop
            a program finds the caches as it left them.
        """
        self._rewarm = rewarm
        for lane in self.racing():
            lane.repeats = max(1, min(int(TURN_S / max(lane.next_s, 1e-9)), MOST_IN_A_ROUND))

    def round_s(self) -> float:
        """What a round should take."""
        return sum(map(self._turn_s, self._running()))

    def _turn_s(self, lane: Lane) -> float:
        return (lane.repeats + self._rewarm) * lane.next_s

    def _running(self) -> list[Lane]:
        return [lane for lane in self.racing() if not lane.resting]

    def rest_slow(self) -> bool:
        """A method that is far slower than ``grad`` has no more rounds in this process: the others' would be too few.

        ``grad`` goes on, since ratios are to a ``grad`` of the same round. Returns whether there was such a method.
        """
        grad_s = next((self._turn_s(lane) for lane in self._running() if lane.method == "grad"), math.inf)
        for lane in self._running():
            lane.resting = self._turn_s(lane) > SLOW * grad_s
        return any(lane.resting for lane in self.racing())

    def uncertainty(self, process: int) -> float:
        """How far a process's ratios to ``grad`` may be off: the largest standard error of their centres.

        Infinite where there is none.
        """
        samples = {
            lane.method: [sample for sample in lane.runs.samples if sample.process == process]
            for lane in self._running()
        }
        grad = samples.pop("grad", [])
        ratios = [log_ratios(each, grad).get(process, []) for each in samples.values()]
        return max(map(standard_error, ratios), default=math.inf) if grad else math.inf

    def left_s(self) -> float:
        return self._runners.left_s()

    def run_round(self, process: int, number: int, *, counts: bool = True) -> None:
        """Runs every method that is left; another one is first each time: who ran last has left its data in the caches.

        Args:
          process: of the samples.
          number: of the round.
          counts: whether its times are kept.
        """
        lanes = self._running()
        turn = number % max(len(lanes), 1)
        for lane in lanes[turn:] + lanes[:turn]:
            times_s = self._run(lane, times=lane.repeats, rewarm=self._rewarm)
            if times_s and counts:
                self._keep_sample(lane, process, number, statistics.median(times_s))

    def renew(self, process: int) -> None:
        """Starts all processes anew, each with a first run, which counts only if there is no warm-up at all."""
        self._end_all(self._runners.renew())
        for lane in self.racing():
            lane.resting = False
            times_s = self._run(lane)
            if times_s and not self.settings.warmup:
                self._keep_sample(lane, process, 0, times_s[0])

    def _keep_sample(self, lane: Lane, process: int, number: int, time_s: float) -> None:
        self._log.add(
            events.Ran(batch=self.terms.batch, method=lane.method, process=process, round=number, time_s=time_s)
        )

    def _run(self, lane: Lane, **how: Any) -> Sequence[float]:
        """The times of a method's runs; none if it went out of the race with them."""
        try:
            return self._runners.run(lane.method, **how).times_s
        except (ChildFailure, NoRoom, PegprofError) as error:
            self._end_by(lane, error)
            return ()

    def _measure_peaks(self) -> None:
        """Where all methods share a process, the peak of each is measured in one of its own."""
        for lane in self.racing():
            program = self._runners.programs[lane.method]
            needed_s = CHECK_SETUP_S + program.compile_s + lane.next_s
            if needed_s > self._runners.left_s():
                self._remark(lane, "peak", "its peak of memory was not measured: the time limit allowed no more")
                continue
            self._talk.doing(f"measuring the memory of {lane.method} at batch {program.batch}", expected_s=needed_s)
            try:
                self._keep_peak(lane, self._runners.run_afresh(lane.method))
            except (ChildFailure, NoRoom) as error:
                self._remark(lane, "peak", f"its peak of memory was not measured: {error}")


def _order(methods: Sequence[str]) -> list[str]:
    """In which methods run first.

    >>> _order(["grad", "vmap", "microbatch", "surgery"])
    ['microbatch', 'surgery', 'grad', 'vmap']
    """
    reference = [method for method in REFERENCES if method in methods][:1]
    others = [method for method in methods if method not in (*reference, *LAST)]
    return [*reference, *others, *(method for method in LAST if method in methods and method not in reference)]


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
