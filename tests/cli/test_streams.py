"""Where things go: stdout, stderr, files, terminals."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from pegprof.errors import ExitCode
from pegprof.result.result import Result
from tests.cli.commands import ENVIRONMENT, FINE, GRAD_ALONE, Pegprof, rows_of
from tests.waiting import LIMIT_S, finish


def test_a_place_that_cannot_be_written_is_said_before_anything_is_measured(pegprof_in):
    (pegprof_in.folder / "reports").write_text("a file where the folder should be")
    done = pegprof_in("run", "mlp")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: cannot write reports/mlp-b64-cpu.csv")
    assert "hint:" in done.stderr
    assert "needs" not in done.stderr


def test_a_folder_that_cannot_be_written_to_is_said_before_anything_is_measured():
    done = Pegprof(Path("/proc/self"))("run", "mlp")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: cannot write reports/mlp-b64-cpu.csv")
    assert "hint: name another file with --export-csv, or leave it out with --no-csv" in done.stderr


def test_a_reader_that_had_enough_changes_no_exit_code(pegprof_in):
    reader, writer = os.pipe()
    os.close(reader)
    for arguments, code in [(["list"], ExitCode.OK), (["doctor", "--quiet"], ExitCode.UNMEASURED)]:
        with pegprof_in.start(*arguments, stdout=writer, JAX_PLATFORMS="abacus") as process:
            assert (finish(process)[1], process.returncode) == ("", code)
    os.close(writer)


def test_what_cannot_be_written_to_stdout_is_an_error_and_not_the_answer_no(pegprof_in):
    with Path("/dev/full").open("w") as full, pegprof_in.start("--version", stdout=full) as process:
        _, stderr = finish(process)
    assert process.returncode == ExitCode.UNMEASURED
    assert stderr.startswith("error: this is a bug in pegprof, or something is wrong with this machine: OSError: ")
    assert stderr.endswith("hint: --debug shows the traceback\n")
    assert "Traceback" not in stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_stream_that_is_closed_is_no_error(closed):
    command = ["sh", "-c", f'exec "$0" -m pegprof list {closed}', sys.executable]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stderr) == (ExitCode.OK, "")


@pytest.fixture(scope="module")
def exporting(tmp_path_factory):
    """A run that exports one format to stdout and the others to files; and the folder that it ran in."""
    pegprof = Pegprof(tmp_path_factory.mktemp("exporting"))
    done = pegprof(*GRAD_ALONE, "--export-json", "-", "--export-csv", "a.csv", "--export-markdown", "new/c.md")
    assert done.returncode == 0, done.stderr
    return done, pegprof.folder


def test_json_on_stdout_is_alone_there_and_the_table_is_on_stderr(exporting):
    done, _ = exporting
    result = Result.from_json(done.stdout)
    assert (result.complete, [row.method for row in result.rows]) == (True, ["grad"])
    assert "fine: 15 parameters" in done.stderr


def test_every_other_export_has_its_file_and_each_path_is_said(exporting):
    done, folder = exporting
    assert sorted(path.name for path in folder.iterdir()) == ["a.csv", "new"]  # and no draft
    assert list(rows_of((folder / "a.csv").read_text())) == ["grad"]
    assert (folder / "new" / "c.md").read_text().startswith("### pegprof: fine")
    assert done.stderr.endswith("wrote a.csv\nwrote new/c.md\n")


def test_quiet_is_quiet_and_a_stream_that_knows_no_times_sign_gets_its_table(pegprof_in):
    done = pegprof_in(*GRAD_ALONE, "--quiet", "--export-json", "new/b.json", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("fine: 15 parameters")
    assert done.stdout.splitlines()[2].split() == ["method", "status", "XLA", "peak", "?", "grad", "flops"]
    assert [path.suffix for path in (pegprof_in.folder / "reports").iterdir()] == [".csv"]
    assert Result.from_json((pegprof_in.folder / "new" / "b.json").read_text()).rows[0].method == "grad"


def test_quiet_leaves_no_table_beside_what_is_exported_to_stdout(pegprof_in):
    done = pegprof_in(*GRAD_ALONE, "--quiet", "--no-csv", "--export-json", "-")
    assert (done.returncode, done.stderr) == (0, "")
    assert [row.method for row in Result.from_json(done.stdout).rows] == ["grad"]


@pytest.mark.slow
def test_two_runs_at_once_in_one_folder_do_not_disturb_each_other(pegprof_in):
    command = ["run", FINE, "--methods", "grad,vmap", "--runs", "3", "--quiet"]
    runs = [pegprof_in.start(*command) for _ in range(2)]
    outputs = [finish(run) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    (file,) = (pegprof_in.folder / "reports").iterdir()  # and no draft
    rows = rows_of(file.read_text())
    assert [(method, row["runs"]) for method, row in rows.items()] == [("grad", "3"), ("vmap", "3")]


def on_a_terminal(pegprof_in, *arguments, stream, columns, **environment):
    """Runs a command with one of its streams on a terminal, and returns what is there."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment |= {"TERM": "xterm", "COLUMNS": str(columns)}  # what else is set would go before the terminal's own
    with pegprof_in.start(*arguments, **{stream: theirs}, **environment) as process:
        os.close(theirs)
        text = b""
        try:
            while chunk := _read(ours):
                text += chunk
        finally:
            finish(process)
    os.close(ours)
    return text.decode()


def _read(terminal):
    assert select.select([terminal], [], [], LIMIT_S)[0], "waited in vain"
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
