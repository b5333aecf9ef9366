"""The examples run as they stand."""

import subprocess
import sys
from pathlib import Path

import jax

from pegprof import check_examples
from pegprof.problem import load_problem

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_noise_scale_is_printed_while_the_loss_falls():
    done = subprocess.run(
        [sys.executable, EXAMPLES / "noise_scale.py"], capture_output=True, text=True, check=True, timeout=300
    )
    lines = done.stdout.splitlines()
    losses = [float(line.split()[3]) for line in lines]
    assert len(losses) == 6
    assert losses[-1] < 0.7 * losses[0]


def test_the_model_of_ones_own_loads_and_its_examples_do_not_interact():
    problem = load_problem(f"{EXAMPLES / 'my_model.py'}:linear", {"width": "16"})
    params, batch = problem.init(jax.random.key(0)), problem.batch(jax.random.key(1), 4)
    assert batch["x"].shape == (4, 16)
    assert check_examples(problem.loss, params, batch).ok
