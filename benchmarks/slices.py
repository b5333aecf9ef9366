"""What the methods send and hold on slices of devices, for the zoo's transformers: compiled, never run.

Each row is one device's. The bars are surgery's. Its collectives send at most 1.1 times the bytes of vmap's; none is
in a loop. Its temporaries are at most 1.1 times grad's. Its flops are at most 1.05 times those of its examples on one
device. What was compiled before comes from the cache.
"""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

import pegprof
from benchmarks.command import run_command, say, write_csv
from pegprof.cli import arguments
from pegprof.errors import ExitCode
from pegprof.result.result import Result, Row
from pegprof.targets import meshes
from pegprof.targets.devices import find_device

METHODS = ("grad", "vmap", "surgery")
MOST_COLLECTIVES, MOST_TEMPORARIES, MOST_FLOPS = 1.1, 1.1, 1.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model, how many examples each device has, and along how many devices its parameters are sharded."""

    model: str
    examples: int
    layers: int | None = None
    fsdp: int = 1

    @property
    def name(self) -> str:
        return self.model if self.layers is None else f"{self.model}, {self.layers} layers"

    def mesh(self, target: str) -> dict[str, int]:
        data = find_device(target).count // self.fsdp
        return {"data": data, "fsdp": self.fsdp} if self.fsdp > 1 else {"data": data}


CASES = (
    Case(model="transformer-tiny", examples=64),
    Case(model="transformer-19m", examples=16),
    Case(model="transformer-19m", examples=16, fsdp=4),
    Case(model="transformer-151m", examples=16),
    Case(model="gpt2-124m", examples=8),
    Case(model="transformer-1.2b", examples=8, layers=4, fsdp=4),
)
TARGETS = "tpu-v5p:4x4x4,tpu-v5e:16x16,h100:8"


def main(
    models: Annotated[str | None, typer.Option(metavar="NAME[,NAME]...", help="Some of the models.")] = None,
    targets: Annotated[str, typer.Option(metavar="NAME[,NAME]...", help="Slices.")] = TARGETS,
    check: Annotated[bool, typer.Option("--check", help="End with 1 if a bar is missed.")] = False,
    csv_file: Annotated[str, typer.Option("--csv", metavar="FILE", help="Where the rows go; - is stdout.")] = "-",
) -> None:
    """Compile the zoo's transformers for slices, and hold surgery's rows against the bars."""
    chosen = arguments.parse_names(models) if models else tuple(case.model for case in CASES)
    rows: list[dict[str, Any]] = []
    for target in arguments.parse_names(targets):
        for case in (case for case in CASES if case.model in chosen):
            say(f"{case.name} on {target} ...")
            rows += measure(case, target)
            if csv_file != "-":
                write_csv(rows, csv_file)  # what is known so far
    if csv_file == "-":
        write_csv(rows, csv_file)
    misses = [miss for row in rows for miss in find_misses(row)]
    for miss in misses:
        say(f"missed: {miss}")
    if check and misses:
        raise typer.Exit(ExitCode.NO)


def measure(case: Case, target: str) -> list[dict[str, Any]]:
    """The rows of one model on one slice."""
    mesh, device = case.mesh(target), find_device(target)
    options = {} if case.layers is None else {"layers": case.layers}
    result = pegprof.profile(
        case.model,
        batch=case.examples * device.count,
        options=options,
        methods=METHODS,
        targets=(target,),
        mesh=mesh,
        time=False,
        time_limit_s=7200.0,
        progress=True,
    )
    alone = flops_alone(case.model, options, case.examples, device.kind)
    return [_cells(case, row, result, alone) for row in result.rows]


def flops_alone(model: str, options: dict[str, Any], examples: int, backend: str) -> int:
    """Those of surgery for so many examples on one device; they are counted, and nothing is compiled."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    from pegprof.engine.flops import count_flops
    from pegprof.models.problem import load_problem

    problem = load_problem(model, options)
    stats_of = pegprof.grad_stats(
        problem.loss, keep_batch_dim=problem.keep_batch_dim, backend=backend, microbatch_size=examples
    )
    return count_flops(jax.make_jaxpr(stats_of)(problem.abstract_params(), problem.abstract_batch(examples)))


def _cells(case: Case, row: Row, result: Result, alone: int) -> dict[str, Any]:
    by_method = {each.method: each for each in result.rows}

    def ratio(column: str, other: str) -> float | None:
        own, others = getattr(row, column), getattr(by_method[other], column)
        return round(own / others, 3) if own is not None and others and row.status == "ok" else None

    in_loops = row.loop_collective_bytes
    return {
        "model": case.name,
        "target": row.target,
        "mesh": meshes.describe(case.mesh(row.target)),
        "batch": row.batch,
        "method": row.method,
        "status": row.status,
        "temp_bytes": row.temp_bytes,
        "temp_to_grad": ratio("temp_bytes", "grad"),
        "peak_bytes": row.peak_bytes,
        "peak_to_grad": ratio("peak_bytes", "grad"),
        "collective_bytes": row.collective_bytes,
        "collectives_to_vmap": ratio("collective_bytes", "vmap"),
        "loop_collective_bytes": in_loops,
        "collective_floor_s": row.collective_floor_s,
        "flops": row.flops,
        "flops_to_one_device": round(row.flops / alone, 3) if row.flops and row.method == "surgery" else None,
        "compile_s": None if row.compile_s is None else round(row.compile_s, 1),
        "microbatch_size": row.microbatch_size,
        "reason": row.reason,
        "pegprof": row.pegprof,
        "jax": row.jax,
    }


def find_misses(row: dict[str, Any]) -> Iterator[str]:
    """The bars that a row of surgery misses, in words."""
    if row["method"] != "surgery":
        return
    where = f"{row['model']} on {row['target']}, {row['mesh']}"
    if row["status"] != "ok":
        yield f"{where}: {row['status']}, {row['reason']}"
        return
    bars: Sequence[tuple[str, float, str]] = (
        ("collectives_to_vmap", MOST_COLLECTIVES, "the collectives of vmap"),
        ("temp_to_grad", MOST_TEMPORARIES, "the temporaries of grad"),
        ("flops_to_one_device", MOST_FLOPS, "the flops of its examples on one device"),
    )
    for column, most, what in bars:
        if row[column] is not None and row[column] > most:
            yield f"{where}: {row[column]:.2f} times {what}, more than {most}"
    if row["loop_collective_bytes"]:
        yield f"{where}: {row['loop_collective_bytes']} bytes are sent in loops"


if __name__ == "__main__":
    run_command(main)
