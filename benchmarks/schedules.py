"""Does the planner run the right number of examples at a time on this CPU? Its estimates beside what they are of.

    models ──> a plan ──> surgery compiled at each schedule that was compared ──> interleaved rounds beside grad

The planner has to order schedules, not to foretell seconds. The last column is what its choice takes beside the
fastest schedule of all. Run it on a machine that does nothing else.
"""

import dataclasses
from typing import Annotated

import jax
import jaxlib
import typer
from rich.table import Table

from benchmarks.command import make_console, run_command, say, write_csv
from benchmarks.models import MODELS, Model, find_models
from benchmarks.timing import compile_program, geometric_mean, race
from pegprof.engine.statistics import resolve
from pegprof.measure.worker import methods
from pegprof.units import format_bytes, format_seconds

REFERENCE = "grad"
SECONDS = 20.0  # of rounds for one repeat, when the number of rounds was not asked for


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One schedule of one model. The fields are the columns of the CSV."""

    model: str
    batch: int
    microbatch_size: int
    chosen: bool
    estimated_s: float
    estimated_bytes: float
    time_s: float
    time_ratio: float  # to grad in the same rounds; the median repeat
    ratios: str  # of all repeats
    runs: int
    temp_bytes: int
    jaxlib: str


def measure_model(model: Model, stats: str, *, rounds: int | None, repeats: int) -> list[Row]:
    """Every schedule that the planner compared for a model, timed."""
    options = methods.Options(stats=resolve(stats.split(",")), microbatch_size=1, backend=jax.default_backend())
    plan = methods.plan_surgery(model.problem, options, model.batch)
    params = jax.jit(model.problem.init)(jax.random.key(0))
    batch = jax.jit(model.problem.batch, static_argnums=1)(jax.random.key(1), model.batch)

    say(f"{model.name}, batch {model.batch}: compiling {len(plan.schedules)} schedules")
    programs = {REFERENCE: compile_program(methods.METHODS["grad"].make(model.problem, options), params, batch)}
    for schedule in plan.schedules:
        at_schedule = dataclasses.replace(options, surgery_size=schedule.microbatch_size)
        fn = methods.METHODS["surgery"].make(model.problem, at_schedule)
        programs[str(schedule.microbatch_size)] = compile_program(fn, params, batch)
    timings = race(programs, REFERENCE, rounds=rounds, seconds=SECONDS, repeats=repeats)
    return [
        Row(
            model=model.name,
            batch=model.batch,
            microbatch_size=schedule.microbatch_size,
            chosen=schedule.microbatch_size == plan.microbatch_size,
            estimated_s=schedule.seconds,
            estimated_bytes=schedule.bytes,
            time_s=timing.time_s,
            time_ratio=timing.ratio,
            ratios=" ".join(f"{ratio:.3f}" for ratio in timing.ratios),
            runs=timing.runs,
            temp_bytes=programs[str(schedule.microbatch_size)].temp_bytes,
            jaxlib=jaxlib.version.__version__,
        )
        for schedule in plan.schedules
        for timing in (timings[str(schedule.microbatch_size)],)
    ]


def regret_of(rows: list[Row]) -> float:
    """What the planner's choice takes beside the fastest schedule of a model.

    >>> row = Row(model="m", batch=2, microbatch_size=2, chosen=True, estimated_s=1, estimated_bytes=0, time_s=3,
    ...     time_ratio=1.2, ratios="", runs=1, temp_bytes=0, jaxlib="")
    >>> regret_of([row, dataclasses.replace(row, microbatch_size=1, chosen=False, time_ratio=1.0)])
    1.2
    """
    (chosen,) = (row.time_ratio for row in rows if row.chosen)
    return chosen / min(row.time_ratio for row in rows)


def render(by_model: list[list[Row]]) -> Table:
    table = Table(title="Surgery at each schedule")
    for column in ("model", "batch", "at a time", "estimate", "time", "× grad", "temporaries", "choice ÷ best"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for rows in by_model:
        for row in rows:
            table.add_row(
                row.model,
                str(row.batch),
                str(row.microbatch_size),
                format_seconds(row.estimated_s),
                format_seconds(row.time_s),
                f"{row.time_ratio:.2f}",
                format_bytes(row.temp_bytes),
                f"{regret_of(rows):.2f}" if row.chosen else "",
                end_section=row is rows[-1],
            )
    return table


def main(
    models: Annotated[str, typer.Option(metavar="A,B", help="Of the table, or what pegprof run takes.")] = ",".join(
        MODELS
    ),
    batch: Annotated[int | None, typer.Option(min=1, help="The batch of every model, instead of its own.")] = None,
    stats: Annotated[str, typer.Option(metavar="A,B", help="Which statistics.")] = "mean,second_moment",
    rounds: Annotated[
        int | None, typer.Option(min=1, help=f"Rounds a repeat; as many as fit {SECONDS:g} s if not given.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="The median of how many.")] = 3,
    csv: Annotated[str | None, typer.Option("--csv", metavar="F", help="Also write a CSV; - is stdout.")] = None,
) -> None:
    """Time surgery at every schedule that the planner compares, and say how far from the best its choice is."""
    by_model: list[list[Row]] = []
    for model in find_models(models, batch=batch):
        by_model.append(measure_model(model, stats, rounds=rounds, repeats=repeats))
        if csv:
            write_csv([dataclasses.asdict(row) for rows in by_model for row in rows], csv)
    console = make_console(to_stderr=csv == "-")
    console.print(render(by_model))
    console.print(f"choice ÷ best, geometric mean: {geometric_mean(list(map(regret_of, by_model))) or 1:.3f}")


if __name__ == "__main__":
    run_command(main)
