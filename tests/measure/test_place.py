"""Real compiles for TPUs and GPUs that are not here, of models as small as can be."""

import contextlib
import dataclasses
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import pegprof
from pegprof.errors import ExitCode, PegprofError
from pegprof.measure import protocol
from pegprof.measure.process import Child
from pegprof.measure.progress import Silence
from pegprof.measure.worker import compiling, place
from pegprof.measure.worker.place import parse_refusal
from pegprof.measure.workers import Workers
from pegprof.result.findings import Compiled
from pegprof.result.settings import Settings
from pegprof.targets.compilers import CUDA, TPU, has_wheels, install_line
from pegprof.targets.devices import DEVICES, GIB
from pegprof.targets.selection import absent_target
from tests.compilers import needs_compilers
from tests.waiting import LIMIT_S

FINE = str(Path(__file__).with_name("models.py")) + ":fine"
SETTINGS = Settings(model=FINE, batches=(4,))
HUGE = str(Path(__file__).with_name("models.py")) + ":huge"


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def compile_for(name, method="grad", batch=4, settings=SETTINGS, capacity_bytes=None):
    target = absent_target(DEVICES[name])
    with contextlib.closing(Workers(settings=settings, talk=Silence())) as workers:
        subject = workers.subject(target)
        asked = protocol.Compile(subject=subject, method=method, batch=batch, capacity_bytes=capacity_bytes)
        return workers.compile(asked, target)[0]


def request(name, **changes):
    settings = dataclasses.replace(SETTINGS, **changes)
    subject = protocol.Subject.at(settings, absent_target(DEVICES[name]))
    return protocol.Compile(subject=subject, method="grad", batch=4)


@needs_compilers
@pytest.mark.parametrize("compiler", [TPU, CUDA], ids=lambda compiler: compiler.backend)
def test_the_compilers_are_installed_wherever_they_have_wheels(compiler):
    """Or the tests below fail, and they shall not be skipped: then nothing would be proven."""
    assert compiler.is_installed, f"{install_line('test')} installs it"


@needs_compilers
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tpu", "gpu"])
def test_every_device_of_the_table_is_accepted_by_its_compiler(backend):
    """And has the memory that the table says, as far as the compiler tells."""
    devices = [device for device in DEVICES.values() if device.compiler.backend == backend]
    environment = absent_target(devices[0]).environment
    with contextlib.closing(Child(environment, talk=Silence())) as child:
        for device in devices:
            protocol.send(child, request(device.name))
            answer = protocol.receive(child, Compiled, limit_s=LIMIT_S)
            assert answer.argument_bytes >= 4 * (4 * 3 + 3 + 4 * 4), device.name
            if backend == "tpu":
                protocol.send(child, request(device.name, model=HUGE))
                answer = protocol.receive(child, Compiled, limit_s=LIMIT_S)
                assert answer.available_bytes == device.memory_bytes, device.name


@needs_compilers
def test_what_does_not_fit_is_refused_with_what_it_needs_and_what_there_is():
    refused = compile_for("tpu-v5e", settings=dataclasses.replace(SETTINGS, model=HUGE))
    assert (refused.refused, refused.failure, refused.available_bytes) == (True, None, int(15.75 * GIB))
    assert refused.peak_bytes > 100 * GIB
    assert not refused.fits(None)


@needs_compilers
def test_the_cache_answers_the_second_time_unless_it_is_told_not_to(tmp_path):
    first, second = (compile_for("h100") for _ in range(2))
    assert (first.from_cache, second.from_cache) == (False, True)
    assert dataclasses.replace(second, from_cache=False) == first
    for file in tmp_path.rglob("*.json"):
        file.write_text(file.read_text()[:10])
    assert not compile_for("h100").from_cache  # nor is one that is cut short believed


