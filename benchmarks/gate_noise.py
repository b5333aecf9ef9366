"""Does a gate on time cry wolf? The same program, unchanged, many times over, while another process loads a core.

The baseline is made on the machine as it is; each gate then measures again with ``--time`` under load. No gate may
fail; "unresolved" is the right answer to a machine that cannot tell. One row a gate goes to the CSV.
"""

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.command import run_command, say, write_csv
from pegprof.errors import ExitCode, PegprofError
from pegprof.profiling.gate import Gate, pass_gate, read_baseline
from pegprof.profiling.limits import LimitTable
from pegprof.profiling.measure import measure
from pegprof.profiling.progress import Silence
from pegprof.profiling.result import Result, Settings

# It ends with whoever started it, however that one ends.
LOAD = "import os; parent = os.getppid()\nwhile os.getppid() == parent: sum(range(10**5))"


def main(
    model: Annotated[str, typer.Option(help="Which model.")] = "transformer-tiny",
    batch: Annotated[int, typer.Option(min=1)] = 16,
    methods: Annotated[str, typer.Option(help="Which methods, grad among them.")] = "grad,surgery",
    gates: Annotated[int, typer.Option(min=1, help="How many.")] = 20,
    load: Annotated[int, typer.Option(min=0, help="How many processes load the machine meanwhile.")] = 1,
    csv: Annotated[Path, typer.Option(help="Where the rows go.")] = Path("reports/gate-noise.csv"),
) -> None:
    """Gate an unchanged program on time, again and again, under load; ends with 1 if one of the gates fails."""
    settings = Settings(model=model, batches=(batch,), methods=tuple(methods.split(",")), check=False)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        baseline = Path(folder, "baseline.json")
        say(f"the baseline: {model} at batch {batch}, nothing else running ...")
        baseline.write_text(_measure(settings).to_json(), encoding="utf-8")
        with _loaded(load):
            for number in range(1, gates + 1):
                start_s = time.monotonic()
                limits, read = LimitTable(flags={"time": True}), read_baseline(baseline, time=True)
                gate = pass_gate(read, limits=limits, measure=lambda settings, check: _measure(settings))
                rows += _rows(gate, number, load, took_s=time.monotonic() - start_s)
                say(f"gate {number}: " + "; ".join(f"{row['outcome']}: {row['words']}" for row in rows[-1:]))
                write_csv(rows, str(csv))
    failed = [row for row in rows if row["failed"]]
    unresolved = [row for row in rows if row["outcome"] == "unresolved"]
    print(f"{len(rows)} comparisons of times in {gates} gates: {len(failed)} failed, {len(unresolved)} unresolved")
    if failed:
        raise PegprofError("a gate failed though nothing had changed", exit_code=ExitCode.NO)


def _measure(settings: Settings) -> Result:
    return measure(settings, talk=Silence())


def _rows(gate: Gate, number: int, load: int, *, took_s: float) -> list[dict[str, Any]]:
    """What the gate says of times, and whether it fails for any reason at all."""
    return [
        {
            "gate": number,
            "model": change.model,
            "method": change.method,
            "load": load,
            "ratio_before": change.before,
            "ratio_after": change.after,
            "outcome": change.outcome,
            "failed": bool(gate.failures),
            "words": change.words,
            "took_s": round(took_s, 1),
        }
        for change in gate.changes
        if change.metric == "time_ratio"
    ]


@contextlib.contextmanager
def _loaded(count: int) -> Iterator[None]:
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
