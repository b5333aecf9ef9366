"""Two Results -> what changed from one to the other, number by number, and whether the limits allow it.

Bytes, flops and plans are the same in every run of the same program, so any growth beyond the limit is real. Times are
not: a method's time is compared as a ratio to ``grad`` of the same rounds, with an interval (``significance.py``). All
of it above the limit fails, all of it below passes, and anything else is unresolved.

What the machine had no memory or no time for is unresolved, too: that says nothing about the program.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from pegprof.compare.limits import Limits, is_of_time
from pegprof.compare.significance import FIRST_LOOK, TimeChange, change_of_ratio
from pegprof.engine.plan import Plan, PlanRow
from pegprof.result.result import Result, Row
from pegprof.result.samples import Sample, median_time_s, shape_of
from pegprof.units import format_bytes, format_count, format_ratio, format_seconds

EXACT = (
    "peak_bytes",
    "temp_bytes",
    "argument_bytes",
    "output_bytes",
    "flops",
)
OF_THE_MODEL = ("activation_bytes_per_example", "parameter_bytes")  # the same in all rows of a batch and target
YARDSTICK = 0.25
"""If grad itself took this much more or less time than before, the machine is not what it was: no ratio fails there."""

Outcome = Literal["same", "better", "worse", "lost", "unresolved"]
FAILURES: tuple[Outcome, ...] = ("worse", "lost")

LimitsOf = Callable[[str], Limits]
"""By method."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """One number, or one parameter's strategy, before and after."""

    model: str
    batch: int
    target: str
    method: str
    metric: str
    before: float | str | None
    after: float | str | None
    outcome: Outcome
    words: str  # the whole of it for a person

    @property
    def is_failure(self) -> bool:
        return self.outcome in FAILURES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Looks:
    """How the second result came about, which decides what its times can say.

    Args:
      sequential: whether it was looked at after each process, up to as many as its settings say.
      interleaved: whether both results are of the same rounds, so that the machine was the same for both.
    """

    sequential: bool = False
    interleaved: bool = False


def compare_results(
    before: Result, after: Result, *, limits: LimitsOf, time: bool, looks: Looks = Looks()
) -> list[Change]:
    """All that changed, and what stayed the same; rows that are new are nobody's loss and are left out.

    Args:
      limits: what is allowed, by method.
      time: whether to compare times.
      looks: how ``after`` was measured.
    """
    return list(_compare(before, after, limits, time, looks))


def times_settled(before: Result, after: Result, *, batch: int, limits: LimitsOf) -> bool:
    """Whether further processes could change nothing about the times at a batch."""
    rows_after = {_key(row): row for row in after.rows}
    for row in before.rows:
        row_after = rows_after.get(_key(row))
        if row.batch != batch or row_after is None or not _has_ratios(row, row_after):
            continue
        found = change_of_ratio(_times(before, row), _times(after, row), planned=after.settings.processes)
        if found is None or found.after.processes < FIRST_LOOK:
            return False
        if found.position(limits(row.method).max_time_ratio) == "across":
            return False
    return True


def _compare(before: Result, after: Result, limits: LimitsOf, time: bool, looks: Looks) -> Iterator[Change]:
    rows_after = {_key(row): row for row in after.rows}
    timed = time or has_times(after)
    models_seen: set[tuple[int, str]] = set()
    for row in before.rows:
        at = _Place(row=row, limits=limits(row.method))
        if (row_after := rows_after.get(_key(row))) is None:
            yield at.change("status", row.status, None, "lost", "it is not there any more")
            continue
        lacked = _lacked_something(row_after)
        yield from _compare_status(at, row, row_after)
        yield from _compare_exact(at, row, row_after, EXACT, lacked=lacked)
        if (row.batch, row.target) not in models_seen:
            models_seen.add((row.batch, row.target))
            unweighed = after.verdict_on(row.target) is None
            yield from _compare_exact(at, row, row_after, OF_THE_MODEL, lacked=unweighed)
        if time:
            yield from _compare_time(at, before, after, row_after, looks)
        yield from _compare_ceilings(at, row_after, timed)
        if row.method == "surgery" and (plan := before.plans_on(row.target).get(row.batch)):
            yield from _compare_plans(at, plan, after.plans_on(row.target).get(row.batch), lacked=lacked)


def has_times(result: Result) -> bool:
    return any(row.time_s is not None for row in result.rows)


