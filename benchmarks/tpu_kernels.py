"""What the TPU's compiler makes of the outer kernel: its schedule beside the chip's peak; compiled, never run.

The kernels are those of four gradients of transformer-151m, one of each kind. A core issues one bundle a cycle, so the
bundles of one step of the grid (``tpu_schedule.py``) times the steps are cycles, if nothing is waited for. The matrix
units may need longer than the bundles that feed them. The larger of both is shown.
"""

import contextlib
import math
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from benchmarks.command import make_console, run_command, say, write_csv
from benchmarks.tpu_schedule import parse_schedule
from pegprof.cli import arguments
from pegprof.measure.process import Child
from pegprof.measure.progress import Silence
from pegprof.targets import selection
from pegprof.targets.chips import CHIPS, Chip
from pegprof.targets.devices import DEVICES, require_compiler

MODEL = "transformer-151m"
PARAMETERS = {
    "block_0/up/kernel": "1024→4096",
    "block_0/down/kernel": "4096→1024",
    "block_0/attention/out/kernel": "heads→1024",
    "embed/embedding": "tied table",
}
LIMIT_S = 1800.0  # for one kernel

Row = dict[str, Any]


def main(
    target: Annotated[str, typer.Option(metavar="NAME[,NAME]...", help="Which TPUs.")] = "tpu-v5e,tpu-v5p,tpu-v6e",
    batch: Annotated[int, typer.Option(min=1, help="Examples.")] = 64,
    export_csv: Annotated[str | None, typer.Option(metavar="FILE", help="Write the rows to this file.")] = None,
) -> None:
    """Compile the outer kernel for TPUs that are not here, and print what its schedule takes."""
    names = arguments.parse_names(target)
    for name in names:
        selection.choose_target(name, selection.cpu_target())  # refuses an unknown name at once
        require_compiler(DEVICES[name])
    rows = [row for name in names for row in schedules(name, batch)]
    make_console().print(as_table(rows))
    if export_csv:
        write_csv(rows, export_csv)


def schedules(name: str, batch: int) -> Iterator[Row]:
    """A row for each gradient. One process for the chip; libtpu reads at its start where to write schedules."""
    with tempfile.TemporaryDirectory(prefix="pegprof-") as folder:
        dump = Path(folder, "llo")
        flags = {"LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true"}
        environment = {**selection.absent_target(DEVICES[name]).environment, **flags}
        module = "benchmarks.children.compile_kernels"
        with contextlib.closing(Child(environment, talk=Silence(), module=module)) as child:
            for parameter in PARAMETERS:
                say(f"{parameter} on {name} ...")
                request = {"device": name, "batch": batch, "model": MODEL, "parameter": parameter}
                facts = _ask(child, "compile_kernel", request)
                figures = read_dump(dump)
                shutil.rmtree(dump)  # a hundred megabytes
                plain = {}
                for dtype in ("float32", "bfloat16"):
                    answer = _ask(child, "compile_plain", {**request, "sizes": facts["sizes"], "dtype": dtype})
                    plain[f"plain_{dtype}_ms"] = round(1e3 * answer["plain_s"], 4)
                yield make_row(CHIPS[name], batch, parameter, facts, figures) | plain


def _ask(child: Child, job: str, request: Row) -> Row:
    child.send(job, request)
    return child.receive(limit_s=LIMIT_S)


def read_dump(folder: Path) -> Row:
    """How many bundles a step of the kernel's grid executes, and the units that are busiest in it."""
    (bundles,) = (p for p in folder.glob("*pegprof_outer*-final_bundles.txt") if "schedule-analysis" not in p.name)
    (usage,) = folder.glob("*pegprof_outer*-final_hlo-static-per-bundle-utilization.txt")
    schedule = parse_schedule(bundles.read_text(encoding="utf-8"))
    busy = schedule.utilization(usage.read_text(encoding="utf-8"))
    busiest = sorted(busy, key=lambda unit: -busy[unit])[:3]
    return {"bundles": schedule.executed, "busiest": ", ".join(f"{unit} {busy[unit]:.0%}" for unit in busiest)}


def make_row(chip: Chip, batch: int, parameter: str, facts: Row, figures: Row) -> Row:
    """Cycles, and milliseconds by the chip's clock. The core with the most tiles decides."""
    assert chip.clock_hz is not None
    tile, tiles = facts["tile"], facts["tiles"]
    steps = math.ceil(tiles / chip.cores) * batch * facts["steps"]  # of one core
    flops_a_cycle = chip.product_flops("bfloat16") / chip.cores / chip.clock_hz
    unit_cycles = round(2 * tile["T"] * tile["D"] * tile["E"] / flops_a_cycle)
    cycles = steps * max(figures["bundles"], unit_cycles)
    peak_s = facts["flops"] / chip.product_flops("bfloat16")
    return {
        "chip": chip.name,
        "parameter": parameter,
        "batch": batch,
        "positions": facts["sizes"]["T"],
        "rows": facts["sizes"]["D"],
        "columns": facts["sizes"]["E"],
        "rows_from": facts["rows"],
        "columns_from": facts["columns"],
        "tile": "×".join(str(tile[axis]) for axis in "DET"),
        "held_mib": round(facts["held_bytes"] / 2**20, 1),
        "used_mib": round(facts["used_bytes"] / 2**20, 1),
        "bundles_a_step": figures["bundles"],
        "unit_cycles_a_step": unit_cycles,
        "busiest": figures["busiest"],
        "steps_of_a_core": steps,
        "cycles": cycles,
        "schedule_ms": round(1e3 * cycles / chip.clock_hz, 4),
        "peak_ms": round(1e3 * peak_s, 4),
        "ratio": round(cycles / chip.clock_hz / peak_s, 3),
        "traffic_ms": round(1e3 * facts["bytes"] / chip.bandwidth, 4),
    }


def as_table(rows: list[Row]) -> Table:
    table = Table(title=f"{MODEL}: mean and mean of squares, float32, by the compiler's schedule", box=box.SIMPLE_HEAD)
    for column in ("chip", "gradient", "rows from", "columns from", "tile", "MiB", "bundles", "units", "busiest"):
        table.add_column(column, justify="right" if column in ("MiB", "bundles", "units") else "left")
    for column in ("ms", "at peak", "ratio", "traffic", "XLA's", "in bf16"):
        table.add_column(column, justify="right")
    for row in rows:
        times = [row[name] for name in ("schedule_ms", "peak_ms", "ratio", "traffic_ms")]
        plain = [row[f"plain_{dtype}_ms"] for dtype in ("float32", "bfloat16")]
        table.add_row(
            row["chip"],
            f"{PARAMETERS[row['parameter']]}, {row['rows']}×{row['columns']}",
            row["rows_from"],
            row["columns_from"],
            row["tile"],
            f"{row['used_mib']:.0f}",
            str(row["bundles_a_step"]),
            str(row["unit_cycles_a_step"]),
            row["busiest"].split(",")[0],
            *(f"{x:.2f}" for x in [*times, *plain]),
        )
    return table


if __name__ == "__main__":
    run_command(main)
