"""How the cost of surgery and of the plain gradient grows with the batch and with the length of an example.

    sweeps (model × sizes) ──> time and temporaries of both methods ──> fitted slopes ──> figure, CSV, table

A slope is what one more example costs, fitted by least squares on relative errors, with a free intercept: what is paid
once a call is not in it. The bar is that surgery's slope in the batch is at most 1.1 times that of ``grad``.
"""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer
from rich.table import Table

from benchmarks.command import make_console, run_command, write_csv
from benchmarks.engine_results import OURS, REFERENCE
from benchmarks.models import MODELS, transformer
from benchmarks.timing import compile_program, make_schedule, time_once, time_rounds
from pegprof.engine.statistics import resolve
from pegprof.errors import ExitCode, PegprofError
from pegprof.measure.worker import methods
from pegprof.models.problem import Problem
from pegprof.units import format_bytes, format_ratio, format_seconds

STATS = ("mean", "second_moment")
SLOPE_BAR = 1.1
SECONDS = 6.0  # of rounds at one size
BATCH = 16  # where the length is what varies


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One method at one size."""

    size: int
    time_s: float
    temp_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """A model over sizes of one axis; ``points`` by method."""

    model: str
    axis: str  # "batch" or "seq_len"
    points: dict[str, list[Point]]

    def slope(self, method: str, quantity: str) -> float | None:
        """What one more unit of the axis costs; None where a single size was measured."""
        points = self.points[method]
        if len(points) < 2:
            return None
        sizes = np.array([point.size for point in points], float)
        values = np.array([getattr(point, quantity) for point in points], float)
        return float(np.polyfit(sizes, values, 1, w=1 / np.maximum(values, np.finfo(float).tiny))[0])

    def slope_ratio(self, quantity: str) -> float | None:
        ours, reference = (self.slope(method, quantity) for method in (OURS, REFERENCE))
        return ours / reference if ours is not None and reference else None


def measure_sweep(
    model: str, axis: str, sizes: Sequence[int], problem_at: Callable[[int], tuple[Problem, int]], rounds: int | None
) -> Sweep:
    """``problem_at(size)`` is the problem and its batch."""
    points: dict[str, list[Point]] = {REFERENCE: [], OURS: []}
    for size in sizes:
        print(f"{model}: {axis} {size}", file=sys.stderr, flush=True)
        problem, B = problem_at(size)
        params = jax.jit(problem.init)(jax.random.key(0))
        batch = jax.jit(problem.batch, static_argnums=1)(jax.random.key(1), B)
        options = methods.Options(stats=resolve(STATS), microbatch_size=1, backend=jax.default_backend())
        programs = {
            name: compile_program(methods.METHODS[name].make(problem, options), params, batch) for name in points
        }
        runs = {name: program.run for name, program in programs.items()}
        for run in runs.values():
            run()
        warm_s = {name: time_once(run) for name, run in runs.items()}
        schedule = make_schedule(warm_s, REFERENCE, rounds=rounds, seconds=SECONDS)
        for name, timing in time_rounds(runs, REFERENCE, schedule, repeats=1).items():
            points[name].append(Point(size=size, time_s=timing.time_s, temp_bytes=programs[name].temp_bytes))
    return Sweep(model=model, axis=axis, points=points)


def measure_sweeps(batches: Sequence[int], lengths: Sequence[int], rounds: int | None) -> list[Sweep]:
    """Two models against the batch, one of them against the length."""
    cnn = MODELS["cnn"]().problem

    def transformer_at(length: int) -> Problem:
        return transformer(f"T={length}", batch=BATCH, seq_len=length, layers=2, width=64)().problem

    small = transformer_at(128)
    return [
        measure_sweep("cnn", "batch", batches, lambda B: (cnn, B), rounds),
        measure_sweep("transformer, D=64, T=128", "batch", batches, lambda B: (small, B), rounds),
        measure_sweep(
            f"transformer, D=64, B={BATCH}", "seq_len", lengths, lambda T: (transformer_at(T), BATCH), rounds
        ),
    ]


def csv_rows(sweeps: Sequence[Sweep]) -> list[dict[str, Any]]:
    """One row for each size and method; the slopes of its sweep are repeated on each. A slope in T means little."""
    rows = []
    for sweep in sweeps:
        for method, points in sweep.points.items():
            slopes: dict[str, Any] = {}
            if sweep.axis == "batch":
                slopes = {
                    "time_slope_s": sweep.slope(method, "time_s"),
                    "temp_slope_bytes": sweep.slope(method, "temp_bytes"),
                    "time_slope_ratio": sweep.slope_ratio("time_s") if method == OURS else None,
                    "temp_slope_ratio": sweep.slope_ratio("temp_bytes") if method == OURS else None,
                }
            head = {"model": sweep.model, "axis": sweep.axis, "method": method}
            rows += [head | dataclasses.asdict(point) | slopes for point in points]
    return rows


def slope_table(sweeps: Sequence[Sweep]) -> Table:
    table = Table(title=f"What one more example costs (surgery ÷ grad, the bar is {SLOPE_BAR:g})")
    for column in (
        "model",
        "time, grad",
        "time, surgery",
        "ratio",
        "temporaries, grad",
        "temporaries, surgery",
        "ratio",
    ):
        table.add_column(column, justify="left" if column == "model" else "right")
    for sweep in _in_batch(sweeps):
        table.add_row(
            sweep.model,
            *[format_seconds(sweep.slope(method, "time_s")) for method in (REFERENCE, OURS)],
            format_ratio(sweep.slope_ratio("time_s")),
            *[format_bytes(sweep.slope(method, "temp_bytes")) for method in (REFERENCE, OURS)],
            format_ratio(sweep.slope_ratio("temp_bytes")),
        )
    return table


def missed_bars(sweeps: Sequence[Sweep]) -> list[str]:
    """In words. A slope below the gradient's is no miss."""
    return [
        f"{sweep.model}: the slope of {what} is {ratio:.3g} of grad's, the bar is {SLOPE_BAR:g}"
        for sweep in _in_batch(sweeps)
        for what, quantity in (("time", "time_s"), ("temporaries", "temp_bytes"))
        if (ratio := sweep.slope_ratio(quantity)) is not None and ratio > SLOPE_BAR
    ]