def _key(row: Row) -> tuple[int, str, str]:
    return row.batch, row.method, row.target


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a change is, and what is allowed there."""

    row: Row
    limits: Limits

    def change(
        self, metric: str, before: float | str | None, after: float | str | None, outcome: Outcome, words: str
    ) -> Change:
        row = self.row
        return Change(
            model=row.model,
            batch=row.batch,
            target=row.target,
            method=row.method,
            metric=metric,
            before=before,
            after=after,
            outcome=outcome,
            words=words,
        )


def _lacked_something(row: Row) -> bool:
    """Whether the machine had no memory or time for it just then, which is not the program's fault.

    A program whose bytes do not fit is refused on every such machine, at any time.
    """
    too_large = row.peak_bytes is not None and row.capacity_bytes is not None and row.peak_bytes > row.capacity_bytes
    return row.status in ("refused", "skipped") and not too_large


def _compare_status(at: _Place, before: Row, after: Row) -> Iterator[Change]:
    words = f"was {before.status}, is {after.status}: {after.reason}"
    if after.status == "failed":
        yield at.change("status", before.status, after.status, "lost", words)
    elif before.status == "ok" and after.status != "ok":
        outcome: Outcome = "unresolved" if _lacked_something(after) else "lost"
        yield at.change("status", before.status, after.status, outcome, words)


def _compare_exact(at: _Place, before: Row, after: Row, metrics: Sequence[str], *, lacked: bool) -> Iterator[Change]:
    for metric in metrics:
        old, new = getattr(before, metric), getattr(after, metric)
        if old is None or (old == 0 and metric == "activation_bytes_per_example"):  # 0 was unknown to older versions
            continue
        show = format_count if metric == "flops" else format_bytes
        if new is None:
            outcome: Outcome = "unresolved" if lacked else "lost"
            yield at.change(metric, old, new, outcome, f"{metric} was {show(old)} and is now unknown")
            continue
        grown = f"{show(old)} -> {show(new)} ({_percent(new, old)}"
        if new > old * (1 + at.limits.max_bytes):
            yield at.change(metric, old, new, "worse", f"{metric} {grown}; the limit is {_share(at.limits.max_bytes)})")
        elif new < old * (1 - at.limits.max_bytes):
            yield at.change(metric, old, new, "better", f"{metric} {grown})")
        else:
            yield at.change(metric, old, new, "same", f"{metric} {show(new)}")


def _compare_ceilings(at: _Place, after: Row, timed: bool) -> Iterator[Change]:
    for column, most in at.limits.ceilings.items():
        value = getattr(after, column)
        if value is None and is_of_time(column) and not timed:
            continue  # nobody asked for it; ``check_limits`` has said so
        if value is None:
            outcome: Outcome = "unresolved" if _lacked_something(after) else "lost"
            yield at.change(f"max {column}", most, None, outcome, f"{column} may be {most:g} at most, and is not known")
        elif not value <= most:  # nor is NaN
            yield at.change(f"max {column}", most, value, "worse", f"{column} is {value:.4g}; the most is {most:g}")
        else:
            yield at.change(f"max {column}", most, value, "same", f"{column} is {value:.4g}, at most {most:g}")


def _compare_time(at: _Place, before: Result, after: Result, row_after: Row, looks: Looks) -> Iterator[Change]:
    row, ratio = at.row, row_after.time_ratio
    if row.method == "grad" or row.time_ratio is None:
        return
    if ratio is None:
        grad = next((each for each in after.rows if _key(each) == (row.batch, "grad", row.target)), row_after)
        lacking = next((each for each in (row_after, grad) if _lacked_something(each)), None)
        outcome: Outcome = "unresolved" if lacking else "lost"
        words = f"time_ratio was {format_ratio(row.time_ratio)} and is now unknown"
        yield at.change("time_ratio", row.time_ratio, None, outcome, f"{words}: {(lacking or row_after).reason}")
        return
    if row.time_batch != row_after.time_batch:
        words = f"timed at batch {row_after.time_batch}, and before at {row.time_batch}: a longer --time-limit may do"
        yield at.change("time_ratio", row.time_ratio, ratio, "unresolved", words)
        return
    times = _times(before, row), _times(after, row)
    found = change_of_ratio(*times, planned=after.settings.processes if looks.sequential else None)
    if found is None:
        words = "never timed in the same round as grad: a longer --time-limit may do"
        yield at.change("time_ratio", row.time_ratio, ratio, "unresolved", words)
        return
    outcome, why = _judge_time(at, found, times, looks)
    shapes = [shape_of(method) for _, method in times]
    measured = shapes[1] if shapes[0] == shapes[1] else f"{shapes[1]}, before {shapes[0]}"
    words = (
        f"time {format_ratio(row.time_ratio)} -> {format_ratio(ratio)} of grad's "
        f"({found.change:+.1%}, between {found.low:+.1%} and {found.high:+.1%}; {measured}){why}"
    )
    yield at.change("time_ratio", row.time_ratio, ratio, outcome, words)


_Times = tuple[Sequence[Sample], Sequence[Sample]]


def _judge_time(at: _Place, found: TimeChange, times: tuple[_Times, _Times], looks: Looks) -> tuple[Outcome, str]:
    """By the position of the interval alone; and why, in words that go on from it."""
    limit = at.limits.max_time_ratio
    position = found.position(limit)
    if position == "below":
        return "better" if found.high < 0 and found.change < -limit else "same", ""
    busy = "" if looks.interleaved else _machine_changed(times[0][0], times[1][0])
    if position == "above":
        return ("unresolved", f"; {busy}") if busy else ("worse", f"; the limit is {_share(limit)}")
    return "unresolved", f"; the limit is {_share(limit)}: {busy or _advise(found, limit, looks)}"


def _advise(found: TimeChange, limit: float, looks: Looks) -> str:
    """What would settle it, with a number."""
    if number := found.processes_to_settle(limit, both=looks.interleaved):
        return f"about {number} processes would settle it (--processes {number})"
    number = found.processes_to_settle(limit, both=True)
    if looks.interleaved or number is None:
        return "these times spread too far to settle it: close other programs"
    have = f"{found.before.processes} process{'' if found.before.processes == 1 else 'es'}"
    return f"the baseline has {have}; one of about {number} would settle it (pegprof run --processes {number})"


def _has_ratios(before: Row, after: Row) -> bool:
    """Whether there are times to compare, at the same batch."""
    timed = before.method != "grad" and before.time_ratio is not None and after.time_ratio is not None
    return timed and before.time_batch == after.time_batch


def _times(result: Result, row: Row) -> _Times:
    """The samples of ``grad`` and of a row's method."""
    return result.samples.get((row.batch, "grad"), ()), result.samples.get((row.batch, row.method), ())


