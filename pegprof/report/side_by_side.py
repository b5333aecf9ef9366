"""Results side by side, for a person: ``pegprof compare``. It judges nothing; that is the gate's.

Two results share a row for each batch, target and method: ``before -> after``. Of more, each has a row of its own, with
its change from the first.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pegprof.compare.comparison import compare_results
from pegprof.compare.gate import find_differences
from pegprof.compare.limits import Limits
from pegprof.report.markdown import escape, table
from pegprof.report.tables import WIDTH, Column, make_console, print_whole_table, print_words, text_of
from pegprof.result.result import Result, Row
from pegprof.units import UNKNOWN, format_bytes, format_count, format_ratio


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Named:
    """A result, and the file that it is from."""

    name: str
    result: Result


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A row of one of several results, and the same row of the first; either may lack it."""

    name: str
    key: tuple[int, str, str]
    pair: Pair


def name_results(files: Sequence[Path], results: Sequence[Result]) -> list[Named]:
    return [Named(name=str(file), result=result) for file, result in zip(files, results, strict=True)]


def pair_rows(before: Result, after: Result) -> list[Pair]:
    """In the order of the first result, then what only the second has."""
    old, new = _rows_of(before), _rows_of(after)
    return [Pair(before=old.get(key), after=new.get(key)) for key in dict.fromkeys([*old, *new])]


def list_entries(named: Sequence[Named]) -> list[Entry]:
    """For each row of any result, that row of all of them."""
    rows = [(each.name, _rows_of(each.result)) for each in named]
    keys = dict.fromkeys(key for _, found in rows for key in found)
    first = rows[0][1]
    return [
        Entry(name=name, key=key, pair=Pair(before=first.get(key), after=found.get(key)))
        for key in keys
        for name, found in rows
    ]


def _rows_of(result: Result) -> dict[tuple[int, str, str], Row]:
    return {(row.batch, row.target, row.method): row for row in result.rows}


def _both(metric: str, show: Callable[[float | None], str]) -> Callable[[Pair], str]:
    def cell(pair: Pair) -> str:
        old, new = (getattr(row, metric) if row else None for row in (pair.before, pair.after))
        return show(new) if show(old) == show(new) else f"{show(old)} -> {show(new)}{_change(old, new)}"

    return cell


def _after(metric: str, show: Callable[[float | None], str]) -> Callable[[Entry], str]:
    def cell(entry: Entry) -> str:
        old, new = (getattr(row, metric) if row else None for row in (entry.pair.before, entry.pair.after))
        return show(new) if show(old) == show(new) else f"{show(new)}{_change(old, new)}"

    return cell


def _change(old: float | None, new: float | None) -> str:
    return f" ({new / old - 1:+.1%})" if old and new is not None else ""


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
COLUMNS_OF_SEVERAL = (
    Column(header="batch", cell=lambda entry: str(entry.key[0])),
    Column(header="target", cell=lambda entry: entry.key[1], right=False, keep=2),
    Column(header="method", cell=lambda entry: entry.key[2], right=False),
    Column(header="result", cell=lambda entry: entry.name, right=False),
    Column(
        header="status",
        cell=lambda entry: entry.pair.after.status if entry.pair.after else UNKNOWN,
        right=False,
        keep=3,
    ),
    Column(header="time × grad", cell=_after("time_ratio", format_ratio)),
    Column(header="XLA peak", cell=_after("peak_bytes", format_bytes)),
    Column(header="temporaries", cell=_after("temp_bytes", format_bytes), keep=1),
    Column(header="flops", cell=_after("flops", format_count), keep=0),
)


def remarks_on(before: Result, after: Result) -> list[str]:
    """What a table has no place for: what the two were made with, and whose strategy changed."""
    made_with = [f"not made alike: {difference}" for difference in find_differences(before, after)]
    changes = compare_results(before, after, limits=lambda method: Limits(), time=False)
    return [*made_with, *(change.words for change in changes if change.metric.startswith("strategy of"))]


def render_terminal(named: Sequence[Named], *, width: int = WIDTH, color: bool = False) -> str:
    console = make_console(width, color)
    print_words(console, _title(named), style="bold")
    print_whole_table(console, *_table_of(named))
    for remark in _all_remarks(named):
        print_words(console, remark)
    return text_of(console)


def render_markdown(named: Sequence[Named]) -> str:
    remarks = [f"- {escape(remark)}" for remark in _all_remarks(named)]
    lines = [f"### pegprof: {escape(_title(named))}", "", *table(*_table_of(named)), ""]
    return "\n".join([*lines, *remarks]).rstrip("\n") + "\n"


def _table_of(named: Sequence[Named]) -> tuple[Sequence[Column], Sequence[Any]]:
    if len(named) > 2:
        return COLUMNS_OF_SEVERAL, list_entries(named)
    before, after = (each.result for each in named)
    return COLUMNS, pair_rows(before, after)


def _all_remarks(named: Sequence[Named]) -> list[str]:
    """What there is to say about each result beside the first; of several, with its name."""
    first, *others = named
    return [
        f"{other.name}: {remark}" if len(others) > 1 else remark
        for other in others
        for remark in remarks_on(first.result, other.result)
    ]


def _title(named: Sequence[Named]) -> str:
    models = " and ".join(dict.fromkeys(each.result.settings.model for each in named))
    if len(named) > 2:
        return f"{models}: {len(named)} results; changes are from {named[0].name}"
    old, new = (each.result.rows[0].timestamp or UNKNOWN if each.result.rows else UNKNOWN for each in named)
    return f"{models}: {old} -> {new}"
