"""The command as people and programs use it: a real process, its streams and its exit code."""

import csv
import io
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import pegprof
from pegprof.problem import zoo_names
from pegprof.profiling.result import METHODS

MODELS = str(Path(__file__).parent / "profiling" / "models.py")


@pytest.fixture
def pegprof_in(tmp_path):
    """Runs ``pegprof ARGUMENTS`` in a folder of its own."""

    def run(*arguments, **environment):
        command = [sys.executable, "-m", "pegprof", *map(str, arguments)]
        root = str(Path(__file__).parents[1])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        env = {**os.environ, "PYTHONPATH": path, **environment}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)

    run.folder = tmp_path
    return run


def rows_of(text):
    return {row["method"]: row for row in csv.DictReader(io.StringIO(text))}


# What costs nothing.


def test_help_takes_less_than_400_ms(pegprof_in):
    times_s = []
    for _ in range(5):
        start_s = time.perf_counter()
        assert pegprof_in("--help").returncode == 0
        times_s.append(time.perf_counter() - start_s)
    assert min(times_s) < 0.4


def test_help_loads_neither_jax_nor_pandas():
    code = (
        "import sys; from pegprof.cli import app; app(['run', '--help'], standalone_mode=False); "
        "sys.exit(bool({'jax', 'pandas', 'numpy', 'rich'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


def test_version_is_data_on_stdout(pegprof_in):
    assert pegprof_in("--version").stdout == f"pegprof {pegprof.__version__}\n"


def test_list_names_every_model_of_the_zoo_with_its_description(pegprof_in):
    done = pegprof_in("list")
    assert done.returncode == 0
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    assert [name for name, _ in lines] == zoo_names()
    assert all(description for _, description in lines)


# What is refused before anything is measured.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "mlp", "--batch", "many"], "'many' is not a batch size"),
        (["run", "mlp", "--memory-limit", "20GB"], "hint: write it like 20GiB"),
        (["run", "mlp", "--set", "width"], "--set width has no value"),
        (["run", "mlp", "--methods", "grad,grad"], "not a list of different names"),
        (["run", "mlp", "--runs", "0"], "--runs"),
        (["run", "mlpp"], "hint: did you mean 'mlp'?"),
        (["run", "mlp", "--methods", "vmpa"], "hint: did you mean 'vmap'?"),
        (["run", "mlp", "--stats", "men"], "hint: did you mean 'mean'?"),
        (["run", "mlp", "--set", "widht=3"], "hint: did you mean 'width'?"),
        (["run", "mlp", "--microbatch-size", "3"], "no microbatches of 3"),
        (["run", "no_such_file.py:model"], "there is no file 'no_such_file.py'"),
        (["walk"], "walk"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_said_on_stderr_with_exit_code_2(pegprof_in, arguments, words):
    done = pegprof_in(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_debug_shows_the_traceback(pegprof_in):
    assert "Traceback" in pegprof_in("run", "mlp", "--batch", "many", "--debug").stderr


def test_a_place_that_cannot_be_written_is_said_before_anything_is_measured(pegprof_in):
    (pegprof_in.folder / "reports").write_text("a file where the folder should be")
    done = pegprof_in("run", "mlp")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: cannot write reports/mlp-b64-cpu.csv")
    assert "hint:" in done.stderr
    assert "needs" not in done.stderr


# What is measured.


def test_a_model_that_prints_does_not_spoil_the_csv_on_stdout(pegprof_in):
    done = pegprof_in("run", f"{MODELS}:prints_at_every_trace", "--methods", "grad", "--no-time", "--export-csv", "-")
    assert done.returncode == 0, done.stderr
    assert list(rows_of(done.stdout)) == ["grad"]
    assert len(done.stdout.splitlines()) == 2
    assert "prints: 15 parameters" in done.stderr  # the table
    assert not list(pegprof_in.folder.iterdir())


def test_a_method_that_crashes_is_a_failed_row_and_exit_code_3(pegprof_in):
    done = pegprof_in("run", f"{MODELS}:dies_when_alone", "--methods", "grad,vmap", "--no-time", "--export-csv", "-")
    assert done.returncode == 3
    rows = rows_of(done.stdout)
    assert (rows["grad"]["status"], rows["vmap"]["status"]) == ("ok", "failed")
    assert "SIGKILL" in rows["vmap"]["reason"]


@pytest.mark.slow
def test_what_does_not_fit_is_refused_with_exit_code_0(pegprof_in):
    limit = ["--memory-limit", "64KiB", "--set", "width=64"]
    done = pegprof_in("run", "mlp", "--methods", "grad,vmap", *limit, "--export-csv", "-", "--quiet")
    assert done.returncode == 0, done.stderr
    for row in rows_of(done.stdout).values():
        assert (row["status"], row["evidence"], row["time_s"]) == ("refused", "compiled", "")
        assert "64.0 KiB available" in row["reason"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options", "dominate"),
    [("mlp", ["--set", "width=32"], "false"), ("transformer-tiny", ["--seq-len", "64", "--set", "layers=1"], "true")],
)
def test_run_measures_every_method(pegprof_in, model, options, dominate):
    done = pegprof_in("run", model, "--batch", "4", "--runs", "3", *options)
    assert done.returncode == 0, done.stderr
    rows = rows_of((pegprof_in.folder / "reports" / f"{model}-b4-cpu.csv").read_text())
    assert tuple(rows) == METHODS
    for row in rows.values():
        assert (row["status"], row["evidence"], row["runs"], row["time_batch"]) == ("ok", "measured", "3", "4")
        assert float(row["time_s"]) > 0
        assert int(row["peak_bytes"]) > int(row["parameter_bytes"])
        assert int(row["flops"]) > 0
        assert row["activations_dominate"] == dominate
    assert (rows["grad"]["time_ratio"], rows["grad"]["peak_ratio"]) == ("1.0", "1.0")
    assert max(float(row["max_rel_error"] or 0) for row in rows.values()) < 1e-3
    assert done.stdout.startswith(f"{model}: ")
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert "\x1b[" not in done.stdout
    assert f"wrote reports/{model}-b4-cpu.csv" in done.stderr
