"""Real children, real models, everything that can go wrong in them. A child takes two or three seconds."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import pegprof
from pegprof.engine.statistics import resolve
from pegprof.errors import ExitCode, PegprofError
from pegprof.profiling import methods, timing
from pegprof.profiling.verdict import Verdict, slope

MODELS = str(Path(__file__).with_name("models.py"))


def by_method(result):
    return {row.method: row for row in result.rows}


def test_a_method_that_raises_fails_alone():
    result = pegprof.profile(f"{MODELS}:raises_when_alone", batch=4, methods=("grad", "vmap"), time=False)
    rows = by_method(result)
    assert (rows["grad"].status, rows["grad"].evidence) == ("ok", "compiled")
    assert rows["vmap"].status == "failed"
    assert "ValueError: no batches of one, please" in rows["vmap"].reason
    assert result.exit_code == ExitCode.UNMEASURED


@pytest.mark.slow
def test_a_method_that_takes_the_timing_process_down_fails_alone(tmp_path):
    options = {"marker": str(tmp_path / "traced")}
    model = f"{MODELS}:dies_alone_the_second_time"
    rows = by_method(pegprof.profile(model, batch=4, options=options, methods=("grad", "vmap"), runs=3))
    assert rows["vmap"].status == "failed"
    assert "SIGKILL" in rows["vmap"].reason
    assert (rows["grad"].status, rows["grad"].runs, rows["grad"].time_ratio) == ("ok", 3, 1.0)


@pytest.mark.slow
def test_examples_that_interact_are_a_disagreement_said_in_words():
    result = pegprof.profile(f"{MODELS}:interacting_examples", batch=4, methods=("grad", "vmap"), runs=3)
    rows = by_method(result)
    assert rows["grad"].status == "failed"
    assert "the examples of a batch interact" in rows["grad"].reason
    assert rows["grad"].max_rel_error > 1e-3
    assert rows["vmap"].status == "ok"
    assert result.exit_code == ExitCode.UNMEASURED


@pytest.mark.parametrize(
    ("name", "words"), [("raises", "RuntimeError: this loss never works"), ("not_a_scalar", "not a scalar")]
)
def test_a_loss_that_is_wrong_is_the_users_error(name, words):
    with pytest.raises(PegprofError, match=words) as caught:
        pegprof.profile(f"{MODELS}:{name}", batch=4)
    assert caught.value.exit_code == ExitCode.USAGE


def test_a_loss_that_raises_is_placed_at_its_own_line():
    with pytest.raises(PegprofError) as caught:
        pegprof.profile(f"{MODELS}:raises", batch=4)
    file, _, line = caught.value.where.rpartition(":")
    assert Path(file).name == "models.py"
    assert "raise RuntimeError" in Path(file).read_text().splitlines()[int(line) - 1]


def test_a_problem_that_children_cannot_import_is_refused():
    problem = pegprof.Problem(name="here", init=lambda key: 0.0, loss=lambda p, b: p, batch=lambda key, B: B)
    with pytest.raises(PegprofError, match="could not import it again"):
        pegprof.profile(problem)


def test_a_batch_too_small_for_a_statistic_is_refused():
    with pytest.raises(PegprofError, match="at least 2"):
        pegprof.profile("mlp", batch=1, stats=("variance",))


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda how: how.name)
def test_no_child_is_left_when_the_command_is_ended_by(how):
    command = [sys.executable, "-m", "pegprof", "run", f"{MODELS}:fine", "--no-csv"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as parent:
        children = _wait_for(lambda: psutil.Process(parent.pid).children(recursive=True))
        os.kill(parent.pid, how)
        parent.wait(timeout=30)
    _wait_for(lambda: not any(child.is_running() for child in children))
    assert parent.returncode == (ExitCode.INTERRUPTED if how == signal.SIGINT else -how)


def _wait_for(condition, limit_s=30.0):
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return found


def test_activations_dominate_from_equality_on():
    assert Verdict(target="cpu", activation_bytes_per_example=8, parameter_bytes=8).activations_dominate
    assert not Verdict(target="cpu", activation_bytes_per_example=7, parameter_bytes=8).activations_dominate


def test_a_slope_is_never_negative():
    assert slope((100, 90)) == 0


@pytest.mark.slow
def test_when_time_is_short_the_first_runs_are_the_times_and_that_is_said():
    rows = by_method(pegprof.profile(f"{MODELS}:fine", batch=8, methods=("grad", "vmap"), time_limit_s=0.01))
    for row in rows.values():
        assert (row.status, row.evidence, row.runs, row.time_batch) == ("ok", "measured", 1, 2)
        assert "timed at batch 2; one cold run within the time limit" in row.reason


@pytest.mark.parametrize(
    ("batch", "stats", "microbatch_size", "expected"),
    [
        (64, ["mean"], 1, [64, 32, 16, 8, 4, 2, 1]),
        (64, ["variance"], 1, [64, 32, 16, 8, 4, 2]),
        (12, ["mean"], 4, [12]),
        (16, ["mean"], 4, [16, 8, 4]),
        (1, ["mean"], 1, [1]),
    ],
)
def test_timing_may_halve_the_batch_while_the_methods_stay_defined(batch, stats, microbatch_size, expected):
    options = methods.Options(stats=resolve(stats), microbatch_size=microbatch_size, backend="cpu")
    assert timing.candidate_batches(batch, options) == expected
