"""Real children, real models, everything that can go wrong in them. A child takes two or three seconds."""

import contextlib
import dataclasses
import signal
import subprocess
import sys
import tempfile
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import psutil
import pytest

import pegprof
from pegprof.compare.gate import read_result
from pegprof.errors import ExitCode, PegprofError
from pegprof.measure import protocol, workers
from pegprof.measure.process import Child
from pegprof.measure.progress import Silence
from pegprof.measure.protocol import Subject
from pegprof.measure.session import Session, measure
from pegprof.measure.worker import compiling
from pegprof.measure.workers import Workers
from pegprof.result import events
from pegprof.result.findings import Compiled
from pegprof.result.result import Result
from pegprof.result.settings import Settings
from pegprof.targets.selection import cpu_target, host_target
from tests.compilers import needs_compilers
from tests.waiting import finish, living, wait_for

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
    options = {"marker": str(tmp_path / "runs"), "after": 0}
    model = f"{MODELS}:dies_when_run_alone"
    rows = by_method(pegprof.profile(model, batch=4, options=options, methods=("grad", "vmap"), runs=3))
    assert rows["vmap"].status == "failed"
    assert "SIGKILL" in rows["vmap"].reason
    assert (rows["grad"].status, rows["grad"].runs, rows["grad"].time_ratio) == ("ok", 3, 1.0)


@pytest.mark.slow
def test_examples_that_interact_are_a_disagreement_said_in_words():
    result = pegprof.profile(f"{MODELS}:interacting_examples", batch=4, methods=("grad", "vmap"), runs=3)
    rows = by_method(result)
    assert rows["grad"].status == "failed"
    assert "is not the gradient of the batch: the examples interact" in rows["grad"].reason
    assert rows["grad"].max_rel_error > 1e-3
    assert rows["vmap"].status == "ok"
    assert result.exit_code == ExitCode.UNMEASURED


def nan_everywhere(w, x):
    return jnp.mean(jnp.sqrt(-1.0 - (x @ w) ** 2))


def nan_alone(w, x):
    """As with a standard deviation over the batch: of one example it is 0, and its gradient is not a number."""
    return nan_everywhere(w, x) if x.shape[0] == 1 else jnp.mean((x @ w) ** 2)


def test_gradients_that_are_not_numbers_have_no_error_and_that_is_said():
    result = pegprof.profile(notebook_problem(nan_everywhere), batch=4, runs=3)
    for row in result.rows:
        assert (row.status, row.max_rel_error) == ("ok", None)
        assert "NaN in the statistics" in row.reason.split("; ")
        assert "the loss of 4 examples is NaN" in row.reason.split("; ")
        assert ("not verified: no finite number to compare" in row.reason) == (row.method != "microbatch")
    assert result.exit_code == ExitCode.OK
    assert Result.from_json(result.to_json()) == result


def test_not_a_number_by_one_method_alone_is_a_disagreement():
    result = pegprof.profile(notebook_problem(nan_alone), batch=4, methods=("grad", "vmap"), runs=3)
    rows = by_method(result)
    assert (rows["grad"].status, rows["grad"].max_rel_error) == ("failed", float("inf"))
    assert "is not the gradient of the batch" in rows["grad"].reason
    assert rows["vmap"].status == "ok"
    assert "NaN in the statistics" in rows["vmap"].reason.split("; ")
    assert result.exit_code == ExitCode.UNMEASURED
    assert Result.from_json(result.to_json()) == result


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


def notebook_problem(loss=lambda w, x: jnp.mean((x @ w) ** 2)):
    """A Problem that no other process could import."""
    return pegprof.Problem(
        name="here",
        init=lambda key: jax.random.normal(key, (8, 4)),
        loss=loss,
        batch=lambda key, B: jax.random.normal(key, (B, 8)),
    )


def test_a_problem_that_children_cannot_import_is_measured_in_this_process():
    result = pegprof.profile(notebook_problem(), batch=4, runs=3)
    for row in result.rows:
        assert (row.status, row.evidence, row.runs, row.target) == ("ok", "measured", 3, "cpu")
        assert "in this process" in row.reason.split("; ")
    assert by_method(result)["surgery"].max_rel_error < 1e-5
    assert result.complete
    assert Result.from_json(result.to_json()) == result


def test_parameters_whose_class_is_another_at_each_call_are_measured_too():
    """As of a module with a static field that is a lambda: no two of its trees are equal."""

    def init(key):
        class Block(typing.NamedTuple):
            w: jax.Array

        return Block(jax.random.normal(key, (8, 4)))

    problem = dataclasses.replace(notebook_problem(lambda block, x: jnp.mean((x @ block.w) ** 2)), init=init)
    for step in (None, "micro_adam"):
        result = pegprof.profile(problem, batch=4, runs=1, methods=("grad", "surgery"), step=step)
        assert [(row.status, row.evidence) for row in result.rows] == 2 * [("ok", "measured")], result


