"""Runs side by side: whatever happens to a process costs its own run, and no process is left."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from concurrent import futures
from pathlib import Path

import psutil
import pytest

from pegprof import experiments
from pegprof.errors import ExitCode, PegprofError
from pegprof.experiments import adam_preconditioner
from pegprof.experiments.workers import MOST_LOST, Lost, measure_side_by_side
from tests.experiments.deadly import make_run, measure
from tests.waiting import finish, living, wait_for

ROOT = Path(__file__).parents[2]
OOM = "killed by SIGKILL, as the system does when memory runs out"


def always(run):
    return True


@pytest.fixture(autouse=True)
def processes(monkeypatch):
    """The processes of runs that there are; in the end there must be none, not even one that waits to be reaped."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    before = set(psutil.Process().children(recursive=True))

    def started():
        return set(psutil.Process().children(recursive=True)) - before

    yield started
    assert not started()


def kill(found):
    """Returns when they can be reaped: a zombie cannot, as long as one of its threads has not ended."""
    for process in found:
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def measure_all(runs, *, workers=2, may_begin=always, **how):
    measuring = measure_side_by_side(measure, runs, workers=workers, may_begin=may_begin, **how)
    return {run.name: found for run, found in measuring}


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
    side_by_side = measure_side_by_side(experiment.measure, short, workers=2, may_begin=may_begin)
    found = {run.name: tables for run, tables in side_by_side}
    assert begun == [run.name for run in short]
    assert found.keys() == {run.name for run in short}
    alone = experiment.measure(short[0])["training"][0]
    assert found[short[0].name]["training"][0]["held_out_loss"] == pytest.approx(alone["held_out_loss"], rel=1e-4)


def test_when_nobody_may_begin_nothing_is_measured(processes):
    assert measure_all([make_run("r")], may_begin=lambda run: False) == {}


def test_once_no_more_may_begin_those_that_have_are_finished():
    begun = []

    def may_begin(run):
        begun.append(run.name)
        return len(begun) <= 2

    assert measure_all([make_run(name) for name in "abc"], may_begin=may_begin).keys() == {"a", "b"}


def test_a_process_measures_one_run_after_the_other():
    found = measure_all([make_run(name) for name in "abcd"], workers=1)
    assert len({tables["training"][0]["pid"] for tables in found.values()}) == 1


def test_a_process_that_is_killed_is_said_and_not_waited_for(processes):
    def may_begin(run):
        if run.name == "second":  # the one that has the first run is starting
            kill(processes())
        return True

    found = measure_all([make_run("first"), make_run("second")], may_begin=may_begin)
    assert found["first"] == Lost(reason=OOM)
    assert found["second"]["training"][0]["loss"] == 2.0


@pytest.mark.parametrize(
    ("death", "reason"),
    [
        ({"die": signal.SIGKILL}, OOM),
        ({"die": signal.SIGSEGV}, "killed by SIGSEGV"),
        ({"exit": 7}, "the process ended with status 7"),
    ],
    ids=["SIGKILL", "SIGSEGV", "exit"],
)
def test_a_process_that_dies_costs_its_own_run_while_the_others_go_on(tmp_path, death, reason):
    go = tmp_path / "go"
    runs = [make_run("long", wait_for_file=str(go)), make_run("dies", **death), make_run("next"), make_run("last")]
    found = {}
    for run, tables in measure_side_by_side(measure, runs, workers=2, may_begin=always):
        found[run.name] = tables
        if run.name == "last":
            go.touch()
    assert list(found) == ["dies", "next", "last", "long"]
    assert found["dies"] == Lost(reason=reason)
    pids = {name: tables["training"][0]["pid"] for name, tables in found.items() if name != "dies"}
    assert pids["next"] == pids["last"] != pids["long"]


def test_a_process_that_is_killed_while_it_imports_jax_costs_its_own_run(processes):
    (run, *_) = adam_preconditioner.make_runs(True, {})
    measuring = measure_side_by_side(adam_preconditioner.measure, [run], workers=2, may_begin=always)

    def kill_when_jax_is_there():
        (process,) = wait_for(processes)
        wait_for(lambda: any("jaxlib" in mapped.path for mapped in process.memory_maps()))
        process.kill()

    with futures.ThreadPoolExecutor(1) as pool:
        killing = pool.submit(kill_when_jax_is_there)
        assert list(measuring) == [(run, Lost(reason=OOM))]
        killing.result()


