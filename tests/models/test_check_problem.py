"""What is said of a Problem that cannot be measured, word for word; and that what can be is let through."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pegprof.errors import ExitCode, PegprofError
from pegprof.models.check_problem import check_problem
from pegprof.models.problem import Problem, load_problem, zoo_names
from pegprof.user_code import home_of

LINEAR = Problem(
    name="linear",
    init=lambda key: {"w": jax.random.normal(key, (4, 3))},
    loss=lambda params, batch: jnp.mean(batch["x"] @ params["w"]),
    batch=lambda key, B: {"x": jax.random.normal(key, (B, 4))},
)
COUNTER = itertools.count()
DATA = np.full((64, 4), np.nan, np.float32)
KEY = jax.random.key(3)


@jax.jit
def random_under_jit(key):
    return jnp.asarray(np.random.default_rng().normal(size=3))


HINT_OF_LOSS = "return one number, the mean over the examples"
HINT_OF_BATCH = "every array that batch(key, B) returns has B rows, one for each example"
HINT_OF_RANDOMNESS = "draw all that is random from the key, with jax.random"


@pytest.mark.parametrize(
    ("part", "fn", "what", "hint"),
    [
        (
            "loss",
            lambda params, batch: jnp.mean(batch["x"] @ params["w"], axis=0),
            "loss returned an array of shape (3,) and dtype float32, not a scalar",
            HINT_OF_LOSS,
        ),
        ("loss", lambda params, batch: (0.0, 1.0), "loss returned a tuple, not a scalar", HINT_OF_LOSS),
        ("loss", lambda params, batch: None, "loss returned a NoneType, not a scalar", HINT_OF_LOSS),
        (
            "loss",
            lambda params, batch: jnp.argmax(params["w"]),
            "loss returned an array of shape () and dtype int32, not a scalar",
            HINT_OF_LOSS,
        ),
        ("loss", lambda params, batch: batch["y"], "loss raised KeyError: 'y'", ""),
        (
            "batch",
            lambda key, B: {"x": jnp.zeros((8, 4))},  # right by chance when 8 are asked for
            "batch was asked for 4 examples and returned ['x'] of shape (8, 4)",
            HINT_OF_BATCH,
        ),
        (
            "batch",
            lambda key, B: {"x": jnp.zeros((B, 4)), "temperature": 1.0},
            "batch was asked for 4 examples and returned ['temperature'] of shape ()",
            HINT_OF_BATCH,
        ),
        (
            "batch",
            lambda key, B: jnp.zeros((3, B)),
            "batch was asked for 4 examples and returned shape (3, 4)",
            HINT_OF_BATCH,
        ),
        ("batch", lambda key, B: {}, "batch returned no arrays", HINT_OF_BATCH),
        (
            "batch",
            lambda key: key,
            "batch raised TypeError: <lambda>() takes 1 positional argument but 2 were given",
            "",
        ),
        (
            "batch",
            lambda key, B: {"x": np.random.default_rng().normal(size=(B, 4))},
            "batch is not deterministic: called twice, it differs",
            HINT_OF_RANDOMNESS,
        ),
        ("init", lambda key: 1 / 0, "init raised ZeroDivisionError: division by zero", ""),
        ("init", lambda key: exit(3), "init raised SystemExit: 3", ""),
        ("init", lambda key: {}, "init returned no parameters", "return a pytree of arrays"),
        (
            "init",
            lambda key: {"w": jnp.zeros((4, 3)), "step": 0},
            "the parameter step is int32, not floating-point",
            "leave arrays that are not trained out of the parameters: close over them",
        ),
        (
            "init",
            lambda key: {"w": np.random.default_rng().normal(size=(4, 3))},
            "init is not deterministic: called twice, it differs",
            HINT_OF_RANDOMNESS,
        ),
        (
            "init",
            lambda key: jax.random.normal(jax.random.key(next(COUNTER)), (4, 3)),
            "init is not deterministic: called twice, it differs",
            HINT_OF_RANDOMNESS,
        ),
        ("init", random_under_jit, "init is not deterministic: called twice, it differs", HINT_OF_RANDOMNESS),
    ],
)
def test_what_is_wrong_is_said_at_the_users_line(part, fn, what, hint):
    with pytest.raises(PegprofError) as caught:
        check_problem(dataclasses.replace(LINEAR, **{part: fn}), 8)
    error = caught.value
    assert (error.where, error.what, error.hint, error.exit_code) == (home_of(fn), what, hint, ExitCode.USAGE)


@pytest.mark.parametrize(
    "problem",
    [
        LINEAR,
        dataclasses.replace(LINEAR, batch=lambda key, B: {"x": DATA[:B]}),  # data with NaN in it
        dataclasses.replace(LINEAR, init=lambda key: {"w": jax.random.normal(KEY, (4, 3))}),
        dataclasses.replace(LINEAR, init=lambda key: {"w": jax.nn.relu(jax.random.normal(key, (4, 3)))}),
        dataclasses.replace(LINEAR, init=lambda key: jax.jit(LINEAR.init)(key)),
    ],
)
def test_what_is_right_is_let_through_with_its_shapes(problem):
    params, batch = check_problem(problem, 8)
    assert (params["w"].shape, batch["x"].shape) == ((4, 3), (8, 4))


def test_a_batch_of_one_is_let_through():
    assert check_problem(LINEAR, 1)[1]["x"].shape == (1, 4)


@pytest.mark.parametrize("name", zoo_names())
def test_every_model_of_the_zoo_is_let_through(name):
    problem = load_problem(name)
    assert check_problem(problem, 4) == (problem.abstract_params(), problem.abstract_batch(4))
