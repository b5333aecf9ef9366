"""The gate: what a baseline holds is measured again, at its settings, and compared with it.

    baseline.json ──> is it whole? ──> is it comparable? ──> measure again ──> compare_results ──> Gate

A baseline that cannot be read, holds nothing to compare, or was made by other versions or on another device is never a
pass: it raises, with the command that makes a new one.
"""

import contextlib
import dataclasses
import itertools
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pegprof.errors import ExitCode, PegprofError
from pegprof.profiling.comparison import EXACT, OF_THE_MODEL, Change, compare_results, has_times
from pegprof.profiling.limits import LimitTable, check_limits
from pegprof.profiling.result import Result, Settings

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
Measure = Callable[[Settings, Check], Result]
"""From settings. The check is given what the result will be made with, before anything is measured, and may raise."""
Warn = Callable[[str], None]


def _ignore(warning: str) -> None:
    pass


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

    baseline: str  # the file
    before: Result
    after: Result
    changes: tuple[Change, ...]
    time: bool

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
    paths: Sequence[Path], *, limits: LimitTable, measure: Measure, result: Path | None = None, warn: Warn = _ignore
) -> tuple[list[Gate], list[Refusal]]:
    """As ``pass_gate`` for each file; one that cannot be compared does not hide what came of the others.

    Args:
      limits: what is allowed.
      measure: makes the result to compare, from settings.
      result: a file to compare with, instead of measuring.
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
            gates.append(pass_gate(baseline, limits=limits, measure=measure))
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


def pass_gate(baseline: Baseline, *, limits: LimitTable, measure: Measure) -> Gate:
    """Compares a baseline with the same runs of today.

    Args:
      limits: what is allowed.
      measure: makes the result to compare, from settings.

    Raises:
      PegprofError: exit code 4 for a baseline that is not comparable.
    """
    before = baseline.before
    after = baseline.after or measure(settings_of(before, time=limits.time), baseline.check_comparable)
    baseline.check_comparable(after)
    changes = compare_results(before, after, limits=lambda method: limits.of(baseline.model, method), time=limits.time)
    return Gate(baseline=str(baseline.path), before=before, after=after, changes=tuple(changes), time=limits.time)


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
    """A Result from a file; what is wrong with the file is said with its name."""
    try:
        return Result.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        what = getattr(error, "strerror", None) or str(error)
        raise PegprofError(f"cannot be read: {what}", where=str(path)) from error
    except PegprofError as error:
        raise PegprofError(error.what, where=str(path), hint=error.hint, exit_code=error.exit_code) from error


def settings_of(baseline: Result, *, time: bool) -> Settings:
    """What to measure again: the same, for as much memory as there was, and timed only if time is compared."""
    on_host = [row.capacity_bytes for row in baseline.rows if row.target == "cpu" and row.capacity_bytes]
    return dataclasses.replace(
        baseline.settings, time=time and baseline.settings.time, planned_bytes=min(on_host, default=None)
    )


def _check_baseline(baseline: Result, path: Path, *, time: bool) -> None:
    """Raises if it says nothing, or nonsense: a gate that passes whatever comes is worse than none."""

    def refuse(why: str) -> PegprofError:
        needed = dataclasses.replace(baseline.settings, time=time or baseline.settings.time)
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
    """
    default = Settings(model=settings.model)
    words = ["pegprof", "run", settings.model, "--batch", ",".join(map(str, settings.batches))]
    for key, value in settings.options.items():
        words += ["--set", f"{key}={value}"]
    flags = {
        "methods": ",".join(settings.methods) if settings.methods != default.methods else None,
        "target": ",".join(settings.targets) or None,
        "step": settings.step,
        "stats": ",".join(settings.stats) if not settings.step and settings.stats != default.stats else None,
        "microbatch-size": _unless_default(settings, default, "microbatch_size"),
        "warmup": _unless_default(settings, default, "warmup"),
        "runs": _unless_default(settings, default, "runs"),
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
