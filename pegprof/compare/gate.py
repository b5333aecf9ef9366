"""The gate: what a baseline holds is measured again, at its settings, and compared with it.

    baseline.json ──> is it whole? ──> is it comparable? ──> measure again ──> compare_results ──> Gate
    a revision    ──────────────────> is it comparable? ──> measure both ───> compare_results ──> Gate

A baseline that cannot be read, holds nothing to compare, or was made by other versions or on another device is never a
pass: it raises, with the command that makes a new one.

Where time is compared, whoever measures is told after each process whether that was enough: as soon as every interval
lies on one side of its limit.
"""

import contextlib
import dataclasses
import itertools
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pegprof.compare.comparison import (
    EXACT,
    OF_THE_MODEL,
    Change,
    LimitsOf,
    Looks,
    compare_results,
    has_times,
    times_settled,
)
from pegprof.compare.limits import LimitTable, check_limits
from pegprof.errors import ExitCode, PegprofError
from pegprof.result import log
from pegprof.result.result import Result
from pegprof.result.samples import log_ratios
from pegprof.result.settings import Settings
from pegprof.targets.meshes import describe
from pegprof.targets.selection import is_host

PROCESSES = 16
"""At most, where time is compared: enough for a change of 1.2 among processes that are 5% apart."""
BASELINE_PROCESSES = 8
"""That a new baseline should have. Nobody looks at it before its end, so it cannot stop early."""
PROCESSES_WITHIN_S = 110.0
"""The last process ends by then, once there are three: a gate of a small model takes less than two minutes."""
MUST_AGREE = (
    "jax",
    "jaxlib",
    "backend",
    "device_kind",
    "device_count",
    "xla_flags",
    "libtpu_init_args",
    "matmul_precision",
    "x64",
)
"""What of the environment decides the bytes and the plans."""

Check = Callable[[Result], None]
Enough = Callable[[Result, int], bool]
Measure = Callable[[Settings, Check, Enough], Result]
"""From settings. The check is given what the result will be made with, before anything is measured, and may raise.
After each process the result so far and the batch that is timed are asked about, whether that is enough."""

CheckPair = Callable[[Result, Result], None]
EnoughPair = Callable[[Result, Result, int], bool]
MeasurePair = Callable[[Settings, CheckPair, EnoughPair], tuple[Result, Result]]
"""The same for two revisions, the older one first."""
Warn = Callable[[str], None]


