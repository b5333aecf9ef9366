"""The command as people and programs use it: a real process, its streams and its exit code."""

import csv
import fcntl
import glob
import io
import json
import os
import pty
import re
import resource
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import psutil
import pytest

import pegprof
from pegprof.errors import ExitCode
from pegprof.problem import zoo_names
from pegprof.profiling.devices import DEVICES
from pegprof.profiling.result import METHODS, Result
from tests import packages

FINE = str(Path(__file__).parent / "profiling" / "models.py") + ":fine"
MODELS = str(Path(__file__).parent / "profiling" / "models.py")


@pytest.fixture
def pegprof_in(tmp_path):
    """Runs ``pegprof ARGUMENTS`` in a folder of its own."""

    root = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))

    def start(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **environment):
        command = [sys.executable, "-m", "pegprof", *map(str, arguments)]
        env = {**os.environ, "PYTHONPATH": path, **environment}
        return subprocess.Popen(command, cwd=tmp_path, env=env, stdout=stdout, stderr=stderr, text=True)

    def run(*arguments, **environment):
        with start(*arguments, **environment) as process:
            stdout, stderr = process.communicate(timeout=300)
        return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)

    run.folder, run.start = tmp_path, start
    return run


def rows_of(text):
    return {row["method"]: row for row in csv.DictReader(io.StringIO(text))}


# What costs nothing.