@needs_compilers
def test_two_compiles_for_a_tpu_do_not_fight_over_its_lock():
    environment = absent_target(DEVICES["tpu-v5e"]).environment
    with (
        contextlib.closing(Child(environment, talk=Silence())) as one,
        contextlib.closing(Child(environment, talk=Silence())) as other,
    ):
        for child in (one, other):
            protocol.send(child, request("tpu-v5e", cache=False))
        answers = [protocol.receive(child, Compiled, limit_s=LIMIT_S) for child in (one, other)]
    assert answers[0].peak_bytes == answers[1].peak_bytes > 0


@needs_compilers
@pytest.mark.slow
def test_a_run_for_targets_has_a_row_for_each_and_runs_nothing():
    names, methods = ("tpu-v5e", "h100"), ("grad", "surgery")
    result = pegprof.profile(FINE, batch=8, methods=methods, targets=names, memory_limit_bytes=20 * GIB)
    assert [(row.target, row.method) for row in result.rows] == [(name, m) for name in names for m in methods]
    assert {(row.evidence, row.time_s) for row in result.rows} == {("compiled", None)}
    tpu, _, gpu, _ = result.rows
    assert (tpu.status, tpu.device, tpu.capacity_bytes) == ("ok", "TPU v5e", DEVICES["tpu-v5e"].memory_bytes)
    assert (gpu.status, gpu.device, gpu.capacity_bytes) == ("ok", "NVIDIA H100 80 GB", 20 * GIB)
    assert (result.plans[8].backend, result.other_plans["h100"][8].backend) == ("tpu-v5e", "h100")
    assert [result.verdict_on(name).target for name in names] == list(names)
    assert result.exit_code == ExitCode.OK
    assert pegprof.Result.from_json(result.to_json()) == result


class TightPlace:
    """As ``place.Place``, for a device into which nothing fits but two examples at a time."""

    device, mesh = DEVICES["h100"], None

    def __init__(self, name, mesh, problem):
        self.compiled = 0

    def compile(self, fn, *arguments, use_cache):
        self.compiled += 1
        return None, {"peak_bytes": 100 if self.compiled < 3 else 10, "flops": 1}


class Teller:
    def __init__(self):
        self.answer, self.sizes = {}, []

    def update(self, **fields):
        self.answer |= fields
        self.sizes += [fields["microbatch_size"]] if "microbatch_size" in fields else []


def test_surgery_takes_fewer_at_a_time_until_it_really_fits(monkeypatch):
    monkeypatch.setattr(compiling, "Place", TightPlace)
    teller = Teller()
    asked = dataclasses.replace(request("h100"), method="surgery", batch=8, capacity_bytes=50)
    compiling.compile_method(asked, teller)
    assert teller.sizes == sorted(teller.sizes, reverse=True)
    assert len(set(teller.sizes)) == len(teller.sizes)
    assert teller.answer["microbatch_size"] == teller.sizes[-1]


def test_where_memory_is_short_activations_are_measured_at_fewer_examples():
    def compile_at(batch):
        if batch > 4:
            return {"refused": True, "peak_bytes": 1000 * batch}
        return {"peak_bytes": 100 * batch, "temp_bytes": 90 * batch}

    assert compiling._find_slope(compile_at, memory_bytes=500) == {2: 180, 4: 360}
    with pytest.raises(PegprofError, match="not even a batch of 1 fits"):
        compiling._find_slope(lambda batch: {"refused": True, "peak_bytes": 1}, memory_bytes=500)


def test_other_words_of_a_compiler_are_read_too():
    assert parse_refusal("Ran out of memory in memory space hbm. Used 16.5G of 15.75G hbm. Exceeded") == (
        int(16.5 * GIB),
        int(15.75 * GIB),
    )
    assert parse_refusal("RESOURCE_EXHAUSTED: nobody knows") is None


class Fragile:
    """A program that a compiler fails at, unless it leaves something out."""

    def __init__(self, needed=None, says="INTERNAL: Couldn't find output tile sizes"):
        self.needed, self.says, self.tried = needed, says, []

    def compile(self, options=None):
        self.tried.append(options)
        if options is None or options != self.needed:
            raise jax.errors.JaxRuntimeError(self.says if options is None else "INTERNAL: this way neither")
        return jax.jit(lambda x: x + 1).lower(1.0).compile()


