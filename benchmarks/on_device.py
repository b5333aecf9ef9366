"""What kernels and whole programs take on the accelerator of this machine: measured, beside what was estimated.

Kernels alone run beside XLA's plain product; grad, vmap and surgery without and with kernels beside each other. Each
is a row of a CSV. What fails is a row with the reason, and the rest goes on. All runs in child processes, one at a
time: one that crashes is replaced.
"""

import contextlib
import dataclasses
import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import pegprof
from benchmarks.command import make_console, run_command, say, write_csv
from benchmarks.on_device_cases import DTYPES, PARTS, PROGRAMS, REAL, TINY, Case, list_cases, parse_shapes
from benchmarks.on_device_rows import (
    Machine,
    Row,
    cells,
    kernel_row,
    kernels_table,
    program_row,
    programs_table,
    with_memory,
    with_ratios,
)
from pegprof.cli import arguments
from pegprof.errors import ExitCode, PegprofError, nearest
from pegprof.measure.process import Child, ChildFailure, Worker
from pegprof.measure.progress import Silence
from pegprof.targets.chips import CHIPS
from pegprof.targets.selection import Target, host_target

LIMIT_S = 1800.0  # for one answer


@dataclasses.dataclass(frozen=True, kw_only=True)
class How:
    """How long to measure."""

    rounds: int | None
    seconds: float


def main(
    model: Annotated[str | None, typer.Option(help="Whole programs of this model; transformer-151m.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Examples; 64.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An option of the model.")
    ] = None,
    stats: Annotated[str | None, typer.Option(metavar="NAME[,NAME]...", help="Which statistics.")] = None,
    dtype: Annotated[str, typer.Option(metavar="NAME[,NAME]...", help="Of kernels and models.")] = ",".join(DTYPES),
    microbatch: Annotated[int | None, typer.Option(min=1, help="Examples at a time in surgery.")] = None,
    shapes: Annotated[
        str | None, typer.Option(metavar="TxDxE[,TxDxE]...", help="Products for kernels alone; transformer-151m's.")
    ] = None,
    parts: Annotated[str, typer.Option("--part", metavar="NAME[,NAME]...", help="What to measure.")] = ",".join(PARTS),
    rounds: Annotated[int | None, typer.Option(min=2, help="How often each is timed.")] = None,
    seconds: Annotated[float, typer.Option(min=0, help="Of rounds, if --rounds is not given.")] = 10.0,
    export_csv: Annotated[Path | None, typer.Option(help="Where rows go; reports/on-device-CHIP.csv.")] = None,
    allow_cpu: Annotated[bool, typer.Option("--allow-cpu", help="Interpret kernels on a CPU: for tests.")] = False,
    chip: Annotated[str, typer.Option(help="With --allow-cpu: whose kernels are interpreted.")] = "tpu-v5p",
    debug: Annotated[bool, typer.Option("--debug", help="Show all that the processes print.")] = False,
) -> None:
    """Measure kernels and whole programs on the accelerator that is here."""
    asked_parts = _known(arguments.parse_names(parts, "--part"), PARTS, "part")
    dtypes = _known(arguments.parse_names(dtype, "--dtype"), DTYPES, "dtype")
    _known((chip,), tuple(CHIPS), "chip")
    target = find_target(allow_cpu=allow_cpu)
    sizes = TINY if target.is_host else REAL
    request: dict[str, Any] = {
        "model": model or sizes.model,
        "options": arguments.parse_options(set_ or ()),
        "stats": arguments.parse_stats(stats),
        "batch": batch or sizes.batch,
        "microbatch": microbatch,
    }
    products, how = parse_shapes(shapes) if shapes else sizes.shapes, How(rounds=rounds, seconds=seconds)
    with contextlib.closing(Device(target, debug=debug)) as device:
        machine = describe_machine(device, target, chip)
        report = Report(machine, export_csv or (None if machine.interprets else _default_file(machine)))
        models = list_models(device, request, dtypes) if "programs" in asked_parts else []
        if "kernels" in asked_parts:
            cases = list_cases(
                machine.kernels_of,
                products,
                batch=request["batch"],
                vocab=sizes.vocab,
                dtypes=dtypes,
                interpret=machine.interprets,
            )
            report.add(measure_kernels(device, machine, cases, how))
        for each in models:
            report.add(measure_programs(device, machine, each, how))
    report.finish()


def find_target(*, allow_cpu: bool) -> Target:
    """The accelerator of this machine, as ``pegprof run`` finds it; the CPU only if that is asked for."""
    target = host_target()
    if target.is_host and not allow_cpu:
        raise PegprofError(
            "no TPU and no NVIDIA GPU was found",
            hint="install jax[tpu] or jax[cuda12] and see that python -c 'import jax; print(jax.devices())' lists one; "
            "JAX_PLATFORMS=tpu or cuda insists. --allow-cpu tries everything out on a CPU",
            exit_code=ExitCode.UNMEASURED,
        )
    return target


def _known(names: tuple[str, ...], known: Sequence[str], what: str) -> tuple[str, ...]:
    for name in names:
        if name not in known:
            raise PegprofError(f"unknown {what} {name!r}", hint=nearest(name, known))
    return names


def _default_file(machine: Machine) -> Path:
    name = machine.chip or "-".join(machine.device_kind.lower().split())
    return Path(f"reports/on-device-{name}.csv")