def test_what_goes_wrong_in_this_process_fails_alone_too():
    def loss(w, x):
        if x.shape[0] == 1:
            raise ValueError("no batches of one, please")
        return jnp.mean((x @ w) ** 2)

    rows = by_method(pegprof.profile(notebook_problem(loss), batch=4, methods=("grad", "vmap"), time=False))
    assert (rows["grad"].status, rows["vmap"].status) == ("ok", "failed")
    assert "ValueError: no batches of one, please" in rows["vmap"].reason


def test_the_compilation_cache_is_as_before_after_measuring_in_this_process():
    before = jax.config.jax_enable_compilation_cache
    pegprof.profile(notebook_problem(), batch=2, methods=("grad",), time=False)
    assert jax.config.jax_enable_compilation_cache == before


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"methods": ("grad", "vmpa")}, "hint: did you mean 'vmap'?"),
        ({"stats": ("men",)}, "hint: did you mean 'mean'?"),
        ({"options": {"widht": "3"}}, "hint: did you mean 'width'?"),
        ({"microbatch_size": 3}, "a batch of 64 has no microbatches of 3"),
        ({"model": "no_such_file.py:model"}, "there is no file 'no_such_file.py'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_wrong_with_a_request_is_the_first_answer_of_a_child(asked, words):
    subject = Subject.at(Settings(**{"model": "mlp", **asked}), cpu_target())
    with pytest.raises(PegprofError) as caught:
        compiling.describe(protocol.Describe(subject=subject), None)
    assert words in str(caught.value)
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"problem": 3}, "a int cannot be measured"),
        ({"problem": notebook_problem(), "options": {"width": 3}}, "a Problem takes no options"),
        ({"problem": "mlp", "options": {"dtype": jnp.float32}}, "the options cannot be handed to another process"),
        ({"problem": "mlp", "batch": 0}, "0 is not a batch size"),
        ({"problem": "mlp", "batch": True}, "True is not a batch size"),
        ({"problem": "mlp", "batch": ()}, "there is no batch size"),
        ({"problem": "mlp", "batch": (8, 8)}, "the batch size 8 is named twice"),
    ],
    ids=range(7),
)
def test_what_profile_cannot_take_is_refused_at_once(arguments, words):
    with pytest.raises(PegprofError, match=words):
        pegprof.profile(**arguments)


def test_the_layers_are_known_without_surgery_too():
    result = pegprof.profile(notebook_problem(), batch=2, methods=("grad",), time=False)
    assert [(layer.T, layer.D) for layer in result.verdict.layers] == [(1, 4)]
    assert result.plans == {}


def test_the_result_is_saved_with_each_step_and_says_when_it_is_whole():
    saved = []
    settings = Settings(model="here", batches=(2,), methods=("grad", "surgery"), runs=3)
    measure(settings, talk=Silence(), save=saved.append, problem=notebook_problem())
    assert [len(result.rows) for result in saved][:3] == [1, 2, 2]
    assert [result.complete for result in saved] == [False] * (len(saved) - 1) + [True]
    assert saved[0].rows[0].reason == "in this process; not timed yet"
    assert "not timed yet" not in saved[-1].rows[0].reason
    assert (saved[-1].plans[2].batch, saved[-1].environment.backend) == (2, "cpu")


@needs_compilers
def test_what_a_result_will_be_made_with_is_known_before_anything_is_compiled():
    outlines, saved = [], []

    def end(outline):
        outlines.append(outline)
        raise PegprofError("that is enough")

    settings = Settings(model=f"{MODELS}:fine", batches=(4, 8), methods=("grad", "vmap"), targets=("cpu", "tpu-v5e"))
    with pytest.raises(PegprofError, match="that is enough"):
        measure(settings, talk=Silence(), save=saved.append, outlined=end)
    (outline,) = outlines
    assert saved == []
    assert outline.environment.jax == jax.__version__
    assert len(outline.rows) == 8
    assert {(row.target, row.compiler is not None) for row in outline.rows} == {("cpu", False), ("tpu-v5e", True)}


