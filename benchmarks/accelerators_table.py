"""The rows of ``benchmarks/accelerators.py`` as tables for people: ``python -m benchmarks.accelerators_table FILE``.

In: a CSV with rows labelled ``before`` and ``after``. Out: Markdown, a line for each model, dtype, target, batch:
ratios to the plain gradient of vmap, of surgery before, and of surgery now. Everything in it is estimated.
"""

import csv
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.command import run_command

Row = Mapping[str, str]
Case = tuple[str, str, str, str, int]
UNKNOWN = "–"
RATIOS = {"time_ratio": "Time", "bytes_ratio": "Bytes moved", "temp_ratio": "Temporaries"}
COLUMNS = ("vmap", "surgery before", "surgery")
FLAGSHIP = ("transformer-151m", "", 64)


def main(file: Annotated[Path, typer.Argument(help="What benchmarks/accelerators.py wrote.")]) -> None:
    """Print the report."""
    print(render(read(file)), end="")


def read(file: Path) -> list[Row]:
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def render(rows: Sequence[Row]) -> str:
    """The whole report as Markdown."""
    parts = ["# Statistics on accelerators, estimated", INTRODUCTION]
    for name, title in RATIOS.items():
        parts += [f"## {title}, as a ratio to the plain gradient's", _table(rows, name)]
    return "\n\n".join([*parts, "## Absolute figures", _absolute(rows)]) + "\n"


INTRODUCTION = """\
Every program was compiled by XLA's own compiler for a device that is not here. Nothing was run. Times are estimated:
XLA's cost model for its own operations, a roofline for the rest, and for the fused kernels their operations and traffic
at the efficiency that the cost model grants XLA's products in the same program. XLA has no prices for an A100: there
every time is a roofline. *Before* is the release without kernels. *Refused*: the compiler says that it does not fit. In
`accelerators.csv` are the shares of flops and bytes that the compiler priced, floors, and versions."""


def summary(rows: Sequence[Row]) -> str:
    """The flagship's float32 rows, for the project's README: all three ratios of each target in one line."""
    found = [(case, cells) for case, cells in _cases(rows) if (case[0], case[1], case[4]) == FLAGSHIP]
    lines = [["target", *(f"{name}, {title.lower()}" for title in RATIOS.values() for name in ("vmap", "surgery"))]]
    for (_, _, dtype, target, _), by_column in found:
        if dtype == "float32":
            cells = [_ratio(by_column.get(c), name) for name in RATIOS for c in ("vmap", "surgery")]
            lines.append([f"`{target}`", *cells])
    return _markdown(lines)


def case_of(row: Row) -> Case:
    options = " ".join(word for word in row["options"].replace(",", " ").split() if not word.startswith("dtype="))
    return row["model"], options, row["dtype"], row["target"], int(row["batch"])


def _cases(rows: Sequence[Row]) -> Iterator[tuple[Case, dict[str, Row]]]:
    for case, group in itertools.groupby(sorted(rows, key=case_of), key=case_of):
        yield case, {_column(row): row for row in group}


def _table(rows: Sequence[Row], ratio: str) -> str:
    lines = [["model", "dtype", "target", "batch", *COLUMNS]]
    for case, found in _cases(rows):
        lines.append([*_names(case), *(_ratio(found.get(column), ratio) for column in COLUMNS)])
    return _markdown(lines)


def _absolute(rows: Sequence[Row]) -> str:
    heads = ["ms", "floor ms", "GB moved", "temporaries GiB", "at a time", "kernels"]
    lines = [["model", "dtype", "target", "batch", "method", *heads]]
    for case, found in _cases(rows):
        for column, row in sorted(found.items()):
            lines.append([*_names(case), column, *_figures(row)])
    return _markdown(lines)


def _figures(row: Row) -> list[str]:
    scales = {"time_s": 1e-3, "floor_s": 1e-3, "bytes_moved": 1e9, "temp_bytes": 2**30}
    numbers = [f"{float(row[name]) / scale:.1f}" if row[name] else UNKNOWN for name, scale in scales.items()]
    return [*numbers, row["microbatch"] or UNKNOWN, row["kernels"] or UNKNOWN]


def _names(case: Case) -> list[str]:
    model, options, dtype, target, batch = case
    return [f"{model} ({options})" if options else model, dtype, target, str(batch)]


def _column(row: Row) -> str:
    """The column of a row. What does not depend on the engine is the same before and after."""
    return "surgery before" if (row["method"], row["label"]) == ("surgery", "before") else row["method"]


def _ratio(row: Row | None, name: str) -> str:
    if row is None:
        return UNKNOWN
    if row["status"] != "ok":
        return row["status"]
    return f"{float(row[name]):.2f}" if row[name] else UNKNOWN


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *rest = lines
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rest))


if __name__ == "__main__":
    run_command(main)
