"""The examples run as they stand."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_noise_scale_is_printed_while_the_loss_falls():
    done = subprocess.run(
        [sys.executable, EXAMPLES / "noise_scale.py"], capture_output=True, text=True, check=True, timeout=300
    )
    lines = done.stdout.splitlines()
    losses = [float(line.split()[3]) for line in lines]
    assert len(losses) == 6
    assert losses[-1] < 0.7 * losses[0]
