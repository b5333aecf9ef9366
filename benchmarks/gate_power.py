"""What a gate on time is worth: how often it fails an unchanged program, and how often a slower one, by slowdown.

The model does extra work inside the method: its loss first multiplies matrices when it sees a single example, as it
does in ``vmap`` and ``surgery``, and not when it sees a batch, as in ``grad``. So it is really slower, by as much as
was calibrated first. With ``--how against`` every gate measures both revisions of a repository that is made for it,
with ``--how baseline`` it measures again what one baseline holds, made under the same load.

Rows are added to the CSV as they come, so that a long benchmark can be done in several sittings.
"""

import contextlib
import csv
import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from benchmarks.command import make_console, run_command, say, write_csv
from benchmarks.gate_power_text import draw, find_missed, render
from pegprof.compare.gate import BASELINE_PROCESSES, Effort, Gate, pass_against, pass_gate, read_baseline
from pegprof.compare.limits import LimitTable
from pegprof.errors import ExitCode, PegprofError, nearest
from pegprof.measure.pair import measure_pair
from pegprof.measure.progress import Silence
from pegprof.measure.revisions import checked_out
from pegprof.measure.session import measure
from pegprof.result.settings import Settings

FILE = "slowed.py"
MODEL = f"{FILE}:slowed"
SOURCE = '''"""A model of the zoo whose loss multiplies a matrix by WORK columns first, if it sees a single example."""

import jax
import jax.numpy as jnp

import pegprof
from pegprof.models.problem import load_problem

WORK = {work}
SIZE = 128
base = load_problem({model!r})
in_a_batch = jax.tree.leaves(base.abstract_batch(2))[0]


def extra_work(data):
    """Next to zero, but a number that depends on the example, so that it is neither left out nor done once for all."""
    matrix = jnp.cos(jnp.arange(SIZE * SIZE, dtype=jnp.float32)).reshape(SIZE, SIZE)
    columns = jnp.mean(data.astype(jnp.float32)) + jnp.arange(SIZE * WORK, dtype=jnp.float32).reshape(SIZE, WORK)
    return 1e-30 * jnp.sum(jnp.tanh(matrix @ columns))


def loss(params, batch):
    data = jax.tree.leaves(batch)[0]
    if WORK and (data.ndim < in_a_batch.ndim or data.shape[0] == 1):
        late = extra_work(data)  # the model waits for it: beside other operations it might cost nothing
        batch = jax.tree.map(lambda x: x + late.astype(x.dtype), batch)
    return base.loss(params, batch)


slowed = pegprof.Problem(
    name="slowed-{model}", init=base.init, loss=loss, batch=base.batch, keep_batch_dim=base.keep_batch_dim
)
'''
FIRST_WORK = 100  # to calibrate with, and then as much as takes about
CALIBRATED_AT = 0.3  # of the method's time, which is found in
CALIBRATIONS = 5  # tries, each with up to
LARGEST_STEP = 8.0  # times as much as the last

# It ends with whoever started it, however that one ends.
LOAD = "import os; parent = os.getppid()\nwhile os.getppid() == parent: sum(range(10**5))"

How = Literal["against", "baseline"]
PassGate = Callable[[int], Gate]
"""With so much work. May be called again and again."""


def main(
    model: Annotated[str, typer.Option(metavar="A,B", help="Models of the zoo.")] = "mlp,transformer-tiny",
    batch: Annotated[int, typer.Option(min=2)] = 16,
    methods: Annotated[str, typer.Option(help="Methods to compare, grad among them.")] = "grad,surgery",
    gates: Annotated[int, typer.Option(min=1, help="How many for each model, slowdown and load.")] = 10,
    slowdowns: Annotated[str, typer.Option(metavar="X,Y", help="1 is the unchanged program.")] = "1,1.1,1.2,1.3,1.5",
    load: Annotated[str, typer.Option(metavar="N,M", help="Processes that load the machine meanwhile.")] = "0,1",
    how: Annotated[str, typer.Option(metavar="against|baseline", help="What to compare with.")] = "against",
    csv_path: Annotated[Path, typer.Option("--csv", help="Where rows are added.")] = Path("reports/gate-power.csv"),
    figure: Annotated[Path | None, typer.Option(help="A figure of all rows of the CSV, png or svg.")] = None,
) -> None:
    """Gate programs on time that are known to be so much slower; ends with 1 if a bar is missed."""
    kind, csv_path = _parse_how(how), csv_path.resolve()
    figure = figure and figure.resolve()
    loads, factors = [int(n) for n in load.split(",")], [float(x) for x in slowdowns.split(",")]
    settings = Settings(model=MODEL, batches=(batch,), methods=tuple(methods.split(",")), check=False)
    rows = read_rows(csv_path)
    for name in model.split(","):
        with _in_repository(name):
            for processes in loads:
                with loaded(processes):
                    unit = calibrate(functools.partial(_pass_against, settings, name, Effort(processes=6)))
                    say(f"{name}, load {processes}: {unit:.3%} of the time for each unit of work")
                    about = {"model": name, "batch": batch, "load": processes, "how": kind}
                    for row in run_gates(_make_gate(kind, settings, name), factors, gates, unit=unit, about=about):
                        rows.append(row)
                        write_csv(rows, str(csv_path))
                        say(f"{name}, load {processes}, {row['slowdown']}: {row['outcome']}: {row['words']}")
    make_console().print(render(rows))
    if figure:
        draw(rows, figure)
    if missed := find_missed(rows):
        raise PegprofError("; ".join(missed), exit_code=ExitCode.NO)


