"""The table of formats: a Result in, text out. A new format is one function and one entry here."""

import csv
import dataclasses
import io
from collections.abc import Callable
from typing import Any

from pegprof.profiling.result import Result, Row
from pegprof.profiling.units import UNKNOWN, format_bytes, format_count, format_ratio, format_seconds

WIDTH = 100

_STATUS_STYLES = {"ok": "green", "refused": "yellow", "failed": "red", "skipped": "dim"}


def render_csv(result: Result) -> str:
    """The rows, one a line; an unknown is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(field.name for field in dataclasses.fields(Row))
    writer.writerows([_cell(value) for value in dataclasses.astuple(row)] for row in result.rows)
    return text.getvalue()


def _cell(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value  # None becomes an empty cell by itself


def render_terminal(result: Result, *, color: bool = False) -> str:
    """A table for each batch, what there is to say about its rows, and the verdict; 100 columns wide at most."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=WIDTH, force_terminal=color, no_color=not color, highlight=False)
    for batch in dict.fromkeys(row.batch for row in result.rows):
        rows = [row for row in result.rows if row.batch == batch]
        console.print(_headline(rows[0]), style="bold")
        console.print(_table(rows))
        for row in rows:
            if row.reason:
                console.print(f"{row.method}: {row.reason}", markup=False)
        console.print()
    if result.verdict:
        console.print(str(result.verdict))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())


def _headline(row: Row) -> str:
    facts = [
        f"{format_count(row.parameters)} parameters",
        f"seq_len {row.seq_len}" if row.seq_len else "",
        row.dtype or "",
        f"batch {row.batch}",
        row.stats.replace(",", " "),
    ]
    room = f"{format_bytes(row.capacity_bytes)} available"
    return f"{row.model}: {', '.join(fact for fact in facts if fact)}\n{row.target}: {row.device}, {room}"


def _table(rows: list[Row]) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    time_batches = {row.time_batch for row in rows} - {None, rows[0].batch}
    time_header = f"time (batch {time_batches.pop()})" if time_batches else "time"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for header in ("method", "status"):
        table.add_column(header, no_wrap=True)
    for header in (time_header, "IQR", "× grad", "peak memory", "× grad", "flops", "error"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.method,
            Text(row.status, style=_STATUS_STYLES[row.status]),
            format_seconds(row.time_s),
            format_seconds(row.time_iqr_s),
            format_ratio(row.time_ratio),
            format_bytes(row.peak_bytes),
            format_ratio(row.peak_ratio),
            format_count(row.flops),
            UNKNOWN if row.max_rel_error is None else f"{row.max_rel_error:.0e}",
        )
    return table


FORMATS: dict[str, Callable[[Result], str]] = {
    "terminal": render_terminal,
    "csv": render_csv,
}
