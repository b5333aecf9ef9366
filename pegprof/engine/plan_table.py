"""A plan as a table for people: what ``print(plan)`` shows."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pegprof.engine.plan import Plan

_RIGHT = {"T", "flops", "moved", "bytes"}  # columns of numbers


def plan_table(plan: "Plan") -> str:
    """One row for each parameter, below a line that says how many examples run at a time."""
    columns = ("parameter", "shape", "contraction", "T", "strategy", "flops", "moved", "bytes", "why")
    cells = [
        (
            row.parameter,
            "×".join(map(str, row.shape)) or "scalar",
            row.contraction or "–",
            "–" if row.rank is None else str(row.rank),
            row.strategy,
            _short(row.flops, {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3}),
            _short(row.bytes_moved, {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}, unit=" B"),
            _short(row.bytes, {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}, unit=" B"),
            row.why,
        )
        for row in plan.rows
    ]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if name in _RIGHT else cell.ljust(width)
            for name, cell, width in zip(columns, line, widths, strict=True)
        ).rstrip()
        for line in (columns, *cells)
    ]
    place = plan.backend if plan.devices == 1 else f"each of {plan.devices} devices ({plan.backend})"
    head = f"plan for {', '.join(plan.stats)} of {plan.batch} examples on {place}, {_at_a_time(plan)}"
    return "\n".join([head, *lines, *plan.remarks])


def _at_a_time(plan: "Plan") -> str:
    if plan.one_at_a_time:
        return f"one at a time: {plan.one_at_a_time}"
    return "all at once" if plan.microbatch_size >= plan.batch else f"{plan.microbatch_size} at a time"


def _short(number: float, units: dict[str, float], unit: str = "") -> str:
    for name, scale in units.items():
        if number >= scale:
            return f"{number / scale:.1f} {name}"
    return f"{number:.0f}{unit}"
