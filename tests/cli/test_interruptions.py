"""Stopping in the middle: by Ctrl-C, by a time limit, by what kills a process."""

import csv
import io
import json
import signal

import psutil
import pytest

from pegprof.errors import ExitCode
from pegprof.result.result import Result
from pegprof.result.settings import METHODS
from tests import packages
from tests.cli.commands import FINE, MODELS, rows_of
from tests.compilers import needs_compilers
from tests.waiting import finish, living, wait_for


def stop_when(process, condition):
    """Ctrl-C at a moment; returns what was on the streams when the process and all its children have ended."""

    def now():
        assert process.poll() is None, process.communicate()
        return condition()

    try:
        wait_for(now)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        streams = finish(process)
    finally:
        process.kill()
    wait_for(lambda: not living(children), limit_s=60)  # none is left behind; a killed one takes a moment to go
    return streams


def test_ctrl_c_ends_a_list_at_once_whatever_its_models_do(pegprof_in):
    sleeper = "import pathlib, time\npathlib.Path('begun').touch()\ntime.sleep(600)\nmodel = None\n"
    packages.install(pegprof_in.folder, "sleeper", sleeper, {"sleeps": "sleeper:model"})
    with pegprof_in.start("list") as process:
        stop_when(process, (pegprof_in.folder / "begun").exists)
    assert process.returncode == ExitCode.INTERRUPTED


def test_ctrl_c_leaves_the_rows_that_are_finished_in_the_files_and_on_the_screen(pegprof_in):
    file = pegprof_in.folder / "r.json"
    with pegprof_in.start("run", FINE, "--no-csv", "--export-json", "r.json", "--quiet") as process:
        stdout, stderr = stop_when(process, file.exists)
    assert (process.returncode, stderr) == (ExitCode.INTERRUPTED, "")
    result = Result.from_json(file.read_text())
    assert not result.complete
    methods = [row.method for row in result.rows]
    assert methods
    assert methods == list(METHODS[: len(methods)])
    assert result.rows[0].reason == "not timed yet"
    assert "Not all is measured" in stdout
    assert [line.split()[0] for line in stdout.splitlines() if line.startswith(METHODS)][: len(methods)] == methods


def timing_has_begun(file):
    """Whether every method has more runs than the first ones."""
    return file.exists() and all((row.runs or 0) > 3 for row in Result.from_json(file.read_text()).rows)


@pytest.mark.slow
def test_ctrl_c_while_timing_keeps_the_times_so_far(pegprof_in):
    talk = pegprof_in.folder / "talk.txt"
    command = ["run", FINE, "--methods", "grad,vmap", "--runs", "1000000", "--export-json", "r.json"]
    with talk.open("w") as stderr, pegprof_in.start(*command, stderr=stderr) as process:
        stop_when(process, lambda: timing_has_begun(pegprof_in.folder / "r.json"))
    assert process.returncode == ExitCode.INTERRUPTED
    result = Result.from_json((pegprof_in.folder / "r.json").read_text())
    assert [(row.method, row.evidence) for row in result.rows] == [("grad", "measured"), ("vmap", "measured")]
    assert [row.runs for row in result.rows] == [len(samples) for samples in result.samples_s.values()]
    assert [file.suffix for file in (pegprof_in.folder / "reports").iterdir()] == [".csv"]  # and no draft
    assert "XLA peak" in talk.read_text()  # memory and verdict came first


@needs_compilers
@pytest.mark.slow
def test_ctrl_c_during_a_fit_leaves_no_process_and_keeps_the_rows_found_so_far(pegprof_in):
    """The second compile of grad never ends; the search for vmap may be anywhere."""
    model = ["fit", f"{MODELS}:never_traced_beyond", "--set", "most=64", "--target", "h100"]
    file = pegprof_in.folder / "found.csv"
    with pegprof_in.start(
        *model, "--methods", "grad,vmap", "--export-csv", file.name, XDG_CACHE_HOME=str(pegprof_in.folder)
    ) as process:
        stdout, stderr = stop_when(process, lambda: file.exists() and "grad" in rows_of(file.read_text()))
    assert (process.returncode, stdout) == (ExitCode.INTERRUPTED, "")
    assert stderr.endswith("wrote found.csv, with what was compiled until then\n")
    assert "Traceback" not in stderr
    rows = list(csv.DictReader(io.StringIO(file.read_text())))
    assert [int(row["batch"]) for row in rows if row["method"] == "grad"] == [64]
    assert {row["status"] for row in rows} == {"ok"}  # none is failed because it was stopped


