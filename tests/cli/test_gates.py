"""Gates: a run against its baseline, and two results side by side."""

import glob
import json
import re
import shutil
import subprocess

import pytest

from pegprof.errors import ExitCode
from tests.cli.commands import ROOT, Pegprof, commit_file

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


@pytest.fixture(scope="module")
def made_baseline(tmp_path_factory):
    """A folder with a user's model, and a baseline of it."""
    pegprof = Pegprof(tmp_path_factory.mktemp("baseline"))
    (pegprof.folder / "net.py").write_text(NET)
    options = ["--batch", "8", "--methods", "grad,surgery", "--no-time", "--no-csv", "--export-json", "b.json"]
    done = pegprof("run", "net.py:net", *options)
    assert done.returncode == 0, done.stderr
    return pegprof.folder


@pytest.fixture
def baseline(pegprof_in, made_baseline):
    """The same in the folder of the test, which may change it."""
    for name in ("net.py", "b.json"):
        shutil.copy(made_baseline / name, pegprof_in.folder)
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
    done = pegprof_in("gate", "b.json", "--quiet", "--export-junit", "j.xml", **environment)
    assert done.returncode == ExitCode.NO
    assert "  FAIL: surgery at batch 8 on cpu: hidden: factored -> loop, holding 0 B -> " in done.stdout
    assert done.stdout.count("::error title=pegprof gate%3A net.py%3Anet::") == 1
    assert "hidden: factored" in (pegprof_in.folder / "summary.md").read_text()
    assert "<failure" in (pegprof_in.folder / "j.xml").read_text()

    assert pegprof_in("gate", "b.json", "--quiet", "--no-fail").returncode == ExitCode.OK


@pytest.mark.slow
def test_a_gate_repeats_the_mesh_of_its_baseline_and_compares_with_no_other(pegprof_in, baseline):
    options = ["net.py:net", "--batch", "8", "--methods", "grad,surgery", "--no-time", "--no-csv", "--target", "cpu:8"]
    for mesh, file in (("data=2,fsdp=4", "mesh.json"), ("data=8", "other.json")):
        done = pegprof_in("run", *options, "--mesh", mesh, "--export-json", file)
        assert done.returncode == 0, done.stderr
    before = json.loads((pegprof_in.folder / "mesh.json").read_text())
    assert {row["mesh"] for row in before["rows"]} == {"data=2,fsdp=4"}

    done = pegprof_in("gate", "mesh.json", "--quiet", "--max", "grad.collective_bytes=1")
    assert done.returncode == ExitCode.NO
    assert "collective_bytes" in done.stdout  # so it was compiled for a mesh again
    done = pegprof_in("gate", "mesh.json", "--quiet")
    assert done.returncode == ExitCode.OK, done.stderr
    assert "nothing changed" in done.stdout

    done = pegprof_in("gate", "mesh.json", "--result", "other.json")
    assert done.returncode == ExitCode.INCOMPARABLE
    assert "the mesh of cpu:8 was data=2,fsdp=4, is data=8" in done.stderr
    assert "--target cpu:8 --mesh data=2,fsdp=4" in done.stderr


def test_a_gate_with_other_options_or_a_broken_baseline_never_passes(pegprof_in, baseline):
    net = pegprof_in.folder / "net.py"
    net.write_text(NET.replace("width: int = 16", "width: int = 32"))
    done = pegprof_in("gate", "b.json", "--export-junit", "j.xml")
    assert done.returncode == ExitCode.INCOMPARABLE
    assert "option width was 16, is 32" in done.stderr
    assert "compiling" not in done.stderr
    assert "option width was 16, is 32" in (pegprof_in.folder / "j.xml").read_text()
    assert "hint: make a new one: pegprof run net.py:net --batch 8" in done.stderr

    baseline.write_text(baseline.read_text()[:500])
    done = pegprof_in("gate", "b.json")
    assert done.returncode == ExitCode.USAGE
    assert done.stderr.startswith("error: b.json: this is not a result of pegprof: ")


@pytest.fixture
def repository(pegprof_in):
    """A repository with a user's model, whose working copy breaks a strategy."""
    commit_file(pegprof_in.folder / "net.py", NET)
    (pegprof_in.folder / "net.py").write_text(NET.replace("return w", "return jnp.linalg.qr(w.T)[0].T"))
    return pegprof_in.folder


MODEL = ["net.py:net", "--batch", "8", "--methods", "grad,surgery"]


def test_a_gate_against_a_revision_needs_no_baseline_and_leaves_nothing_behind(pegprof_in, repository):
    done = pegprof_in("gate", *MODEL, "--against", "HEAD", "--no-time", "--quiet")
    assert done.returncode == ExitCode.NO, done.stderr
    assert re.match(r"net\.py:net against HEAD \([0-9a-f]{7}\): \d failed", done.stdout)
    assert "  FAIL: surgery at batch 8 on cpu: hidden: factored -> loop, holding 0 B -> " in done.stdout
    assert worktrees(repository) == 1