class Device:
    """Asks a child that has the device. After a failure the next is a new one: a driver may be in disorder."""

    def __init__(self, target: Target, *, debug: bool):
        self._target, self._debug = target, debug
        self._child: Worker | None = None

    def ask(self, job: str, request: Mapping[str, Any], *, fresh: bool = False) -> dict[str, Any]:
        """
        Raises:
          ChildFailure: with what was known until then.
        """
        if fresh:
            self.close()
        self._child = self._child or start_child(self._target, debug=self._debug)
        self._child.send(job, request)
        try:
            return self._child.receive(limit_s=LIMIT_S)
        except ChildFailure:
            self.close()
            raise

    def close(self) -> None:
        if self._child:
            self._child.close()
        self._child = None


def start_child(target: Target, *, debug: bool) -> Worker:
    return Child(target.environment, talk=_Talk(), debug=debug, module="benchmarks.children.on_device")


class _Talk(Silence):
    """Progress of a child, on stderr."""

    def __call__(self, text: str) -> None:
        say(text)

    def doing(self, text: str, *, expected_s: float | None = None, kind: str = "") -> None:
        say(f"  {text}")


def describe_machine(device: Device, target: Target, interpreted_chip: str) -> Machine:
    """What is here, from a child."""
    try:
        found = device.ask("describe_device", {})
    except ChildFailure as failure:
        hint = "python -c 'import jax; print(jax.devices())' must work first; --debug shows more"
        raise PegprofError(
            f"the device does not start: {failure}", hint=hint, exit_code=ExitCode.UNMEASURED
        ) from failure
    on_cpu = found.pop("backend") == "cpu"
    if on_cpu and not target.is_host:
        raise PegprofError(f"JAX finds no {target.name}", hint="--debug shows why", exit_code=ExitCode.UNMEASURED)
    known, planned_as = found.pop("known_chip"), found.pop("chip")
    machine = Machine(
        **found,
        chip=known or "",
        kernels_of=interpreted_chip if on_cpu else planned_as,
        evidence="interpreted on a CPU" if on_cpu else "measured",
        pegprof=pegprof.__version__,
        timestamp=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    say(f"{machine.device_kind}, kernels of {machine.kernels_of}, jax {machine.jax}")
    if not known and not on_cpu:
        say(f"  not in pegprof/targets/chips.py: peaks are those of {planned_as}, and nothing is estimated")
    return machine


def measure_kernels(device: Device, machine: Machine, cases: Iterator[Case], how: How) -> Iterator[Row]:
    for case in cases:
        request = {"case": dataclasses.asdict(case), "estimates": bool(machine.chip), **dataclasses.asdict(how)}
        try:
            yield kernel_row(case, device.ask("measure_kernel", request))
        except ChildFailure as failure:
            yield kernel_row(case, failure.answer, failure.reason)


def list_models(device: Device, request: dict[str, Any], dtypes: Sequence[str]) -> list[dict[str, Any]]:
    """The model in each dtype, if it has such an option, and if ``--set`` does not choose one."""
    found = device.ask("describe_model", request)
    options = request["options"]
    if not found["takes_dtype"] or "dtype" in options:
        return [{**request, "dtype": found["dtype"]}]
    return [{**request, "options": options | {"dtype": dtype}, "dtype": dtype} for dtype in dtypes]


def measure_programs(device: Device, machine: Machine, request: dict[str, Any], how: How) -> list[Row]:
    """All programs together for their times, then each alone for its memory and for what was estimated."""
    request = {**request, **dataclasses.asdict(how), "chip": machine.kernels_of, "interpret": machine.interprets}
    request["estimates"] = bool(machine.chip)
    answers, failures = time_programs(device, request)
    rows = []
    for name in PROGRAMS:
        row = program_row(request, name, answers.get(name, {}), failures.get(name, ""))
        if row.status != "failed" and not machine.interprets:  # a CPU keeps no account of its peaks
            row = _add_memory(device, request, row)
        rows.append(row)
    return with_ratios(rows)


def time_programs(device: Device, request: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """What is known of each program, and why some failed. One that takes its process down is left out of the next."""
    failures: dict[str, str] = {}
    while names := [name for name in PROGRAMS if name not in failures]:
        try:
            answer = device.ask("time_programs", {**request, "programs": names}, fresh=True)
        except ChildFailure as failure:
            guilty = failure.answer.get("doing")
            failures |= dict.fromkeys([guilty] if guilty else names, failure.reason)
            continue
        return answer.get("programs", {}), failures | answer.get("failures", {})
    return {}, failures


def _add_memory(device: Device, request: Mapping[str, Any], row: Row) -> Row:
    try:
        return with_memory(row, device.ask("measure_memory", {**request, "program": row.name}, fresh=True))
    except ChildFailure as failure:
        say(f"  {row.name}, memory: {failure}")
        return with_memory(row, failure.answer)


class Report:
    """Rows so far: each is told at once, and the file is complete after each."""

    def __init__(self, machine: Machine, file: Path | None):
        self._machine, self._file = machine, file
        self._rows: list[Row] = []

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            say(f"{row.name} {row.shape} {row.dtype}: {row.status} {row.reason}".rstrip())
            self._rows.append(row)
            if self._file:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                write_csv([cells(row, self._machine) for row in self._rows], str(self._file))

    def finish(self) -> None:
        """Prints the tables; a kernel or program that failed or is wrong is told by the exit code."""
        console = make_console()
        if kernels := [row for row in self._rows if row.part == "kernel"]:
            console.print(kernels_table(kernels, self._machine))
        if programs := [row for row in self._rows if row.part == "program"]:
            console.print(programs_table(programs, self._machine))
        if self._file:
            say(f"wrote {self._file}")
        bad = [row for row in self._rows if row.status in ("failed", "wrong")]
        if bad or not self._rows:
            say(f"{len(bad)} of {len(self._rows)} rows failed or are wrong")
            raise typer.Exit(ExitCode.UNMEASURED)


if __name__ == "__main__":
    run_command(main)
