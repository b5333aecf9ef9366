"""Is XLA's figure for the memory of a program what it really takes on this machine? For every model of the zoo.

Each method runs once, in a process of its own, as in ``pegprof run``, but alone: so each at the largest batch that it
can run at here, up to the one asked for. The peak of that process stands beside XLA's figure for the same program.
They agree if they differ by at most 10%, or by at most 32 MiB. The files are rewritten after each model, so that what
is known is on disk when one stops waiting; what they have of other models stays there.
"""

import csv
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import pegprof
from benchmarks.command import run_command, say, write_csv
from pegprof.cli import arguments
from pegprof.errors import ExitCode, PegprofError
from pegprof.models.problem import zoo_names
from pegprof.report.markdown import table
from pegprof.report.tables import Column
from pegprof.result.findings import Peak
from pegprof.result.result import Row
from pegprof.result.settings import METHODS
from pegprof.units import UNKNOWN, format_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared:
    """One method of one model. The fields are the columns of the CSV."""

    model: str
    method: str
    batch: int | None = None
    xla_bytes: int | None = None
    measured_bytes: int | None = None
    difference: float | None = None  # of the measured peak, as a share of XLA's figure
    agrees: bool | None = None
    reason: str = ""
    jaxlib: str | None = None
    xla_flags: str | None = None


def main(
    models: Annotated[str | None, typer.Option(metavar="NAME[,NAME]...", help="Which models; all of the zoo.")] = None,
    batch: Annotated[
        int, typer.Option(min=1, help="Fewer examples are run where these do not fit or take too long.")
    ] = 64,
    time_limit: Annotated[float, typer.Option(metavar="S", min=1, help="Seconds for each method of a model.")] = 150,
    csv_file: Annotated[Path, typer.Option("--csv", help="Where the rows go.")] = Path("reports/host-memory.csv"),
    markdown: Annotated[Path, typer.Option(help="Where the table goes.")] = Path("reports/host-memory.md"),
    check: Annotated[bool, typer.Option("--check", help="End with 1 if something does not agree.")] = False,
) -> None:
    """Compare peaks of memory, measured and by XLA, for every method of every model of the zoo."""
    names = arguments.parse_names(models) if models else zoo_names()
    compared = [each for each in read_rows(csv_file) if each.model not in names]
    for model in names:
        say(f"{model} ...")
        found = list(compare(model, batch, time_limit))
        for each in found:
            say(f"  {each.method}: {each.reason or _percent(each.difference)}")
        compared += found
        write_csv([dataclasses.asdict(each) for each in compared], str(csv_file))
        markdown.write_text(render(compared), encoding="utf-8")
    if check and any(each.agrees is False for each in compared):
        raise PegprofError("measured peaks and XLA's figures do not agree everywhere", exit_code=ExitCode.NO)


def read_rows(path: Path) -> list[Compared]:
    """What an earlier run left."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [Compared(**{name: _READ[name](cell) for name, cell in row.items()}) for row in csv.DictReader(file)]


_READ: dict[str, Callable[[str], Any]] = dict.fromkeys(("model", "method", "reason"), str)
_READ |= dict.fromkeys(("jaxlib", "xla_flags"), lambda cell: cell or None)
_READ |= dict.fromkeys(("batch", "xla_bytes", "measured_bytes"), lambda cell: int(cell) if cell else None)
_READ |= {
    "difference": lambda cell: float(cell) if cell else None,
    "agrees": {"": None, "True": True, "False": False}.get,
}


def compare(model: str, batch: int, time_limit_s: float) -> Iterator[Compared]:
    """What each method takes, or the reason why that is not known."""
    for method in METHODS:
        try:
            (row,) = pegprof.profile(
                model, batch=batch, methods=(method,), warmup=0, runs=1, check=False, time_limit_s=time_limit_s
            ).rows
        except PegprofError as error:
            yield Compared(model=model, method=method, reason=error.what)
        else:
            yield summarise(row)


def summarise(row: Row) -> Compared:
    """What of a row is in the table."""
    untouched = Compared(
        model=row.model, method=row.method, reason=row.reason, jaxlib=row.jaxlib, xla_flags=row.xla_flags
    )
    if row.host_peak_bytes is None or row.measured_batch is None or row.measured_batch_peak_bytes is None:
        return untouched
    peak = Peak(batch=row.measured_batch, xla_bytes=row.measured_batch_peak_bytes, host_bytes=row.host_peak_bytes)
    return dataclasses.replace(
        untouched,
        batch=peak.batch,
        xla_bytes=peak.xla_bytes,
        measured_bytes=peak.measured_bytes,
        difference=peak.measured_bytes / peak.xla_bytes - 1,
        agrees=not peak.is_far_from_xla,
        reason="",
    )


def _percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share:+.1%}"


_TABLE = (
    Column(header="model", cell=lambda each: each.model, right=False),
    Column(header="method", cell=lambda each: each.method, right=False),
    Column(header="batch", cell=lambda each: str(each.batch or UNKNOWN)),
    Column(header="by XLA", cell=lambda each: format_bytes(each.xla_bytes)),
    Column(header="measured", cell=lambda each: format_bytes(each.measured_bytes)),
    Column(header="difference", cell=lambda each: _percent(each.difference)),
    Column(header="agrees", cell=lambda each: {None: UNKNOWN, True: "yes", False: "no"}[each.agrees], right=False),
)


def render(compared: Sequence[Compared]) -> str:
    """The table, and why a row has holes."""
    known = [each for each in compared if each.agrees is not None]
    flags = next((f'XLA_FLAGS="{each.xla_flags}" ' for each in compared if each.xla_flags), "")
    jaxlib = next((each.jaxlib for each in compared if each.jaxlib), UNKNOWN)
    lines = [
        "# Peaks of memory on a CPU: measured, and by XLA",
        "",
        f"By `{flags}python benchmarks/host_memory.py`, with jaxlib {jaxlib}.",
        "Arguments are included. Two figures agree if they differ by at most 10%, or by at most 32 MiB:",
        f"{sum(bool(each.agrees) for each in known)} of {len(known)} do.",
        "",
        *table(_TABLE, compared),
        "",
        *(f"- {each.model}, {each.method}: {each.reason}" for each in compared if each.agrees is None),
    ]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    run_command(main)
