"""Models of one's own: what is wrong with them, what they print, how to begin."""

import pytest

from tests.cli.commands import FINE, NOISY_MODEL, rows_of

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


def test_a_file_without_a_name_is_told_which_names_it_has(pegprof_in):
    (pegprof_in.folder / "mine.py").write_text(MODEL + "other = model()\n_hidden = model()\n")
    done = pegprof_in("run", "mine.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: 'mine.py' does not say which name holds the model\nhint: write mine.py:model or mine.py:other\n"
    )
    assert pegprof_in("run", "none.py").stderr == "error: there is no file 'none.py'\n"


def test_a_relative_import_is_told_the_name_of_its_module(pegprof_in):
    package = pegprof_in.folder / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "sizes.py").write_text("WIDTH = 3\n")
    (package / "mine.py").write_text(f"from .sizes import WIDTH\n{MODEL}")
    done = pegprof_in("inspect", "package/mine.py:model", "--quiet")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: package/mine.py:1: a file on its own cannot import relatively: it belongs to no package\n"
        "hint: name its module instead, package.mine:model\n"
    )
    assert pegprof_in("inspect", "package.mine:model", "--quiet").returncode == 0
    pegprof_in.folder = package
    assert f"package.mine:model in the folder {package.parent}\n" in pegprof_in("inspect", "mine.py:model").stderr


def test_a_users_folder_takes_the_place_of_no_standard_library(pegprof_in):
    """Nor of what jax imports from it; the user's other modules are found as ever."""
    for name in ("queue", "random", "statistics", "html", "tokenize", "profile"):
        (pegprof_in.folder / f"{name}.py").write_text("raise RuntimeError('shadowed')\n")
    (pegprof_in.folder / "sizes.py").write_text("WIDTH = 3\n")
    (pegprof_in.folder / "mine.py").write_text(f"import random\nfrom sizes import WIDTH\n{MODEL}")
    for spec in ("mine.py:model", "mine:model"):
        done = pegprof_in("run", spec, "--batch", "4", "--methods", "grad", "--no-time", "--no-csv")
        assert done.returncode == 0, done.stderr


def test_debug_shows_the_users_own_traceback(pegprof_in):
    (pegprof_in.folder / "mine.py").write_text(MODEL + "wrong = model(loss=lambda w, x: 1 / 0)\n")
    assert (
        pegprof_in("run", "mine.py:wrong", "--quiet").stderr
        == "error: mine.py:14: loss raised ZeroDivisionError: division by zero\n"
    )
    debugged = pegprof_in("run", "mine.py:wrong", "--debug")
    assert debugged.returncode != 0
    assert "wrong = model(loss=lambda w, x: 1 / 0)" in debugged.stderr  # the line itself


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


def test_a_dtype_that_a_users_model_has_no_option_for_is_an_error_that_names_it(pegprof_in):
    done = pegprof_in("run", FINE, "--dtype", "bfloat16", "--no-csv")
    assert (done.returncode, done.stdout) == (2, "")
    assert "models.py" in done.stderr
    assert "unknown option 'dtype'" in done.stderr


OWN_CLASSES = """\
import dataclasses
import typing
import jax
import jax.numpy as jnp
import pegprof


class Dense(typing.NamedTuple):
    w: jax.Array
    b: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Block:
    dense: Dense
    activation: typing.Callable = dataclasses.field(metadata={"static": True})


def init(key):
    return Block(Dense(jax.random.normal(key, (4, 3)), jnp.zeros(3)), activation=lambda x: jnp.tanh(x))


def loss(block, x):
    return jnp.mean(block.activation(x @ block.dense.w + block.dense.b) ** 2)


model = pegprof.Problem(name="own", init=init, loss=loss, batch=lambda key, B: jax.random.normal(key, (B, 4)))
"""


def test_parameters_may_be_of_a_class_that_the_file_defines(pegprof_in):
    (pegprof_in.folder / "own.py").write_text(OWN_CLASSES)
    done = pegprof_in("run", "own.py:model", "--batch", "4", "--runs", "1", "--export-csv", "-", "--quiet")
    assert (done.returncode, done.stderr[:500]) == (0, "")
    for row in rows_of(done.stdout).values():
        assert (row["status"], row["evidence"]) == ("ok", "measured")
    assert float(rows_of(done.stdout)["surgery"]["max_rel_error"]) < 1e-3


NOT_A_NUMBER = (
    MODEL
    + """\
def root(w, x):
    return jnp.mean(jnp.sqrt(-jnp.abs(x @ w["w"]))) + jnp.mean(x**2) * w["b"] ** 2

nan = model(init=lambda key: {"w": jnp.ones(3), "b": jnp.ones(())}, loss=root)
"""
)


def test_a_loss_and_gradients_that_are_not_numbers_are_said_and_nothing_is_called_right(pegprof_in):
    (pegprof_in.folder / "mine.py").write_text(NOT_A_NUMBER)
    run = ["run", "mine.py:nan", "--batch", "4", "--methods", "grad,surgery", "--runs", "3"]
    done = pegprof_in(*run, "--export-json", "nan.json", "--export-csv", "nan.csv")
    words = "NaN in the statistics of 1 of 2 parameters: w"
    assert done.returncode == 0, done.stderr
    assert f"\nwarning: {words} (surgery, grad)\n" in done.stderr
    assert "\nwarning: the loss of 4 examples is NaN\n" in done.stderr
    assert f"\nall: {words}; the loss of 4 examples is NaN" in done.stdout
    rows = rows_of((pegprof_in.folder / "nan.csv").read_text())
    assert float(rows["grad"]["max_rel_error"]) < 1e-3  # of b, which is a number
    assert all(row["status"] == "ok" and words in row["reason"] for row in rows.values())
    shown = pegprof_in("compare", "nan.json", "nan.json")
    assert shown.returncode == 0, shown.stderr