def _in_batch(sweeps: Sequence[Sweep]) -> list[Sweep]:
    return [sweep for sweep in sweeps if sweep.axis == "batch"]


# Colours of Okabe and Ito, told apart with any colour vision; markers and dashes tell the same without colour.
STYLES = {
    REFERENCE: {"color": "#000000", "marker": "o", "linestyle": "-", "markersize": 7, "markerfacecolor": "white"},
    OURS: {"color": "#D55E00", "marker": "s", "linestyle": "--", "markersize": 4},
}
AXES = {"batch": "batch B (examples)", "seq_len": "length T (tokens an example)"}
QUANTITIES = (("time_s", "time (ms)", 1e3), ("temp_bytes", "temporaries (MiB)", 2.0**-20))


def draw(sweeps: Sequence[Sweep], stem: Path) -> list[Path]:
    """A column for each sweep, time above temporaries; as PNG and SVG."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator
    except ImportError as error:
        raise PegprofError("the figure needs matplotlib", hint="pip install 'pegprof[bench]'") from error

    mpl.rcParams["svg.hashsalt"] = "pegprof"  # the same data give the same file
    figure = Figure(figsize=(4.2 * len(sweeps), 6.4), layout="constrained")
    grid = figure.subplots(len(QUANTITIES), len(sweeps), squeeze=False)
    for column, sweep in enumerate(sweeps):
        for row, (quantity, label, scale) in enumerate(QUANTITIES):
            axes = grid[row, column]
            for method, points in sweep.points.items():
                values = [getattr(point, quantity) * scale for point in points]
                axes.plot([point.size for point in points], values, label=method, **STYLES[method])
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks([point.size for point in sweep.points[REFERENCE]])
            axes.xaxis.set_major_formatter(lambda size, _: f"{size:g}")
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.minorticks_off()
            axes.grid(alpha=0.3)
            axes.set_xlabel(AXES[sweep.axis])
            axes.set_ylabel(label)
            axes.set_title(_panel_title(sweep, quantity), fontsize=10)
            axes.legend(frameon=False)
    paths = [Path(f"{stem}.{suffix}") for suffix in ("png", "svg")]
    figure.savefig(paths[0], dpi=150)
    figure.savefig(paths[1], metadata={"Date": None})
    return paths


def _panel_title(sweep: Sweep, quantity: str) -> str:
    if sweep.axis != "batch":
        return sweep.model
    return f"{sweep.model}\nslope of surgery ÷ that of grad: {format_ratio(sweep.slope_ratio(quantity))}"


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError as error:
        raise PegprofError(f"{text!r} is not a list of numbers", hint="write it like 8,16,32") from error


def main(
    batches: Annotated[str, typer.Option(metavar="N,N", help="Batch sizes.")] = "8,16,32,64,128,256,512",
    lengths: Annotated[str, typer.Option(metavar="N,N", help="Lengths T.")] = "32,64,128,256,512",
    rounds: Annotated[
        int | None, typer.Option(min=1, help=f"Rounds at each size; as many as fit {SECONDS:g} s if not given.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="STEM", help="Where: STEM.png, STEM.svg and STEM.csv.")] = Path(
        "reports/engine-batch"
    ),
    check: Annotated[bool, typer.Option("--check", help="End with 1 if a slope is above the bar.")] = False,
) -> None:
    """Time and temporaries of grad and surgery against the batch and the length: figure, CSV and slopes."""
    sweeps = measure_sweeps(_numbers(batches), _numbers(lengths), rounds)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_csv(csv_rows(sweeps), f"{out}.csv")
    console = make_console()
    console.print(slope_table(sweeps))
    for path in [*draw(sweeps, out), Path(f"{out}.csv")]:
        console.print(f"written: {path}", markup=False, highlight=False)
    if check and (missed := missed_bars(sweeps)):
        for text in missed:
            console.print(f"missed: {text}", markup=False, highlight=False)
        raise typer.Exit(ExitCode.NO)


if __name__ == "__main__":
    run_command(main)