def test_a_batch_too_small_for_a_statistic_is_refused():
    with pytest.raises(PegprofError, match="at least 2"):
        pegprof.profile("mlp", batch=1, stats=("variance",))


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda how: how.name)
def test_no_child_is_left_when_the_command_is_ended_by(how):
    command = [sys.executable, "-m", "pegprof", "run", f"{MODELS}:fine", "--no-csv"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as parent:
        try:
            children = wait_for(lambda: psutil.Process(parent.pid).children(recursive=True))
            parent.send_signal(how)
            finish(parent)
        finally:
            parent.kill()
    wait_for(lambda: not living(children))
    assert parent.returncode == (ExitCode.INTERRUPTED if how == signal.SIGINT else -how)


def test_four_methods_take_five_processes_and_each_program_is_compiled_once(tmp_path, monkeypatch):
    started, sent = [], []

    class Counted(Child):
        def __init__(self, *args, **how):
            super().__init__(*args, **how)
            started.append(self)

        def send(self, job, request):
            sent.append((job, request.get("method"), request.get("batch")))
            super().send(job, request)

    monkeypatch.setattr(workers, "Child", Counted)
    result = measure(Settings(model=f"{MODELS}:fine", batches=(4,), runs=1), talk=Silence())
    assert {row.status for row in result.rows} == {"ok"}
    assert len(started) <= 5, "one a method, and one that checks the examples"
    compiled = [each for each in sent if each[0] == "Compile"]
    assert len(compiled) == len(set(compiled)) == 4


def test_a_program_is_compiled_once_and_read_back_by_another_child(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    settings = Settings(model=f"{MODELS}:fine", batches=(4,), methods=("surgery",))
    request = protocol.Compile(subject=Subject.at(settings, host_target()), method="surgery", batch=4)
    with contextlib.closing(Workers(settings=settings, talk=Silence())) as pool:
        compiled, _ = pool.compile(request, host_target())
        (folder,) = tmp_path.iterdir()
        programs = {path.name for path in folder.iterdir()}
        with contextlib.closing(pool.start(host_target())) as bench:
            protocol.send(bench, request)
            answer = protocol.receive(bench, Compiled, limit_s=600)
        assert programs
        assert {path.name for path in folder.iterdir()} == programs, "nothing new was compiled"
    assert (answer.temp_bytes, answer.peak_bytes) == (compiled.temp_bytes, compiled.peak_bytes)
    assert not list(tmp_path.iterdir()), "nothing is left"


# The log.


def test_a_log_that_is_whole_is_the_result_and_nothing_is_measured_again(tmp_path):
    how = dict(batch=4, methods=("grad", "surgery"), runs=3, log=tmp_path / "run.jsonl")
    first = pegprof.profile(notebook_problem(), **how)
    assert read_result(how["log"]) == first
    never = lambda w, x: pytest.fail("it was traced again")
    assert pegprof.profile(notebook_problem(never), **how) == first


def test_a_run_that_was_cut_short_goes_on_from_its_log(tmp_path):
    how = dict(batch=(4, 8), methods=("grad", "surgery"), runs=3, log=tmp_path / "run.jsonl")
    first = pegprof.profile(notebook_problem(), **how)
    lines = how["log"].read_bytes().splitlines(keepends=True)
    end_of_first = next(i for i, line in enumerate(lines) if b'"BatchTimed"' in line)
    how["log"].write_bytes(b"".join(lines[: end_of_first + 3]))  # in the middle of the second batch
    again = pegprof.profile(notebook_problem(), **how)
    assert again.complete
    assert {key: samples for key, samples in again.samples.items() if key[0] == 4} == {
        key: samples for key, samples in first.samples.items() if key[0] == 4
    }
    assert {row.batch: row.runs for row in again.rows} == {4: 3, 8: 3}


def test_a_log_of_another_measurement_is_refused(tmp_path):
    log = tmp_path / "run.jsonl"
    pegprof.profile(notebook_problem(), batch=4, methods=("grad",), time=False, log=log)
    with pytest.raises(PegprofError, match="the log is of another measurement"):
        pegprof.profile(notebook_problem(), batch=8, methods=("grad",), time=False, log=log)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [events.Described, events.MethodCompiled, events.FirstRun, events.Compared, events.Ran]
)
def test_a_worker_that_is_killed_at_any_event_costs_its_own_row_at_most(monkeypatch, kind):
    hear, killed = Session._hear, []

    def kill(session, event):
        hear(session, event)
        seat = session.workers.find(host_target(), "vmap") if hasattr(session, "workers") else None
        if isinstance(event, kind) and seat and not killed:
            killed.append(event)
            psutil.Process(seat.worker._process.pid).kill()

    monkeypatch.setattr(Session, "_hear", kill)
    settings = Settings(model=f"{MODELS}:fine", batches=(4,), methods=("grad", "vmap"), runs=3)
    result = measure(settings, talk=Silence())
    rows = by_method(result)
    assert killed
    assert (rows["grad"].status, rows["grad"].runs) == ("ok", 3)
    assert rows["vmap"].status == "ok" or "SIGKILL" in rows["vmap"].reason
    assert result.complete
