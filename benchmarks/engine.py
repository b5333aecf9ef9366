"""What statistics of per-example gradients cost beside the plain gradient: time and memory, method by method.

    models × methods ──> compile, run, compare the statistics ──> rounds ──> tables, CSV, and with --check the bars

Everything is a ratio to ``grad`` of the same model and batch. Times are medians over interleaved rounds, and of
three repeats the median; temporaries are XLA's own figure. Run it on a machine that does nothing else.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import typer
from rich.console import Console

import pegprof
from benchmarks.command import make_console, run_command, say, write_csv
from benchmarks.engine_bars import MOMENTS, check_bars
from benchmarks.engine_results import OURS, REFERENCE, Cell, Extras, Results, Row
from benchmarks.engine_text import csv_rows, memory_table, time_table
from benchmarks.models import MODELS, Model, find_models, transformer
from benchmarks.timing import TOO_SLOW, compile_program, make_schedule, time_once, time_rounds, warm_time
from pegprof.engine.plan import Plan
from pegprof.engine.statistics import resolve
from pegprof.errors import ExitCode, PegprofError, nearest
from pegprof.measure.worker import methods
from pegprof.measure.worker.agreement import max_rel_error
from pegprof.models.problem import load_problem

METHODS: dict[str, tuple[str, int]] = {  # our name: the profiler's method, its microbatch size
    REFERENCE: ("grad", 1),
    "vmap": ("vmap", 1),
    "micro_grad_1": ("microbatch", 1),
    "micro_grad_4": ("microbatch", 4),
    "micro_grad_16": ("microbatch", 16),
    OURS: ("surgery", 1),
}
SECONDS = 8.0  # of rounds for one repeat of one model, when the number of rounds was not asked for


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
    """Compile time for 12 layers, the median of three; tracing and planning of the zoo's largest model."""
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
    return Extras(deep_compile_ratio=statistics.median(ratios), plan_s=_plan(largest, stats)[1] or math.inf)


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
    repeats: Annotated[int, typer.Option(min=1, help="The median of how many.")] = 3,
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
    outcome = check_bars(results)
    texts = {"met": outcome.met, "not measured": outcome.unmeasured, "missed": outcome.missed}
    for kind, bars in texts.items():
        for bar in bars:
            console.print(f"{kind}: {bar}", markup=False, highlight=False)
    if outcome.missed:
        raise typer.Exit(ExitCode.NO)


if __name__ == "__main__":
    run_command(main)
