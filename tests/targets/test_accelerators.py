"""The program that lists estimates: its groups, its CSV, and one real run."""

import csv
import dataclasses

import pytest
from typer.testing import CliRunner

from benchmarks import accelerators
from benchmarks.accelerators_text import group, short_op_name
from pegprof.errors import PegprofError
from pegprof.targets.hlo.estimate import OperationPrice
from tests.compilers import needs_compilers

OPERATION = OperationPrice(
    name="fusion.1",
    kind="fusion",
    opcode="fusion",
    shape="f32[8]",
    op_name="jit(f)/block_0/up/dot_general",
    source="",
    kernel="",
    trips=3,
    flops=10,
    vector_flops=0,
    bytes=100,
    products_s=0.0,
    compiler_s=None,
    roofline_s=1.0,
    estimate_s=1.0,
)


def change(**fields):
    return dataclasses.replace(OPERATION, **fields)


def test_operations_of_different_layers_share_a_line():
    groups = group([OPERATION, change(name="fusion.2", op_name="jit(f)/block_11/up/dot_general")])
    assert [(each.count, each.op_name, each.total_s) for each in groups] == [(2, "jit(f)/block_*/up/dot_general", 6.0)]


def test_operations_of_different_shapes_or_trips_do_not_and_the_dearest_comes_first():
    groups = group([OPERATION, change(shape="f32[4]", estimate_s=2.0), change(trips=1)])
    assert [each.total_s for each in groups] == [6.0, 3.0, 1.0]


def test_a_name_is_shown_without_what_all_names_share():
    assert short_op_name("jit(<lambda>)/vmap()/while/body/closed_call/add") == "while/add"


def test_a_row_of_the_same_question_is_replaced_and_others_stay(tmp_path):
    path = tmp_path / "rows.csv"
    row = dict.fromkeys(accelerators.KEY, "x")
    accelerators._add_to_csv([{**row, "time_s": 1.0}, {**row, "method": "grad", "time_s": 2.0}], path)
    accelerators._add_to_csv([{**row, "time_s": 3.0, "kernels": 5}], path)
    with path.open(newline="") as file:
        found = [(each["method"], each["time_s"], each["kernels"]) for each in csv.DictReader(file)]
    assert found == [("grad", "2.0", ""), ("x", "3.0", "5")]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["mlp", "--target", "abacus"], "unknown target"),
        (["mlp", "--method", "magic"], "unknown method"),
        (["mlp", "--microbatch", "many"], "no number of examples"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_compiled(arguments, words):
    with pytest.raises(PegprofError, match=words):
        run(*arguments)


def run(*arguments):
    import typer

    app = typer.Typer()
    app.command()(accelerators.main)
    return CliRunner().invoke(app, arguments, catch_exceptions=False, standalone_mode=False)


@needs_compilers
@pytest.mark.slow
def test_a_model_is_estimated_and_listed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "rows.csv"
    command = ["mlp", "--target", "h100", "--batch", "8", "--method", "grad,vmap", "--export-csv", str(path)]
    shown = run(*command, "--label", "first").stdout
    assert "mlp, grad on h100" in shown
    assert "gemm_fusion" in shown
    run(*command, "--label", "second")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["label"], row["method"]) for row in rows] == [
        ("first", "grad"), ("first", "vmap"), ("second", "grad"), ("second", "vmap"),
    ]  # fmt: skip
    assert all(row["status"] == "ok" and row["evidence"] == "estimated" for row in rows)
    assert float(rows[0]["time_ratio"]) == 1.0
    assert float(rows[0]["time_s"]) == float(rows[2]["time_s"]) > 0
    assert len(list((tmp_path / "cache").rglob("*.json.gz"))) == 2