def test_what_a_compiler_fails_at_is_tried_once_more_without_what_it_fails_at():
    program = Fragile(needed=CUDA.second_try.options)
    answer = place._compile_or_refuse(program, CUDA)
    assert answer["second_try"]
    assert answer["peak_bytes"] > 0
    assert program.tried == [None, CUDA.second_try.options]


def test_where_that_does_not_help_the_first_failure_is_told():
    with pytest.raises(jax.errors.JaxRuntimeError, match="output tile sizes"):
        place._compile_or_refuse(Fragile(), CUDA)
    with pytest.raises(jax.errors.JaxRuntimeError, match="output tile sizes"):
        place._compile_or_refuse(Fragile(), TPU)


def test_what_does_not_fit_is_not_tried_again():
    says = "the total memory required for HLO temporaries (22.50G) exceeds available HBM (15.75G)."
    program = Fragile(says=says)
    assert place._compile_or_refuse(program, CUDA)["refused"]
    assert program.tried == [None]


@needs_compilers
@pytest.mark.slow
def test_a_vision_transformer_is_compiled_for_a_gpu_and_the_row_says_how_the_cache_too():
    """Its 197 positions are what XLA's compiler fails at, as of 0.10.2."""
    options = {"layers": 1, "classes": 10}
    results = [
        pegprof.profile("vit-s16", options=options, batch=8, methods=("grad",), targets=("h100",), time=False)
        for _ in range(2)
    ]
    rows = [row for result in results for row in result.rows]
    assert [row.status for row in rows] == ["ok", "ok"]
    assert rows[0].reason in ("", CUDA.second_try.note)
    assert rows[1].reason == "; ".join(filter(None, [rows[0].reason, "from the cache, as compiled before"]))


def test_activations_are_not_the_difference_between_two_ways_to_compile():
    def compile_at(batch):
        return {"peak_bytes": 100 * batch, "temp_bytes": 90 * batch, "second_try": batch > 16}

    with pytest.raises(PegprofError, match="takes another way"):
        compiling._find_slope(compile_at, memory_bytes=10**6)


HIDE = """
import sys

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name in {hidden!r}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Hide())
"""


@pytest.mark.parametrize(
    ("target", "hidden", "extra"), [("tpu-v5e", "libtpu", "tpu"), ("h100", "nvidia.cuda_nvcc", "gpu")]
)
def test_a_wheel_that_is_missing_is_the_install_line_and_exit_code_3(tmp_path, monkeypatch, target, hidden, extra):
    (tmp_path / "sitecustomize.py").write_text(HIDE.format(hidden=[hidden]))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    command = [sys.executable, "-m", "pegprof", "run", FINE, "--target", target, "--no-csv"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=tmp_path)
    monkeypatch.chdir(tmp_path)  # the hint names a clone as seen from there
    remedy = install_line(extra) if has_wheels() else "its wheels are for Linux on x86-64 only"
    assert done.returncode == ExitCode.UNMEASURED
    assert f"error: the compiler for {target} is not installed\nhint: {remedy}" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@needs_compilers
def test_where_a_compiler_keeps_nothing_of_a_small_model_in_memory_the_trace_decides():
    settings = {"targets": ("tpu-v5e",), "methods": ("grad",), "batch": 4, "time": False}
    result = pegprof.profile(FINE, **settings)
    (row,) = result.rows
    assert (row.activation_bytes_per_example, row.activations_dominate) == (None, False)
    assert result.verdict.traced_bytes_per_example > 0
    text = " ".join(str(result).split())
    assert "Parameters dominate, by the trace: it counts 36 B of activations for one example" in text
    assert "XLA's figure for tpu-v5e cannot tell" in text
    assert "0 B of activations" not in text
    assert pegprof.Result.from_json(result.to_json()) == result
