"""What a shell offers on Tab, asked as a shell asks."""

import pytest

from pegprof.engine.statistics import STATISTICS
from pegprof.models.problem import zoo_names
from pegprof.result.settings import METHODS
from pegprof.targets.devices import DEVICES
from tests.cli.commands import run_python


def complete(pegprof, *words):
    line = {"COMP_WORDS": " ".join(["pegprof", *words]), "COMP_CWORD": str(len(words))}
    done = pegprof(_PEGPROF_COMPLETE="complete_bash", **line)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offers"),
    [
        (["r"], ["run"]),
        (["run", "tr"], [name for name in zoo_names() if name.startswith("tr")]),
        (["run", "mlp", "--methods", ""], list(METHODS)),
        (["run", "mlp", "--methods", "grad,v"], ["grad,vmap"]),
        (["run", "mlp", "--stats", "mean,"], [f"mean,{name}" for name in STATISTICS if name != "mean"]),
        (["inspect", "mlp", "--target", "cpu,tpu"], [f"cpu,{name}" for name in DEVICES if name.startswith("tpu")]),
        (["fit", "mlp", "--target", "cpu,tpu"], []),
        (["fit", "mlp", "--step", "micro_adam_"], ["micro_adam_var", "micro_adam_msq"]),
        (["run", "mlp", "--set", "w"], ["width="]),
        (["run", "mlp", "--dtype", "b"], ["bfloat16"]),
        (["experiment", "sign"], ["sign-placement"]),
        (["cache", ""], ["info", "clear"]),
        (["gate", "--export-ju"], ["--export-junit"]),
        (["run", "nothing-like-it"], []),
    ],
    ids=lambda value: " ".join(value),
)
def test_tab_completes(pegprof_in, words, offers):
    assert complete(pegprof_in, *words) == offers


def test_behind_a_file_its_names_are_offered(pegprof_in):
    (pegprof_in.folder / "mine.py").write_text("import os\n_hidden = 1\n\ndef model():\n    pass\n\nother = model()\n")
    assert complete(pegprof_in, "run", "mine.py") == ["mine.py:model", "mine.py:other"]
    assert complete(pegprof_in, "run", "none.py") == []


def test_zsh_is_told_what_each_name_means(pegprof_in):
    line = {"_PEGPROF_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "pegprof run mlp --stats second"}
    assert pegprof_in(**line).stdout.strip() == """_arguments '*: :(("second_moment":"mean of g²"))'"""


def test_a_pyproject_that_is_wrong_does_not_stop_completion(pegprof_in):
    (pegprof_in.folder / "pyproject.toml").write_text("[tool.pegprof.run]\nbacth = 4\n")
    assert complete(pegprof_in, "run", "ml") == ["mlp"]


def test_completion_loads_neither_jax_nor_pandas(tmp_path):
    code = """
import os, sys
os.environ |= {"_PEGPROF_COMPLETE": "complete_bash", "COMP_WORDS": "pegprof run mlp --stats m", "COMP_CWORD": "4"}
from pegprof.cli import app
try:
    app(prog_name="pegprof")
except SystemExit:
    sys.exit(bool({"jax", "pandas", "numpy", "rich"} & set(sys.modules)))
"""
    done = run_python(code, tmp_path)
    assert (done.returncode, done.stdout.split()) == (0, ["mean", "mean_squared"])
