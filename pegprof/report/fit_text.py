"""Fit -> text for a person: what fits, and the memory over the batch as a small plot."""

import math
from collections.abc import Sequence

from pegprof.measure.fit import Answer, Fit
from pegprof.report.tables import WIDTH, Column, make_console, print_table, print_words, text_of
from pegprof.report.terminal import headline, place, remarks
from pegprof.result.result import Row
from pegprof.units import UNKNOWN, format_bytes

PLOT_ROWS, PLOT_COLUMNS = 12, 64
HEADROOM = 1.5  # how much of what does not fit is shown, as a multiple of what there is
_SEVERAL = "*"


def render_fit(fit: Fit, *, width: int = WIDTH, color: bool = False) -> str:
    """The answers, what there is to say about them, and the plot."""
    console = make_console(width, color)
    rows = fit.result.rows
    if not rows:
        return ""
    print_words(console, headline(rows[0], with_batch=fit.batch is not None), style="bold")
    print_words(console, place(rows[0]))
    if fit.batch is not None:
        print_table(console, _CHECK_COLUMNS, rows)
        for line in remarks(fit.result, rows):
            print_words(console, line)
        if fit.uncompiled:
            print_words(console, f"{', '.join(fit.uncompiled)}: the time limit came before that was compiled")
        return text_of(console)
    print_table(console, _edge_columns(fit), fit.answers)
    for answer in fit.answers:
        if answer.failure:
            print_words(console, f"{answer.method}: {answer.failure}")
    console.print()
    for line in plot(rows):
        print_words(console, line)
    return text_of(console)


_STYLES = {"yes": "green", "no": "yellow", UNKNOWN: "red"}
_CHECK_COLUMNS = (
    Column(header="method", cell=lambda row: row.method, right=False),
    Column(header="fits", cell=lambda row: _yes_or_no(row), right=False, style=lambda row: _STYLES[_yes_or_no(row)]),
    Column(header="needs", cell=lambda row: format_bytes(row.peak_bytes)),
    Column(header="at a time", cell=lambda row: str(row.microbatch_size or row.batch)),
)


def _yes_or_no(row: Row) -> str:
    return {"ok": "yes", "refused": "no"}.get(row.status, UNKNOWN)


def _edge_columns(fit: Fit) -> tuple[Column, ...]:
    needs = {(row.method, row.batch): row.peak_bytes for row in fit.result.rows}

    def need(answer: Answer, batch: int | None) -> str:
        return UNKNOWN if batch is None else format_bytes(needs.get((answer.method, batch)))

    return (
        Column(header="method", cell=lambda answer: answer.method, right=False),
        Column(header="largest batch", cell=lambda answer: describe_edge(answer, fit.most), right=False),
        Column(header="needs", cell=lambda a: need(a, a.edge.largest if a.edge else None)),
        Column(header="the next", cell=lambda a: str(a.edge.refused or UNKNOWN) if a.edge else UNKNOWN),
        Column(header="would need", cell=lambda a: need(a, a.edge.refused if a.edge else None)),
        Column(header="at a time", cell=lambda a: str(a.microbatch_size or "all")),
    )


def describe_edge(answer: Answer, most: int | None) -> str:
    """
    >>> from pegprof.measure.batch_search import Edge
    >>> describe_edge(Answer(method="grad", edge=Edge(largest=51, refused=52, is_exact=True)), 4096)
    '51'
    >>> describe_edge(Answer(method="grad", edge=Edge(largest=4096, refused=None, is_exact=True)), 4096)
    'no limit found up to 4096'
    """
    edge = answer.edge
    if edge is None:
        return UNKNOWN
    if edge.is_exact and edge.refused is None:
        return f"no limit found up to {edge.largest}"
    if edge.is_exact:
        return str(edge.largest or "none fits")
    below = f", less than {edge.refused}" if edge.refused else ""
    return f"at least {edge.largest or 0}{below}: no time left"


def plot(rows: Sequence[Row]) -> list[str]:
    """Bytes over the batch, which doubles from mark to mark; a letter is a method, and the line what there is."""
    points = [(row.batch, row.peak_bytes, row.method) for row in rows if row.peak_bytes is not None]
    capacity = rows[0].capacity_bytes
    if not points or capacity is None:
        return []
    low, high = min(batch for batch, _, _ in points), max(batch for batch, _, _ in points)
    top = min(HEADROOM * capacity, max(capacity, *(size for _, size, _ in points)) * 1.05)
    grid = [[" "] * PLOT_COLUMNS for _ in range(PLOT_ROWS)]
    grid[_row_of(capacity, top)] = ["─"] * PLOT_COLUMNS
    span = math.log2(high / low) or 1.0
    for batch, size, method in points:
        column = round(math.log2(batch / low) / span * (PLOT_COLUMNS - 1))
        line = grid[_row_of(min(size, top), top)]
        line[column] = method[0] if line[column] in " ─" + method[0] else _SEVERAL
    scale = {0: format_bytes(top), _row_of(capacity, top): format_bytes(capacity), PLOT_ROWS - 1: "0 B"}
    body = [f"{scale.get(number, ''):>10} │{''.join(line).rstrip()}" for number, line in enumerate(grid)]
    axis = f"{low}{f'batch {high}':>{PLOT_COLUMNS - len(str(low))}}"
    methods = ", ".join(f"{name[0]} {name}" for name in dict.fromkeys(method for _, _, method in points))
    return [*body, f"{'':>10} └{'─' * PLOT_COLUMNS}", f"{'':>12}{axis}", f"{methods}, {_SEVERAL} several"]


def _row_of(size: float, top: float) -> int:
    return PLOT_ROWS - 1 - round(size / top * (PLOT_ROWS - 1))
