"""What is measured."""

import pytest

from pegprof.errors import ExitCode
from pegprof.result.settings import METHODS
from tests.cli.commands import GRAD_ALONE, rows_of

WHOLE_STEPS = """\
mlp: 26.5 k parameters, float32, batch 8, one step of micro_adam, optimizer state 207.1 KiB
cpu: """


def test_a_run_of_whole_steps_shows_the_state_and_whose_step_grad_is(pegprof_in):
    options = ["--set", "width=32", "--batch", "8", "--methods", "grad,surgery", "--no-time", "--quiet"]
    done = pegprof_in("run", "mlp", "--step", "micro_adam", *options)
    assert (done.returncode, done.stderr) == (ExitCode.OK, "")
    assert done.stdout.startswith(WHOLE_STEPS)
    assert "\ngrad: a step of adam, which takes the mean alone\n" in done.stdout
    assert "\nA step of micro_adam, which takes mean and second_moment, fits in memory here: surgery" in done.stdout
    rows = rows_of((pegprof_in.folder / "reports" / "mlp-micro_adam-b8-cpu.csv").read_text())
    assert {(row["step"], row["optimizer_state_bytes"]) for row in rows.values()} == {
        ("micro_adam", str(4 + 8 * 26506))
    }


def test_dtype_is_the_models_option(pegprof_in):
    done = pegprof_in("run", "mlp", "--dtype", "bfloat16", "--set", "width=8", *GRAD_ALONE[2:], "--export-csv", "-")
    assert done.returncode == 0, done.stderr
    assert rows_of(done.stdout)["grad"]["dtype"] == "bfloat16"


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
    hurry = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # the same bytes, in half the time that it takes to compile
    done = pegprof_in("run", model, "--batch", "4", "--runs", "3", *options, **hurry)
    assert done.returncode == 0, done.stderr
    rows = rows_of((pegprof_in.folder / "reports" / f"{model}-b4-cpu.csv").read_text())
    assert tuple(rows) == METHODS
    for row in rows.values():
        assert (row["status"], row["evidence"], row["runs"], row["time_batch"]) == ("ok", "measured", "3", "4")
        assert float(row["time_s"]) > 0
        assert int(row["peak_bytes"]) > int(row["parameter_bytes"])
        assert int(row["flops"]) > 0
        assert row["activations_dominate"] == dominate
        assert row["measured_batch"] == "4"
        assert abs(int(row["host_peak_bytes"]) - int(row["measured_batch_peak_bytes"])) <= 32 * 2**20
    assert (rows["grad"]["time_ratio"], rows["grad"]["peak_ratio"]) == ("1.0", "1.0")
    assert max(float(row["max_rel_error"] or 0) for row in rows.values()) < 1e-3
    assert done.stdout.startswith(f"{model}: ")
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert "\x1b[" not in done.stdout
    assert f"wrote reports/{model}-b4-cpu.csv" in done.stderr
