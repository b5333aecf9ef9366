"""Defaults of ``pegprof run`` in pyproject.toml."""

import pytest

from pegprof.errors import ExitCode
from tests.cli.commands import rows_of

PROJECT = """\
[tool.pegprof.run]
batch = [4, 8]
methods = ["grad"]
stats = "mean"
time = false
seed = 7
no-csv = true
set = { width = 8 }
"""


def test_a_flag_goes_before_the_file_and_the_file_before_our_own_defaults(pegprof_in):
    (pegprof_in.folder / "pyproject.toml").write_text(PROJECT)
    done = pegprof_in("run", "mlp", "--batch", "2", "--export-csv", "-", "--csv")
    assert done.returncode == 0, done.stderr
    (row,) = rows_of(done.stdout).values()
    assert [row[name] for name in ("batch", "method", "stats", "seed", "time_s")] == ["2", "grad", "mean", "7", ""]
    assert int(row["parameters"]) < 10_000  # the width is the file's
    assert done.stderr.startswith(
        "defaults from pyproject.toml: batch = 4,8, methods = grad, stats = mean, time = false, seed = 7, "
        "no-csv = true, set = width=8\n"
    )


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "bacth = 4",
            "pyproject.toml: [tool.pegprof.run]: 'bacth' is not an option of run\nhint: did you mean 'batch'?",
        ),
        ("time = 3", "pyproject.toml: [tool.pegprof.run]: time is 3\nhint: write true or false"),
        ("set = 3", "pyproject.toml: [tool.pegprof.run]: set is 3\nhint: write set = { width = 64 }"),
        ("batch = { a = 3 }", "pyproject.toml: [tool.pegprof.run]: batch is a table\nhint: write batch = ..."),
        ("stats = ['men']", "--stats: unknown statistic 'men'\nhint: did you mean 'mean'?"),
        ("batch = ", "[tool.pegprof.run] cannot be read: "),
    ],
)
def test_a_file_that_is_wrong_is_an_error_that_names_it(pegprof_in, text, error):
    (pegprof_in.folder / "pyproject.toml").write_text(f"[tool.pegprof.run]\n{text}\n")
    done = pegprof_in("run", "mlp")
    assert (done.returncode, done.stdout) == (ExitCode.USAGE, "")
    assert error in done.stderr
    assert pegprof_in("run", "--help").returncode == 0


def test_the_file_of_a_folder_above_counts_and_other_commands_ignore_it(pegprof_in):
    (pegprof_in.folder / "pyproject.toml").write_text("[tool.pegprof.run]\nstats = 'men'\n")
    pegprof_in.folder = pegprof_in.folder / "below"
    pegprof_in.folder.mkdir()
    assert pegprof_in("run", "mlp").returncode == ExitCode.USAGE
    assert "men" not in pegprof_in("inspect", "mlp", "--batch", "x").stderr


def test_a_project_without_defaults_says_nothing(pegprof_in):
    (pegprof_in.folder / "pyproject.toml").write_text("[project]\nname = 'mine'\n")
    assert pegprof_in("run", "mlp", "--batch", "x").stderr.startswith("error: 'x' is not a batch size")
