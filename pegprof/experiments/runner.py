"""Runs an experiment: each run once, a file for each that is finished, then tables, figures and a page.

What is stopped goes on where it was: a file is read instead of measured if its settings and the version of pegprof are
those of the run. After the time limit no run begins, and the page says how many there are of how many. A run whose
process dies is named there with the reason; the others go on.
"""

import contextlib
import csv
import dataclasses
import importlib.util
import itertools
import json
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pegprof
from pegprof.errors import ExitCode, PegprofError
from pegprof.experiments.base import Experiment, Finding, Run, Tables
from pegprof.experiments.workers import HINT, Lost, measure_side_by_side
from pegprof.measure.progress import Talk
from pegprof.targets.compilers import install_line
from pegprof.units import format_duration

FULL_LIMIT_S, QUICK_LIMIT_S = 85 * 60.0, 4 * 60.0  # no run begins after this; the last may take a while


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What an experiment came to, and where it is written. ``lost`` has the runs whose process died, and why."""

    findings: Sequence[Finding]
    done: int
    planned: int
    page: Path
    lost: Mapping[str, str]

    def require_all(self) -> None:
        """Raises PegprofError if a run was lost."""
        if self.lost:
            raise _lost_error(self.lost)


def run_experiment(
    experiment: Experiment,
    folder: Path,
    *,
    quick: bool,
    talk: Talk,
    workers: int | None = None,
    now_s: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Run what is not yet on file, then write everything into the folder.

    Args:
      experiment: which one.
      folder: where it goes.
      quick: whether to make do with what five minutes allow.
      talk: told what is being done.
      workers: how many runs are measured at once, 1 in this very process; None for one on each core.
      now_s: the clock.
    """
    require_packages(experiment)
    clock = _Clock(now_s=now_s, start_s=now_s(), limit_s=QUICK_LIMIT_S if quick else FULL_LIMIT_S)
    count = (workers or os.cpu_count() or 1) if experiment.side_by_side else 1
    runs, found, lost = _measure_all(experiment, folder / "runs", quick=quick, clock=clock, talk=talk, workers=count)
    if lost and not found:
        raise _lost_error(lost)
    if not found:
        raise PegprofError("the time limit came before a single run was finished", exit_code=ExitCode.TIME_LIMIT)
    merged = _merge(runs, found)
    for name, rows in merged.items():
        _write_csv(folder / f"{name}.csv", rows)
    figures = experiment.draw(merged)
    for name, figure in figures.items():
        _save_figure(figure, folder / name)
    findings = experiment.judge(merged)
    page = folder / "README.md"
    outcome = Outcome(findings=findings, done=len(found), planned=len(runs), page=page, lost=lost)
    page.write_text(render_page(experiment, outcome, list(merged), list(figures), quick=quick), encoding="utf-8")
    return outcome


def _lost_error(lost: Mapping[str, str]) -> PegprofError:
    reasons = "; ".join(f"{name}: {reason}" for name, reason in lost.items())
    what = f"{len(lost)} {'run is' if len(lost) == 1 else 'runs are'} not measured: {reasons}"
    return PegprofError(what, hint=HINT, exit_code=ExitCode.UNMEASURED)


def require_packages(experiment: Experiment) -> None:
    """Before hours of running, not after: what draws the figures must be there."""
    missing = [name for name in experiment.packages if importlib.util.find_spec(name) is None]
    if missing:
        raise PegprofError(
            f"the experiment {experiment.name} needs {' and '.join(missing)}, which are not installed",
            hint=install_line("experiments"),
            exit_code=ExitCode.UNMEASURED,
        )


@dataclasses.dataclass(kw_only=True)
class _Clock:
    """How the time goes: what is left is foretold from the runs that were measured so far."""

    now_s: Callable[[], float]
    start_s: float
    limit_s: float
    measured: int = 0

    @property
    def spent_s(self) -> float:
        return self.now_s() - self.start_s

    @property
    def is_up(self) -> bool:
        return self.spent_s > self.limit_s

    def foretell(self, runs: int) -> str:
        return format_duration(self.spent_s / self.measured * runs) if self.measured else "–"


