"""What each method would take on an accelerator that is not here, operation by operation: compiled, never run.

The time of an operation is what the compiler's own cost model says, else a roofline (``pegprof/targets``). Such times
are for ratios on one device and to find what is slow. Every method is compiled in a process of its own, one at a time.
"""

import contextlib
import csv
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

import pegprof
from benchmarks.accelerators_text import operations_table
from benchmarks.command import run_command, say, write_csv
from pegprof.cli import arguments
from pegprof.errors import PegprofError
from pegprof.measure.process import Child, ChildFailure
from pegprof.measure.progress import Silence
from pegprof.result.settings import METHODS
from pegprof.targets import cache, selection
from pegprof.targets.devices import DEVICES, require_compiler
from pegprof.targets.hlo.estimate import Estimate, estimate
from pegprof.units import UNKNOWN, format_bytes

LIMIT_S = 1800.0  # for one method
WIDTH = 230
KEY = ("label", "model", "options", "dtype", "batch", "asked_microbatch", "stats", "target", "method")

Row = dict[str, Any]


def main(
    model: Annotated[str, typer.Argument(help="A name (see pegprof list), package.module:name or file.py:name.")],
    target: Annotated[str, typer.Option(metavar="NAME[,NAME]...", help="Which devices.")] = "tpu-v5p,h100",
    batch: Annotated[int, typer.Option(min=1, help="Examples.")] = 64,
    method: Annotated[str, typer.Option(metavar="NAME[,NAME]...", help="Methods to compare.")] = "grad,vmap,surgery",
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An option of the model.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(metavar="float32|bfloat16", help="The same as --set dtype=...")] = None,
    stats: Annotated[str | None, typer.Option(metavar="NAME[,NAME]...", help="Which statistics.")] = None,
    microbatch: Annotated[
        str | None, typer.Option(metavar="N|auto", help="Examples at a time in surgery; auto takes what fits.")
    ] = None,
    top: Annotated[int, typer.Option(min=0, help="How many operations to list.")] = 20,
    export_csv: Annotated[Path | None, typer.Option(help="Add a row for each method to this file.")] = None,
    label: Annotated[str, typer.Option(help="Goes into the rows: before, after.")] = "",
    cache_folder: Annotated[Path | None, typer.Option("--cache", help="Where compiled programs are kept.")] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Compile everything anew.")] = False,
    keep: Annotated[Path | None, typer.Option(help="Write the compiled programs into this folder.")] = None,
) -> None:
    """Estimate what each method takes on each target, and list what costs most."""
    options = arguments.parse_options(set_ or (), dtype=dtype)
    names, places = arguments.parse_names(method), arguments.parse_names(target)
    for place in places:
        selection.choose_target(place, selection.cpu_target())  # refuses an unknown name at once
        require_compiler(DEVICES[place])
    if unknown := [name for name in names if name not in METHODS]:
        raise PegprofError(f"unknown method {unknown[0]!r}", hint=f"choose from {', '.join(METHODS)}")
    console, rows = _make_console(), []
    request = {
        "model": model,
        "options": options,
        "batch": batch,
        "stats": arguments.parse_stats(stats),
        "microbatch": _parse_microbatch(microbatch),
        "cache": None if no_cache else str(cache_folder or cache.folder().with_name("programs")),
    }
    for place in places:
        found = [_estimate_one(request, place, name, console, top, keep) for name in names]
        rows += _add_ratios(found)
        console.print(_totals_table(f"{model} on {place}, batch {batch}", found))
    if export_csv:
        versions = {"pegprof": pegprof.__version__} | {name: metadata.version(name) for name in ("jax", "jaxlib")}
        _add_to_csv([{"label": label, **row, **versions} for row in rows], export_csv)


def _make_console() -> Console:
    """In a file, wide enough for the longest names."""
    return Console(width=None if sys.stdout.isatty() else WIDTH)


def _parse_microbatch(text: str | None) -> int | str | None:
    if text is None or text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise PegprofError(f"--microbatch {text} is no number of examples", hint="write a number, or auto")
    return int(text)


def _estimate_one(
    request: Mapping[str, Any], place: str, method: str, console: Console, top: int, keep: Path | None
) -> Row:
    """One method on one target, listed as soon as it is known."""
    row: Row = {
        "model": request["model"],
        "options": " ".join(f"{key}={value}" for key, value in request["options"].items()),
        "dtype": request["options"].get("dtype", ""),
        "batch": request["batch"],
        "asked_microbatch": request["microbatch"] or "",
        "stats": ",".join(request["stats"]),
        "target": place,
        "method": method,
        "evidence": "estimated",
    }
    say(f"{method} on {place} ...")
    with tempfile.TemporaryDirectory(prefix="pegprof-") as folder:
        text = (keep or Path(folder)) / f"{request['model'].replace('/', '_')}-{place}-{method}.hlo"
        text.parent.mkdir(parents=True, exist_ok=True)
        try:
            answer = _ask({**request, "device": place, "method": method, "text": str(text)}, place)
        except (ChildFailure, PegprofError) as failure:
            say(f"  failed: {failure}")
            return {**row, "status": "failed", "reason": str(failure)}
        row |= _read_answer(answer, place)
        if answer.get("refused"):
            return row
        priced = estimate(text.read_text(encoding="utf-8"), place)
    row |= _sums(priced)
    if top:
        console.print(operations_table(f"{request['model']}, {method} on {place}", priced, top))
    for name in priced.unknown_trips:
        say(f"  how often the loop {name} runs is not known: it counts once")
    return row