def test_a_process_that_is_killed_between_two_runs_costs_none(tmp_path, processes):
    go = tmp_path / "go"
    pids = []

    def may_begin(run):
        if run.name == "third":
            kill([psutil.Process(pids[0])])
            go.touch()
        return True

    runs = [make_run("first"), make_run("second", wait_for_file=str(go)), make_run("third")]
    found = {}
    for run, tables in measure_side_by_side(measure, runs, workers=2, may_begin=may_begin):
        found[run.name] = tables["training"][0]["pid"]
        pids.append(found[run.name])
    assert found.keys() == {"first", "second", "third"}
    assert found["third"] not in (found["first"], found["second"])


def test_a_process_whose_own_process_holds_its_socket_open_is_not_waited_for(tmp_path):
    """So that the end of the socket is no sign of its death."""
    held = tmp_path / "pid"
    found = measure_all([make_run("dies", die_behind_a_process=str(held)), make_run("next")])
    assert found["dies"] == Lost(reason=OOM)
    assert found["next"]["training"]
    wait_for(lambda: not psutil.pid_exists(int(held.read_text())))  # its group is ended with it


def test_where_every_process_dies_it_ends_with_an_error():
    begun = []

    def may_begin(run):
        begun.append(run.name)
        return True

    runs = [make_run(f"r{i}", die=signal.SIGKILL) for i in range(9)]
    measuring = measure_side_by_side(measure, runs, workers=2, may_begin=may_begin)
    found = [next(measuring)[1] for _ in range(MOST_LOST)]
    with pytest.raises(PegprofError, match=f"{MOST_LOST} runs in a row were lost.*\n.*enough memory") as caught:
        next(measuring)
    assert caught.value.exit_code == ExitCode.UNMEASURED
    assert found == [Lost(reason=OOM)] * MOST_LOST
    assert len(begun) <= MOST_LOST + 1


def test_a_run_that_is_finished_in_between_counts_the_lost_ones_anew():
    deaths = [make_run(f"r{i}", die=signal.SIGKILL) for i in range(2 * (MOST_LOST - 1))]
    half = len(deaths) // 2
    found = measure_all([*deaths[:half], make_run("fine"), *deaths[half:]], workers=1)
    assert [name for name, each in found.items() if not isinstance(each, Lost)] == ["fine"]


def test_a_run_that_hangs_is_lost():
    found = measure_all([make_run("hangs", sleep=600)], run_limit_s=0.5)
    assert found == {"hangs": Lost(reason="it took too long and was stopped")}


def test_an_error_in_a_run_ends_everything_and_names_it_with_its_traceback():
    runs = [make_run("sleeps", sleep=600), make_run("fails", fail="no such axis")]
    with pytest.raises(RuntimeError, match="ValueError: no such axis, in the run fails") as caught:
        measure_all(runs)
    assert "in _raise\n    raise ValueError(what)" in str(caught.value)


def test_an_error_that_is_the_users_to_mend_comes_as_it_is():
    with pytest.raises(PegprofError) as caught:
        measure_all([make_run("refuses", refuse="a wrong file")])
    error = caught.value
    assert (error.what, error.where, error.hint) == ("a wrong file", "file.py:3", "another file")
    assert error.exit_code == ExitCode.USAGE


def test_when_the_rest_is_not_wanted_its_processes_are_ended(processes):
    runs = [make_run("sleeps", sleep=600), make_run("fine"), make_run("sleeps too", sleep=600)]
    measuring = measure_side_by_side(measure, runs, workers=2, may_begin=always)
    assert next(measuring)[0].name == "fine"
    assert len(processes()) == 2
    measuring.close()
    assert not processes()


SLEEPING = """
from pegprof.experiments.workers import measure_side_by_side
from tests.experiments.deadly import make_run, measure
runs = [make_run(name, sleep=600) for name in "ab"]
list(measure_side_by_side(measure, runs, workers=2, may_begin=lambda run: True))
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda how: how.name)
def test_no_process_is_left_when_the_command_is_ended_by(how):
    with subprocess.Popen([sys.executable, "-c", SLEEPING], stderr=subprocess.PIPE, text=True) as parent:
        try:
            started = wait_for(lambda: (found := psutil.Process(parent.pid).children())[1:] and found)
            parent.send_signal(how)
            _, stderr = finish(parent)
        finally:
            parent.kill()
    assert parent.returncode == -how
    assert ("KeyboardInterrupt" in stderr) == (how == signal.SIGINT)
    wait_for(lambda: not living(started))


@pytest.mark.parametrize("name", experiments.EXPERIMENTS)
def test_a_process_can_find_what_measures_the_runs_of_an_experiment_and_is_told_its_settings_whole(name):
    experiment = experiments.load_experiment(name)
    module = sys.modules[experiment.measure.__module__]
    assert getattr(module, experiment.measure.__qualname__) is experiment.measure
    for run in experiment.make_runs(True, {}):
        assert json.loads(json.dumps(run.settings)) == run.settings
