"""Result -> Markdown as GitHub shows it: what goes into a pull request."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from pegprof.report.explain import explain
from pegprof.report.tables import Column
from pegprof.report.terminal import (
    INCOMPLETE,
    LAYER_COLUMNS,
    columns_of,
    headline,
    largest_layers,
    note_on_layers,
    place,
    remarks,
)
from pegprof.result.result import Result
from pegprof.units import format_bytes, format_seconds


def render_markdown(result: Result) -> str:
    """A section for each batch and target, the verdict, and what it was measured with, folded."""
    return "\n".join(_lines(result)).rstrip("\n") + "\n"


def _lines(result: Result) -> Iterator[str]:
    for rows in result.groups:
        yield from (f"### pegprof: {escape(headline(rows[0]))}", "", escape(place(rows[0])), "")
        yield from table(columns_of(rows), rows)
        yield from ("", *(f"- {escape(remark)}" for remark in remarks(result, rows)), "")
    sentences = [escape(sentence) for sentence in explain(result)]
    yield from (line for sentence in sentences for line in (sentence, ""))
    if not result.complete:
        yield from (f"**{INCOMPLETE}**", "")
    if result.verdict and result.verdict.layers:
        layers = result.verdict.layers
        note = note_on_layers(layers)
        body = [*table(LAYER_COLUMNS, largest_layers(layers)), *(("", note) if note else ())]
        yield from _folded("T and D, layer by layer", body)
    yield from _folded("Measured with", _environment(result))


def _environment(result: Result) -> list[str]:
    settings = result.settings
    facts: dict[str, Any] = {
        "batches": ", ".join(map(str, settings.batches)),
        "options": " ".join(f"{key}={value}" for key, value in result.options.items()),
        "warm-up runs": settings.warmup,
        "time limit": format_seconds(settings.time_limit_s),
        "memory limit": format_bytes(settings.memory_limit_bytes) if settings.memory_limit_bytes else None,
        "seed": settings.seed,
        "timestamp": result.rows[0].timestamp if result.rows else None,
    }
    if result.environment:
        facts |= vars(result.environment)
    return [f"- {name}: {escape(str(value))}" for name, value in facts.items() if value not in (None, "")]


def _folded(title: str, body: Sequence[str]) -> Iterator[str]:
    yield from ("<details>", f"<summary>{title}</summary>", "", *body, "", "</details>", "")


def table(columns: Sequence[Column], records: Sequence[Any]) -> Iterator[str]:
    """Records as a table."""
    yield _line(column.header for column in columns)
    yield _line("---:" if column.right else "---" for column in columns)
    for record in records:
        yield _line(escape(column.cell(record)) for column in columns)


def _line(cells: Iterator[str]) -> str:
    return f"| {' | '.join(cells)} |"


def escape(text: str) -> str:
    """Words as they are: no mark-up, and no line or cell ends in their midst.

    >>> escape("block_*/{a,b} [x] <y> | z")
    'block\\\\_\\\\*/{a,b} \\\\[x\\\\] \\\\<y\\\\> \\\\| z'
    """
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", " ".join(text.split()))
