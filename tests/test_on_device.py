"""``benchmarks/on_device.py``, with kernels interpreted on a CPU, and with an accelerator that is made up."""

import collections
import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import on_device
from benchmarks.children import on_device as child
from benchmarks.on_device_cases import PROGRAMS, Shape, list_cases, parse_shapes
from benchmarks.on_device_rows import COLUMNS
from pegprof.engine.kernels import gpu, tpu
from pegprof.errors import ExitCode, PegprofError, first_line
from pegprof.measure.process import ChildFailure
from pegprof.measure.worker.main import Reporter
from pegprof.targets.selection import Target
from tests.waiting import LIMIT_S

ROOT = Path(__file__).parent.parent
LINEAR = """
import jax, jax.numpy as jnp, pegprof
linear = pegprof.Problem(
    name="linear",
    init=lambda key: {"w": jax.random.normal(key, (8, 16))},
    loss=lambda p, x: jnp.mean(jnp.tanh(x @ p["w"]) ** 2),
    batch=lambda key, B: jax.random.normal(key, (B, 24, 8)),
)
"""
TINY = ("--allow-cpu", "--rounds", 2, "--batch", 2, "--shapes", "128x16x24", "--dtype", "float32")


@pytest.fixture(scope="module")
def linear(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "linear.py"
    path.write_text(LINEAR, encoding="utf-8")
    return f"{path}:linear"


class Here:
    """A child's jobs in this process, where a test can change what they call."""

    alive = True

    def __init__(self, jobs):
        self.jobs, self.requests = jobs, collections.deque()

    def send(self, job, request):
        self.requests.append((job, json.loads(json.dumps(request))))

    def receive(self, *, limit_s, watch=None):
        job, request = self.requests.popleft()
        reporter = Reporter(self)
        try:
            self.jobs[job](request, reporter)
        except Exception as error:
            if isinstance(error, PegprofError | ChildFailure):
                raise
            raise ChildFailure(first_line(error), answer=reporter.answer, output="") from error
        return reporter.answer

    def send_bytes(self, text):
        json.loads(text)

    def close(self):
        pass


def invoke(*arguments):
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command()(on_device.main)
    return CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)


