"""What ``gate_power.py`` found: how many gates failed, by model, load and slowdown; the bars; a table and a figure."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from pegprof.errors import PegprofError

MOST_FAILURES = 0.0  # of unchanged programs
BARS = {0: 1.2, 1: 1.3}  # by load: the slowdown that
SHARE = 0.9  # of the gates must find
MOST_S = 120.0  # that a gate may take


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One for each model, way, load and slowdown; numbers of rows that were read are text."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        key = row["model"], row["how"], int(row["load"]), float(row["slowdown"])
        groups.setdefault(key, []).append(row)
    return [
        {
            "model": model,
            "how": how,
            "load": load,
            "slowdown": slowdown,
            "gates": len(group),
            "failed": sum(row["outcome"] == "worse" for row in group),
            "unresolved": sum(row["outcome"] in ("unresolved", "lost") for row in group),
            "change": statistics.median(float(row["change"] or 0) for row in group),
            "took_s": statistics.median(float(row["took_s"]) for row in group),
            "longest_s": max(float(row["took_s"]) for row in group),
        }
        for (model, how, load, slowdown), group in sorted(groups.items())
    ]


def find_missed(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The bars that are missed, in words."""
    missed = []
    for group in summarise(rows):
        where = f"{group['model']}, {group['how']}, load {group['load']}, slowdown {group['slowdown']:g}"
        share = group["failed"] / group["gates"]
        if group["slowdown"] == 1 and share > MOST_FAILURES:
            missed.append(f"{where}: {group['failed']} of {group['gates']} gates failed though nothing had changed")
        if group["slowdown"] >= BARS.get(group["load"], float("inf")) and share < SHARE:
            missed.append(f"{where}: only {group['failed']} of {group['gates']} gates failed")
        if group["longest_s"] > MOST_S:
            missed.append(f"{where}: a gate took {group['longest_s']:.0f} s")
    return missed


def render(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="Gates on time: failed and unresolved of all; medians of the change and of the time they took")
    columns = ("model", "how", "load", "slowdown", "gates", "failed", "unresolved", "change", "took", "longest")
    for column in columns:
        table.add_column(column, justify="left" if column in ("model", "how") else "right")
    for group in summarise(rows):
        shown = [group[key] for key in ("model", "how", "load", "slowdown", "gates", "failed", "unresolved")]
        times = [f"{group['took_s']:.0f} s", f"{group['longest_s']:.0f} s"]
        table.add_row(*map(str, shown), f"{group['change']:+.1%}", *times)
    return table


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """The share of gates that fail, by slowdown: a curve for each model and load."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise PegprofError("the figure needs matplotlib", hint="pip install 'pegprof[bench]'") from error
    curves: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    for group in summarise(rows):
        point = group["slowdown"], group["failed"] / group["gates"]
        curves.setdefault((group["model"], group["how"], group["load"]), []).append(point)
    shown = Figure(figsize=(6.4, 4), layout="constrained")
    axes = shown.subplots()
    for (model, how, load), points in curves.items():
        label = f"{model}, {how}, {'idle' if load == 0 else f'{load} core loaded'}"
        axes.plot(*zip(*points, strict=True), marker="o", linestyle="--" if load else "-", label=label)
    axes.axvline(1.1, color="0.5", linewidth=1, linestyle=":")
    axes.annotate("the limit", (1.1, 0.5), xytext=(4, 0), textcoords="offset points", color="0.3")
    axes.set(xlabel="how much slower the method is, ×", ylabel="share of gates that fail", ylim=(-0.03, 1.03))
    axes.legend(frameon=False)
    shown.savefig(path)
