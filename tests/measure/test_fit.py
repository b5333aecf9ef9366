"""What fits: the search with a session that is made up, the words that come of it, and the command for real."""

import csv
import dataclasses
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pegprof.errors import ExitCode, PegprofError
from pegprof.measure import fit as fitting
from pegprof.measure.batch_search import Edge
from pegprof.measure.fit import Answer, Fit, check_fit, find_largest
from pegprof.measure.progress import Silence
from pegprof.measure.session import Session
from pegprof.report.fit_text import describe_edge, plot, render_fit
from pegprof.result import events
from pegprof.result.findings import Compiled
from pegprof.result.result import Result
from pegprof.result.settings import Settings
from pegprof.targets.devices import DEVICES, GIB
from pegprof.targets.selection import absent_target
from tests.compilers import needs_compilers
from tests.result.results import make_facts, make_row
from tests.waiting import LIMIT_S

TARGET = absent_target(DEVICES["tpu-v5e"])
SETTINGS = Settings(model="made-up", time=False)
NEEDS = {  # GiB at a batch
    "grad": lambda batch: batch * 0.3,
    "vmap": lambda batch: 1 + batch * 0.3,
    "microbatch": lambda batch: 1 + batch * 0.0001,
    "surgery": lambda batch: 5 + batch * 0.0001,
}


class MadeUp(Session):
    """Compiles nothing: the needs are formulas."""

    def describe(self):
        capacity_bytes = {TARGET.name: TARGET.device.memory_bytes}
        self.log.add(events.Described(facts=make_facts(), capacity_bytes=capacity_bytes))

    def try_compile(self, batch, method, target, *, surgery_size=None, limit_s=None, count=""):
        if method == "broken":
            return Compiled(failure="it broke")
        size = surgery_size or (16 if method == "surgery" else None)
        return Compiled(peak_bytes=int(NEEDS[method](batch) * GIB), microbatch_size=size)


@pytest.fixture(autouse=True)
def made_up(monkeypatch):
    monkeypatch.setattr(fitting, "Session", MadeUp)


def find(settings=SETTINGS):
    return find_largest(settings, TARGET, most=4096, talk=Silence(), save=lambda result: None)


def check(batch, **settings):
    asked = dataclasses.replace(SETTINGS, batches=(batch,), **settings)
    return check_fit(asked, TARGET, talk=Silence(), save=lambda result: None)


GOLDEN = """\
transformer-151m: 184.4 M parameters, seq_len 512, float32, mean second_moment
tpu-v5e: TPU v5e, 15.8 GiB available
method      largest batch                 needs  the next  would need  at a time
────────────────────────────────────────────────────────────────────────────────
grad        52                         15.6 GiB        53    15.9 GiB        all
vmap        49                         15.7 GiB        50    16.0 GiB        all
microbatch  no limit found up to 4096   1.4 GiB         –           –          1
surgery     no limit found up to 4096   5.4 GiB         –           –         16
"""


def test_the_largest_batch_of_each_method_reads_so():
    found = find()
    assert render_fit(found).startswith(GOLDEN)
    assert found.exit_code == ExitCode.OK


def test_surgery_is_held_to_the_size_that_the_planner_chose_first():
    rows = [row for row in find().result.rows if row.method == "surgery"]
    assert [(row.batch, row.microbatch_size) for row in rows] == [(64, 16), (4096, 16)]


def test_one_batch_is_a_yes_or_no_and_surgery_decides_the_exit_code():
    found = check(64)
    assert [row.status for row in found.result.rows] == ["refused", "refused", "ok", "ok"]
    assert found.exit_code == ExitCode.OK
    lines = render_fit(found).splitlines()
    assert [line.split()[:2] for line in lines[4:8]] == [
        ["grad", "no"],
        ["vmap", "no"],
        ["microbatch", "yes"],
        ["surgery", "yes"],
    ]
    assert lines[8] == "grad: needs 19.2 GiB, 15.8 GiB available"
    assert check(64, methods=("grad", "microbatch")).exit_code == ExitCode.NO
    assert check(32, methods=("grad",)).exit_code == ExitCode.OK


def test_a_method_that_fails_is_no_answer():
    found = find(dataclasses.replace(SETTINGS, methods=("broken", "grad")))
    assert found.exit_code == ExitCode.UNMEASURED
    assert "broken: batch 64: it broke" in render_fit(found)
    assert found.answers[1].edge.largest == 52


