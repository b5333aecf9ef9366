"""Limits: the more special goes before the more general, a flag before the file, and nonsense is refused."""

import pytest

from pegprof.compare.limits import Limits, read_limits
from pegprof.errors import PegprofError

PYPROJECT = """
[tool.pegprof.gate]
max-bytes = "2%"
time = true
max = { "surgery.time_ratio" = 1.2 }

[tool.pegprof.gate.models.mlp]
max-bytes = "3%"

[tool.pegprof.gate.models.mlp.methods.vmap]
max-bytes = "4%"
max-time-ratio = "50%"
"""


def limits(folder, *, max_bytes=None, max_time_ratio=None, ceilings=(), time=None):
    return read_limits(folder, max_bytes=max_bytes, max_time_ratio=max_time_ratio, ceilings=ceilings, time=time)


def test_without_flags_or_file_bytes_may_grow_by_1_percent_and_time_is_not_looked_at(tmp_path):
    table = limits(tmp_path)
    assert table.of("mlp", "surgery") == Limits(max_bytes=0.01, max_time_ratio=0.10, ceilings={})
    assert not table.time


def test_the_file_of_a_folder_above_has_limits_by_model_and_method(tmp_path):
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    (tmp_path / "deep" / "er").mkdir(parents=True)
    table = limits(tmp_path / "deep" / "er")
    assert table.time
    assert table.of("cnn", "grad").max_bytes == 0.02
    assert table.of("mlp", "grad").max_bytes == 0.03
    assert table.of("mlp", "vmap") == Limits(max_bytes=0.04, max_time_ratio=0.5)
    assert table.of("mlp", "surgery").ceilings == {"time_ratio": 1.2}


def test_a_flag_goes_before_the_file(tmp_path):
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    table = limits(tmp_path, max_bytes="0.5%", ceilings=["surgery.time_ratio=2", "vmap.peak_ratio=3"])
    assert table.of("mlp", "vmap") == Limits(max_bytes=0.005, max_time_ratio=0.5, ceilings={"peak_ratio": 3.0})
    assert table.of("mlp", "surgery").ceilings == {"time_ratio": 2.0}


def test_a_pyproject_that_says_nothing_of_gates_is_as_good_as_none(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert limits(tmp_path).of("mlp", "grad") == Limits()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[tool.pegprof.gate]\nmax-byte = '1%'", "'max-byte' is not a limit\nhint: did you mean 'max-bytes'"),
        ("[tool.pegprof.gate]\nmax-bytes = 0.01", "0.01 is not a share\nhint: write it like 1%"),
        ("[tool.pegprof.gate]\ntime = 'yes'", "time is 'yes'\nhint: write true or false"),
        ("[tool.pegprof.gate]\nmax = 3", "max is not a table"),
        ("[tool.pegprof]\ngate = 3", r"\[tool.pegprof.gate\] is not a table"),
        ("[tool.pegprof.gate.max]\n'surgery.time' = 3", "'time' is not a column of numbers"),
        ("[tool.pegprof.gate.max]\n'surgery.time_ratio' = 'two'", "is 'two', not a number"),
        ("[tool.pegprof.gate.max]\n'surgery.time_ratio' = nan", "is nan\nhint: write a number of 0 or more"),
        ("[tool.pegprof.gate.models.mlp.methods.vamp]\nmax-bytes = '1%'", "'vamp' is not a method"),
        (
            "[tool.pegprof.gate.models.mlp.methods.vmap.max]\n'surgery.flops' = 1",
            "surgery.flops is not a column of vmap",
        ),
        ("[tool.pegprof.gate", "the limits cannot be read"),
    ],
)
def test_a_file_that_is_wrong_is_said_with_its_path(tmp_path, text, words):
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(PegprofError, match=words) as caught:
        limits(tmp_path)
    assert str(tmp_path) in caught.value.where


@pytest.mark.parametrize(
    "flags",
    [
        {"max_bytes": "1"},
        {"max_time_ratio": "-1%"},
        *({"ceilings": [f"surgery.peak_ratio{value}"]} for value in ("", "=", "=nan", "=inf", "=-inf", "=-1")),
        {"ceilings": ["x.y=1"]},
    ],
    ids=str,
)
def test_a_flag_that_is_wrong_is_refused(tmp_path, flags):
    with pytest.raises(PegprofError):
        limits(tmp_path, **flags)
