"""Any experiment is run, resumed, cut off in time and written down."""

import dataclasses
import json
import multiprocessing

import pytest
from typer.testing import CliRunner

from pegprof import experiments
from pegprof.cli import app
from pegprof.errors import ExitCode, PegprofError
from pegprof.experiments.base import Experiment, Finding, Run
from pegprof.experiments.figures import make_panels, style
from pegprof.experiments.runner import FULL_LIMIT_S, run_experiment
from pegprof.experiments.workers import measure_side_by_side
from pegprof.profiling.progress import Silence


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
    with pytest.raises(PegprofError, match=r"needs no_such_package.*\n.*\.\[experiments\]") as caught:
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


@pytest.mark.slow
def test_runs_side_by_side_give_what_they_give_one_by_one():
    pytest.importorskip("sklearn", reason="pip install -e '.[experiments]'")
    experiment = experiments.load_experiment("sign-placement")
    runs = [run for run in experiment.make_runs(True, {}) if run.name.startswith("digits")][:2]
    begun = []

    def may_begin(run):
        begun.append(run.name)
        return True

    short = [dataclasses.replace(run, settings={**run.settings, "steps": 2}) for run in runs]
    found = {
        run.name: tables for run, tables in measure_side_by_side(experiment.name, short, workers=2, may_begin=may_begin)
    }
    assert begun == [run.name for run in short]
    assert found.keys() == {run.name for run in short}
    alone = experiment.measure(short[0])["training"][0]
    assert found[short[0].name]["training"][0]["held_out_loss"] == pytest.approx(alone["held_out_loss"], rel=1e-4)


def test_when_nobody_may_begin_nothing_is_measured():
    runs = [Run(name="r", settings={})]
    assert list(measure_side_by_side("adam-preconditioner", runs, workers=2, may_begin=lambda run: False)) == []


def test_a_process_that_is_killed_is_said_and_not_waited_for():
    def may_begin(run):
        for child in multiprocessing.active_children():  # the one that has the first run
            child.kill()
        return True

    runs = [Run(name=name, settings={}) for name in ("first", "second")]
    with pytest.raises(PegprofError, match="a process that measured a run was killed") as caught:
        list(measure_side_by_side("sign-placement", runs, workers=2, may_begin=may_begin))
    assert caught.value.exit_code == ExitCode.UNMEASURED
