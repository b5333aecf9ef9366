"""What ``pegprof new`` writes runs as it is, and overwrites nothing unasked."""

import jax
import pytest

from pegprof import check_examples
from pegprof.errors import ExitCode, PegprofError
from pegprof.models.check_problem import check_problem
from pegprof.models.problem import load_problem
from pegprof.models.starting_file import FUNCTION, write_starting_file


@pytest.mark.parametrize(
    ("name", "options"), [(FUNCTION, {"width": "16", "classes": "3"}), ("flax_model", {"width": "16"})]
)
def test_every_model_of_the_file_can_be_measured(tmp_path, name, options):
    write_starting_file(tmp_path / "mine.py")
    problem = load_problem(f"{tmp_path / 'mine.py'}:{name}", options)
    check_problem(problem, 8)
    params, batch = problem.init(jax.random.key(0)), problem.batch(jax.random.key(1), 4)
    assert check_examples(problem.loss, params, batch).ok


def test_the_file_speaks_of_itself_by_its_own_name(tmp_path):
    write_starting_file(tmp_path / "mine.py")
    text = (tmp_path / "mine.py").read_text()
    assert f"pegprof run mine.py:{FUNCTION} --batch 32" in text
    assert "my_model" not in text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("there.py", "{}/there.py is there already\nhint: choose another name, or overwrite it with --force"),
        ("mine.txt", "{}/mine.txt is not the name of a Python file\nhint: write it like my_model.py"),
        ("mine", "{}/mine is not the name of a Python file\nhint: write it like my_model.py"),
        ("nowhere/mine.py", "there is no folder {}/nowhere\nhint: make it first"),
        ("folder.py", "{}/folder.py is there already\nhint: choose another name, or overwrite it with --force"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path, name, message):
    (tmp_path / "there.py").write_text("precious")
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(PegprofError) as refusal:
        write_starting_file(tmp_path / name)
    assert str(refusal.value) == message.format(tmp_path)
    assert refusal.value.exit_code == ExitCode.USAGE
    assert (tmp_path / "there.py").read_text() == "precious"


def test_force_overwrites_a_file_but_not_a_folder(tmp_path):
    (tmp_path / "there.py").write_text("precious")
    write_starting_file(tmp_path / "there.py", force=True)
    assert "precious" not in (tmp_path / "there.py").read_text()
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(PegprofError, match=r"cannot write .*folder.py: Is a directory"):
        write_starting_file(tmp_path / "folder.py", force=True)