def _parse_how(text: str) -> How:
    known: dict[str, How] = {"against": "against", "baseline": "baseline"}
    if text not in known:
        raise PegprofError(f"--how {text} is not known", hint=nearest(text, known))
    return known[text]


# The programs.


@contextlib.contextmanager
def _in_repository(model: str) -> Iterator[None]:
    """A temporary repository to work in, whose one commit is the unchanged program."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="gate-power-") as folder:
        os.chdir(folder)
        try:
            write_program(Path(folder), model, work=0)
            author = ["-c", "user.name=gate-power", "-c", "user.email=gate-power@localhost"]
            for words in (["init", "--quiet"], ["add", FILE], [*author, "commit", "--quiet", "-m", "unchanged"]):
                subprocess.run(["git", *words], check=True)
            yield
        finally:
            os.chdir(before)


def write_program(folder: Path, model: str, *, work: int) -> None:
    (folder / FILE).write_text(SOURCE.format(model=model, work=work), encoding="utf-8")


def calibrate(gate: PassGate) -> float:
    """The share of the method's time that a unit of work takes, by as much of it as takes about ``CALIBRATED_AT``."""
    work = FIRST_WORK
    for _ in range(CALIBRATIONS):
        change = _slowest_change(gate(work))
        if CALIBRATED_AT / 2 < change < CALIBRATED_AT * 2:
            return change / work
        work = max(1, round(work * min(CALIBRATED_AT / max(change, 1e-3), LARGEST_STEP)))
    raise PegprofError("the extra work cannot be calibrated", hint="look for other work on this machine")


def _slowest_change(gate: Gate) -> float:
    """Of the methods that are compared with grad."""
    return max((float(row["change"]) for row in _rows(gate)), default=0.0)


# The gates.


def _make_gate(how: How, settings: Settings, model: str) -> PassGate:
    if how == "against":
        return functools.partial(_pass_against, settings, model, Effort())
    write_program(Path.cwd(), model, work=0)
    baseline = Path("baseline.json")
    say(f"the baseline: {model} ...")
    result = measure(Effort(processes=BASELINE_PROCESSES).apply(settings), talk=Silence())
    baseline.write_text(result.to_json(), encoding="utf-8")

    def gate(work: int) -> Gate:
        write_program(Path.cwd(), model, work=work)
        return pass_gate(
            read_baseline(baseline, time=True),
            limits=LimitTable(flags={"time": True}),
            measure=lambda settings, check, enough: measure(settings, talk=Silence(), enough=enough),
        )

    return gate


def _pass_against(settings: Settings, model: str, effort: Effort, work: int) -> Gate:
    write_program(Path.cwd(), model, work=work)
    with checked_out("HEAD", settings.model, folder=Path.cwd()) as revision:
        return pass_against(
            settings,
            revision=revision.name,
            limits=LimitTable(flags={"time": True}),
            measure=functools.partial(measure_pair, revision, talk=Silence()),
            effort=effort,
        )


def run_gates(
    gate: PassGate, slowdowns: Sequence[float], gates: int, *, unit: float, about: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """A row for each gate and method. Slowdowns take turns, so that what drifts hits them alike."""
    for number in range(1, gates + 1):
        for slowdown in slowdowns:
            work, start_s = round((slowdown - 1) / unit), time.monotonic()
            found = gate(work)
            took_s = round(time.monotonic() - start_s, 1)
            for row in _rows(found):
                yield {**about, "slowdown": slowdown, "work": work, "gate": number, **row, "took_s": took_s}


def _rows(gate: Gate) -> list[dict[str, Any]]:
    """What a gate says of times; that more work also has more flops is another matter."""
    processes = {row.method: row.processes for row in gate.after.rows}
    return [
        {
            "method": change.method,
            "outcome": change.outcome,
            "ratio_before": change.before,
            "ratio_after": change.after,
            "change": float(change.after or 0) / float(change.before) - 1 if change.before else None,
            "processes": processes.get(change.method),
            "words": change.words,
        }
        for change in gate.changes
        if change.metric == "time_ratio"
    ]


def read_rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@contextlib.contextmanager
def loaded(count: int) -> Iterator[None]:
    """So many processes that do nothing but take a core each."""
    processes = [subprocess.Popen([sys.executable, "-c", LOAD]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    run_command(main)
