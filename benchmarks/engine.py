"""What statistics of per-example gradients cost beside the plain gradient: time and memory, method by method.

    models × methods ──> compile, run, compare the statistics ──> rounds ──> tables, CSV, and with --check the bars

Everything is a ratio to ``grad`` of the same model and batch. Times are medians over interleaved rounds, and the best
of three repeats counts; temporaries are XLA's own figure. Run it on a machine that does nothing else.
"""

import collections
import dataclasses
import datetime
import math
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import typer
from rich.console import Console
from rich.table import Table

import pegprof
from benchmarks.command import make_console, run_command, say, write_csv
from benchmarks.models import MODELS, Model, find_models, transformer
from benchmarks.timing import (
    TOO_SLOW,
    Program,
    Timing,
    compile_program,
    geometric_mean,
    make_schedule,
    time_once,
    time_rounds,
    warm_time,
)
from pegprof.engine.plan import Plan
from pegprof.engine.statistics import resolve
from pegprof.errors import ExitCode, PegprofError, nearest
from pegprof.problem import load_problem
from pegprof.profiling import methods
from pegprof.profiling.agreement import TOLERANCES, max_rel_error
from pegprof.profiling.targets import cpu_name
from pegprof.profiling.units import UNKNOWN, format_bytes, format_ratio, format_seconds

