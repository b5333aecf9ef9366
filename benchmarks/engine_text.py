"""What ``engine.py`` found as text: tables for a person, CSV for a program."""

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import jax
from rich.table import Table

import pegprof
from benchmarks.engine_results import NOISE, OURS, REFERENCE, Results, Row
from benchmarks.timing import geometric_mean
from pegprof.targets.selection import cpu_name
from pegprof.units import UNKNOWN, format_bytes, format_ratio, format_seconds


def time_table(results: Results, names: Sequence[str]) -> Table:
    title = f"Time of {' and '.join(results.stats)}, as a ratio to grad's (the median of the repeats)"
    table = Table(title=title, caption=f"ok: as fast as the best of vmap and micro_grad, within {NOISE - 1:.0%}")
    for column in ("model", "B", "grad", *_others(names)):
        table.add_column(column, justify="left" if column == "model" else "right")
    table.add_column("as fast")
    for row in results.rows:
        grad = row.cells[REFERENCE].timing
        table.add_row(
            row.model.name,
            str(row.model.batch),
            format_seconds(grad.time_s if grad else None),
            *[_time_text(row, name) for name in _others(names)],
            _verdict(row.time_against_others, NOISE, f" ({row.best_other} {row.time_against_others or 0:.2f})"),
        )
    table.add_section()
    table.add_row("geometric mean", "", "", *[_mean_text(results, name, Row.time_ratio) for name in _others(names)], "")
    return table


def memory_table(results: Results, names: Sequence[str]) -> Table:
    title = "Temporaries, as a ratio to grad's, and what surgery planned"
    table = Table(title=title, caption="bar: 1.1 times grad's, or grad's and one largest parameter")
    for column in ("model", "grad", *_others(names)):
        table.add_column(column, justify="left" if column == "model" else "right")
    for column in ("bar", "compile", "plan", "at a time", "strategies"):
        table.add_column(column, justify="right" if column in ("compile", "plan", "at a time") else "left")
    for row in results.rows:
        table.add_row(
            row.model.name,
            format_bytes(row.temp_bytes(REFERENCE)),
            *[format_ratio(row.temp_ratio(name)) for name in _others(names)],
            _verdict(row.temp_against_allowed, 1.0, f" ({format_bytes(row.allowed_temp_bytes)})"),
            format_ratio(row.compile_ratio),
            format_seconds(row.plan_s),
            row.examples_at_a_time,
            row.strategies,
        )
    table.add_section()
    means = [_mean_text(results, name, Row.temp_ratio) for name in _others(names)]
    compiles = [ratio for row in results.rows if (ratio := row.compile_ratio) is not None]
    table.add_row("geometric mean", "", *means, "", format_ratio(geometric_mean(compiles)), "", "", "")
    return table


def _others(names: Sequence[str]) -> list[str]:
    return [name for name in names if name != REFERENCE]


def _time_text(row: Row, name: str) -> str:
    cell = row.cells[name]
    return format_ratio(row.time_ratio(name)) if cell.timing else cell.reason


def _mean_text(results: Results, name: str, ratio: Callable[[Row, str], float | None]) -> str:
    known = [value for row in results.rows if (value := ratio(row, name)) is not None]
    of = f" ({len(known)} of {len(results.rows)})" if 0 < len(known) < len(results.rows) else ""
    return format_ratio(geometric_mean(known)) + of


def _verdict(value: float | None, limit: float, detail: str) -> str:
    return UNKNOWN if value is None else "ok" if value <= limit else f"no{detail}"


def csv_rows(results: Results, names: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each model and method, then the geometric means. An unknown is an empty cell."""
    about = {
        "stats": "+".join(results.stats),
        "device": cpu_name() if jax.default_backend() == "cpu" else jax.devices()[0].device_kind,
        "pegprof": pegprof.__version__,
        "jax": jax.__version__,
        "timestamp": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    rows = [_csv_row(row, name) | about for row in results.rows for name in names]
    means = [
        {
            "model": "geometric mean",
            "method": name,
            "time_ratio": geometric_mean([v for row in results.rows if (v := row.time_ratio(name)) is not None]),
            "temp_ratio": geometric_mean([v for row in results.rows if (v := row.temp_ratio(name)) is not None]),
        }
        | about
        for name in names
    ]
    return [*rows, *means]


def _csv_row(row: Row, name: str) -> dict[str, Any]:
    cell = row.cells[name]
    timing, program, grad = cell.timing, cell.program, row.cells[REFERENCE].program
    fields = {
        "model": row.model.name,
        "batch": row.model.batch,
        "parameters": row.parameters,
        "method": name,
        "reason": cell.reason,
        "time_s": timing and timing.time_s,
        "time_ratio": timing and timing.ratio,
        "time_ratio_by_repeat": timing and ";".join(f"{ratio:.4f}" for ratio in timing.ratios),
        "runs": timing and timing.runs,
        "temp_bytes": row.temp_bytes(name),
        "temp_ratio": row.temp_ratio(name),
        "compile_s": program and program.compile_s,
        "compile_ratio": program and grad and program.compile_s / grad.compile_s,
        "max_rel_error": cell.error,
    }
    if name == OURS:
        fields |= {
            "time_against_others": row.time_against_others,
            "allowed_temp_bytes": row.allowed_temp_bytes,
            "plan_s": row.plan_s,
            "microbatch_size": row.plan and row.plan.microbatch_size,
            "strategies": row.strategies,
        }
    return fields
