"""Runs an experiment: each run once, a file for each that is finished, then tables, figures and a page.

What is stopped goes on where it was: a file is read instead of measured if its settings and the version of pegprof are
those of the run. After the time limit no run begins, and the page says how many there are of how many.
"""

import csv
import dataclasses
import importlib.util
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pegprof
from pegprof.errors import ExitCode, PegprofError
from pegprof.experiments.base import Experiment, Finding, Run, Tables
from pegprof.profiling.progress import Talk
from pegprof.profiling.units import format_duration

FULL_LIMIT_S, QUICK_LIMIT_S = 85 * 60.0, 4 * 60.0  # no run begins after this; the last may take a while


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What an experiment came to, and where it is written."""

    findings: Sequence[Finding]
    done: int
    planned: int
    page: Path


def run_experiment(
    experiment: Experiment,
    folder: Path,
    *,
    quick: bool,
    talk: Talk,
    now_s: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Run what is not yet on file, then write everything into the folder."""
    require_packages(experiment)
    runs = experiment.make_runs(quick)
    tables = _measure_all(experiment, runs, folder / "runs", QUICK_LIMIT_S if quick else FULL_LIMIT_S, talk, now_s)
    done = [run for run in runs if run.name in tables]
    if not done:
        raise PegprofError("the time limit came before a single run was finished", exit_code=ExitCode.TIME_LIMIT)
    merged = _merge([(run, tables[run.name]) for run in done])
    for name, rows in merged.items():
        _write_csv(folder / f"{name}.csv", rows)
    figures = experiment.draw(merged)
    for name, figure in figures.items():
        _save_figure(figure, folder / name)
    findings = experiment.judge(merged)
    page = folder / "README.md"
    page.write_text(
        render_page(experiment, findings, list(merged), list(figures), done=len(done), planned=len(runs), quick=quick),
        encoding="utf-8",
    )
    return Outcome(findings=findings, done=len(done), planned=len(runs), page=page)


def require_packages(experiment: Experiment) -> None:
    """Before hours of running, not after: what draws the figures must be there."""
    missing = [name for name in experiment.packages if importlib.util.find_spec(name) is None]
    if missing:
        raise PegprofError(
            f"the experiment {experiment.name} needs {' and '.join(missing)}, which are not installed",
            hint="pip install -e '.[experiments]'",
            exit_code=ExitCode.UNMEASURED,
        )


def _measure_all(
    experiment: Experiment, runs: Sequence[Run], folder: Path, limit_s: float, talk: Talk, now_s: Callable[[], float]
) -> dict[str, Tables]:
    """The tables of each run, from its file or by running it."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {run.name: tables for run in runs if (tables := _read_run(run, folder)) is not None}
    if found:
        talk(f"{len(found)} of {len(runs)} runs are on file")
    start_s, missing = now_s(), [run for run in runs if run.name not in found]
    for number, run in enumerate(missing):
        spent_s = now_s() - start_s
        if spent_s > limit_s:
            talk(f"{len(missing) - number} runs are left out: the time is up; the same command goes on with them")
            break
        left = format_duration(spent_s / number * (len(missing) - number)) if number else "–"
        talk.doing(f"{experiment.name}, run {len(found) + 1} of {len(runs)}, about {left} left: {run.name}")
        begun_s = now_s()
        found[run.name] = experiment.measure(run)
        _write_run(run, found[run.name], now_s() - begun_s, folder)
    return found


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


def _merge(done: Sequence[tuple[Run, Tables]]) -> Tables:
    """The rows of all runs, each with the settings of its run."""
    merged: Tables = {}
    for run, tables in done:
        for name, rows in tables.items():
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
    experiment: Experiment,
    findings: Sequence[Finding],
    tables: Sequence[str],
    figures: Sequence[str],
    *,
    done: int,
    planned: int,
    quick: bool,
) -> str:
    """The page of an experiment: what it is, what it found, what it looks like."""
    command = f"pegprof experiment {experiment.name}{' --quick' if quick else ''}"
    lines = [
        f"# {experiment.title}",
        "",
        f"By `{command}`, {done} of {planned} runs.",
        *(["This is the quick version: a look, no evidence."] if quick else []),
        "",
        *(line for paragraph in experiment.about for line in (paragraph, "")),
        "| what the paper says | what was measured here | |",
        "|---|---|---|",
        *(f"| {finding.claim} | {finding.measured} | {finding.verdict} |" for finding in findings),
        "",
        *(line for name in figures for line in (f"![{name}]({name}.png)", "")),
        f"The numbers: {', '.join(f'[{name}.csv]({name}.csv)' for name in tables)}.",
    ]
    return "\n".join(lines) + "\n"
