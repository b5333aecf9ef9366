"""What the methods need on a CPU, on TPUs and on a GPU, for every model of the zoo: compiled, never run.

Each model and target is what ``pegprof run MODEL --target TARGET --no-time`` gives. The CSV is rewritten after each,
and one that is in it already, by the same versions and at the same batch, is not compiled again: the program can be
stopped and started as one likes. After a change of the engine ``--again surgery`` compiles that method anew, no other.
"""

import contextlib
import csv
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

import pegprof
from benchmarks.command import run_command, say, write_csv
from benchmarks.zoo_targets_figure import draw
from pegprof.cli import arguments
from pegprof.errors import PegprofError
from pegprof.measure.progress import Silence
from pegprof.measure.session import Session, find_targets
from pegprof.models.problem import zoo_names
from pegprof.result.result import Result, Row
from pegprof.result.settings import METHODS, Settings
from pegprof.targets.devices import DEVICES

TARGETS = "cpu,tpu-v5e,tpu-v5p,h100"
COLUMNS = tuple(field.name for field in dataclasses.fields(Row))

Cells = dict[str, str]
"""A row of the CSV, as text: what was just measured and what was read again look the same."""


def main(
    models: Annotated[str | None, typer.Option(metavar="NAME[,NAME]...", help="Which models; all of the zoo.")] = None,
    targets: Annotated[str, typer.Option(metavar="NAME[,NAME]...", help="Which targets.")] = TARGETS,
    batch: Annotated[int, typer.Option(min=1, help="Examples.")] = 64,
    again: Annotated[
        str | None, typer.Option(metavar="METHOD[,METHOD]...", help="Compile these anew, where all are known.")
    ] = None,
    csv_file: Annotated[Path, typer.Option("--csv", help="Where the rows go.")] = Path("reports/zoo-targets.csv"),
    figure: Annotated[Path, typer.Option(help="Where the figure goes, as .png and .svg.")] = Path(
        "reports/zoo-targets.png"
    ),
) -> None:
    """Write what every method needs for every model on every target, and how often activations dominate."""
    names, places = arguments.parse_names(models) if models else zoo_names(), arguments.parse_names(targets)
    anew = arguments.parse_names(again) if again else ()
    rows = read_rows(csv_file)
    for model, target in itertools.product(names, places):
        known = [row for row in rows if (row["model"], row["target"]) == (model, target)]
        if not is_known(rows, model, target, batch):
            found = compile_all(model, target, batch)
        elif anew:
            found = compile_anew(known, model, target, batch, anew)
        else:
            say(f"{model} on {target}: known")
            continue
        rows = in_order([row for row in rows if row not in known] + found)
        write_csv(rows, str(csv_file))
    wanted = [row for row in rows if row["model"] in names and row["target"] in places]
    print(render_shares(wanted, places))
    draw(wanted, places, batch, figure)
    say(f"wrote {csv_file}, {figure}, {figure.with_suffix('.svg')}")


def read_rows(path: Path) -> list[Cells]:
    """What an earlier run left; nothing if its columns were others. Those that came later are empty."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        found = tuple(reader.fieldnames or ())
        return [dict.fromkeys(COLUMNS, "") | row for row in reader] if found == COLUMNS[: len(found)] else []


def is_known(rows: Sequence[Cells], model: str, target: str, batch: int) -> bool:
    """Whether all methods are there, by these versions and at this batch, and none of them failed."""
    now = {"batch": str(batch), "pegprof": pegprof.__version__}
    now |= {package: metadata.version(package) for package in ("jax", "jaxlib")}
    now["compiler"] = DEVICES[target].compiler.description if target in DEVICES else ""
    found = [row for row in rows if (row["model"], row["target"]) == (model, target)]
    fresh = [row for row in found if row["status"] != "failed" and all(row[key] == now[key] for key in now)]
    return {row["method"] for row in fresh} == set(METHODS)


def in_order(rows: Sequence[Cells]) -> list[Cells]:
    """Model by model and target by target, as they came, and each with its methods in the order of the table."""
    models, targets = (list(dict.fromkeys(row[key] for row in rows)) for key in ("model", "target"))
    return sorted(
        rows,
        key=lambda row: (models.index(row["model"]), targets.index(row["target"]), METHODS.index(row["method"])),
    )


def compile_all(model: str, target: str, batch: int) -> list[Cells]:
    """The rows of one model on one target; none if it could not be loaded."""
    say(f"{model} on {target} ...")
    try:
        result = pegprof.profile(model, batch=batch, targets=(target,), time=False)
    except PegprofError as error:
        say(f"{model} on {target}: {error}")
        return []
    return _cells(result)


def compile_anew(known: Sequence[Cells], model: str, target: str, batch: int, anew: Sequence[str]) -> list[Cells]:
    """The rows of one model on one target, some of them compiled anew; what activations take is known of the others."""
    say(f"{model} on {target}: {', '.join(anew)} ...")
    settings = Settings(model=model, batches=(batch,), methods=tuple(anew), targets=(target,), time=False)
    (place,) = find_targets(settings, talk=Silence())
    session = Session(settings, (place,), talk=Silence())
    with contextlib.closing(session.workers):
        session.describe()
        for method in anew:
            session.compile(batch, method, place)
    old = {row["method"]: row for row in known}
    new = {row["method"]: row for row in _cells(session.result())}
    for method, row in new.items():
        row |= {name: old[method][name] for name in ("activation_bytes_per_example", "activations_dominate")}
        needed = session.history.compiled[batch, method, place.name].assigned_bytes
        if needed and "grad" not in new and old["grad"]["peak_ratio"]:  # one that was refused has none
            row["peak_ratio"] = str(needed / int(old["grad"]["peak_bytes"]))
    return list((old | new).values())


def _cells(result: Result) -> list[Cells]:
    for row in result.rows:
        say(f"  {row.method}: {row.status} {row.peak_bytes} {row.reason}")
    return [{name: _cell(value) for name, value in dataclasses.asdict(row).items()} for row in result.rows]


def _cell(value: object) -> str:
    """As ``report.render_csv`` writes it."""
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def share_of(rows: Sequence[Cells], target: str) -> tuple[int, int]:
    """For how many models activations dominate on a target, and of how many that is known."""
    known = {row["model"]: row["activations_dominate"] for row in rows if row["target"] == target}
    judged = [dominate for dominate in known.values() if dominate]
    return judged.count("true"), len(judged)


def render_shares(rows: Sequence[Cells], targets: Sequence[str]) -> str:
    """One line for each target."""
    shares: Mapping[str, tuple[int, int]] = {target: share_of(rows, target) for target in targets}
    return "\n".join(
        f"{target}: activations dominate for {count} of {known} models" for target, (count, known) in shares.items()
    )


if __name__ == "__main__":
    run_command(main)