def _machine_changed(grad_before: Sequence[Sample], grad_after: Sequence[Sample]) -> str:
    old, new = median_time_s(grad_before), median_time_s(grad_after)
    if max(old, new) <= (1 + YARDSTICK) * min(old, new):
        return ""
    took = f"grad took {format_seconds(new)}, and before {format_seconds(old)}"
    return f"{took}: the machine is busy, or another one. gate --against REV measures both side by side"


def _compare_plans(at: _Place, before: Plan, after: Plan | None, *, lacked: bool) -> Iterator[Change]:
    if after is None:
        outcome: Outcome = "unresolved" if lacked else "lost"
        yield at.change("plan", f"{len(before.rows)} parameters", None, outcome, "there is no plan any more")
        return
    rows_after = {row.parameter: row for row in after.rows}
    for row in before.rows:
        row_after = rows_after.get(row.parameter)
        metric = f"strategy of {row.parameter}"
        if row_after is None:
            yield at.change(metric, row.strategy, None, "lost", f"{row.parameter} is not a parameter any more")
        elif row_after.strategy != row.strategy:
            held = f"holding {format_bytes(row.bytes)} -> {format_bytes(row_after.bytes)}"
            words = f"{row.parameter}: {row.strategy} -> {row_after.strategy}, {held}"
            outcome = "worse" if _is_dearer(row, row_after, at.limits.max_bytes) else "better"
            yield at.change(metric, row.strategy, row_after.strategy, outcome, words)
    old, new = len(before.materialised), len(after.materialised)
    if new > old:
        words = f"gradients materialised of {new} parameters, and before of {old}"
        yield at.change("materialised_parameters", old, new, "worse", words)


def _is_dearer(before: PlanRow, after: PlanRow, limit: float) -> bool:
    """Whether another strategy costs more; one that is cheaper in all respects is no regression."""
    more = after.flops > before.flops * (1 + limit) or after.bytes > before.bytes * (1 + limit)
    return more or (after.materialised and not before.materialised)


def _percent(new: float, old: float) -> str:
    return f"{new / old - 1:+.1%}" if old else "from nothing"


def _share(limit: float) -> str:
    return f"{limit:.3g}" if limit >= 10 else f"{limit:.2%}".replace(".00%", "%")
