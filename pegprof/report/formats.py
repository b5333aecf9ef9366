"""The table of formats: a Result in, text out. A new format is one function and one entry here."""

import csv
import dataclasses
import io
from collections.abc import Callable
from typing import Any

from pegprof.report.markdown import render_markdown
from pegprof.report.terminal import render_terminal
from pegprof.result.result import Result, Row


def render_csv(result: Result) -> str:
    """The rows, one a line; an unknown is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(field.name for field in dataclasses.fields(Row))
    writer.writerows([_cell(value) for value in dataclasses.astuple(row)] for row in result.rows)
    return text.getvalue()


def _cell(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value  # None becomes an empty cell by itself


def render_json(result: Result) -> str:
    """Everything; ``Result.from_json`` reads it back."""
    return result.to_json() + "\n"


FORMATS: dict[str, Callable[[Result], str]] = {
    "terminal": render_terminal,
    "csv": render_csv,
    "json": render_json,
    "markdown": render_markdown,
}
