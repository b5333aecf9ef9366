"""What a whole step of training costs with an optimizer that takes statistics, beside Adam on the plain gradient.

    models × optimizers ──> compile the steps ──> interleaved rounds ──> table, CSV, and with --check the bar

A step is the loss, its gradient or statistics, the optimizer's update and the new parameters, in one compiled program.
The reference is ``optax.adam`` on ``jax.value_and_grad`` of the batch. The others take their statistics by surgery, as
``pegprof.train_step`` does; the optimizers named with ``--by-vmap`` take them by ``jax.vmap`` once more. Run it on a
machine that does nothing else.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import jaxlib
import optax
import typer
from rich.table import Table

import pegprof
from benchmarks.command import make_console, run_command, say, write_csv
from benchmarks.models import Model, find_models
from benchmarks.timing import Program, Timing, compile_program, race
from pegprof import optimizers
from pegprof.cli import arguments
from pegprof.engine.statistics import resolve
from pegprof.errors import ExitCode, PegprofError, nearest
from pegprof.measure.worker import methods
from pegprof.result.settings import DEFAULT_BATCH
from pegprof.units import format_bytes, format_seconds

REFERENCE = "adam by grad"
BAR = 1.15  # for micro_adam by surgery on transformer-tiny
BARRED_MODEL, BARRED_STEP = "transformer-tiny", "micro_adam by surgery"
SECONDS = 12.0  # of rounds for one repeat, when the number of rounds was not asked for
RATE = 1e-3

Step = Callable[..., Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One step on one model. The fields are the columns of the CSV."""

    model: str
    batch: int
    step: str
    time_s: float
    time_ratio: float  # to the reference in the same rounds; the median repeat
    ratios: str  # of all repeats
    runs: int
    temp_bytes: int
    compile_s: float
    rounds: int
    jaxlib: str


def plain_step(model: Model) -> tuple[Any, Step]:
    """``optax.adam`` on the gradient of the batch, as anyone would write it."""
    opt = optax.adam(RATE)

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, gradient = jax.value_and_grad(model.problem.loss)(params, batch)
        updates, state = opt.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    return opt, step


def surgery_step(model: Model, name: str) -> tuple[Any, Step]:
    opt = optimizers.OPTIMIZERS[name](RATE)
    return opt, pegprof.train_step(model.problem.loss, opt, keep_batch_dim=model.problem.keep_batch_dim)


def vmap_step(model: Model, name: str) -> tuple[Any, Step]:
    """The same statistics from ``jax.vmap`` of the gradient, without the value of the loss."""
    opt = optimizers.OPTIMIZERS[name](RATE)

    def step(params: Any, state: Any, batch: Any) -> Any:
        needed = resolve(optimizers.needed_statistics(opt, params))
        options = methods.Options(stats=needed, microbatch_size=1, backend=jax.default_backend())
        stats = methods.METHODS["vmap"].make(model.problem, options)(params, batch)
        updates, state = optimizers.update(opt, stats, state, params)
        return optax.apply_updates(params, updates), state

    return opt, step


def measure_model(
    model: Model, names: Sequence[str], by_vmap: Sequence[str], *, rounds: int | None, repeats: int
) -> list[Row]:
    """Compile every step, then time them against the reference, once a round each."""
    params = jax.jit(model.problem.init)(jax.random.key(0))
    batch = jax.jit(model.problem.batch, static_argnums=1)(jax.random.key(1), model.batch)
    steps = {REFERENCE: plain_step(model)}
    steps |= {f"{name} by surgery": surgery_step(model, name) for name in names}
    steps |= {f"{name} by vmap": vmap_step(model, name) for name in by_vmap}
    programs: dict[str, Program] = {}
    for name, (opt, step) in steps.items():
        say(f"{model.name}, batch {model.batch}: compiling {name}")
        programs[name] = compile_program(step, params, opt.init(params), batch)
    timings = race(programs, REFERENCE, rounds=rounds, seconds=SECONDS, repeats=repeats)
    done = timings[REFERENCE].runs // repeats
    return [_row(model, name, programs[name], timings[name], done) for name in steps]


def _row(model: Model, step: str, program: Program, timing: Timing, rounds: int) -> Row:
    return Row(
        model=model.name,
        batch=model.batch,
        step=step,
        time_s=timing.time_s,
        time_ratio=timing.ratio,
        ratios=" ".join(f"{ratio:.3f}" for ratio in timing.ratios),
        runs=timing.runs,
        temp_bytes=program.temp_bytes,
        compile_s=program.compile_s,
        rounds=rounds,
        jaxlib=jaxlib.version.__version__,
    )


def render(rows: Sequence[Row]) -> Table:
    table = Table(title=f"A step of training beside {REFERENCE}")
    for column in ("model", "batch", "step", "time", "× adam", "all repeats", "temporaries", "compile"):
        table.add_column(column, justify="left" if column in ("model", "step") else "right")
    for row in rows:
        table.add_row(
            row.model,
            str(row.batch),
            row.step,
            format_seconds(row.time_s),
            f"{row.time_ratio:.2f}",
            row.ratios,
            format_bytes(row.temp_bytes),
            format_seconds(row.compile_s),
        )
    return table


def missed_bars(rows: Sequence[Row]) -> list[str]:
    """In words."""
    return [
        f"{row.step} on {row.model}, batch {row.batch}: {row.time_ratio:.2f}, the bar is {BAR:g}"
        for row in rows
        if (row.model, row.step) == (BARRED_MODEL, BARRED_STEP) and row.time_ratio > BAR
    ]


def main(
    models: Annotated[str, typer.Option(metavar="A,B", help="Of the table, or what pegprof run takes.")] = BARRED_MODEL,
    batch: Annotated[str, typer.Option(metavar="N[,N]...", help="Batch sizes.")] = str(DEFAULT_BATCH),
    names: Annotated[
        str, typer.Option("--optimizers", metavar="A,B", help=f"Of {', '.join(optimizers.OPTIMIZERS)}.")
    ] = ",".join(optimizers.OPTIMIZERS),
    by_vmap: Annotated[
        str, typer.Option(metavar="A,B", help="Optimizers to time by vmap as well; none if empty.")
    ] = "micro_adam",
    rounds: Annotated[
        int | None, typer.Option(min=1, help=f"Rounds a repeat; as many as fit {SECONDS:g} s if not given.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="The median of how many.")] = 3,
    csv_path: Annotated[
        str | None, typer.Option("--csv", metavar="F", help="Also write a CSV; - is stdout, the table then on stderr.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help=f"End with 1 if MicroAdam takes more than {BAR:g}.")] = False,
) -> None:
    """Time steps of training with each optimizer against Adam on the plain gradient, interleaved."""
    wanted, slow = arguments.parse_names(names), arguments.parse_names(by_vmap) if by_vmap else ()
    for name in (*wanted, *slow):
        if name not in optimizers.OPTIMIZERS:
            raise PegprofError(f"unknown optimizer {name!r}", hint=nearest(name, optimizers.OPTIMIZERS))
    chosen = [model for size in arguments.parse_batches(batch) for model in find_models(models, batch=size)]
    rows = [row for model in chosen for row in measure_model(model, wanted, slow, rounds=rounds, repeats=repeats)]
    make_console(to_stderr=csv_path == "-").print(render(rows))
    if csv_path:
        write_csv([dataclasses.asdict(row) for row in rows], csv_path)
    if check and (missed := missed_bars(rows)):
        raise PegprofError("; ".join(missed), exit_code=ExitCode.NO)


if __name__ == "__main__":
    run_command(main)
