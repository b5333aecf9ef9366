"""Two Results -> what changed from one to the other, number by number, and whether the limits allow it.

Bytes, flops and plans are the same in every run of the same program, so any growth beyond the limit is real. Times are
not: a method's time is compared as a ratio to ``grad`` of the same run, and counts against it only if the growth is
over the limit and significant.
"""

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from pegprof.engine.plan import Plan, PlanRow
from pegprof.profiling.limits import Limits, is_of_time
from pegprof.profiling.result import Result, Row
from pegprof.profiling.significance import change_of_ratio
from pegprof.profiling.units import format_bytes, format_count, format_ratio, format_seconds

EXACT = (
    "peak_bytes",
    "temp_bytes",
    "argument_bytes",
    "output_bytes",
    "flops",
)
OF_THE_MODEL = ("activation_bytes_per_example", "parameter_bytes")  # the same in all rows of a batch and target
YARDSTICK = 0.25
"""If grad itself took this much more or less time than before, the machine is not what it was: no ratio settles it."""

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


def compare_results(before: Result, after: Result, *, limits: LimitsOf, time: bool) -> list[Change]:
    """All that changed, and what stayed the same; rows that are new are nobody's loss and are left out.

    Args:
      limits: what is allowed, by method.
      time: whether to compare times.
    """
    return list(_compare(before, after, limits, time))


def _compare(before: Result, after: Result, limits: LimitsOf, time: bool) -> Iterator[Change]:
    rows_after = {_key(row): row for row in after.rows}
    timed = time or has_times(after)
    models_seen: set[tuple[int, str]] = set()
    for row in before.rows:
        at = _Place(row=row, limits=limits(row.method))
        if (row_after := rows_after.get(_key(row))) is None:
            yield at.change("status", row.status, None, "lost", "it is not there any more")
            continue
        yield from _compare_status(at, row, row_after)
        yield from _compare_exact(at, row, row_after, EXACT)
        if (row.batch, row.target) not in models_seen:
            models_seen.add((row.batch, row.target))
            yield from _compare_exact(at, row, row_after, OF_THE_MODEL)
        if time:
            yield from _compare_time(at, before, after, row_after)
        yield from _compare_ceilings(at, row_after, timed)
        if row.method == "surgery" and (plan := before.plans_on(row.target).get(row.batch)):
            yield from _compare_plans(at, plan, after.plans_on(row.target).get(row.batch))


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


def _compare_status(at: _Place, before: Row, after: Row) -> Iterator[Change]:
    if after.status == "failed" or (before.status == "ok" and after.status == "refused"):
        yield at.change(
            "status", before.status, after.status, "lost", f"was {before.status}, is {after.status}: {after.reason}"
        )


def _compare_exact(at: _Place, before: Row, after: Row, metrics: Sequence[str]) -> Iterator[Change]:
    for metric in metrics:
        old, new = getattr(before, metric), getattr(after, metric)
        if old is None or (old == 0 and metric == "activation_bytes_per_example"):  # 0 was unknown to older versions
            continue
        show = format_count if metric == "flops" else format_bytes
        if new is None:
            yield at.change(metric, old, new, "lost", f"{metric} was {show(old)} and is not known any more")
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
            yield at.change(f"max {column}", most, None, "lost", f"{column} may be {most:g} at most, and is not known")
        elif not value <= most:  # nor is NaN
            yield at.change(f"max {column}", most, value, "worse", f"{column} is {value:.4g}; the most is {most:g}")
        else:
            yield at.change(f"max {column}", most, value, "same", f"{column} is {value:.4g}, at most {most:g}")


def _compare_time(at: _Place, before: Result, after: Result, row_after: Row) -> Iterator[Change]:
    row, limit = at.row, at.limits.max_time_ratio
    if row.method == "grad" or row.time_ratio is None:
        return
    if row_after.time_ratio is None:
        words = f"time_ratio was {format_ratio(row.time_ratio)} and is not known any more: {row_after.reason}"
        yield at.change("time_ratio", row.time_ratio, None, "lost", words)
        return
    if row.time_batch != row_after.time_batch:
        words = f"timed at batch {row_after.time_batch}, and before at {row.time_batch}"
        yield at.change("time_ratio", row.time_ratio, row_after.time_ratio, "unresolved", words)
        return
    samples = [
        (result.samples_s[row.batch, "grad"], result.samples_s[row.batch, row.method]) for result in (before, after)
    ]
    found = change_of_ratio(samples[0], samples[1])
    ratios = f"{format_ratio(row.time_ratio)} -> {format_ratio(row_after.time_ratio)}"
    words = f"time {ratios} of grad's ({found.change:+.1%}"
    if found.low is not None and found.high is not None:
        words += f", between {found.low:+.1%} and {found.high:+.1%}"
    words += ")"
    outcome: Outcome = "same"
    if (busy := _machine_changed(samples[0][0], samples[1][0])) and found.change > limit:
        outcome, words = "unresolved", f"{words}; {busy}"
    elif found.is_significantly_over(limit):
        outcome, words = "worse", f"{words}; the limit is {_share(limit)}"
    elif found.change > limit or found.is_too_wide_for(limit):
        outcome = "unresolved"
        words += f"; the limit is {_share(limit)}: about {found.runs_to_settle(limit)} runs would settle it"
    elif found.high is not None and found.high < -limit:
        outcome = "better"
    yield at.change("time_ratio", row.time_ratio, row_after.time_ratio, outcome, words)


def _machine_changed(grad_before: tuple[float, ...], grad_after: tuple[float, ...]) -> str:
    old, new = statistics.median(grad_before), statistics.median(grad_after)
    if max(old, new) <= (1 + YARDSTICK) * min(old, new):
        return ""
    took = f"grad took {format_seconds(new)}, and before {format_seconds(old)}"
    return f"{took}: the machine is busy, or another one, and settles nothing"


def _compare_plans(at: _Place, before: Plan, after: Plan | None) -> Iterator[Change]:
    if after is None:
        yield at.change("plan", f"{len(before.rows)} parameters", None, "lost", "there is no plan any more")
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
            outcome: Outcome = "worse" if _is_dearer(row, row_after, at.limits.max_bytes) else "better"
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