def _ignore(warning: str) -> None:
    pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effort:
    """What a gate may spend on times, where that is not left to it.

    Args:
      runs: rounds in each process.
      processes: at most, one after the other.
      time_limit_s: for everything.
    """

    runs: int | None = None
    processes: int | None = None
    time_limit_s: float | None = None

    def apply(self, settings: Settings) -> Settings:
        left_to_us = self.processes is None and self.time_limit_s is None
        return dataclasses.replace(
            settings,
            runs=self.runs,
            processes=self.processes or PROCESSES,
            processes_within_s=PROCESSES_WITHIN_S if left_to_us else None,
            time_limit_s=settings.time_limit_s if self.time_limit_s is None else self.time_limit_s,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Baseline:
    """A file that can be compared, and what to compare it with, if that need not be measured."""

    path: Path
    before: Result
    after: Result | None = None

    @property
    def model(self) -> str:
        return self.before.settings.model

    def check_comparable(self, after: Result) -> None:
        if differences := find_differences(self.before, after):
            raise PegprofError(
                "the baseline is not comparable: " + "; ".join(differences),
                where=str(self.path),
                hint=f"make a new one: {command_of(self.before.settings, export_json=self.path)}",
                exit_code=ExitCode.INCOMPARABLE,
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gate:
    """A baseline, what it was compared with, and what came of it."""

    baseline: str  # the file, or the revision
    before: Result
    after: Result
    changes: tuple[Change, ...]
    time: bool
    interleaved: bool = False  # two revisions, in the same rounds

    @property
    def model(self) -> str:
        return self.before.settings.model

    @property
    def failures(self) -> list[Change]:
        return [change for change in self.changes if change.is_failure]

    @property
    def unresolved(self) -> list[Change]:
        return [change for change in self.changes if change.outcome == "unresolved"]

    @property
    def improvements(self) -> list[Change]:
        return [change for change in self.changes if change.outcome == "better"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refusal:
    """A baseline that could not be compared, and why."""

    baseline: str  # the file
    error: PegprofError

    @property
    def words(self) -> str:
        """Why, with the place if that is not the baseline itself."""
        error = self.error
        return error.what if error.where in ("", self.baseline) else f"{error.where}: {error.what}"


def pass_gates(
    paths: Sequence[Path],
    *,
    limits: LimitTable,
    measure: Measure,
    result: Path | None = None,
    effort: Effort = Effort(),
    warn: Warn = _ignore,
) -> tuple[list[Gate], list[Refusal]]:
    """As ``pass_gate`` for each file; one that cannot be compared does not hide what came of the others.

    Args:
      limits: what is allowed.
      measure: makes the result to compare, from settings.
      result: a file to compare with, instead of measuring.
      effort: what may be spent on times.
      warn: is told what of the file of limits limits nothing.

    Raises:
      PegprofError: a limit of the command line limits nothing.
    """
    baselines: list[Baseline] = []
    gates: list[Gate] = []
    refusals: list[Refusal] = []
    for path in paths:
        with _collecting(refusals, path):
            baselines.append(read_baseline(path, time=limits.time, result=result))
    if not refusals:  # a file that cannot be read may be the one that a limit is for
        for warning in _check_limits(limits, baselines):
            warn(warning)
    for baseline in baselines:
        with _collecting(refusals, baseline.path):
            gates.append(pass_gate(baseline, limits=limits, measure=measure, effort=effort))
    return gates, refusals


def exit_code(gates: Sequence[Gate], errors: Sequence[PegprofError], *, no_fail: bool = False) -> ExitCode:
    """A regression first, and last that something is not comparable: that alone may be no reason to stop."""
    if any(gate.failures for gate in gates) and not no_fail:
        return ExitCode.NO
    codes = [error.exit_code for error in errors]
    return min(codes, key=lambda code: (code == ExitCode.INCOMPARABLE, code), default=ExitCode.OK)


@contextlib.contextmanager
def _collecting(refusals: list[Refusal], baseline: Path) -> Iterator[None]:
    try:
        yield
    except PegprofError as error:
        refusals.append(Refusal(baseline=str(baseline), error=error))


def _check_limits(limits: LimitTable, baselines: Sequence[Baseline]) -> list[str]:
    methods_of: dict[str, dict[str, None]] = {}
    for baseline in baselines:
        methods_of.setdefault(baseline.model, {}).update(dict.fromkeys(baseline.before.settings.methods))
    timed = limits.time or any(baseline.after and has_times(baseline.after) for baseline in baselines)
    return check_limits(limits, methods_of, timed=timed)


def pass_gate(baseline: Baseline, *, limits: LimitTable, measure: Measure, effort: Effort = Effort()) -> Gate:
    """Compares a baseline with the same runs of today.

    Args:
      limits: what is allowed.
      measure: makes the result to compare, from settings.
      effort: what may be spent on times.

    Raises:
      PegprofError: exit code 4 for a baseline that is not comparable.
    """
    before, limits_of = baseline.before, _limits_of(limits, baseline.model)
    settings = settings_of(before, time=limits.time, effort=effort)
    looks = Looks(sequential=baseline.after is None)

    def enough(so_far: Result, batch: int) -> bool:
        return times_settled(before, so_far, batch=batch, limits=limits_of)

    after = baseline.after or measure(settings, baseline.check_comparable, enough)
    baseline.check_comparable(after)
    changes = compare_results(before, after, limits=limits_of, time=limits.time, looks=looks)
    return Gate(baseline=str(baseline.path), before=before, after=after, changes=tuple(changes), time=limits.time)


def pass_against(
    settings: Settings, *, revision: str, limits: LimitTable, measure: MeasurePair, effort: Effort = Effort()
) -> Gate:
    """Compares a revision of the user's code with the code as it is.

    Args:
      settings: what to measure.
      revision: how it is called.
      limits: what is allowed.
      measure: measures both.
      effort: what may be spent on times.

    Raises:
      PegprofError: exit code 4 if the two are not comparable, 3 if there is nothing to compare with.
    """
    limits_of, looks = _limits_of(limits, settings.model), Looks(sequential=True, interleaved=True)
    if limits.time:
        settings = effort.apply(settings)

    def check(before: Result, after: Result) -> None:
        if differences := find_differences(before, after):
            what = f"{revision} is not comparable: {'; '.join(differences)}"
            raise PegprofError(
                what, hint="name the options, so that both have the same", exit_code=ExitCode.INCOMPARABLE
            )

    def enough(before: Result, after: Result, batch: int) -> bool:
        return times_settled(before, after, batch=batch, limits=limits_of)

    before, after = measure(dataclasses.replace(settings, time=limits.time), check, enough)
    for row in before.rows:
        if row.status == "failed":
            what = f"{row.method} at batch {row.batch} failed in {revision}: {row.reason}"
            raise PegprofError(what, exit_code=ExitCode.UNMEASURED)
    changes = compare_results(before, after, limits=limits_of, time=limits.time, looks=looks)
    return Gate(
        baseline=revision, before=before, after=after, changes=tuple(changes), time=limits.time, interleaved=True
    )


def _limits_of(limits: LimitTable, model: str) -> LimitsOf:
    return lambda method: limits.of(model, method)


def read_baseline(path: Path, *, time: bool, result: Path | None = None) -> Baseline:
    """A file that ``pegprof run --export-json`` wrote, to be compared with what is measured or with another such file.

    Args:
      time: whether times will be compared.

    Raises:
      PegprofError: exit code 2 for a file that is no baseline.
    """
    before = read_result(path)
    _check_baseline(before, path, time=time)
    return Baseline(path=path, before=before, after=read_result(result) if result else None)


def read_result(path: Path) -> Result:
    """A Result from a file, its JSON or its log; what is wrong with the file is said with its name."""
    try:
        data = path.read_bytes()
        return log.read_result(data, str(path)) if log.is_log(data) else Result.from_json(data.decode("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        what = getattr(error, "strerror", None) or str(error)
        raise PegprofError(f"cannot be read: {what}", where=str(path)) from error
    except PegprofError as error:
        raise PegprofError(error.what, where=str(path), hint=error.hint, exit_code=error.exit_code) from error


def settings_of(baseline: Result, *, time: bool, effort: Effort = Effort()) -> Settings:
    """What to measure again: the same, for as much memory as there was, and timed only if time is compared."""
    on_host = [row.capacity_bytes for row in baseline.rows if is_host(row.target) and row.capacity_bytes]
    settings = dataclasses.replace(
        baseline.settings, time=time and baseline.settings.time, planned_bytes=min(on_host, default=None)
    )
    return effort.apply(settings) if settings.time else settings


def _check_baseline(baseline: Result, path: Path, *, time: bool) -> None:
    """Raises if it says nothing, or nonsense: a gate that passes whatever comes is worse than none."""

    def refuse(why: str) -> PegprofError:
        needed = dataclasses.replace(baseline.settings, time=time or baseline.settings.time)
        needed = dataclasses.replace(needed, processes=BASELINE_PROCESSES) if time else needed
        hint = f"make a new one: {command_of(needed, export_json=path)}"
        return PegprofError(f"this is no baseline: {why}", where=str(path), hint=hint)

    if not baseline.complete:
        raise refuse("the run was stopped before its end")
    settings = baseline.settings
    asked = set(itertools.product(settings.batches, settings.methods, settings.targets or baseline.targets))
    if not asked or {(row.batch, row.method, row.target) for row in baseline.rows} != asked:
        raise refuse("its rows are not those that its settings ask for")
    for row in baseline.rows:
        for metric in (*EXACT, *OF_THE_MODEL):
            value = getattr(row, metric)
            if value is not None and value < 0:
                raise refuse(f"{metric} of {row.method} is {value}")
        if row.status == "failed":
            raise refuse(f"{row.method} at batch {row.batch} failed in it")
        if row.peak_bytes is None:
            raise refuse(f"{row.method} at batch {row.batch} has no peak_bytes")
    if baseline.environment is None:
        raise refuse("it does not say what it was made with")
    if any(not all(0 < x < float("inf") for x in times_s) for times_s in baseline.samples_s.values()):
        raise refuse("it has times that are no times")
    if time and not any(row.time_ratio is not None for row in baseline.rows):
        raise refuse("time is to be compared, and it has no times beside those of grad")
    for row in baseline.rows if time else ():
        times = [baseline.samples.get((row.batch, method), ()) for method in (row.method, "grad")]
        if row.time_ratio is not None and not log_ratios(*times):
            raise refuse(f"it does not say which times of {row.method} and grad are of the same round")


def find_differences(before: Result, after: Result) -> list[str]:
    """What two results do not have in common and would have to, to be compared."""
    differences = [
        f"{name} was {_shown(old)}, is {_shown(new)}"
        for name in MUST_AGREE
        if (old := getattr(before.environment, name, None)) != (new := getattr(after.environment, name, None))
    ]
    compilers = {(row.batch, row.method, row.target): row.compiler for row in after.rows}
    for row in before.rows:
        new = compilers.get((row.batch, row.method, row.target), row.compiler)
        if row.compiler != new:
            difference = f"the compiler for {row.target} was {_shown(row.compiler)}, is {_shown(new)}"
            differences += [] if difference in differences else [difference]
    meshes = [{row.target: row.mesh for row in result.rows} for result in (before, after)]
    for target in meshes[0].keys() & meshes[1].keys():
        old, new = (of_target[target] for of_target in meshes)
        if old != new:
            differences.append(f"the mesh of {target} was {_shown(old)}, is {_shown(new)}")
    for name in ("model", "batches", "targets", "stats", "step", "microbatch_size", "seed"):
        old, new = getattr(before.settings, name), getattr(after.settings, name)
        if old != new:
            differences.append(f"{name} was {_shown(old)}, is {_shown(new)}")
    for name in sorted({*before.options, *after.options}):
        old, new = before.options.get(name), after.options.get(name)
        if old != new:
            differences.append(f"option {name} was {_shown(old)}, is {_shown(new)}")
    return differences


def _shown(value: object) -> str:
    if value is None:
        return "not set"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def command_of(settings: Settings, *, export_json: Path) -> str:
    """What to type for a new result with these settings.

    >>> settings = Settings(model="mlp", batches=(8, 16), time=False, options={"width": 32})
    >>> command_of(settings, export_json=Path("b.json"))
    'pegprof run mlp --batch 8,16 --set width=32 --no-time --no-csv --export-json b.json'
    >>> command_of(Settings(model="mlp", targets=("cpu:8",), mesh={"data": 2, "fsdp": 4}), export_json=Path("b.json"))
    'pegprof run mlp --batch 64 --target cpu:8 --mesh data=2,fsdp=4 --no-csv --export-json b.json'
    """
    default = Settings(model=settings.model)
    words = ["pegprof", "run", settings.model, "--batch", ",".join(map(str, settings.batches))]
    for key, value in settings.options.items():
        words += ["--set", f"{key}={value}"]
    flags = {
        "methods": ",".join(settings.methods) if settings.methods != default.methods else None,
        "target": ",".join(settings.targets) or None,
        "mesh": describe(settings.mesh) or None,
        "step": settings.step,
        "stats": ",".join(settings.stats) if not settings.step and settings.stats != default.stats else None,
        "microbatch-size": _unless_default(settings, default, "microbatch_size"),
        "warmup": _unless_default(settings, default, "warmup"),
        "runs": _unless_default(settings, default, "runs"),
        "processes": _unless_default(settings, default, "processes"),
        "time-limit": _unless_default(settings, default, "time_limit_s"),
        "memory-limit": f"{settings.memory_limit_bytes}B" if settings.memory_limit_bytes else None,
        "seed": _unless_default(settings, default, "seed"),
    }
    words += [word for flag, value in flags.items() if value is not None for word in (f"--{flag}", value)]
    words += [] if settings.time else ["--no-time"]
    words += [] if settings.check else ["--no-check"]
    return shlex.join([*words, "--no-csv", "--export-json", str(export_json)])


def _unless_default(settings: Settings, default: Settings, name: str) -> str | None:
    value = getattr(settings, name)
    return None if value == getattr(default, name) else f"{value:g}" if isinstance(value, float) else str(value)