def test_help_takes_less_than_400_ms(pegprof_in):
    """Of the processor: it waits for nothing, and the machine may be busy with other tests."""
    times_s = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert pegprof_in("--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times_s.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert min(times_s) < 0.4


def test_help_loads_neither_jax_nor_pandas():
    code = (
        "import sys; from pegprof.cli import app; app(['run', '--help'], standalone_mode=False); "
        "sys.exit(bool({'jax', 'pandas', 'numpy', 'rich'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


def test_version_is_data_on_stdout(pegprof_in):
    assert pegprof_in("--version").stdout == f"pegprof {pegprof.__version__}\n"


def test_list_names_every_model_of_the_zoo_in_less_than_5_s(pegprof_in):
    start_s = time.perf_counter()
    done = pegprof_in("list")
    assert time.perf_counter() - start_s < 5
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()[3:] if not line.startswith(" ")] == zoo_names()
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert "\x1b[" not in done.stdout


def test_list_as_json_has_what_the_table_has_and_more(pegprof_in):
    models = json.loads(pegprof_in("list", "--json").stdout)
    assert [model["name"] for model in models] == zoo_names()
    large = next(model for model in models if model["name"] == "transformer-151m")
    assert large["parameters_outside_embeddings"] == 150_994_944 + 25 * 1024
    assert (large["package"], large["batch"], large["seq_len"]) == ("pegprof", 64, 512)
    assert large["activations_dominate"]
    assert large["options"]["heads"] == 16


def test_a_package_that_prints_or_is_broken_spoils_no_json(pegprof_in):
    packages.install(pegprof_in.folder, "noisy", NOISY_MODEL, {"noisy-net": "noisy:model", "broken": "noisy:missing"})
    done = pegprof_in("list", "--json")
    assert done.returncode == 0
    assert [model["name"] for model in json.loads(done.stdout)] == [*zoo_names(), "noisy-net"]
    assert done.stderr == (
        "warning: broken of noisy cannot be used: noisy.py:1: there is no 'missing' here\nhint: known: model, Noisy\n"
    )


def test_ctrl_c_ends_a_list_at_once_whatever_its_models_do(pegprof_in):
    sleeper = "import pathlib, time\npathlib.Path('begun').touch()\ntime.sleep(600)\nmodel = None\n"
    packages.install(pegprof_in.folder, "sleeper", sleeper, {"sleeps": "sleeper:model"})
    with pegprof_in.start("list") as process:
        stop_when(process, (pegprof_in.folder / "begun").exists)
    assert process.returncode == ExitCode.INTERRUPTED
    assert not left_behind(process)


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
        (["run", "mlp", "--step", "micro_adma"], "hint: did you mean 'micro_adam'?"),
        (["fit", "mlp", "--step", "micro_adam", "--stats", "mean"], "hint: leave the statistics out"),
        (["run", "mlp", "--set", "widht=3"], "hint: did you mean 'width'?"),
        (["run", "mlp", "--microbatch-size", "3"], "no microbatches of 3"),
        (["run", "no_such_file.py:model"], "there is no file 'no_such_file.py'"),
        (["run", "mlp", "--export-csv", "-", "--export-json", "-"], "cannot both go to stdout"),
        (["run", "mlp", "--export-csv", "x.csv", "--no-csv"], "contradict each other"),
        (["run", "mlp", "--export-json", "/proc/x.json"], "error: cannot write /proc/x.json"),
        (["inspect", "mlpp"], "hint: did you mean 'mlp'?"),
        (["inspect", "mlp", "--stats", "men"], "hint: did you mean 'mean'?"),
        (["walk"], "walk"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_said_on_stderr_with_exit_code_2(pegprof_in, arguments, words):
    done = pegprof_in(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr


MODEL = """\
import jax
import jax.numpy as jnp
import numpy as np
import pegprof


def model(
    init=lambda key: jax.random.normal(key, (3,)),
    loss=lambda w, x: jnp.mean(x @ w),
    batch=lambda key, B: jax.random.normal(key, (B, 3)),
):
    return pegprof.Problem(name="mine", init=init, loss=loss, batch=batch)

"""  # and on line 14


@pytest.mark.parametrize(
    ("line_14", "error", "hint"),
    [
        ("def wrong(:", "mine.py:14: syntax error: invalid syntax", None),
        ("wrang = model()", "mine.py:1: there is no 'wrong' here", "did you mean 'wrang'?"),
        (
            "wrong = model(loss=lambda w, x: x @ w)",
            "mine.py:14: loss returned an array of shape (8,) and dtype float32, not a scalar",
            "return one number, the mean over the examples",
        ),
        (
            "wrong = model(batch=lambda key, B: jnp.ones((8, 3)))",
            "mine.py:14: batch was asked for 4 examples and returned shape (8, 3)",
            "every array that batch(key, B) returns has B rows, one for each example",
        ),
        (
            "wrong = model(init=lambda key: np.random.rand(3))",
            "mine.py:14: init is not deterministic: called twice, it differs",
            "draw all that is random from the key, with jax.random",
        ),
    ],
    ids=["syntax error", "missing name", "vector", "ignores B", "random init"],
)
def test_a_users_file_that_is_wrong_is_said_in_one_message_with_its_line(pegprof_in, line_14, error, hint):
    (pegprof_in.folder / "mine.py").write_text(MODEL + line_14 + "\n")
    done = pegprof_in("run", "mine.py:wrong", "--batch", "8", "--quiet")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {error}\n" + (f"hint: {hint}\n" if hint else "")


def test_debug_shows_the_users_own_traceback(pegprof_in):
    (pegprof_in.folder / "mine.py").write_text(MODEL + "wrong = model(loss=lambda w, x: 1 / 0)\n")
    assert (
        pegprof_in("run", "mine.py:wrong", "--quiet").stderr
        == "error: mine.py:14: loss raised ZeroDivisionError: division by zero\n"
    )
    debugged = pegprof_in("run", "mine.py:wrong", "--debug")
    assert debugged.returncode != 0
    assert "wrong = model(loss=lambda w, x: 1 / 0)" in debugged.stderr  # the line itself


def test_debug_shows_the_traceback(pegprof_in):
    assert "Traceback" in pegprof_in("run", "mlp", "--batch", "many", "--debug").stderr


def test_a_place_that_cannot_be_written_is_said_before_anything_is_measured(pegprof_in):
    (pegprof_in.folder / "reports").write_text("a file where the folder should be")
    done = pegprof_in("run", "mlp")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: cannot write reports/mlp-b64-cpu.csv")
    assert "hint:" in done.stderr
    assert "needs" not in done.stderr


# A starting file.


def test_a_starting_file_runs_as_it_is(pegprof_in):
    done = pegprof_in("new", "mine.py")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "wrote mine.py\nnext: pegprof run mine.py:model --batch 32\n"
    done = pegprof_in("run", "mine.py:model", "--batch", "8", "--no-time", "--methods", "grad,surgery")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("mine: 18.9 k parameters, float32, batch 8")


def test_a_starting_file_overwrites_nothing_unasked(pegprof_in):
    (pegprof_in.folder / "mine.py").write_text("precious")
    done = pegprof_in("new", "mine.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: mine.py is there already\nhint: choose another name, or overwrite it with --force\n"
    assert pegprof_in("new", "mine.py", "--force").returncode == 0


# Where things go.


GRAD_ALONE = ["run", FINE, "--methods", "grad", "--no-time"]


def test_json_on_stdout_is_alone_there_and_the_table_is_on_stderr(pegprof_in):
    done = pegprof_in(*GRAD_ALONE, "--export-json", "-", "--no-csv")
    assert done.returncode == 0, done.stderr
    result = Result.from_json(done.stdout)
    assert (result.complete, [row.method for row in result.rows]) == (True, ["grad"])
    assert "fine: 15 parameters" in done.stderr
    assert not list(pegprof_in.folder.iterdir())


def test_every_export_has_its_file_and_each_path_is_said(pegprof_in):
    files = ["--export-csv", "a.csv", "--export-json", "new/b.json", "--export-markdown", "c.md"]
    done = pegprof_in(*GRAD_ALONE, *files)
    assert done.returncode == 0, done.stderr
    folder = pegprof_in.folder
    assert list(rows_of((folder / "a.csv").read_text())) == ["grad"]
    assert Result.from_json((folder / "new" / "b.json").read_text()).rows[0].method == "grad"
    assert (folder / "c.md").read_text().startswith("### pegprof: fine")
    assert done.stderr.endswith("wrote a.csv\nwrote new/b.json\nwrote c.md\n")
    assert done.stdout.startswith("fine: 15 parameters")


def test_quiet_is_quiet_and_a_stream_that_knows_no_times_sign_gets_its_table(pegprof_in):
    done = pegprof_in(*GRAD_ALONE, "--quiet", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[2].split() == ["method", "status", "XLA", "peak", "?", "grad", "flops"]
    assert (pegprof_in.folder / "reports").is_dir()


def test_two_runs_at_once_in_one_folder_do_not_disturb_each_other(pegprof_in):
    runs = [pegprof_in.start(*GRAD_ALONE, "--quiet") for _ in range(2)]
    assert [run.wait(timeout=300) for run in runs] == [0, 0]
    for run in runs:
        run.communicate()
    (file,) = (pegprof_in.folder / "reports").iterdir()  # and no draft
    assert list(rows_of(file.read_text())) == ["grad"]


@pytest.mark.slow
def test_two_runs_that_run_something_at_once_in_one_folder_both_end_well(pegprof_in):
    command = ["run", FINE, "--methods", "grad,vmap", "--runs", "3", "--quiet"]
    runs = [pegprof_in.start(*command) for _ in range(2)]
    outputs = [run.communicate(timeout=300) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    (file,) = (pegprof_in.folder / "reports").iterdir()
    assert {row["runs"] for row in rows_of(file.read_text()).values()} == {"3"}


def test_a_folder_that_cannot_be_written_to_is_said_before_anything_is_measured():
    command = [sys.executable, "-m", "pegprof", "run", "mlp"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, cwd="/proc/self", env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: cannot write reports/mlp-b64-cpu.csv")
    assert "hint: name another file with --export-csv, or leave it out with --no-csv" in done.stderr


def on_a_terminal(pegprof_in, *arguments, stream, columns, **environment):
    """Runs a command with one of its streams on a terminal, and returns what is there."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment |= {"TERM": "xterm", "COLUMNS": str(columns)}  # what else is set would go before the terminal's own
    with pegprof_in.start(*arguments, **{stream: theirs}, **environment) as process:
        os.close(theirs)
        text = b""
        while chunk := _read(ours):
            text += chunk
        process.communicate(timeout=300)
    os.close(ours)
    return text.decode()


def _read(terminal):
    try:
        return os.read(terminal, 4096)
    except OSError:  # Linux ends a terminal so
        return b""


@pytest.mark.parametrize(("environment", "color"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_on_a_terminal_the_text_is_as_wide_as_that_and_colored_unless_told_not_to(pegprof_in, environment, color):
    text = on_a_terminal(pegprof_in, "doctor", "--quiet", stream="stdout", columns=70, **environment)
    assert "Ready to measure." in text
    assert ("\x1b[" in text) == color
    if not color:
        assert 60 < max(map(len, text.splitlines())) <= 70


def test_on_a_terminal_the_step_under_way_moves_and_then_goes(pegprof_in):
    text = on_a_terminal(pegprof_in, "doctor", stream="stderr", columns=80)
    assert "asking JAX for its devices" in text
    assert text.rstrip().endswith("\x1b[2K")  # its line is erased


# Stopping in the middle.


def left_behind(process):
    """What still lives of a process's children, which are in groups of their own and know it by their command."""
    mine = {p.pid for p in process.children}
    return [p for p in psutil.process_iter() if p.pid in mine and p.status() != psutil.STATUS_ZOMBIE]


def stop_when(process, condition, limit_s=120.0):
    """Ctrl-C at a moment; returns what was on the streams."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert process.poll() is None, process.communicate()
        if time.monotonic() > deadline:
            process.kill()
            raise AssertionError("waited in vain", process.communicate())
        time.sleep(0.02)
    process.children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    try:
        return process.communicate(timeout=60)
    finally:
        process.kill()  # if it does not heed


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


@pytest.mark.slow
def test_ctrl_c_while_timing_keeps_the_times_so_far(pegprof_in):
    talk = pegprof_in.folder / "talk.txt"
    command = ["run", FINE, "--methods", "grad,vmap", "--runs", "1000000", "--export-json", "r.json"]
    with talk.open("w") as stderr, pegprof_in.start(*command, stderr=stderr) as process:
        timing = []
        stop_when(process, lambda: "timing at batch" in talk.read_text() and (timing.append(1) or len(timing) > 50))
    assert process.returncode == ExitCode.INTERRUPTED
    result = Result.from_json((pegprof_in.folder / "r.json").read_text())
    assert [(row.method, row.evidence) for row in result.rows] == [("grad", "measured"), ("vmap", "measured")]
    assert [row.runs for row in result.rows] == [len(samples) for samples in result.samples_s.values()]
    assert [file.suffix for file in (pegprof_in.folder / "reports").iterdir()] == [".csv"]  # and no draft
    assert "XLA peak" in talk.read_text()  # memory and verdict came first
    assert not left_behind(process)


def test_targets_lists_what_is_here_and_every_device(pegprof_in):
    done = pegprof_in("targets")
    assert done.returncode == 0
    names = [line.split()[0] for line in done.stdout.splitlines()[2:] if line and not line.startswith(" ")]
    assert names[: len(DEVICES) + 1] == ["cpu", *DEVICES]


def test_inspect_shows_the_plan_for_a_device_that_is_not_here(pegprof_in):
    done = pegprof_in("inspect", "mlp", "--batch", "8", "--set", "width=32", "--target", "tpu-v5e")
    assert done.returncode == 0, done.stderr
    assert "plan for mean, second_moment of 8 examples on tpu" in done.stdout


# Gates.

NET = """
import jax
import jax.numpy as jnp
from pegprof import Problem

def weight(w):
    return w

def net(width: int = 16):
    def init(key):
        first, second = jax.random.split(key)
        return {"hidden": jax.random.normal(first, (8, width)), "out": jax.random.normal(second, (width, 4))}

    def loss(params, x):
        return jnp.mean(jnp.sum((jnp.tanh(x @ weight(params["hidden"])) @ params["out"]) ** 2, -1))

    return Problem(name="net", init=init, loss=loss, batch=lambda key, B: jax.random.normal(key, (B, 8)))
"""


@pytest.fixture
def baseline(pegprof_in):
    """A user's model, and a baseline of it."""
    (pegprof_in.folder / "net.py").write_text(NET)
    options = ["--batch", "8", "--methods", "grad,surgery", "--no-time", "--no-csv", "--export-json", "b.json"]
    assert pegprof_in("run", "net.py:net", *options).returncode == 0
    return pegprof_in.folder / "b.json"


def test_a_gate_passes_what_did_not_change_and_fails_what_broke_a_strategy(pegprof_in, baseline):
    done = pegprof_in("gate", "b.json", "--quiet")
    assert (done.returncode, done.stderr) == (ExitCode.OK, "")
    assert done.stdout == (
        "net.py:net against b.json: nothing changed; 12 within the limits (bytes, flops and plans)\n"
    )

    net = pegprof_in.folder / "net.py"
    net.write_text(NET.replace("return w", "return jnp.linalg.qr(w.T)[0].T"))
    environment = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(pegprof_in.folder / "summary.md")}
    done = pegprof_in("gate", "b.json", "--quiet", "--junit", "j.xml", **environment)
    assert done.returncode == ExitCode.NO
    assert "  FAIL: surgery at batch 8 on cpu: hidden: factored -> materialise, holding 0 B -> " in done.stdout
    assert done.stdout.count("::error title=pegprof gate%3A net.py%3Anet::") == 1
    assert "hidden: factored" in (pegprof_in.folder / "summary.md").read_text()
    assert "<failure" in (pegprof_in.folder / "j.xml").read_text()

    assert pegprof_in("gate", "b.json", "--quiet", "--no-fail").returncode == ExitCode.OK


def test_a_gate_with_other_options_or_a_broken_baseline_never_passes(pegprof_in, baseline):
    net = pegprof_in.folder / "net.py"
    net.write_text(NET.replace("width: int = 16", "width: int = 32"))
    done = pegprof_in("gate", "b.json", "--quiet")
    assert done.returncode == ExitCode.INCOMPARABLE
    assert "option width was 16, is 32" in done.stderr
    assert "hint: make a new one: pegprof run net.py:net --batch 8" in done.stderr

    baseline.write_text(baseline.read_text()[:500])
    done = pegprof_in("gate", "b.json")
    assert done.returncode == ExitCode.USAGE
    assert done.stderr.startswith("error: b.json: this is not a result of pegprof: ")


def test_two_results_are_compared_without_running_anything(pegprof_in, baseline):
    done = pegprof_in("compare", "b.json", "b.json")
    assert done.returncode == 0
    assert [line.split()[2] for line in done.stdout.splitlines()[3:]] == ["grad", "surgery"]
    done = pegprof_in("compare", "b.json", "b.json", "--markdown")
    assert "| 8 | cpu | surgery | ok |" in done.stdout
    done = pegprof_in("gate", "b.json", "--result", "b.json")
    assert (done.returncode, done.stderr) == (ExitCode.OK, "")


def test_the_commands_of_the_example_workflow_run(pegprof_in, baseline):
    workflow = (Path(__file__).parents[1] / "examples" / "ci" / "pegprof.yml").read_text()
    (command,) = re.findall(r"run: pegprof (.*)", workflow)
    (pegprof_in.folder / "baselines").mkdir()
    baseline.rename(pegprof_in.folder / "baselines" / "net.json")
    arguments = [word for part in command.split() for word in glob.glob(part, root_dir=pegprof_in.folder) or [part]]
    assert pegprof_in(*arguments).returncode == 0
    assert (pegprof_in.folder / "pegprof-gate.xml").exists()


# Looking without measuring.


def test_inspect_shows_the_model_and_its_plan(pegprof_in):
    done = pegprof_in("inspect", "mlp", "--batch", "8", "--set", "width=32", "--stats", "second_moment")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("mlp: 26,506 parameters (103.5 KiB), float32\n")
    assert "plan for second_moment of 8 examples on cpu, all at once" in done.stdout
    assert ["Dense_0/kernel", "784×32", "bi,bo->io", "1", "factored"] in [
        x.split()[:5] for x in done.stdout.splitlines()
    ]
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert done.stderr == "tracing mlp ...\n"
    assert not list(pegprof_in.folder.iterdir())


def test_inspect_as_json_is_alone_on_stdout(pegprof_in):
    done = pegprof_in("inspect", f"{MODELS}:prints_at_every_trace", "--json", "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    data = json.loads(done.stdout)
    assert (data["schema"], data["model"], data["parameters"]) == (1, "prints", 15)
    assert [row["parameter"] for row in data["plan"]["rows"]] == ["b", "w"]


@pytest.mark.slow
def test_the_largest_model_is_inspected_in_15_s_of_one_core(pegprof_in):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert pegprof_in("inspect", "transformer-151m").returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 15


def test_the_doctor_is_content_with_this_machine(pegprof_in):
    done = pegprof_in("doctor")
    assert (done.returncode, done.stderr) == (0, "asking JAX for its devices ...\n")
    assert "ok    jax" in done.stdout
    assert re.search("ok    device +cpu: ", done.stdout)
    assert done.stdout.endswith("Ready to measure.\n")


def test_the_doctor_finds_a_platform_that_does_not_exist(pegprof_in):
    done = pegprof_in("doctor", JAX_PLATFORMS="abacus")
    assert done.returncode == 3
    assert "JAX_PLATFORMS is 'abacus'" in done.stdout
    assert "Not ready to measure: 1 problem above." in done.stdout


@pytest.mark.parametrize("arguments", [[*GRAD_ALONE, "--no-csv"], ["inspect", "mlp"], ["doctor"]], ids=lambda a: a[0])
def test_the_process_that_a_user_starts_does_not_even_import_jax(arguments):
    code = (
        f"import sys; from pegprof.cli import app; code = app({arguments!r} + ['--quiet'], standalone_mode=False); "
        "sys.exit(code or 9 * ('jax' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


# What is measured.


NOISY_MODEL = """\
import atexit, os
import jax.numpy as jnp

def model():
    return Noisy()

print("at import")
os.write(1, b"not by print")
atexit.register(print, "at exit")

class Noisy:
    def init(self, key):
        print("in init")
        return jnp.zeros(3)

    def loss(self, w, x):
        print("in loss")
        os.system("echo from a process of its own")
        return jnp.mean(x @ w)

    def batch(self, key, B):
        print("in batch")
        return jnp.ones((B, 3))
"""


def test_a_model_that_prints_does_not_spoil_the_csv_on_stdout(pegprof_in):
    (pegprof_in.folder / "noisy.py").write_text(NOISY_MODEL)
    run = ["run", "noisy.py:model", "--batch", "4", "--methods", "grad"]
    done = pegprof_in(*run, "--runs", "1", "--export-csv", "-")
    assert done.returncode == 0, done.stderr
    assert list(rows_of(done.stdout)) == ["grad"]
    assert len(done.stdout.splitlines()) == 2
    assert "model: 3 parameters" in done.stderr  # the table
    assert " in loss" not in done.stderr
    assert "in loss" in pegprof_in(*run, "--no-time", "--no-csv", "--debug").stderr
    assert [path.name for path in pegprof_in.folder.iterdir() if path.name != "__pycache__"] == ["noisy.py"]


def test_a_method_that_crashes_is_a_failed_row_and_exit_code_3(pegprof_in):
    done = pegprof_in("run", f"{MODELS}:dies_when_alone", "--methods", "grad,vmap", "--no-time", "--export-csv", "-")
    assert done.returncode == 3
    rows = rows_of(done.stdout)
    assert (rows["grad"]["status"], rows["vmap"]["status"]) == ("ok", "failed")
    assert "SIGKILL" in rows["vmap"]["reason"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("after", "runs"), [(0, ""), (2, "1")], ids=["where its memory is measured", "where it is timed"]
)
def test_a_method_that_is_killed_while_it_runs_fails_alone_and_what_was_measured_is_on_disk(pegprof_in, after, runs):
    model = ["run", f"{MODELS}:dies_when_run_alone", "--set", "marker=marker", "--set", f"after={after}"]
    done = pegprof_in(*model, "--batch", "4", "--runs", "3", "--methods", "vmap,grad", "--no-check", "--quiet")
    assert done.returncode == 3, done.stderr
    (file,) = (pegprof_in.folder / "reports").iterdir()
    rows = rows_of(file.read_text())
    assert (rows["vmap"]["status"], rows["vmap"]["runs"]) == ("failed", runs)
    assert "killed by SIGKILL" in rows["vmap"]["reason"]
    assert (rows["grad"]["status"], rows["grad"]["runs"]) == ("ok", "3")
    assert int(rows["grad"]["host_peak_bytes"]) > 0


@pytest.mark.slow
def test_a_time_limit_that_leaves_nothing_timed_is_exit_code_124(pegprof_in):
    done = pegprof_in("run", FINE, "--methods", "grad", "--time-limit", "1", "--export-csv", "-", "--quiet")
    assert done.returncode == 124, done.stderr
    (row,) = rows_of(done.stdout).values()
    assert (row["status"], row["evidence"], row["time_s"]) == ("skipped", "compiled", "")
    assert "time limit" in row["reason"]
    assert int(row["peak_bytes"]) > 0


@pytest.mark.slow
def test_a_run_that_takes_longer_than_the_time_limit_is_stopped_in_the_middle(pegprof_in):
    start_s = time.monotonic()
    done = pegprof_in("run", f"{MODELS}:sleeps", "--methods", "grad", "--time-limit", "25", "--no-csv", "--quiet")
    assert done.returncode == 124, done.stderr
    assert time.monotonic() - start_s < 60  # which its first run alone would have taken
    assert "grad: stopped: it took longer than the time limit allows" in done.stdout


def test_a_dtype_that_a_users_model_has_no_option_for_is_an_error_that_names_it(pegprof_in):
    done = pegprof_in("run", FINE, "--dtype", "bfloat16", "--no-csv")
    assert (done.returncode, done.stdout) == (2, "")
    assert "models.py" in done.stderr
    assert "unknown option 'dtype'" in done.stderr


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
        assert row["measured_batch"] == "4"
        assert abs(int(row["host_peak_bytes"]) - int(row["measured_batch_peak_bytes"])) <= 32 * 2**20
    assert (rows["grad"]["time_ratio"], rows["grad"]["peak_ratio"]) == ("1.0", "1.0")
    assert max(float(row["max_rel_error"] or 0) for row in rows.values()) < 1e-3
    assert done.stdout.startswith(f"{model}: ")
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert "\x1b[" not in done.stdout
    assert f"wrote reports/{model}-b4-cpu.csv" in done.stderr
