"""Looking without measuring: list, targets, inspect and doctor."""

import json
import re

import pytest

from pegprof.models.problem import zoo_names
from pegprof.targets.devices import DEVICES
from tests import packages
from tests.cli.commands import MODELS, NOISY_MODEL
from tests.waiting import children_cpu_s


def test_list_names_every_model_of_the_zoo_in_less_than_5_s_of_one_core(pegprof_in):
    before_s = children_cpu_s()
    done = pegprof_in("list")
    assert children_cpu_s() - before_s < 5
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()[3:] if not line.startswith(" ")] == zoo_names()
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert "\x1b[" not in done.stdout


def test_what_is_piped_is_as_wide_as_columns_says(pegprof_in):
    narrow, wide = (pegprof_in("list", COLUMNS=columns).stdout for columns in ("50", "160"))
    assert max(map(len, narrow.splitlines())) <= 50
    assert "Not shown at this width: outside embeddings, batch, seq_len, description; " in " ".join(narrow.split())
    assert "Not shown" not in wide
    assert 110 < max(map(len, wide.splitlines())) <= 160


def test_an_export_to_a_file_leaves_the_table_on_stdout(pegprof_in):
    done = pegprof_in("list", "--export-json", "new/models.json")
    assert (done.returncode, done.stderr) == (0, "wrote new/models.json\n")
    assert "transformer-tiny" in done.stdout
    assert [model["name"] for model in json.loads((pegprof_in.folder / "new/models.json").read_text())] == zoo_names()


def test_list_as_json_has_what_the_table_has_and_more(pegprof_in):
    models = json.loads(pegprof_in("list", "--export-json", "-").stdout)
    assert [model["name"] for model in models] == zoo_names()
    large = next(model for model in models if model["name"] == "transformer-151m")
    assert large["parameters_outside_embeddings"] == 150_994_944 + 25 * 1024
    assert (large["package"], large["batch"], large["seq_len"]) == ("pegprof", 64, 512)
    assert large["activations_dominate"]
    assert large["options"]["heads"] == 16


def test_a_package_that_prints_or_is_broken_spoils_no_json(pegprof_in):
    packages.install(pegprof_in.folder, "noisy", NOISY_MODEL, {"noisy-net": "noisy:model", "broken": "noisy:missing"})
    done = pegprof_in("list", "--export-json", "-", "--quiet")
    assert done.returncode == 0
    assert [model["name"] for model in json.loads(done.stdout)] == [*zoo_names(), "noisy-net"]
    assert done.stderr == (
        "warning: broken of noisy cannot be used: noisy.py:1: there is no 'missing' here\nhint: known: model, Noisy\n"
    )


def test_targets_lists_what_is_here_and_every_device(pegprof_in):
    done = pegprof_in("targets")
    assert done.returncode == 0
    names = [line.split()[0] for line in done.stdout.splitlines()[2:] if line and not line.startswith(" ")]
    assert names[: len(DEVICES) + 1] == ["cpu", *DEVICES]


def test_inspect_shows_the_model_and_its_plan(pegprof_in):
    done = pegprof_in("inspect", "mlp", "--batch", "8", "--set", "width=32", "--stats", "second_moment")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("mlp: 26,506 parameters (103.5 KiB), float32\n")
    assert "plan for second_moment of 8 examples on cpu, all at once" in done.stdout
    assert ["Dense_0/kernel", "784×32", "bi,bo->io", "1", "factored"] in [
        x.split()[:5] for x in done.stdout.splitlines()
    ]
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert done.stderr == "tracing mlp ...\n"
    assert not list(pegprof_in.folder.iterdir())


def test_inspect_takes_the_dtype_as_run_does(pegprof_in):
    done = pegprof_in("inspect", "mlp", "--set", "width=32", "--dtype", "bfloat16")
    assert done.stdout.startswith("mlp: 26,506 parameters (103.5 KiB), bfloat16\n"), done.stderr


def test_inspect_shows_the_plan_for_a_device_that_is_not_here(pegprof_in):
    done = pegprof_in("inspect", "mlp", "--batch", "8", "--set", "width=32", "--target", "tpu-v5e")
    assert done.returncode == 0, done.stderr
    assert "plan for mean, second_moment of 8 examples on tpu" in done.stdout


def test_inspect_as_json_is_alone_on_stdout(pegprof_in):
    done = pegprof_in("inspect", f"{MODELS}:prints_at_every_trace", "--export-json", "-", "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    data = json.loads(done.stdout)
    assert (data["schema"], data["model"], data["parameters"]) == (2, "prints", 15)
    assert [row["parameter"] for row in data["plan"]["rows"]] == ["b", "w"]


@pytest.mark.slow
def test_the_largest_model_is_inspected_in_15_s_of_one_core(pegprof_in):
    before_s = children_cpu_s()
    assert pegprof_in("inspect", "transformer-151m").returncode == 0
    assert children_cpu_s() - before_s < 15


def test_the_doctor_is_content_with_this_machine(pegprof_in):
    done = pegprof_in("doctor")
    assert (done.returncode, done.stderr) == (0, "asking JAX for its devices ...\n")
    assert "ok    jax" in done.stdout
    assert re.search("ok    device +cpu: ", done.stdout)
    assert done.stdout.endswith("Ready to measure.\n")


def test_the_doctor_finds_a_platform_that_does_not_exist(pegprof_in):
    done = pegprof_in("doctor", JAX_PLATFORMS="abacus")
    assert done.returncode == 3
    assert "JAX_PLATFORMS is 'abacus'" in done.stdout
    assert "Not ready to measure: 1 problem above." in done.stdout
