"""Events in, Result out: a fold over the log. Everything that is known of a measurement is known from its events.

The same fold serves whoever measures, who asks it what has been found so far, and whoever reads a log back.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Iterable

from pegprof.engine.plan import Plan
from pegprof.result import events
from pegprof.result.events import Event, Place
from pegprof.result.findings import Compiled, Facts, Peak
from pegprof.result.remarks import Remark
from pegprof.result.result import Result, Row, RowRemarks, Traffic
from pegprof.result.rows import make_row
from pegprof.result.samples import Sample, median_time_s
from pegprof.result.settings import Settings
from pegprof.result.verdict import Verdict

Key = tuple[int, str, str]  # batch, method, target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed:
    """What came of running one method. Of ``failure``, ``refused`` and ``skipped`` at most one is there."""

    failure: str | None = None  # it crashed, or is wrong
    refused: str | None = None  # it did not fit
    skipped: str | None = None  # there was no time for it
    remarks: tuple[Remark, ...] = ()
    batch: int | None = None
    samples: tuple[Sample, ...] = ()
    max_rel_error: float | None = None
    peak: Peak | None = None

    @property
    def time_s(self) -> float | None:
        return median_time_s(self.samples) if self.samples else None

    @property
    def iqr_s(self) -> float | None:
        if len(self.samples) < 2:
            return None
        times_s = [sample.time_s for sample in self.samples]
        first, _, third = statistics.quantiles(times_s, n=4, method="inclusive")
        return third - first

    @property
    def has_ended(self) -> bool:
        return bool(self.samples or self.failure or self.refused or self.skipped)


@dataclasses.dataclass(kw_only=True)
class Runs:
    """The runs of one method at one batch. ``first_s`` and ``samples`` are times at ``time_batch`` examples."""

    time_batch: int | None = None
    first_s: float | None = None
    samples: list[Sample] = dataclasses.field(default_factory=list)
    max_rel_error: float | None = None
    peak: Peak | None = None
    ended: events.Ended | None = None
    remarks: list[Remark] = dataclasses.field(default_factory=list)

    def forget_times(self) -> None:
        self.time_batch, self.first_s, self.peak, self.samples = None, None, None, []


class History:
    """What the events of a measurement say, so far."""

    def __init__(self, happened: Iterable[Event] = ()):
        self.asked = self.settings = Settings(model="")  # the second one with as many processes as there was time for
        self.places: tuple[Place, ...] = ()
        self.timestamp, self.pegprof, self.in_process = "", "", False
        self.xla_flags: str | None = None
        self.facts: Facts | None = None
        self.capacity_bytes: dict[str, int | None] = {}  # by target
        self.compiled: dict[Key, Compiled] = {}
        self.verdicts: dict[str, Verdict] = {}  # by target
        self.timed_batches: set[int] = set()
        self.complete = False
        self._runs: dict[tuple[int, str], Runs] = {}
        for event in happened:
            self.apply(event)

    def apply(self, event: Event) -> None:
        """One more event."""
        match event:
            case events.Begun():
                self.asked = self.settings = event.settings
                self.places, self.in_process = event.places, event.in_process
                self.timestamp, self.pegprof, self.xla_flags = event.timestamp, event.pegprof, event.xla_flags
            case events.Described():
                self.facts, self.capacity_bytes = event.facts, dict(event.capacity_bytes)
            case events.MethodCompiled():
                self.compiled[event.batch, event.method, event.target] = event.compiled
            case events.Weighed():
                self.verdicts[event.verdict.target] = event.verdict
            case events.ProcessesPlanned():
                self.settings = dataclasses.replace(self.settings, processes=event.processes)
            case events.BatchChosen():
                for (batch, _), runs in self._runs.items():
                    if batch == event.batch:
                        runs.forget_times()
            case events.BatchTimed():
                self.timed_batches.add(event.batch)
            case events.Finished():
                self.complete = True
            case _:
                _apply_to_runs(event, self.runs(event.batch, event.method))

    def runs(self, batch: int, method: str) -> Runs:
        """The runs of a method at a batch, so far; later events show in it."""
        return self._runs.setdefault((batch, method), Runs())

    def timed(self, batch: int, method: str) -> Timed:
        """What came of them. The first run counts where there is no warm-up, or where there are too few others."""
        runs = self._runs.get((batch, method), Runs())
        samples, remarks = list(runs.samples), list(runs.remarks)
        is_short = len(samples) < self.settings.least_runs
        if runs.first_s is not None and (is_short or not self.settings.warmup):
            samples.insert(0, Sample(process=0, round=0, time_s=runs.first_s))
        words = {runs.ended.status: runs.ended.words} if runs.ended else {}
        if samples and "skipped" in words:
            remarks.append(Remark(kind="skipped", words=words.pop("skipped")))
        return Timed(
            failure=words.get("failed"),
            refused=words.get("refused"),
            skipped=words.get("skipped"),
            remarks=tuple(remarks),
            batch=runs.time_batch if samples else None,
            samples=tuple(samples),
            max_rel_error=runs.max_rel_error,
            peak=runs.peak,
        )

    def plans(self, target: str) -> dict[int, Plan]:
        """Surgery's on a target, by batch."""
        found = list(self.compiled.items())  # searches of ``fit`` may add to it meanwhile
        return {batch: compiled.plan for (batch, _, name), compiled in found if compiled.plan and name == target}

    def result(self) -> Result:
        """What is known by now: a row for all that is compiled."""
        return self._result([key for key in self._keys() if (key[0], key[1], key[2].name) in self.compiled])

    def outline(self) -> Result:
        """The result with all of its rows, as if each compile had said nothing."""
        return self._result(self._keys())

    def _keys(self) -> list[tuple[int, str, Place]]:
        """Batch by batch, and for each the targets in the order in which they were named. ``fit`` finds batches."""
        batches = dict.fromkeys([*(batch for batch, _, _ in list(self.compiled)), *self.settings.batches])
        return [(b, m, place) for b, place, m in itertools.product(batches, self.places, self.settings.methods)]

    def _result(self, keys: list[tuple[int, str, Place]]) -> Result:
        assert self.facts is not None, "an event says what the model is before any other"
        first, *others = (place.name for place in self.places)
        made = [make_row(self, batch, method, place) for batch, method, place in keys]
        return Result(
            settings=self.settings,
            rows=tuple(row for row, _ in made),
            verdict=self.verdicts.get(first),
            samples=self._samples(),
            plans=self.plans(first),
            environment=self.facts.environment,
            options=self.facts.model_options,
            complete=self.complete,
            other_verdicts=tuple(self.verdicts[name] for name in others if name in self.verdicts),
            other_plans={name: plans for name in others if (plans := self.plans(name))},
            traffic=tuple(self._traffic(row) for row, _ in made if self._sent(row)),
            remarks=tuple(
                RowRemarks(batch=row.batch, method=row.method, target=row.target, remarks=found)
                for row, found in made
                if found
            ),
        )

    def _samples(self) -> dict[tuple[int, str], tuple[Sample, ...]]:
        """Of what has times so far, in the order of the rows."""
        keys = itertools.product(self.settings.batches, self.settings.methods)
        return {key: timed.samples for key in keys if (timed := self.timed(*key)).samples}

    def _sent(self, row: Row) -> Compiled | None:
        compiled = self.compiled.get((row.batch, row.method, row.target))
        return compiled if compiled and compiled.collectives else None

    def _traffic(self, row: Row) -> Traffic:
        collectives = self.compiled[row.batch, row.method, row.target].collectives
        return Traffic(batch=row.batch, method=row.method, target=row.target, collectives=collectives)


def _apply_to_runs(event: Event, runs: Runs) -> None:
    """An event of one method's runs."""
    match event:
        case events.FirstRun():
            runs.forget_times()
            runs.time_batch, runs.first_s = event.time_batch, event.time_s
        case events.Ran():
            runs.samples.append(Sample(process=event.process, round=event.round, time_s=event.time_s))
        case events.PeakMeasured():
            runs.peak = event.peak
        case events.Compared():
            runs.max_rel_error = event.max_rel_error
        case events.Remarked():
            runs.remarks.append(event.remark)
        case events.Ended():
            runs.ended = event
        case events.Cleared():
            runs.ended, runs.max_rel_error = None, None
