"""On eight devices a sharded batch has the statistics that it has on one. Processes of their own do the work."""

import subprocess
import sys

import pytest

from tests.programs import PROGRAMS
from tests.waiting import LIMIT_S

SETTINGS = ("automatic", "fsdp", "explicit", "shard_map that checks", "one at a time", "explicit fsdp", "shard_map")
PARTS = 8
OFTEN = ["mlp_regression", "transformer_block", "tied_embedding", "scanned_layers_rematerialised"]


def check(cases):
    command = [sys.executable, "-m", "tests.engine.sharded", *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": agrees") == len(cases)


@pytest.mark.parametrize(
    "what", ["collectives", "fsdp", "kernels", "keys", "refusals", "sequence", "training", "transformations"]
)
def test_on_a_mesh_this_holds(what):
    check([what])


@pytest.mark.parametrize("name", OFTEN)
def test_statistics_of_a_sharded_batch_are_those_of_the_whole(name):
    check([f"{setting}:{name}" for setting in (*SETTINGS, "fsdp untold")])


def test_parameters_may_be_sharded_over_a_model_axis():
    check([f"model:{name}" for name in PROGRAMS if "transformer" in name or "mlp" in name])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_program_is_right_on_a_mesh(part):
    """Each in one of the settings; ``python -m tests.engine.sharded --everything`` runs it in all."""
    cases = [f"{SETTINGS[i % len(SETTINGS)]}:{name}" for i, name in enumerate(PROGRAMS)]
    check(cases[part::PARTS])
