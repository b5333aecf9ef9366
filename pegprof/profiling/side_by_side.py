"""Two Results side by side, for a person: ``pegprof compare``. It judges nothing; that is the gate's."""

import dataclasses
from collections.abc import Callable, Sequence

from pegprof.profiling.comparison import compare_results
from pegprof.profiling.gate import find_differences
from pegprof.profiling.limits import Limits
from pegprof.profiling.markdown import escape, table
from pegprof.profiling.result import Result, Row
from pegprof.profiling.tables import WIDTH, Column, make_console, print_table, print_words, text_of
from pegprof.profiling.units import UNKNOWN, format_bytes, format_count, format_ratio


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """The same row of two results; one of them may lack it."""

    before: Row | None
    after: Row | None

    @property
    def row(self) -> Row:
        row = self.before or self.after
        assert row is not None  # it is of one of the two
        return row


def pair_rows(before: Result, after: Result) -> list[Pair]:
    """In the order of the first result, then what only the second has."""
    old, new = ({(row.batch, row.target, row.method): row for row in result.rows} for result in (before, after))
    return [Pair(before=old.get(key), after=new.get(key)) for key in dict.fromkeys([*old, *new])]


def _both(metric: str, show: Callable[[float | None], str]) -> Callable[[Pair], str]:
    def cell(pair: Pair) -> str:
        old, new = (getattr(row, metric) if row else None for row in (pair.before, pair.after))
        change = f" ({new / old - 1:+.1%})" if old and new is not None and show(old) != show(new) else ""
        return show(new) if show(old) == show(new) else f"{show(old)} -> {show(new)}{change}"

    return cell


def _statuses(pair: Pair) -> str:
    old, new = (row.status if row else UNKNOWN for row in (pair.before, pair.after))
    return old if old == new else f"{old} -> {new}"


COLUMNS = (
    Column(header="batch", cell=lambda pair: str(pair.row.batch)),
    Column(header="target", cell=lambda pair: pair.row.target, right=False, keep=2),
    Column(header="method", cell=lambda pair: pair.row.method, right=False),
    Column(header="status", cell=_statuses, right=False),
    Column(header="time × grad", cell=_both("time_ratio", format_ratio)),
    Column(header="XLA peak", cell=_both("peak_bytes", format_bytes)),
    Column(header="temporaries", cell=_both("temp_bytes", format_bytes), keep=1),
    Column(header="flops", cell=_both("flops", format_count), keep=0),
)


def remarks_on(before: Result, after: Result) -> list[str]:
    """What a table has no place for: what the two were made with, and whose strategy changed."""
    made_with = [f"not made alike: {difference}" for difference in find_differences(before, after)]
    changes = compare_results(before, after, limits=lambda method: Limits(), time=False)
    return [*made_with, *(change.words for change in changes if change.metric.startswith("strategy of"))]


def render_terminal(before: Result, after: Result, *, width: int = WIDTH, color: bool = False) -> str:
    console = make_console(width, color)
    print_words(console, _title(before, after), style="bold")
    print_table(console, COLUMNS, pair_rows(before, after))
    for remark in remarks_on(before, after):
        print_words(console, remark)
    return text_of(console)


def render_markdown(before: Result, after: Result) -> str:
    remarks: Sequence[str] = [f"- {escape(remark)}" for remark in remarks_on(before, after)]
    lines = [f"### pegprof: {escape(_title(before, after))}", "", *table(COLUMNS, pair_rows(before, after)), ""]
    return "\n".join([*lines, *remarks]).rstrip("\n") + "\n"


def _title(before: Result, after: Result) -> str:
    names = dict.fromkeys(result.settings.model for result in (before, after))
    when = [result.rows[0].timestamp or UNKNOWN if result.rows else UNKNOWN for result in (before, after)]
    return f"{' and '.join(names)}: {when[0]} -> {when[1]}"
