"""The README says what is there, its examples run, and so do those of the docstrings."""

import csv
import dataclasses
import doctest
import importlib
import os
import pkgutil
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import model_zoo
import pegprof
from benchmarks import accelerators_table
from benchmarks.reports_index import render_index
from pegprof.cli import app
from pegprof.engine.statistics import STATISTICS
from pegprof.errors import ExitCode
from pegprof.experiments import EXPERIMENTS
from pegprof.measure.catalog import Entry
from pegprof.models.logical_axes import TABLE
from pegprof.models.own_models import ENTRY_POINTS
from pegprof.models.problem import load_problem, zoo_names
from pegprof.optimizers import OPTIMIZERS, needed_statistics
from pegprof.report.formats import FORMATS
from pegprof.result.result import Result, Row
from pegprof.result.settings import METHODS
from pegprof.targets.devices import DEVICES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODULES = [
    module.name
    for package in (pegprof, model_zoo)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if not module.name.endswith("__main__")
]


def first_cells(section: str) -> list[str]:
    """The first column of the table under a heading, without its back-ticks."""
    text = re.search(rf"^#+ {section}\n(.*?)(?=^#+ |\Z)", README, re.MULTILINE | re.DOTALL).group(1)
    cells = re.findall(r"^\| *([^|]+?) *\|", text, re.MULTILINE)
    return [cell.strip("`") for cell in cells[2:]]  # below the head and its rule


def code_below(marker: str) -> str:
    return re.search(rf"<!-- {marker} -->\n```\w+\n(.*?)\n```", README, re.DOTALL).group(1)


def test_the_python_examples_of_the_readme_run():
    namespace = {}
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(block, namespace)
    assert namespace["stats"]["second_moment"]["w"].shape == (3, 1)
    assert namespace["linear"](width=8).abstract_batch(4)["x"].shape == (4, 8)
    assert namespace["net"].abstract_params()["kernel"].shape == (784, 10)


@pytest.mark.parametrize(
    ("marker", "end"),
    [("command:run", "pegprof run transformer-151m --batch 64"), ("command:test", "python -m pytest -n 2")],
)
def test_each_command_of_the_readme_is_one_line_that_does_all_set_up(marker, end):
    command = code_below(marker)
    assert command.startswith("python3 -m venv .venv && .venv/bin/pip install")
    assert command.endswith(end)
    assert "\n" not in command