REFERENCE, OURS = "grad", "surgery"
METHODS: dict[str, tuple[str, int]] = {  # our name: the profiler's method, its microbatch size
    REFERENCE: ("grad", 1),
    "vmap": ("vmap", 1),
    "micro_grad_1": ("microbatch", 1),
    "micro_grad_4": ("microbatch", 4),
    "micro_grad_16": ("microbatch", 16),
    OURS: ("surgery", 1),
}
SECONDS = 8.0  # of rounds for one repeat of one model, when the number of rounds was not asked for
NOISE = 1.10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One method on one model. What was not measured says why."""

    program: Program | None = None
    timing: Timing | None = None
    reason: str = ""
    error: float | None = None  # of its statistics, relative to another method's


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One model: a cell for each method, and what surgery planned."""

    model: Model
    stats: tuple[str, ...]
    cells: dict[str, Cell]
    plan: Plan | None
    plan_s: float | None
    largest_parameter_bytes: int
    parameters: int

    def time_ratio(self, method: str) -> float | None:
        cell = self.cells.get(method)
        return cell.timing.ratio if cell and cell.timing else None

    def temp_ratio(self, method: str) -> float | None:
        temp, reference = self.temp_bytes(method), self.temp_bytes(REFERENCE)
        return None if temp is None or not reference else temp / reference

    def temp_bytes(self, method: str) -> int | None:
        cell = self.cells.get(method)
        return cell.program.temp_bytes if cell and cell.program else None

    @property
    def compile_ratio(self) -> float | None:
        ours, reference = (self.cells[m].program if m in self.cells else None for m in (OURS, REFERENCE))
        return ours.compile_s / reference.compile_s if ours and reference else None

    @property
    def best_other(self) -> str | None:
        others = {m: r for m in self.cells if m not in (REFERENCE, OURS) and (r := self.time_ratio(m)) is not None}
        return min(others, key=lambda m: others[m]) if others else None

    @property
    def time_against_others(self) -> float | None:
        """Surgery's time in units of the best other's; infinite where only the others could be timed."""
        if OURS not in self.cells or self.best_other is None:
            return None
        other = self.time_ratio(self.best_other)
        ours = self.time_ratio(OURS)
        return math.inf if ours is None or other is None else ours / other

    @property
    def allowed_temp_bytes(self) -> float | None:
        """1.1 times the gradient's temporaries, or these and one largest parameter."""
        reference = self.temp_bytes(REFERENCE)
        return None if reference is None else max(1.1 * reference, reference + self.largest_parameter_bytes)

    @property
    def temp_against_allowed(self) -> float | None:
        ours, allowed = self.temp_bytes(OURS), self.allowed_temp_bytes
        return None if ours is None or allowed is None else ours / allowed

    @property
    def strategies(self) -> str:
        """How often each strategy was planned, as in "loop 12, direct 5"."""
        if self.plan is None:
            return ""
        counts = collections.Counter(row.strategy for row in self.plan.rows)
        return ", ".join(f"{name} {count}" for name, count in counts.most_common())

    @property
    def pace(self) -> str:
        if self.plan is None:
            return UNKNOWN
        return "all" if self.plan.microbatch_size >= self.plan.batch else str(self.plan.microbatch_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extras:
    """What the bars need beside the rows."""

    deep_compile_ratio: float  # for 12 layers
    plan_s: float  # tracing and planning transformer-151m


@dataclasses.dataclass(frozen=True, kw_only=True)
class Results:
    rows: Sequence[Row]
    stats: tuple[str, ...]
    extras: Extras | None = None


def measure_model(
    model: Model, names: Sequence[str], stats: tuple[str, ...], *, rounds: int | None, repeats: int
) -> Row:
    """Compile, run once, compare, then time what is left in the race."""
    params_key, batch_key = jax.random.split(jax.random.key(0))
    params = jax.jit(model.problem.init)(params_key)
    batch = jax.jit(model.problem.batch, static_argnums=1)(batch_key, model.batch)
    cells = {name: _compile(model, name, stats, params, batch) for name in names}
    cells = _run_first(model, cells)

    runs = {name: cell.program.run for name, cell in cells.items() if cell.program and not cell.reason}
    if REFERENCE in runs:
        warm_s = {name: time_once(run) for name, run in runs.items()}
        schedule = make_schedule(warm_s, REFERENCE, rounds=rounds, seconds=SECONDS)
        say(f"{model.name}: {repeats} × {schedule.rounds} rounds")
        for name, timing in time_rounds(runs, REFERENCE, schedule, repeats).items():
            cells[name] = dataclasses.replace(cells[name], timing=timing)

    plan, plan_s = _plan(model, stats) if OURS in names else (None, None)
    leaves = jax.tree.leaves(params)
    return Row(
        model=model,
        stats=stats,
        cells=cells,
        plan=plan,
        plan_s=plan_s,
        largest_parameter_bytes=max(leaf.nbytes for leaf in leaves),
        parameters=sum(leaf.size for leaf in leaves),
    )


def _compile(model: Model, name: str, stats: tuple[str, ...], params: Any, batch: Any) -> Cell:
    method, size = METHODS[name]
    if method == "microbatch" and model.batch % size:
        return Cell(reason=f"{size} does not divide {model.batch}")
    say(f"{model.name}: compiling {name}")
    options = methods.Options(stats=resolve(stats), microbatch_size=size, backend=jax.default_backend())
    try:
        return Cell(program=compile_program(methods.METHODS[method].make(model.problem, options), params, batch))
    except Exception as error:
        return Cell(reason=f"failed: {type(error).__name__}: {error}".splitlines()[0])


def _run_first(model: Model, cells: dict[str, Cell]) -> dict[str, Cell]:
    """Each program's first run: those far too slow are left out, and the statistics of all are compared."""
    grad = cells[REFERENCE].program
    if grad is None:
        return cells
    reference_s, found = warm_time(grad.run), {}
    for name, cell in cells.items():
        if cell.program is None or name == REFERENCE:
            continue
        say(f"{model.name}: running {name}")
        start_s = time.perf_counter()
        try:
            found[name] = cell.program.run()
        except Exception as error:
            cells[name] = dataclasses.replace(cell, reason=f"failed: {type(error).__name__}: {error}".splitlines()[0])
            continue
        first_s = time.perf_counter() - start_s
        # A short run is cheap to repeat, and its first may be slow for reasons of its own.
        ratio = (first_s if first_s > 1 else min(first_s, time_once(cell.program.run))) / reference_s
        if ratio > TOO_SLOW:
            cells[name] = dataclasses.replace(cell, reason=f"skipped: {ratio:.0f}× at its first run")
    oracle = next((name for name in ("micro_grad_1", "vmap", "micro_grad_4", "micro_grad_16") if name in found), None)
    for name in found:
        if oracle and name != oracle:
            cells[name] = dataclasses.replace(cells[name], error=max_rel_error(found[name], found[oracle]))
    return cells


def _plan(model: Model, stats: tuple[str, ...]) -> tuple[Plan | None, float | None]:
    problem = model.problem
    params, batch = problem.abstract_params(), problem.abstract_batch(model.batch)
    jax.clear_caches()
    start_s = time.perf_counter()
    try:
        plan = pegprof.make_plan(problem.loss, params, batch, stats=stats, keep_batch_dim=problem.keep_batch_dim)
    except Exception as error:
        say(f"{model.name}: no plan: {error}")
        return None, None
    return plan, time.perf_counter() - start_s


def measure_extras(stats: tuple[str, ...]) -> Extras:
    """Compile time for 12 layers, the best of three; tracing and planning of the zoo's largest model."""
    say("compiling 12 layers, planning transformer-151m")
    deep = transformer("deep", batch=16, seq_len=128, layers=12, width=64)()
    params = jax.jit(deep.problem.init)(jax.random.key(0))
    batch = jax.jit(deep.problem.batch, static_argnums=1)(jax.random.key(1), deep.batch)
    ratios = []
    for _ in range(3):
        cells = [_compile(deep, name, stats, params, batch) for name in (REFERENCE, OURS)]
        grad_s, ours_s = (cell.program.compile_s if cell.program else math.inf for cell in cells)
        ratios.append(ours_s / grad_s)
    largest = Model(name="transformer-151m", problem=load_problem("transformer-151m"), batch=64)
    return Extras(deep_compile_ratio=min(ratios), plan_s=_plan(largest, stats)[1] or math.inf)


# The bars. Each gives values by what they are values of, none of which may be above the limit.

Values = dict[str, float | None]
MOMENTS, NORMS = frozenset({"mean", "second_moment"}), frozenset({"norm"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bar:
    what: str
    limit: float
    values: Callable[[Results], Values]
    stats: frozenset[str] | None = MOMENTS  # the statistics that it is for; None: any
    goal: float | None = None


def _times(kind: str = "") -> Callable[[Results], Values]:
    """Surgery's time by model, infinite where there is none although it was asked for."""

    def values(results: Results) -> Values:
        rows = [row for row in results.rows if not kind or kind in row.model.kinds]
        ours = {row.model.name: row.time_ratio(OURS) for row in rows if OURS in row.cells}
        return {name: math.inf if ratio is None else ratio for name, ratio in ours.items()}

    return values


def _mean_time(results: Results) -> Values:
    times = [t for t in _times()(results).values() if t is not None]
    return {"all models": geometric_mean(times)} if len(times) > 1 else {}


BARS = (
    Bar(what="time ÷ grad, geometric mean", limit=1.15, goal=1.05, values=_mean_time),
    Bar(what="time ÷ grad", limit=1.6, values=_times()),
    Bar(what="time ÷ grad, CNN and depthwise", limit=1.2, values=_times("convolution")),
    Bar(what="time ÷ grad, transformers with T ≥ D", limit=0.9, values=_times("T≥D")),
    Bar(what="time ÷ grad, scanned and rematerialised", limit=1.15, values=_times("scanned")),
    Bar(what="time ÷ grad, LSTM", limit=1.3, values=_times("recurrent")),
    Bar(what="time ÷ grad of norms, transformers", limit=1.3, values=_times("transformer"), stats=NORMS),
    Bar(
        what="time ÷ the best of vmap and micro_grad",
        limit=NOISE,
        values=lambda results: {row.model.name: row.time_against_others for row in results.rows},
        stats=None,
    ),
    Bar(
        what="temporaries ÷ what is allowed (1.1 × grad's, or grad's and one largest parameter)",
        limit=1.0,
        values=lambda results: {row.model.name: row.temp_against_allowed for row in results.rows},
        stats=None,
    ),
    Bar(
        what="error of the statistics",
        limit=TOLERANCES["float32"],
        values=lambda results: {row.model.name: row.cells[OURS].error for row in results.rows if OURS in row.cells},
        stats=None,
    ),
    Bar(
        what="compile time ÷ grad's",
        limit=2.5,
        values=lambda results: {"12 layers": results.extras.deep_compile_ratio if results.extras else None},
    ),
    Bar(
        what="seconds of tracing and planning",
        limit=3.0,
        values=lambda results: {"transformer-151m": results.extras.plan_s if results.extras else None},
    ),
)


def check_bars(results: Results) -> tuple[list[str], list[str]]:
    """The bars that were missed and those for which nothing was measured, in words."""
    missed, unmeasured = [], []
    for bar in BARS:
        if bar.stats is not None and bar.stats != frozenset(results.stats):
            continue
        values = bar.values(results)
        missed += [
            f"{bar.what}: {value:.3g} for {name}, the bar is {bar.limit:g}"
            for name, value in values.items()
            if value is not None and not value <= bar.limit
        ]
        if not any(value is not None for value in values.values()):
            unmeasured.append(bar.what)
    return missed, unmeasured


# Text: tables for a person, CSV for a program.


def time_table(results: Results, names: Sequence[str]) -> Table:
    title = f"Time of {' and '.join(results.stats)}, as a ratio to grad's (best of the repeats)"
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
            row.pace,
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


def find_methods(text: str) -> list[str]:
    """``grad`` is always there; ``micro_grad`` is all of its sizes."""
    wanted = set()
    for name in text.split(","):
        sizes = [known for known in METHODS if known == name or known.startswith(f"{name}_")]
        if not sizes:
            raise PegprofError(f"unknown method {name!r}", hint=nearest(name, [*METHODS, "micro_grad"]))
        wanted.update(sizes)
    return [name for name in METHODS if name in wanted or name == REFERENCE]


def main(
    models: Annotated[str, typer.Option(metavar="A,B", help="Of the table, or what pegprof run takes.")] = ",".join(
        MODELS
    ),
    batch: Annotated[int | None, typer.Option(min=1, help="The batch of every model, instead of its own.")] = None,
    method_names: Annotated[
        str, typer.Option("--methods", metavar="A,B", help=f"Of {', '.join(METHODS)}; micro_grad is all sizes.")
    ] = "grad,vmap,micro_grad,surgery",
    stats: Annotated[str, typer.Option(metavar="A,B", help="Which statistics.")] = "mean,second_moment",
    rounds: Annotated[
        int | None, typer.Option(min=1, help=f"Rounds a repeat; as many as fit {SECONDS:g} s if not given.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="The best of how many.")] = 3,
    csv_path: Annotated[
        str | None, typer.Option("--csv", metavar="F", help="Also write a CSV; - is stdout, tables then go to stderr.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Hold the results against the bars; 1 if one is missed.")] = (
        False
    ),
) -> None:
    """Time grad, vmap, micro_grad and surgery on the same models, interleaved; ratios to grad, with geometric means."""
    names, wanted = find_methods(method_names), tuple(stats.split(","))
    chosen = find_models(models, batch=batch)
    rows = [measure_model(model, names, wanted, rounds=rounds, repeats=repeats) for model in chosen]
    results = Results(
        rows=rows, stats=wanted, extras=measure_extras(wanted) if check and frozenset(wanted) == MOMENTS else None
    )
    console = make_console(to_stderr=csv_path == "-")
    console.print(time_table(results, names))
    console.print(memory_table(results, names))
    if csv_path:
        write_csv(csv_rows(results, names), csv_path)
    if check:
        _report_bars(results, console)


def _report_bars(results: Results, console: Console) -> None:
    missed, unmeasured = check_bars(results)
    for text in unmeasured:
        console.print(f"not measured: {text}", markup=False, highlight=False)
    for text in missed:
        console.print(f"missed: {text}", markup=False, highlight=False)
    if missed:
        raise typer.Exit(ExitCode.NO)
    console.print("every bar that was measured is met", highlight=False)


if __name__ == "__main__":
    run_command(main)
