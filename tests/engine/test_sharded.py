"""Inside a user's own ``shard_map`` each device has the statistics of its own examples, whatever ``check_vma`` is."""

import subprocess
import sys

from tests.waiting import LIMIT_S

PROGRAMS = [
    "mlp_regression",
    "transformer_block",
    "tied_embedding",
    "embedding_lookup",
    "convolution_2d_grouped",
    "scanned_layers_rematerialised",
    "scanned_layers_with_a_regulariser",
    "cond_with_a_predicate_that_differs",
    "gru_with_a_learned_initial_state",
    "dropout_with_typed_keys_in_the_batch",
    "regulariser_without_the_batch",
]


def test_eight_devices_have_together_the_statistics_of_the_whole_batch():
    command = [sys.executable, "-m", "tests.engine.sharded", *PROGRAMS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("agrees") == 4 * len(PROGRAMS) + 2
    assert "explicit axes: agrees" in done.stdout
    assert "kernels: agrees" in done.stdout