def _ask(request: Mapping[str, Any], place: str) -> dict[str, Any]:
    target, module = selection.absent_target(DEVICES[place]), "benchmarks.children.compile_text"
    with contextlib.closing(Child(target.environment, talk=Silence(), module=module)) as child:
        child.send("compile_text", {**request, "backend": target.backend})
        return child.receive(limit_s=LIMIT_S)


def _read_answer(answer: Mapping[str, Any], place: str) -> Row:
    """What XLA says of memory. A GPU's compiler refuses nothing: what needs more than there is does not fit."""
    capacity, peak = DEVICES[place].memory_bytes, answer["peak_bytes"]
    refused = answer.get("refused") or peak > capacity
    reasons = [f"needs {format_bytes(peak)} of {format_bytes(capacity)}"] if refused else []
    reasons += [answer[key] for key in ("note", "second_try") if answer.get(key)]
    sizes = ("temp_bytes", "argument_bytes", "output_bytes", "peak_bytes", "compile_s")
    return {
        "dtype": answer["dtype"],
        "microbatch": answer.get("microbatch") or "",
        "status": "refused" if refused else "ok",
        "reason": "; ".join(reasons),
        **{name: answer.get(name) for name in sizes},
        "compiler": DEVICES[place].compiler.description,
    }


def _sums(priced: Estimate) -> Row:
    kernels_s = sum(each.total_s for each in priced.kernels)
    return {
        "time_s": priced.time_s,
        "floor_s": priced.floor_s,
        "bytes_moved": priced.bytes,
        "flops": priced.flops,
        "flops_coverage": round(priced.flops_coverage, 4),
        "bytes_coverage": round(priced.bytes_coverage, 4),
        "efficiency": round(priced.efficiency, 4),
        "kernels": len(priced.kernels),
        "kernels_share": round(kernels_s / priced.time_s, 4) if priced.time_s else 0.0,
    }


RATIOS = {"time_ratio": "time_s", "floor_ratio": "floor_s", "bytes_ratio": "bytes_moved", "temp_ratio": "temp_bytes"}


def _add_ratios(rows: Sequence[Row]) -> list[Row]:
    """To ``grad`` of the same target, where both are known."""
    grad = next((row for row in rows if row["method"] == "grad"), {})
    for row in rows:
        for ratio, name in RATIOS.items():
            known = row.get(name) is not None and grad.get(name)
            row[ratio] = round(row[name] / grad[name], 4) if known else None
    return list(rows)


def _totals_table(title: str, rows: Sequence[Row]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    columns = (
        "method",
        "time",
        "× grad",
        "floor",
        "moved",
        "× grad",
        "Tflop",
        "temporaries",
        "× grad",
        "priced",
        "kernels",
    )
    for column in (*columns, ""):
        table.add_column(column, justify="left" if column in ("method", "") else "right")

    def show(row: Row, name: str, form: str, scale: float = 1.0) -> str:
        return UNKNOWN if row.get(name) is None else form.format(row[name] * scale)

    for row in rows:
        table.add_row(
            row["method"],
            show(row, "time_s", "{:.2f} ms", 1e3),
            show(row, "time_ratio", "{:.2f}"),
            show(row, "floor_s", "{:.2f} ms", 1e3),
            show(row, "bytes_moved", "{:.1f} GB", 1e-9),
            show(row, "bytes_ratio", "{:.2f}"),
            show(row, "flops", "{:.2f}", 1e-12),
            format_bytes(row.get("temp_bytes")),
            show(row, "temp_ratio", "{:.2f}"),
            show(row, "flops_coverage", "{:.0%} flops, ") + show(row, "bytes_coverage", "{:.0%} bytes"),
            f"{row['kernels']}, {row['kernels_share']:.0%}" if row.get("kernels") else "",
            row["reason"] if row["status"] != "failed" else f"failed: {row['reason']}",
        )
    return table


def _add_to_csv(rows: Sequence[Row], path: Path) -> None:
    """Rows of the same question are replaced."""
    old: list[Row] = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            old = list(csv.DictReader(file))
    new = {tuple(str(row.get(name, "")) for name in KEY) for row in rows}
    kept = [row for row in old if tuple(row.get(name, "") for name in KEY) not in new]
    columns = list(dict.fromkeys(name for row in [*kept, *rows] for name in row))
    write_csv([{name: row.get(name) for name in columns} for row in [*kept, *rows]], str(path))
    say(f"wrote {path}")


if __name__ == "__main__":
    run_command(main)
