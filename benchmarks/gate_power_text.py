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
        groups.setdefault(_key(row), []).append(row)
    return [
        {
            "model": model,
            "how": how,
            "load": load,
            "slowdown": slowdown,
            "gates": len(group),
            "failed": sum(_outcome(row) == "failed" for row in group),
            "unresolved": sum(_outcome(row) == "unresolved" for row in group),
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


MARKS = {"failed": ("X", "C3"), "unresolved": ("D", "C1"), "passed": ("o", "C0")}


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Every gate by the change that it measured: a line for each model, load and slowdown, a mark for each outcome."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise PegprofError("the figure needs matplotlib", hint="pip install 'pegprof[bench]'") from error
    groups = summarise(rows)
    shown = Figure(figsize=(7.2, 1.2 + 0.32 * len(groups)), layout="constrained")
    axes = shown.subplots()
    lines = {_key(group): len(groups) - number for number, group in enumerate(groups)}
    for outcome, (marker, color) in MARKS.items():
        found = [row for row in rows if _outcome(row) == outcome]
        changes = [float(row["change"] or 0) for row in found]
        axes.scatter(changes, [lines[_key(row)] for row in found], marker=marker, color=color, alpha=0.7, label=outcome)
    axes.axvline(0.1, color="0.5", linewidth=1, linestyle=":")
    axes.annotate("limit", (0.1, 0.4), xytext=(3, 0), textcoords="offset points", color="0.3")
    axes.set_yticks(list(lines.values()), [_label(group) for group in groups])
    axes.set(xlabel="measured change of the method's time", ylim=(0.3, len(groups) + 0.7))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:+.0%}")
    shown.legend(loc="outside upper right", ncols=3, frameon=False)
    shown.savefig(path)


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    """Of a row, or of a group of rows."""
    return row["model"], row["how"], int(row["load"]), float(row["slowdown"])


def _outcome(row: dict[str, Any]) -> str:
    return {"worse": "failed", "unresolved": "unresolved", "lost": "unresolved"}.get(row["outcome"], "passed")


def _label(group: dict[str, Any]) -> str:
    """
    >>> _label({"model": "mlp", "how": "against", "load": 1, "slowdown": 1.0})
    'mlp, 1 core loaded, unchanged'
    """
    load = f"{group['load']} core{'s' * (group['load'] > 1)} loaded" if group["load"] else "idle"
    slowdown = "unchanged" if group["slowdown"] == 1 else f"slowed to {group['slowdown']:g} ×"
    how = [] if group["how"] == "against" else [group["how"]]
    return ", ".join([group["model"], *how, load, slowdown])