class Slow(MadeUp):
    """Each compile takes 1000 s."""

    def try_compile(self, *arguments, **fields):
        self.start_s -= 1000
        return super().try_compile(*arguments, **fields)


def test_when_the_time_is_up_what_is_known_is_said(monkeypatch):
    monkeypatch.setattr(fitting, "Session", Slow)
    found = find(dataclasses.replace(SETTINGS, time_limit_s=500.0, methods=("grad",)))
    assert found.answers[0].edge == Edge(largest=None, refused=64, is_exact=False)
    assert found.exit_code == ExitCode.TIME_LIMIT


def test_the_time_limit_is_for_one_batch_too_and_what_it_came_before_is_no_answer(monkeypatch):
    monkeypatch.setattr(fitting, "Session", Slow)
    found = check(64, time_limit_s=1500.0)
    assert [row.method for row in found.result.rows] == ["grad", "vmap"]
    assert render_fit(found).endswith("\nmicrobatch, surgery: the time limit came before that was compiled")
    assert found.exit_code == ExitCode.TIME_LIMIT
    assert check(64, time_limit_s=500.0, methods=("surgery", "grad")).exit_code == ExitCode.OK
    assert check(64, time_limit_s=500.0, methods=("grad", "microbatch")).exit_code == ExitCode.NO
    assert check(64, time_limit_s=500.0, methods=("microbatch", "grad")).exit_code == ExitCode.TIME_LIMIT


@pytest.mark.parametrize("ask", [find, lambda settings: check(64, time_limit_s=settings.time_limit_s)])
def test_a_time_limit_that_comes_before_anything_is_compiled_is_said(ask):
    with pytest.raises(PegprofError, match="the time limit came before anything was compiled") as raised:
        ask(dataclasses.replace(SETTINGS, time_limit_s=0.0))
    assert raised.value.exit_code == ExitCode.TIME_LIMIT


@pytest.mark.parametrize(
    ("edge", "words"),
    [
        (Edge(largest=None, refused=1, is_exact=True), "none fits"),
        (Edge(largest=32, refused=64, is_exact=False), "at least 32, less than 64: no time left"),
        (Edge(largest=32, refused=None, is_exact=False), "at least 32: no time left"),
        (None, "–"),
    ],
)
def test_other_answers_read_so(edge, words):
    assert describe_edge(Answer(method="grad", edge=edge), 4096) == words


def test_the_plot_has_the_needs_the_capacity_and_what_the_letters_mean():
    rows = [
        make_row("grad", batch=16, peak_bytes=5 * GIB, capacity_bytes=10 * GIB),
        make_row("grad", batch=64, peak_bytes=19 * GIB, capacity_bytes=10 * GIB, status="refused"),
        make_row("surgery", batch=16, peak_bytes=5 * GIB, capacity_bytes=10 * GIB),
        make_row("microbatch", batch=64, capacity_bytes=10 * GIB, status="failed"),
    ]
    lines = plot(rows)
    assert lines[0].startswith("  15.0 GiB │") and lines[0].endswith("g")  # noqa: PT018
    assert [line for line in lines if line.startswith("  10.0 GiB │──")]
    assert [line for line in lines if line.endswith("│*")]
    assert lines[-1] == "g grad, s surgery, * several"
    assert plot([make_row("grad")]) == []


def test_nothing_to_show_is_no_text():
    assert render_fit(Fit(result=Result(settings=SETTINGS, rows=()))) == ""


@pytest.mark.slow
@needs_compilers
def test_the_answer_for_a_real_device_is_confirmed_by_its_compiler(tmp_path):
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root), "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "pegprof", "fit", "mlp", "--target", "h100", "--memory-limit", "24MiB"]
    arguments = [*command, "--methods", "grad", "--export-csv", "-"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=LIMIT_S, cwd=tmp_path, env=env)
    assert done.returncode == ExitCode.OK, done.stderr
    _, largest, *_ = next(line for line in done.stderr.splitlines() if line.startswith("grad  ")).split()
    rows = {int(row["batch"]): row for row in csv.DictReader(io.StringIO(done.stdout))}
    assert (rows[int(largest)]["status"], rows[int(largest) + 1]["status"]) == ("ok", "refused")
    assert {(row["target"], row["evidence"]) for row in rows.values()} == {("h100", "compiled")}
