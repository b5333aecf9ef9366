"""Records as a table of text that fits a width: it drops its least important columns until it does."""

import dataclasses
import io
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDTH = 100
GAP = "  "  # between columns


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column:
    """A column: how a record's cell reads, and what may be done to it to make the table fit.

    Args:
      keep: the smallest is dropped first, None never.
      narrowest: the width that its words may be wrapped to before anything is dropped, None for as wide as they are.
      whole: never wrapped: a name that people type.
    """

    header: str
    cell: Callable[[Any], str]
    keep: int | None = None
    narrowest: int | None = None
    whole: bool = False
    right: bool = True
    style: Callable[[Any], str] = lambda record: ""


def make_console(width: int, color: bool) -> "Console":
    """One that writes to a text, in a notebook too, where rich would write to the cell."""
    from rich.console import Console

    return Console(
        file=io.StringIO(),
        width=width,
        force_terminal=color,
        force_jupyter=False,
        no_color=not color,
        highlight=False,
    )


def text_of(console: "Console") -> str:
    """What was written, without the blanks that rich fills lines with."""
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.removesuffix("\n").split("\n"))


def print_words(console: "Console", text: str, style: str = "") -> None:
    """Words as they are, wrapped: a user's model may be called [bold]."""
    console.print(text, style=style, markup=False, highlight=False, emoji=False)


def print_table(console: "Console", columns: Sequence[Column], records: Sequence[Any]) -> list[Column]:
    """The table, without as many of its columns as it takes to fit. If that does not suffice, its words are wrapped.

    Returns:
      The columns that it leaves out.
    """
    kept = list(columns)
    for column in sorted((c for c in columns if c.keep is not None), key=lambda c: c.keep or 0):
        if _least_width(kept, records) <= console.width:
            break
        kept.remove(column)
    console.print(_make_table(kept, records))
    return [column for column in columns if column not in kept]


def print_whole_table(console: "Console", columns: Sequence[Column], records: Sequence[Any]) -> None:
    """As ``print_table``, and below it which columns it leaves out, for a table that no file holds."""
    if left_out := print_table(console, columns, records):
        names = ", ".join(" ".join(column.header.split()) for column in left_out)
        width = _least_width(columns, records)
        print_words(console, f"Not shown at this width: {names}; a wider terminal, or COLUMNS={width}, shows all.")


def name_of(group: Any) -> str:
    """A name that may stand for several, with how many."""
    return f"{group.count} × {group.name}" if group.count > 1 else group.name


def _least_width(columns: Sequence[Column], records: Sequence[Any]) -> int:
    """What a table must have: rich's own measure is cut at the width of the console."""
    widths = (min(natural_width(c, records), c.narrowest or sys.maxsize) for c in columns)
    return sum(widths) + len(GAP) * (len(columns) - 1)


def natural_width(column: Column, records: Sequence[Any]) -> int:
    """What a column would like to have."""
    cells = [column.header, *(column.cell(record) for record in records)]
    return max(len(line) for cell in cells for line in cell.split("\n"))


def _make_table(columns: Sequence[Column], records: Sequence[Any]) -> "Table":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, len(GAP) - 1, 0, 0)
    )  # the box adds one
    for column in columns:
        no_wrap = column.right or column.whole
        table.add_column(column.header, justify="right" if column.right else "left", no_wrap=no_wrap)
    for record in records:
        table.add_row(*(Text(column.cell(record), style=column.style(record)) for column in columns))
    return table
