"""Help as people read it. PEGPROF_UPDATE_HELP=1 writes the golden texts anew."""

import os

import pytest

from pegprof.cli.application import COMMANDS
from pegprof.result.settings import FORMULAS, METHODS
from pegprof.result.steps import STEPS
from tests.cli.commands import ROOT

GOLDEN = ROOT / "tests" / "cli" / "help"
PAGES = ["", *COMMANDS, "cache", "cache info", "cache clear"]


@pytest.mark.parametrize("command", PAGES, ids=lambda command: command or "pegprof")
def test_help_reads_so(pegprof_in, command):
    done = pegprof_in(*command.split(), "--help", COLUMNS="100")
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 100
    file = GOLDEN / f"{command.replace(' ', '-') or 'pegprof'}.txt"
    if os.environ.get("PEGPROF_UPDATE_HELP"):
        file.write_text(done.stdout)
    assert done.stdout == file.read_text()


def test_h_is_short_for_help(pegprof_in):
    assert pegprof_in("run", "-h").stdout == pegprof_in("run", "--help").stdout


def test_help_says_what_the_choices_are():
    text = " ".join((GOLDEN / "run.txt").read_text().split())
    assert f"Methods to compare: {', '.join(METHODS)}." in text
    assert f"Statistics to compute: {', '.join(FORMULAS)}." in text
    assert f"its state included: {', '.join(STEPS)}." in text


def test_without_a_command_there_is_help_on_stderr_and_exit_code_2(pegprof_in):
    for command in ([], ["cache"]):
        done = pegprof_in(*command)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("Usage: pegprof")


def test_debug_may_stand_before_the_command(pegprof_in):
    for command in (["run", "mlp", "--batch", "many"], ["cache", "clear", "--bad"]):
        done = pegprof_in("--debug", *command)
        assert "Traceback" in done.stderr
        assert done.returncode == 2