def _measure_all(
    experiment: Experiment, folder: Path, *, quick: bool, clock: _Clock, talk: Talk, workers: int
) -> tuple[Sequence[Run], dict[str, Tables], dict[str, str]]:
    """All runs that are wanted, the tables of those that are done, from their files or by running them; and why those
    are not done whose process died."""
    folder.mkdir(parents=True, exist_ok=True)
    runs: Sequence[Run] = ()
    found: dict[str, Tables] = {}
    lost: dict[str, str] = {}
    while True:
        runs = experiment.make_runs(quick, _merge(runs, found))
        wanted = [run for run in runs if run.name not in found]
        if not wanted:
            return runs, found, lost
        on_file = {run.name: tables for run in wanted if (tables := _read_run(run, folder)) is not None}
        if on_file:
            talk(f"{len(on_file)} of {len(runs)} runs are on file")
            found |= on_file
        missing = [run for run in wanted if run.name not in found]
        measuring = _measure(experiment, missing, clock=clock, talk=talk, workers=workers)
        with contextlib.closing(measuring):  # whatever goes wrong here, no process is left
            for run, came, time_s in measuring:
                if isinstance(came, Lost):
                    lost[run.name] = came.reason
                    talk(f"the run {run.name} is lost: {came.reason}")
                else:
                    found[run.name] = came
                    _write_run(run, came, time_s, folder)
        if left := [run for run in runs if run.name not in found and run.name not in lost]:
            talk(f"{len(left)} runs are left out: the time is up; the same command goes on with them")
        if left or lost:
            return runs, found, lost


def _measure(
    experiment: Experiment, missing: Sequence[Run], *, clock: _Clock, talk: Talk, workers: int
) -> Generator[tuple[Run, Tables | Lost, float]]:
    """Each run with its tables and the time it took, as long as there is time to begin another."""
    begun_s: dict[str, float] = {}

    def may_begin(run: Run) -> bool:
        if clock.is_up:
            return False
        begun_s[run.name] = clock.now_s()
        left = clock.foretell(len(missing) - len(begun_s) + 1)
        talk.doing(f"{experiment.name}, run {len(begun_s)} of {len(missing)}, about {left} left: {run.name}")
        return True

    here = ((run, experiment.measure(run)) for run in itertools.takewhile(may_begin, missing))
    elsewhere = measure_side_by_side(experiment.measure, missing, workers=workers, may_begin=may_begin)
    with contextlib.closing(elsewhere):
        for run, tables in here if workers == 1 else elsewhere:
            clock.measured += not isinstance(tables, Lost)
            yield run, tables, clock.now_s() - begun_s[run.name]


def _read_run(run: Run, folder: Path) -> Tables | None:
    path = folder / f"{run.name}.json"
    if not path.exists():
        return None
    recorded = json.loads(path.read_text(encoding="utf-8"))
    return recorded["tables"] if recorded["run"] == _identity(run) else None


def _write_run(run: Run, tables: Tables, time_s: float, folder: Path) -> None:
    """Whole or not at all, whenever one interrupts."""
    path = folder / f"{run.name}.json"
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps({"run": _identity(run), "time_s": time_s, "tables": tables}), encoding="utf-8")
    draft.replace(path)


def _identity(run: Run) -> dict[str, Any]:
    return json.loads(json.dumps({"name": run.name, "settings": run.settings, "pegprof": pegprof.__version__}))


def _merge(runs: Sequence[Run], found: Mapping[str, Tables]) -> Tables:
    """The rows of all runs that are done, in the order of the runs, each with the settings of its own."""
    merged: Tables = {}
    for run in runs:
        for name, rows in found.get(run.name, {}).items():
            merged.setdefault(name, []).extend({**run.settings, **row} for row in rows)
    return merged


def _write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _save_figure(figure: Any, stem: Path) -> None:
    figure.savefig(stem.with_suffix(".png"), dpi=150)
    figure.savefig(stem.with_suffix(".svg"), metadata={"Date": None})


def render_page(
    experiment: Experiment, outcome: Outcome, tables: Sequence[str], figures: Sequence[str], *, quick: bool
) -> str:
    """The page of an experiment: what it is, what it found, what it looks like; and which runs are lost."""
    command = f"pegprof experiment {experiment.name}{' --quick' if quick else ''}"
    lines = [
        f"# {experiment.title}",
        "",
        f"By `{command}`, {outcome.done} of {outcome.planned} runs.",
        *(f"Not measured: `{name}`, because its process died or hung: {why}." for name, why in outcome.lost.items()),
        *(["This is the quick version: a look, no evidence."] if quick else []),
        "",
        *(line for paragraph in experiment.about for line in (paragraph, "")),
        "| what the paper says | what was measured here | |",
        "|---|---|---|",
        *(f"| {finding.claim} | {finding.measured} | {finding.verdict} |" for finding in outcome.findings),
        "",
        *(line for name in figures for line in (f"![{name}]({name}.png)", "")),
        f"The numbers: {', '.join(f'[{name}.csv]({name}.csv)' for name in tables)}.",
    ]
    return "\n".join(lines) + "\n"
