"""Result -> text for a person: a table for each batch and target, remarks on its rows, the verdict, the layers.

What a narrow table leaves out is in the CSV and in the JSON.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pegprof.report.explain import explain
from pegprof.report.tables import WIDTH, Column, make_console, name_of, print_table, print_words, text_of
from pegprof.result.layers import Layer
from pegprof.result.result import Result, Row
from pegprof.targets.chips import CHIPS
from pegprof.targets.hlo.collectives import Collective, floor_s
from pegprof.units import UNKNOWN, format_bytes, format_count, format_ratio, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

MOST_LAYERS = 12
INCOMPLETE = "Not all is measured: the run was stopped, or is not over."

_STATUS_STYLES = {"ok": "green", "refused": "yellow", "failed": "red", "skipped": "dim"}


def render_terminal(result: Result, *, width: int = WIDTH, color: bool = False) -> str:
    """All that a person wants to see of a result."""
    console = make_console(width, color)
    for rows in result.groups:
        _print_headline(console, rows[0])
        print_table(console, columns_of(rows), rows)
        for line in remarks(result, rows):
            print_words(console, line)
        if sent := traffic_of(result, rows):
            console.print()
            print_table(console, [c for c in TRAFFIC_COLUMNS if any(c.cell(each) for each in sent)], sent)
            for line in findings(sent):
                print_words(console, line, style="yellow")
        console.print()
    if not result.complete:
        print_words(console, INCOMPLETE, style="yellow")
    for sentence in explain(result):
        print_words(console, sentence)
    if result.verdict and result.verdict.layers:
        console.print()
        print_table(console, LAYER_COLUMNS, largest_layers(result.verdict.layers))
        if note := note_on_layers(result.verdict.layers):
            print_words(console, note)
    return text_of(console)


def render_preview(result: Result, *, width: int = WIDTH, color: bool = False) -> str:
    """What is known before anything is timed: memory and what dominates."""
    console = make_console(width, color)
    for rows in result.groups:
        console.print()
        _print_headline(console, rows[0])
        print_table(console, _MEMORY_COLUMNS, rows)
    for sentence in explain(result):
        print_words(console, sentence)
    console.print()
    return text_of(console)


def _print_headline(console: "Console", row: Row) -> None:
    print_words(console, headline(row), style="bold")
    print_words(console, place(row))


def headline(row: Row, *, with_batch: bool = True) -> str:
    """What was measured."""
    facts = [
        f"{format_count(row.parameters)} parameters",
        f"seq_len {row.seq_len}" if row.seq_len else "",
        row.dtype or "",
        f"batch {row.batch}" if with_batch else "",
        f"one step of {row.step}" if row.step else row.stats.replace(",", " "),
        f"optimizer state {format_bytes(row.optimizer_state_bytes)}" if row.step else "",
    ]
    return f"{row.model}: {', '.join(fact for fact in facts if fact)}"


def place(row: Row) -> str:
    """Where it was measured."""
    each = f" each, mesh {row.mesh}; figures of one device" if row.mesh else ""
    return f"{row.target}: {row.device}, {format_bytes(row.capacity_bytes)} available{each}"


def remarks(result: Result, rows: Sequence[Row]) -> list[str]:
    """What there is to say about rows, one line a method; what is true of several is said once."""
    methods_of: dict[str, list[str]] = {}
    for row in rows:
        for remark in result.remarks_on(row):
            methods_of.setdefault(str(remark), []).append(row.method)
    parts_of: dict[tuple[str, ...], list[str]] = {(row.method,): [] for row in rows}
    for part, methods in methods_of.items():
        parts_of.setdefault(tuple(methods), []).append(part)
    return [
        f"{'all' if 1 < len(methods) == len(rows) else ', '.join(methods)}: {'; '.join(parts)}"
        for methods, parts in parts_of.items()
        if parts
    ]


_METHOD = Column(header="method", cell=lambda row: row.method, right=False)
_STATUS = Column(
    header="status", cell=lambda row: row.status, right=False, style=lambda row: _STATUS_STYLES[row.status]
)
_XLA_PEAK = Column(header="XLA peak", cell=lambda row: format_bytes(row.peak_bytes))
_PEAK_RATIO = Column(header="× grad", cell=lambda row: format_ratio(row.peak_ratio))
_FLOPS = Column(header="flops", cell=lambda row: format_count(row.flops), keep=0)

_MEMORY_COLUMNS = (
    _METHOD,
    _STATUS,
    _XLA_PEAK,
    _PEAK_RATIO,
    _FLOPS,
    Column(header="compiled in", cell=lambda row: format_seconds(row.compile_s), keep=1),
)


def columns_of(rows: Sequence[Row]) -> list[Column]:
    """The columns of the table of results; one that would be empty in every row is left out."""
    time_batches = {row.time_batch for row in rows} - {None, rows[0].batch}
    peak_batches = {row.measured_batch for row in rows} - {None, rows[0].batch}
    columns = [
        _METHOD,
        _STATUS,
        Column(
            header=f"time (batch {time_batches.pop()})" if time_batches else "time",
            cell=lambda row: format_seconds(row.time_s),
        ),
        Column(header="IQR", cell=lambda row: format_seconds(row.time_iqr_s), keep=2),
        Column(header="× grad", cell=lambda row: format_ratio(row.time_ratio)),
        _XLA_PEAK,
        _PEAK_RATIO,
        Column(
            header=f"measured (batch {peak_batches.pop()})" if peak_batches else "measured",
            cell=lambda row: format_bytes(row.device_peak_bytes or row.host_peak_bytes),
            keep=3,
        ),
        _FLOPS,
        Column(header="error", cell=lambda row: _format_error(row.max_rel_error), keep=1),
    ]
    return [column for column in columns if any(column.cell(row) != UNKNOWN for row in rows)]


def _format_error(error: float | None) -> str:
    return UNKNOWN if error is None else f"{error:.0e}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sent:
    """Collectives of one kind that one method has, in loops or outside of them."""

    method: str
    kind: str
    in_loop: bool
    collectives: tuple[Collective, ...]
    target: str

    @property
    def count(self) -> int:
        return sum(each.count for each in self.collectives)

    @property
    def total_bytes(self) -> int:
        return sum(each.total_bytes for each in self.collectives)

    @property
    def origin(self) -> str:
        """The parameter, or else the line of source, that most of the bytes are of."""
        totals: dict[str, int] = {}
        for each in self.collectives:
            origin = each.parameter or short_source(each.source)
            totals[origin] = totals.get(origin, 0) + each.total_bytes
        return max(totals, key=lambda origin: totals[origin])


def short_source(source: str) -> str:
    """A line of source as a table has room for it: from the current folder, or the file and its folder.

    >>> short_source("/usr/lib/python3/site-packages/optax/transforms.py:90")
    'optax/transforms.py:90'
    """
    try:
        return str(Path(source).relative_to(Path.cwd()))
    except ValueError:
        return "/".join(Path(source).parts[-2:]) if Path(source).is_absolute() else source


def traffic_of(result: Result, rows: Sequence[Row]) -> list[Sent]:
    """What the methods of a table send from device to device."""
    found = []
    for traffic in result.traffic:
        if (traffic.batch, traffic.target) != (rows[0].batch, rows[0].target):
            continue
        groups: dict[tuple[str, bool], list[Collective]] = {}
        for each in traffic.collectives:
            groups.setdefault((each.kind, bool(each.loop)), []).append(each)
        found += [
            Sent(method=traffic.method, kind=kind, in_loop=in_loop, collectives=tuple(some), target=traffic.target)
            for (kind, in_loop), some in groups.items()
        ]
    return found


def findings(sent: Sequence[Sent]) -> list[str]:
    """Collectives inside of loops: a loop over examples should have none."""
    return [
        f"{each.method}: {each.kind} inside a loop, {trips} times ({short_source(each.collectives[0].loop)})"
        for each in sent
        if each.in_loop and (trips := max(c.trips for c in each.collectives)) > 1
    ]


def _floor(sent: Sent) -> str:
    kind = sent.target.partition(":")[0]
    return format_seconds(floor_s(sent.collectives, kind) if kind in CHIPS else None)


TRAFFIC_COLUMNS = (
    Column(header="method", cell=lambda sent: sent.method, right=False),
    Column(header="collective", cell=lambda sent: sent.kind, right=False),
    Column(header="count", cell=lambda sent: str(sent.count)),
    Column(header="in a loop", cell=lambda sent: "yes" if sent.in_loop else "no", right=False, keep=2),
    Column(header="bytes × trips", cell=lambda sent: format_bytes(sent.total_bytes)),
    Column(header="at least", cell=_floor, keep=1),
    Column(header="most from", cell=lambda sent: sent.origin, right=False, keep=0),
)

LAYER_COLUMNS = (
    Column(header="matrices", cell=name_of, right=False),
    Column(header="shape", cell=lambda layer: "×".join(map(str, layer.shape)), keep=0),
    Column(header="T", cell=lambda layer: UNKNOWN if layer.T is None else str(layer.T)),
    Column(header="D", cell=lambda layer: UNKNOWN if layer.D is None else str(layer.D)),
    Column(header="T ≥ D", cell=lambda layer: {None: UNKNOWN, True: "yes", False: "no"}[layer.obeys_rule]),
)


def largest_layers(layers: Sequence[Layer]) -> list[Layer]:
    """Those with the most parameters, as many as one wants to read, in the order of the model."""
    largest = sorted(layers, key=lambda layer: layer.parameters, reverse=True)[:MOST_LAYERS]
    return [layer for layer in layers if layer in largest]


def note_on_layers(layers: Sequence[Layer]) -> str:
    """What ``largest_layers`` leaves out."""
    left_out = len(layers) - len(largest_layers(layers))
    return f"and {left_out} smaller kinds of matrices, which the JSON has" if left_out > 0 else ""
