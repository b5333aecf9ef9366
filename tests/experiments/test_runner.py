"""Any experiment is run, resumed, cut off in time and written down."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pegprof import experiments
from pegprof.cli import app
from pegprof.errors import ExitCode, PegprofError
from pegprof.experiments.base import Experiment, Finding, Run
from pegprof.experiments.figures import make_panels, style
from pegprof.experiments.runner import FULL_LIMIT_S, run_experiment
from pegprof.measure.progress import Silence
from tests.experiments.deadly import make_run, measure


def draw(tables):
    figure, (axes,) = make_panels(1)
    axes.plot([row["rate"] for row in tables["training"]], [row["loss"] for row in tables["training"]], **style(0))
    return {"loss": figure}


class Counted:
    """An experiment of three runs that counts how often each is measured; a run takes as long as it is told."""

    def __init__(self, *, run_s=1.0, fail_at=None, packages=("matplotlib",)):
        self.measured, self.clock_s, self.run_s, self.fail_at = [], 0.0, run_s, fail_at
        self.experiment = Experiment(
            name="counted",
            title="Counting",
            about=("One paragraph.",),
            packages=packages,
            make_runs=lambda quick, tables: [Run(name=f"r{i}", settings={"rate": i, "quick": quick}) for i in range(3)],
            measure=self.measure,
            draw=draw,
            side_by_side=False,
            judge=lambda tables: [Finding(claim="they count", measured=str(len(tables["training"])), verdict="agrees")],
        )

    def measure(self, run):
        if run.name == self.fail_at:
            raise KeyboardInterrupt
        self.measured.append(run.name)
        self.clock_s += self.run_s
        return {"training": [{"loss": 2.0 * run.settings["rate"]}]}

    def run(self, folder, *, quick=False):
        return run_experiment(
            self.experiment, folder, quick=quick, talk=Silence(), workers=1, now_s=lambda: self.clock_s
        )


def test_a_whole_experiment_leaves_tables_figures_and_a_page(tmp_path):
    outcome = Counted().run(tmp_path)
    assert (outcome.done, outcome.planned) == (3, 3)
    assert (tmp_path / "training.csv").read_text().splitlines() == [
        "rate,quick,loss",
        "0,False,0.0",
        "1,False,2.0",
        "2,False,4.0",
    ]
    assert (tmp_path / "loss.png").stat().st_size > 1000
    assert (tmp_path / "loss.svg").read_text().startswith("<?xml")
    page = outcome.page.read_text()
    assert "By `pegprof experiment counted`, 3 of 3 runs." in page
    assert "| they count | 3 | agrees |" in page
    assert "![loss](loss.png)" in page


def test_what_was_interrupted_goes_on_where_it_stopped(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        Counted(fail_at="r2").run(tmp_path)
    second = Counted()
    assert second.run(tmp_path).done == 3
    assert second.measured == ["r2"]


def test_a_run_with_other_settings_is_measured_again(tmp_path):
    Counted().run(tmp_path)
    again = Counted()
    again.run(tmp_path, quick=True)
    assert again.measured == ["r0", "r1", "r2"]
    assert json.loads((tmp_path / "runs" / "r0.json").read_text())["run"]["settings"] == {"rate": 0, "quick": True}


def test_after_the_time_limit_no_run_begins_and_the_page_says_how_many_there_are(tmp_path):
    slow = Counted(run_s=FULL_LIMIT_S * 0.6)
    outcome = slow.run(tmp_path)
    assert (outcome.done, outcome.planned) == (2, 3)
    assert "2 of 3 runs" in outcome.page.read_text()
    assert slow.run(tmp_path).done == 3  # the same command goes on


def test_a_missing_package_is_named_with_what_installs_it_before_anything_runs(tmp_path):
    lacking = Counted(packages=("matplotlib", "no_such_package"))
    with pytest.raises(PegprofError, match=r"needs no_such_package.*\nhint: pip install .*\[experiments\]") as caught:
        lacking.run(tmp_path)
    assert caught.value.exit_code == ExitCode.UNMEASURED
    assert lacking.measured == []


def test_an_experiment_that_is_not_there_is_named_with_the_nearest():
    with pytest.raises(PegprofError, match="did you mean 'sign-placement'"):
        experiments.load_experiment("sign-placment")


def test_the_command_prints_the_findings_and_says_where_the_page_is(tmp_path, monkeypatch):
    monkeypatch.setattr(experiments, "load_experiment", lambda name: Counted().experiment)
    result = CliRunner().invoke(app, ["experiment", "counted", "--quick", "--out", str(tmp_path)])
    assert result.exit_code == 0
    assert result.stdout == "agrees: they count\n    3\n"
    assert str(tmp_path / "README.md") in result.stderr


class Staged(Counted):
    """First three runs, then one more at the rate that was best of those."""

    def __init__(self):
        super().__init__()
        self.experiment = dataclasses.replace(self.experiment, make_runs=self.make_runs)

    def make_runs(self, quick, tables):
        first = [Run(name=f"r{i}", settings={"rate": i}) for i in range(3)]
        rows = tables.get("training", [])
        if len(rows) < 3:
            return first
        best = max(rows, key=lambda row: row["loss"])["rate"]
        return [*first, Run(name="more", settings={"rate": best})]


def test_what_the_first_runs_found_says_what_the_next_are(tmp_path):
    staged = Staged()
    assert staged.run(tmp_path).done == 4
    assert staged.measured == ["r0", "r1", "r2", "more"]
    assert (tmp_path / "training.csv").read_text().splitlines()[-1] == "2,4.0"
    again = Staged()
    assert again.run(tmp_path).done == 4
    assert again.measured == []


class Mortal(Counted):
    """Runs side by side; the processes of the deadly ones die, unless a file is there."""

    def __init__(self, folder, *, names=("r0", "r1", "r2"), deadly=("r1",)):
        super().__init__()
        self.file = folder / "alive"
        does = {name: "die_unless" if name in deadly else "finish" for name in names}
        runs = [make_run(name, **{does[name]: str(self.file)}) for name in names]
        self.experiment = dataclasses.replace(
            self.experiment, side_by_side=True, measure=measure, make_runs=lambda quick, tables: runs
        )

    def run(self, folder):
        return run_experiment(self.experiment, folder, quick=False, talk=Silence(), workers=2)


@pytest.fixture
def tests_can_be_imported(monkeypatch):
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")])))


def test_a_run_whose_process_dies_is_named_on_the_page_and_measured_by_the_same_command(
    tmp_path, tests_can_be_imported
):
    first = Mortal(tmp_path)
    outcome = first.run(tmp_path)
    reason = "killed by SIGKILL, as the system does when memory runs out"
    assert (outcome.done, outcome.planned, outcome.lost) == (2, 3, {"r1": reason})
    assert f"2 of 3 runs.\nNot measured: `r1`, because its process died or hung: {reason}." in outcome.page.read_text()
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["r0.json", "r2.json"]
    kept = (tmp_path / "runs" / "r0.json").read_text()
    with pytest.raises(PegprofError, match=f"1 run is not measured: r1: {reason}\n.*enough memory"):
        outcome.require_all()
    first.file.touch()
    again = first.run(tmp_path)
    assert (again.done, again.lost) == (3, {})
    again.require_all()
    assert "Not measured" not in again.page.read_text()
    assert (tmp_path / "runs" / "r0.json").read_text() == kept


def test_where_all_runs_are_lost_there_is_no_page_and_no_talk_of_a_time_limit(tmp_path, tests_can_be_imported):
    with pytest.raises(PegprofError, match="2 runs are not measured: ") as caught:
        Mortal(tmp_path, names=("r0", "r1"), deadly=("r0", "r1")).run(tmp_path)
    assert caught.value.exit_code == ExitCode.UNMEASURED
    assert not (tmp_path / "README.md").exists()


def test_the_command_shows_what_there_is_and_fails_when_a_run_is_lost(tmp_path, monkeypatch, tests_can_be_imported):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(experiments, "load_experiment", lambda name: Mortal(tmp_path).experiment)
    result = CliRunner().invoke(app, ["experiment", "counted", "--out", str(tmp_path)])
    assert result.stdout == "agrees: they count\n    2\n"
    assert "the run r1 is lost: killed by SIGKILL" in result.stderr
    assert f"2 of 3 runs; wrote {tmp_path / 'README.md'}" in result.stderr
    assert isinstance(result.exception, PegprofError)
    assert result.exception.exit_code == ExitCode.UNMEASURED