def read(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def in_process(monkeypatch):
    monkeypatch.setattr(on_device, "start_child", lambda target, *, debug: Here(child.JOBS))


def run_as_program(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.on_device", *map(str, arguments)],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def test_without_an_accelerator_it_says_so_and_ends_with_3():
    done = run_as_program()
    assert done.returncode == ExitCode.UNMEASURED == 3
    assert "error: no TPU and no NVIDIA GPU was found\nhint: " in done.stderr
    assert "--allow-cpu" in done.stderr


@pytest.mark.slow
def test_it_measures_kernels_and_programs_in_processes_of_its_own(linear, tmp_path):
    file = tmp_path / "rows.csv"
    done = run_as_program(*TINY, "--model", linear, "--export-csv", file)
    assert done.returncode == 0, done.stderr
    rows = read(file)
    assert tuple(rows[0]) == COLUMNS
    assert [row["name"] for row in rows] == ["outer", "gram", "rows", *PROGRAMS]
    assert {row["status"] for row in rows} == {"ok"}
    for row in rows:
        assert float(row["time_s"]) > 0
        assert float(row["ratio"]) > 0
        assert row["evidence"] == "interpreted on a CPU"  # never "measured": the time of an interpreter says nothing
        assert (row["device_kind"], row["chip"], row["kernels_of"]) == ("cpu", "", "tpu-v5p")
    outer, grad, surgery = rows[0], rows[3], rows[-1]
    assert outer["shape"] == "2×128×16×24"
    assert outer["flops"] == str(2 * 2 * 128 * 16 * 24)
    assert float(outer["max_rel_error"]) < 1e-5
    assert (grad["ratio"], grad["peak_ratio"], grad["peak_evidence"]) == ("1.0", "1.0", "compiled")
    assert (surgery["kernel_sites"], surgery["compared_with"]) == ("1", "surgery-without-kernels")
    assert float(surgery["max_rel_error"]) < 1e-5
    assert "surgery-without-kernels" in done.stdout  # the table


def test_kernels_of_a_gpu_are_interpreted_too(in_process, tmp_path):
    file = tmp_path / "rows.csv"
    result = invoke(*TINY, "--chip", "h100", "--part", "kernels", "--dtype", "bfloat16", "--export-csv", file)
    assert result.exit_code == 0
    assert [(row["name"], row["dtype"], row["status"]) for row in read(file)] == [
        ("outer", "bfloat16", "ok"),
        ("gram", "bfloat16", "ok"),
    ]


def test_a_kernel_that_does_not_compile_is_a_failed_row_and_the_rest_goes_on(in_process, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise NotImplementedError("no such instruction")

    monkeypatch.setattr(tpu, "fold_outer", fail)
    file = tmp_path / "rows.csv"
    result = invoke(*TINY, "--part", "kernels", "--export-csv", file)
    assert result.exit_code == ExitCode.UNMEASURED
    outer, gram, rows = read(file)
    assert (outer["status"], outer["reason"]) == ("failed", "NotImplementedError: no such instruction")
    assert outer["time_s"] == ""
    assert outer["tile"]  # what was known before it failed
    assert (gram["status"], rows["status"]) == ("ok", "ok")


def test_a_kernel_whose_values_are_off_is_a_wrong_row(in_process, tmp_path, monkeypatch):
    right = gpu.fold_outer
    monkeypatch.setattr(gpu, "fold_outer", lambda *args, **kwargs: [1.1 * x for x in right(*args, **kwargs)])
    file = tmp_path / "rows.csv"
    result = invoke(*TINY, "--chip", "h100", "--part", "kernels", "--export-csv", file)
    assert result.exit_code == ExitCode.UNMEASURED
    outer, gram = read(file)
    assert (outer["status"], outer["reason"]) == ("wrong", "off by 0.1, more than 0.001")
    assert float(outer["time_s"]) > 0  # it may be of use to whoever repairs it
    assert gram["status"] == "ok"


TIMES = {"times_s": [0.9, 1.0, 1.1], "ratios": [1.9, 2.0, 2.1], "reference_times_s": [0.5, 0.5, 0.5], "calls": 1}
V5P = {
    "backend": "tpu",
    "device_kind": "TPU v5",
    "known_chip": "tpu-v5p",
    "chip": "tpu-v5p",
    "runtime": "PJRT C API",
    "jax": "0.10.2",
    "jaxlib": "0.10.2",
    "libtpu": "0.0.42",
    "cuda_plugin": None,
    "matmul_precision": None,
    "xla_flags": None,
    "libtpu_init_args": None,
}


@pytest.fixture
def v5p(monkeypatch, tmp_path):
    """A TPU that is made up: the table of its jobs, which a test may change, and how often a process was started."""
    started = []
    peaks = {"grad": 100, "vmap": 180, "surgery-without-kernels": 150, "surgery": 120}

    def time_programs(request, reporter):
        reporter.update(programs={name: {**TIMES, "peak_bytes": 90} for name in request["programs"]}, failures={})

    def measure_memory(request, reporter):
        peak = peaks[request["program"]]
        reporter.update(device_peak_bytes=peak, estimated_s=peak / 1000)

    jobs = {
        "describe_device": lambda request, reporter: reporter.update(**V5P),
        "describe_model": lambda request, reporter: reporter.update(takes_dtype=True, dtype="float32"),
        "measure_kernel": lambda request, reporter: reporter.update(**TIMES, flops=3, bytes_moved=4, estimated_s=0.8),
        "time_programs": time_programs,
        "measure_memory": measure_memory,
    }

    def start(target, *, debug):
        started.append(target)
        return Here(jobs)

    target = Target(name="tpu", backend="tpu", environment={}, runs=True)
    monkeypatch.setattr(on_device, "find_target", lambda *, allow_cpu: target)
    monkeypatch.setattr(on_device, "start_child", start)
    monkeypatch.chdir(tmp_path)
    return jobs, started


def test_on_an_accelerator_the_report_is_named_after_the_chip(v5p):
    result = invoke()
    assert result.exit_code == 0
    rows = read(Path("reports/on-device-tpu-v5p.csv"))
    kernels, programs = rows[:13], rows[13:]
    assert [row["shape"] for row in kernels[:3]] == ["64×512×1024×4096", "64×512×4096×1024", "64×512×1024×1024"]
    assert [row["shape"] for row in kernels if row["name"] == "rows"] == ["64×32100×512"]
    assert [(row["name"], row["dtype"]) for row in programs] == [
        (name, dtype) for dtype in ("float32", "bfloat16") for name in PROGRAMS
    ]
    versions = ("device_kind", "chip", "jax", "jaxlib", "libtpu", "evidence")
    assert {tuple(row[name] for name in versions) for row in rows} == {
        ("TPU v5", "tpu-v5p", "0.10.2", "0.10.2", "0.0.42", "measured")
    }
    assert (kernels[0]["time_s"], kernels[0]["flops_per_s"], kernels[0]["estimated_s"]) == ("1.0", "3.0", "0.8")
    assert float(kernels[0]["time_iqr_s"]) == pytest.approx(0.1)


def test_a_cpu_leaves_no_report_unless_a_file_is_named(v5p, monkeypatch):
    jobs, started = v5p
    cpu = Target(name="cpu", backend="cpu", environment={}, runs=True)
    monkeypatch.setattr(on_device, "find_target", lambda *, allow_cpu: cpu)
    jobs["describe_device"] = lambda request, reporter: reporter.update(**{**V5P, "backend": "cpu"})
    assert invoke("--allow-cpu", "--dtype", "float32").exit_code == 0
    assert not list(Path().iterdir())
    assert len(started) == 2  # no peaks, of which a CPU keeps no account


def test_every_peak_is_taken_in_a_fresh_process_and_stands_beside_that_of_grad(v5p):
    _, started = v5p
    assert invoke("--part", "programs", "--dtype", "float32").exit_code == 0
    assert len(started) == 1 + 1 + len(PROGRAMS)  # the device, the times, each peak
    rows = {row["name"]: row for row in read(Path("reports/on-device-tpu-v5p.csv"))}
    assert (rows["surgery"]["peak_bytes"], rows["surgery"]["peak_evidence"]) == ("120", "device")
    assert (rows["surgery"]["peak_ratio"], rows["surgery"]["estimated_ratio"]) == ("1.2", "1.2")


def test_a_device_that_keeps_no_account_shows_compiled_bytes(v5p):
    jobs, _ = v5p
    jobs["measure_memory"] = lambda request, reporter: reporter.update(device_peak_bytes=None)
    assert invoke("--part", "programs", "--dtype", "float32").exit_code == 0
    rows = read(Path("reports/on-device-tpu-v5p.csv"))
    assert {(row["peak_bytes"], row["peak_evidence"], row["estimated_s"]) for row in rows} == {("90", "compiled", "")}


def test_a_program_that_takes_its_process_down_is_left_out_of_the_next(v5p):
    jobs, _ = v5p
    others = jobs["time_programs"]

    def die_of_vmap(request, reporter):
        if "vmap" in request["programs"]:
            raise ChildFailure("killed by SIGABRT", answer={"doing": "vmap"}, output="")
        others(request, reporter)

    jobs["time_programs"] = die_of_vmap
    assert invoke("--part", "programs", "--dtype", "float32").exit_code == ExitCode.UNMEASURED
    rows = {row["name"]: row for row in read(Path("reports/on-device-tpu-v5p.csv"))}
    assert (rows["vmap"]["status"], rows["vmap"]["reason"]) == ("failed", "killed by SIGABRT")
    assert {row["status"] for name, row in rows.items() if name != "vmap"} == {"ok"}


def test_a_program_that_does_not_fit_is_refused_which_is_an_answer(v5p):
    jobs, _ = v5p

    def refuse(request, reporter):
        done = {name: TIMES for name in PROGRAMS if name != "vmap"}
        reporter.update(programs=done, failures={"vmap": "JaxRuntimeError: RESOURCE_EXHAUSTED: 40 GiB"})

    jobs["time_programs"] = refuse
    assert invoke("--part", "programs", "--dtype", "float32").exit_code == 0
    rows = {row["name"]: row for row in read(Path("reports/on-device-tpu-v5p.csv"))}
    assert rows["vmap"]["status"] == "refused"


def test_a_device_that_does_not_start_is_said_with_a_hint(v5p):
    jobs, _ = v5p

    def fail(request, reporter):
        raise RuntimeError("Unable to initialize backend 'tpu'")

    jobs["describe_device"] = fail
    with pytest.raises(PegprofError, match="the device does not start: RuntimeError: Unable") as caught:
        invoke()
    assert caught.value.exit_code == ExitCode.UNMEASURED


def test_a_device_that_is_not_in_the_table_is_named_as_jax_names_it(v5p):
    jobs, _ = v5p
    unknown = {**V5P, "backend": "gpu", "device_kind": "NVIDIA RTX 9090", "known_chip": None, "chip": "h100"}
    jobs["describe_device"] = lambda request, reporter: reporter.update(**unknown)
    assert invoke("--part", "kernels").exit_code == 0
    (row, *_) = read(Path("reports/on-device-nvidia-rtx-9090.csv"))
    assert (row["chip"], row["kernels_of"]) == ("", "h100")


def test_what_is_asked_for_is_checked_first():
    with pytest.raises(PegprofError, match="unknown part 'kernel'"):
        invoke("--part", "kernel")
    with pytest.raises(PegprofError, match="unknown dtype 'float16'"):
        invoke("--dtype", "float16")
    with pytest.raises(PegprofError, match="512x1024 is no shape"):
        parse_shapes("512x1024")


def test_only_tpus_take_rows_and_only_in_float32():
    def names(chip):
        cases = list_cases(
            chip,
            [Shape(T=1, D=2, E=3)],
            batch=4,
            vocab=5,
            dtypes=("float32", "bfloat16"),
            interpret=False,
        )
        return [(case.kernel, case.dtype) for case in cases]

    assert ("rows", "float32") in names("tpu-v5e")
    assert ("rows", "bfloat16") not in names("tpu-v5e")
    assert "rows" not in dict(names("a100"))
