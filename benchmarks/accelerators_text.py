"""Estimates as a person reads them: operations in groups, the largest first, and the sums of all methods."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from pegprof.targets.hlo.estimate import Estimate, OperationPrice
from pegprof.units import UNKNOWN

FAR = 3.0  # times the roofline: a price that is worth a look


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Operations that differ in their layer alone."""

    first: OperationPrice
    count: int
    op_name: str

    @property
    def total_s(self) -> float:
        return self.first.total_s * self.count


def group(operations: Sequence[OperationPrice]) -> list[Group]:
    """Largest first. Numbers of layers in names become ``*``."""
    found: dict[tuple[object, ...], list[OperationPrice]] = {}
    for each in operations:
        key = (each.kind, each.shape, each.trips, each.kernel, each.flops, each.bytes, each.estimate_s)
        found.setdefault((*key, _without_layer(each.op_name)), []).append(each)
    groups = [
        Group(
            first=members[0],
            count=len(members),
            op_name=members[0].op_name if len(members) == 1 else _without_layer(members[0].op_name),
        )
        for members in found.values()
    ]
    return sorted(groups, key=lambda each: -each.total_s)


def operations_table(title: str, estimate: Estimate, top: int) -> Table:
    """The groups that take most of the time, then all others in one line."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, caption_justify="left")
    columns = "ms", "share", "runs", "compiler µs", "roofline µs", "÷", "Gflop", "MB", "operation", "result", "from"
    for column in columns:
        table.add_column(column, justify="right" if column in columns[:8] else "left", overflow="fold")
    groups, total_s = group(estimate.operations), estimate.time_s or 1.0
    for each in groups[:top]:
        first = each.first
        ratio = first.estimate_s / first.roofline_s if first.roofline_s else float("inf")
        runs = f"{each.count}" if first.trips == 1 else f"{each.count} × {first.trips}"
        table.add_row(
            f"{1e3 * each.total_s:.3f}",
            f"{100 * each.total_s / total_s:.1f}%",
            runs,
            UNKNOWN if first.compiler_s is None else f"{1e6 * first.compiler_s:.1f}",
            f"{1e6 * first.roofline_s:.1f}",
            f"{ratio:.1f}{'!' if ratio > FAR else ''}",
            f"{first.flops / 1e9:.2f}" if first.flops else "",
            f"{first.bytes / 1e6:.2f}",
            f"{'kernel ' if first.kernel else ''}{first.kernel or first.kind}",
            _shorten(first.shape, 48),
            f"{short_op_name(each.op_name)}  {_short_source(first.source)}".strip(),
        )
    rest = groups[top:]
    if rest:
        rest_s = sum(each.total_s for each in rest)
        table.add_row(
            f"{1e3 * rest_s:.3f}", f"{100 * rest_s / total_s:.1f}%", "", "", "", "", "", "", f"{len(rest)} more"
        )
    return table


def short_op_name(op_name: str) -> str:
    """Without what every name of a program has.

    >>> short_op_name("jit(<lambda>)/vmap()/while/body/closed_call/transpose(jvp(Transformer))/block_1/up/dot_general")
    'while/transpose(jvp(Transformer))/block_1/up/dot_general'
    """
    parts = [part for part in op_name.split("/") if part not in ("body", "closed_call", "vmap()")]
    return "/".join(parts[1:] if parts and parts[0].startswith("jit(") else parts)


def _without_layer(op_name: str) -> str:
    """
    >>> _without_layer("jvp(Transformer)/block_11/up")
    'jvp(Transformer)/block_*/up'
    """
    return re.sub(r"(?<=_)\d+(?=/|\))", "*", op_name)


def _short_source(source: str) -> str:
    file, _, line = source.rpartition(":")
    return f"{'/'.join(Path(file).parts[-2:])}:{line}" if file else ""


def _shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
