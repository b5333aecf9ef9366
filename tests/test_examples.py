"""The examples run as they stand."""

import subprocess
import sys
from pathlib import Path

import pytest

from pegprof.models.problem import load_problem
from tests.waiting import LIMIT_S

EXAMPLES = Path(__file__).parents[1] / "examples"


def run_example(name, *arguments):
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments], capture_output=True, text=True, check=True, timeout=LIMIT_S
    )
    return done.stdout.splitlines()


def test_the_noise_scale_is_printed_while_the_loss_falls():
    losses = [float(line.split()[3]) for line in run_example("noise_scale.py")]
    assert len(losses) == 6
    assert losses[-1] < 0.7 * losses[0]


def test_every_optimizer_of_the_example_learns_from_the_statistics_that_it_needs():
    words = {line.split()[0]: line.split()[2:] for line in run_example("train_micro_adam.py")}
    assert list(words) == ["adam", "micro_adam", "sign_ema", "micro_sign_sgd"]
    for first, _, last, *_ in words.values():
        assert float(last) < float(first)
    assert words["micro_adam"][-2:] == ["mean,", "second_moment"]
    assert words["micro_sign_sgd"][-1] == "sign_mean"


def test_two_processes_train_as_one_does():
    script = "train_on_two_hosts.py"
    (one, *of_one), (two, *of_two) = run_example(script, "--processes", "1"), run_example(script)[-3:]
    assert (one, two) == ("processes 1, devices 8", "processes 2, devices 8")
    numbers = [
        [float(word) for line in lines for word in line.split() if word[0].isdigit()] for lines in (of_one, of_two)
    ]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-4)
    assert numbers[0][2] < 0.8 * numbers[0][0]


def test_a_model_of_the_zoo_is_also_one_whose_examples_are_batches_of_one():
    assert not load_problem("transformer-tiny").keep_batch_dim
    problem = load_problem(f"{EXAMPLES / 'batches_of_one.py'}:batches_of_one", {"model": "transformer-tiny"})
    assert (problem.name, problem.keep_batch_dim) == ("transformer-tiny-batches-of-one", True)