@pytest.mark.slow
def test_ctrl_c_while_meshes_are_tried_keeps_the_rows_of_those_before(pegprof_in):
    file = pegprof_in.folder / "found.csv"
    options = ["--target", "cpu:2", "--mesh", "auto", "--methods", "grad", "--up-to", "64", "--export-csv", file.name]
    with pegprof_in.start("fit", f"{MODELS}:twins", *options) as process:
        stdout, stderr = stop_when(process, file.exists)
    assert (process.returncode, stdout) == (ExitCode.INTERRUPTED, "")
    assert stderr.endswith("wrote found.csv, with what was compiled until then\n")
    assert "Traceback" not in stderr
    assert {row["mesh"] for row in csv.DictReader(io.StringIO(file.read_text()))} == {"data=2"}


@pytest.mark.slow
def test_ctrl_c_during_an_experiment_leaves_no_process_and_keeps_the_runs_that_are_finished(pegprof_in):
    pytest.importorskip("sklearn", reason="pip install -e '.[experiments]'")
    runs = pegprof_in.folder / "reports/sign-placement-quick/runs"
    with pegprof_in.start("experiment", "sign-placement", "--quick") as process:
        stdout, stderr = stop_when(process, lambda: list(runs.glob("*.json")))
    assert (process.returncode, stdout) == (ExitCode.INTERRUPTED, "")
    assert "Traceback" not in stderr
    assert all(json.loads(file.read_text())["tables"] for file in runs.iterdir())  # whole, and no draft


def test_a_method_that_crashes_is_a_failed_row_and_exit_code_3(pegprof_in):
    done = pegprof_in("run", f"{MODELS}:dies_when_alone", "--methods", "grad,vmap", "--no-time", "--export-csv", "-")
    assert done.returncode == 3
    rows = rows_of(done.stdout)
    assert (rows["grad"]["status"], rows["vmap"]["status"]) == ("ok", "failed")
    assert "SIGKILL" in rows["vmap"]["reason"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("after", "runs"),
    [(0, {""}), (2, {"1", "2"})],  # if the first run is held up for a tenth of a second, the next ones come one by one
    ids=["where its memory is measured", "where it is timed"],
)
def test_a_method_that_is_killed_while_it_runs_fails_alone_and_what_was_measured_is_on_disk(pegprof_in, after, runs):
    model = ["run", f"{MODELS}:dies_when_run_alone", "--set", "marker=marker", "--set", f"after={after}"]
    done = pegprof_in(*model, "--batch", "4", "--runs", "3", "--methods", "vmap,grad", "--no-check", "--quiet")
    assert done.returncode == 3, done.stderr
    (file,) = (pegprof_in.folder / "reports").iterdir()
    rows = rows_of(file.read_text())
    assert rows["vmap"]["status"] == "failed"
    assert rows["vmap"]["runs"] in runs
    assert "killed by SIGKILL" in rows["vmap"]["reason"]
    assert (rows["grad"]["status"], rows["grad"]["runs"]) == ("ok", "3")
    assert int(rows["grad"]["host_peak_bytes"]) > 0


@pytest.mark.slow
def test_a_time_limit_that_leaves_nothing_timed_is_exit_code_124(pegprof_in):
    done = pegprof_in("run", FINE, "--methods", "grad", "--time-limit", "1s", "--export-csv", "-", "--quiet")
    assert done.returncode == 124, done.stderr
    assert done.stderr.startswith("error: the time limit of 1s left too little time to measure")
    assert "\nhint: try --time-limit 1m, or --no-time for memory and verdict alone\n" in done.stderr
    (row,) = rows_of(done.stdout).values()
    assert (row["status"], row["evidence"], row["time_s"]) == ("skipped", "compiled", "")
    assert "time limit" in row["reason"]
    assert int(row["peak_bytes"]) > 0


@pytest.mark.slow
def test_a_run_that_takes_longer_than_the_time_limit_is_stopped_in_the_middle(pegprof_in):
    """And not after the hour that its first run would have taken."""
    model = ["run", f"{MODELS}:sleeps", "--set", "seconds=3600"]
    for limit_s in (15, 60, 240):  # on a slow machine a short limit is over before anything runs
        done = pegprof_in(*model, "--methods", "grad", "--time-limit", limit_s, "--no-csv", "--quiet")
        assert done.returncode == 124, done.stderr
        if "grad: stopped: it took longer than the time limit allows" in done.stdout:
            return
    pytest.fail(done.stdout)