def test_the_plan_in_the_readme_is_the_one_that_is_printed(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    plan = next(i for i, block in enumerate(blocks) if "make_plan" in block)
    exec("".join(blocks[: plan + 1]), {})
    assert capsys.readouterr().out.strip() == code_below("plan")


def test_the_readme_shows_the_run_that_is_on_record():
    record = ROOT / "reports" / "first-screen.json"
    result = Result.from_json(record.read_text(encoding="utf-8"))
    block = f"```console\n$ pegprof run transformer-151m --batch 64\n{result}\n```"
    shown = re.search(r"<!-- run:begin -->\n(.+)\n<!-- run:end -->", README, re.DOTALL).group(1)
    if os.environ.get("PEGPROF_UPDATE_README"):
        (ROOT / "README.md").write_text(README.replace(shown, block), encoding="utf-8")
    else:
        assert shown == block
    assert result.complete
    assert [row.method for row in result.rows] == list(METHODS)
    assert record.with_suffix(".csv").read_text(encoding="utf-8") == FORMATS["csv"](result)


def costs_of_surgery(report):
    with (ROOT / "reports" / report).open(newline="") as file:
        return {row["model"]: row for row in csv.DictReader(file) if row["method"] == "surgery"}


def test_the_readme_shows_the_costs_that_are_on_record():
    recorded = costs_of_surgery("engine.csv")
    table = re.search(r"<!-- engine -->\n(.*?)\n\n", README, re.DOTALL).group(1)
    shown = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    assert [(model, time, temp) for model, _, time, temp, _ in shown] == [
        (model, f"{float(row['time_ratio']):.2f}", f"{float(row['temp_ratio']):.2f}") for model, row in recorded.items()
    ]


def test_the_readme_says_what_surgery_costs_beside_a_faster_gradient():
    ratios = {model: float(row["time_ratio"]) for model, row in costs_of_surgery("engine-individual-dots.csv").items()}
    words = re.search(
        r"geometric mean is ([\d.]+), with ([\d.]+) for `cnn` and\n([\d.]+) for `resnet`", README
    ).groups()
    assert words == tuple(f"{ratios[model]:.2f}" for model in ("geometric mean", "cnn", "resnet"))


def test_the_readme_shows_the_estimates_for_accelerators_that_are_on_record():
    rows = accelerators_table.read(ROOT / "reports" / "accelerators.csv")
    shown = re.search(r"<!-- accelerators -->\n(.*?)\n\n", README, re.DOTALL).group(1)
    assert shown == accelerators_table.summary(rows)
    assert (ROOT / "reports" / "accelerators.md").read_text(encoding="utf-8") == accelerators_table.render(rows)


def test_the_readme_lists_every_model_with_its_parameters():
    assert sorted(first_cells("Models")) == sorted(zoo_names())
    for name in zoo_names():
        leaves = jax.tree.leaves(load_problem(name).abstract_params())
        assert re.search(rf"^\| `{name}` .*\| {sum(leaf.size for leaf in leaves):,} \|$", README, re.MULTILINE)


def test_the_readme_lists_every_statistic():
    assert sorted(first_cells("Statistics")) == sorted(STATISTICS)


def test_the_readme_lists_every_logical_axis_name_in_the_order_of_the_table():
    table = README.partition("| name | axis of the mesh |\n|---|---|\n")[2].partition("\n\n")[0]
    rows = [re.findall(r"[^|]+", line) for line in table.splitlines()]
    axes = [(name, axis.strip(" `")) for names, axis in rows for name in re.findall(r"`(\w+)`", names)]
    assert [(name, name if axis == "itself" else axis) for name, axis in axes if axis != "none"] == list(TABLE.items())


def test_the_readme_lists_every_optimizer_with_what_it_needs():
    table = re.search(r"^\| optimizer \|.*?\n\n", README, re.MULTILINE | re.DOTALL).group(0)
    names = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert names == list(OPTIMIZERS)
    for name, needs in zip(names, table.strip().splitlines()[2:], strict=True):
        found = [need for need in needed_statistics(OPTIMIZERS[name](1e-3), jnp.zeros(2)) if need != "mean"]
        assert re.findall(r"`(\w+)`", needs.split("|")[3]) == (found if name != "adam_mix" else [])


def test_the_readme_shows_the_steps_that_are_on_record():
    with (ROOT / "reports" / "optimizer-step.csv").open(newline="") as file:
        recorded = {(row["step"], row["batch"]): float(row["time_ratio"]) for row in csv.DictReader(file)}
    text = re.search(r"<!-- optimizer-step -->\n(.*?)\n\n", README, re.DOTALL).group(1)
    head, _, *lines = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    batches = [cell.removeprefix("batch ") for cell in head[1:]]
    shown = {(line[0], batch): cell for line in lines for batch, cell in zip(batches, line[1:], strict=True)}
    assert shown == {key: f"{ratio:.2f}" for key, ratio in recorded.items() if key[0] != "adam by grad"}


def test_the_readme_lists_every_experiment():
    assert sorted(first_cells("The paper's experiments")) == sorted(EXPERIMENTS)


def test_the_index_of_the_reports_is_made_of_what_is_there():
    """Run ``python benchmarks/reports_index.py`` after adding a report."""
    folder = ROOT / "reports"
    assert (folder / "README.md").read_text(encoding="utf-8") == render_index(folder)


def test_the_readme_lists_every_method():
    assert first_cells("Measuring") == list(METHODS)


def test_the_readme_lists_every_exit_code():
    assert first_cells("Exit codes") == [str(code.value) for code in ExitCode]


def test_the_readme_lists_the_columns_of_the_csv_in_their_order():
    columns = re.split(r",\s+", code_below("columns"))
    assert columns == [field.name for field in dataclasses.fields(Row)]


def test_the_readme_lists_the_fields_of_list_as_json():
    assert re.split(r",\s+", code_below("list")) == [field.name for field in dataclasses.fields(Entry)]


def test_the_readme_names_the_group_of_entry_points():
    assert f'[project.entry-points."{ENTRY_POINTS}"]' in README


def test_the_readme_mentions_every_command():
    names = [command.name for command in app.registered_commands]
    for group in app.registered_groups:
        name = group.typer_instance.info.name
        names += [f"{name} {command.name}" for command in group.typer_instance.registered_commands]
    assert names
    assert [name for name in names if f"`pegprof {name}" not in README] == []


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_run(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_the_readme_lists_every_target_with_its_memory():
    assert first_cells("Devices that are not here") == ["cpu", *DEVICES]
    for device in DEVICES.values():
        (shown,) = re.findall(rf"^\| `{device.name}` .*\| ([\d.]+) GiB \|$", README, re.MULTILINE)
        assert float(shown) == pytest.approx(device.memory_bytes / 2**30, abs=0.05)