@pytest.mark.slow
def test_a_gate_against_a_revision_times_both_in_the_same_rounds(pegprof_in, repository):
    (repository / "net.py").write_text(NET)
    done = pegprof_in("gate", *MODEL, "--against", "HEAD", "--processes", "2", "--runs", "3", "--export-json", "g.json")
    assert done.returncode == ExitCode.OK, done.stderr
    assert "HEAD (" in done.stderr  # who is compiling
    (found,) = json.loads((repository / "g.json").read_text())["gates"]
    (change,) = [change for change in found["changes"] if change["metric"] == "time_ratio"]
    assert "2 processes × 3 rounds" in change["words"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--against", "nowhere"], "there is no revision 'nowhere'"),
        (["--against", "HEAD", "--result", "b.json"], "--result runs nothing, and --against does"),
        (["--against", "HEAD", "--set", "width=8", "--no-time"], None),
    ],
    ids=["revision", "result", "fine"],
)
def test_what_cannot_be_compared_with_is_usage(pegprof_in, repository, arguments, words):
    done = pegprof_in("gate", *MODEL, *arguments, "--quiet")
    if words:
        assert (done.returncode, words in done.stderr) == (ExitCode.USAGE, True)
        assert "hint: " in done.stderr
    else:
        assert done.returncode == ExitCode.NO
    assert worktrees(repository) == 1


def test_a_model_that_the_revision_lacks_is_said(pegprof_in, repository):
    (repository / "other.py").write_text(NET)
    subprocess.run(["git", "add", "other.py"], cwd=repository, check=True)
    done = pegprof_in("gate", "other.py:net", "--against", "HEAD", "--quiet")
    assert (done.returncode, done.stderr.splitlines()[0]) == (
        ExitCode.USAGE,
        "error: --against HEAD: HEAD has no other.py",
    )
    (repository / "net.py").write_text(NET.replace("def net(", "def newer("))
    done = pegprof_in("gate", "net.py:newer", "--against", "HEAD", "--quiet", "--no-time")
    assert done.returncode == ExitCode.USAGE
    assert "in HEAD (" in done.stderr
    assert "there is no 'newer' here" in done.stderr


def test_options_of_a_model_are_no_options_of_a_baseline(pegprof_in, baseline):
    done = pegprof_in("gate", "b.json", "--batch", "8")
    assert (done.returncode, done.stderr) == (
        ExitCode.USAGE,
        "error: these options need a MODEL\nhint: a baseline has its own settings\n",
    )


def worktrees(folder):
    listed = subprocess.run(["git", "worktree", "list"], cwd=folder, check=True, capture_output=True, text=True)
    return len(listed.stdout.splitlines())


def test_two_results_are_compared_without_running_anything(pegprof_in, baseline):
    done = pegprof_in("compare", "b.json", "b.json")
    assert done.returncode == 0
    assert [line.split()[2] for line in done.stdout.splitlines()[3:]] == ["grad", "surgery"]
    done = pegprof_in("compare", "b.json", "b.json", "--export-markdown", "-")
    assert "| 8 | cpu | surgery | ok |" in done.stdout
    done = pegprof_in("compare", "b.json", "b.json", "b.json", "--export-markdown", "c.md")
    assert (done.returncode, done.stderr) == (0, "wrote c.md\n")
    assert done.stdout.startswith("net.py:net: 3 results; changes are from b.json\n")
    assert "| 8 | cpu | surgery | b.json | ok |" in (pegprof_in.folder / "c.md").read_text()
    done = pegprof_in("gate", "b.json", "--result", "b.json")
    assert (done.returncode, done.stderr) == (ExitCode.OK, "")


@pytest.mark.parametrize("inputs", [["b.json"], ["other.json", "--result", "b.json"]], ids=["baseline", "result"])
@pytest.mark.parametrize("flag", ["--export-json", "--export-markdown", "--export-junit"])
def test_a_gate_does_not_write_over_what_it_reads(pegprof_in, baseline, inputs, flag):
    before = baseline.read_text()
    done = pegprof_in("gate", *inputs, flag, "./b.json")
    assert done.returncode == ExitCode.USAGE
    assert done.stderr == f"error: b.json is both read and written\nhint: name another file with {flag}\n"
    assert baseline.read_text() == before


def test_a_gate_looks_whether_it_can_write_before_it_measures(pegprof_in, baseline):
    done = pegprof_in("gate", "b.json", "--export-junit", "net.py/j.xml")
    assert done.returncode == ExitCode.USAGE
    assert done.stderr.startswith("error: cannot write net.py/j.xml: ")  # and nothing before that of any progress


def test_an_export_to_stdout_is_alone_there_and_the_text_is_on_stderr(pegprof_in, baseline):
    done = pegprof_in("gate", "b.json", "--result", "b.json", "--export-json", "-")
    assert done.returncode == ExitCode.OK
    (found,) = json.loads(done.stdout)["gates"]
    assert found["passed"]
    assert done.stderr.startswith("net.py:net against b.json: nothing changed")
    assert not (pegprof_in.folder / "-").exists()
    done = pegprof_in("gate", "nofile.json", "--export-markdown", "-", GITHUB_ACTIONS="true", GITHUB_STEP_SUMMARY="")
    assert done.returncode == ExitCode.USAGE
    assert done.stdout.startswith("### ❌ pegprof gate: nofile.json was not compared\n")
    assert done.stderr.startswith("::error title=pegprof gate%3A nofile.json::")


def test_the_commands_of_the_example_workflow_run(pegprof_in, baseline):
    workflow = (ROOT / "examples" / "ci" / "pegprof.yml").read_text()
    (command,) = re.findall(r"run: pegprof (.*)", workflow)
    (pegprof_in.folder / "baselines").mkdir()
    baseline.rename(pegprof_in.folder / "baselines" / "net.json")
    arguments = [word for part in command.split() for word in glob.glob(part, root_dir=pegprof_in.folder) or [part]]
    assert pegprof_in(*arguments).returncode == 0
    assert (pegprof_in.folder / "pegprof-gate.xml").exists()
