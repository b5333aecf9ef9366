"""The loop over examples: unrolled where adding up is what takes the time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pegprof import grad_stats, make_plan
from pegprof.engine.rules.folds import FEW_POSITIONS, UNROLL
from tests.oracles import quick_jit

pytestmark = pytest.mark.smoke


def _loss(w, x):
    return jnp.mean(jnp.square(jnp.tanh(x @ w)))


_gradient = quick_jit(jax.grad(_loss))


def _arguments(*, B=8, T, D=32, E=48):
    w_key, x_key = jax.random.split(jax.random.key(0))
    return jax.random.normal(w_key, (D, E)), jax.random.normal(x_key, (B, T, D))


def _examples_a_step(T):
    """How many examples a step of the site's loop takes, as jax was told."""
    jaxpr = jax.make_jaxpr(grad_stats(_loss, microbatch_size=8, backend="cpu"))(*_arguments(T=T))
    (loop,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    return loop.params["unroll"]


def test_few_positions_are_taken_some_examples_a_step_and_many_one():
    assert _examples_a_step(FEW_POSITIONS // 2) == UNROLL
    assert _examples_a_step(FEW_POSITIONS) == 1


def test_no_more_gradients_are_held_than_the_plan_allows():
    # A gradient is as large as four examples' frontiers: beside those of eight examples, two may be held.
    row = make_plan(_loss, *_arguments(T=16, D=128, E=128), microbatch_size=8, backend="cpu").row("params")
    assert (row.strategy, row.chunk) == ("loop", 2)
    assert row.bytes == 2 * 4 * 128 * 128


@pytest.mark.parametrize("B", [1, 3, 4, 7, 9])
def test_a_batch_that_is_not_a_multiple_of_a_step_has_every_example_counted_once(B):
    w, x = _arguments(B=B, T=40)
    assert _examples_a_step(40) == UNROLL
    stats = quick_jit(grad_stats(_loss, microbatch_size=B))(w, x)
    gradients = np.stack([_gradient(w, x[i : i + 1]) for i in range(B)])
    np.testing.assert_allclose(stats["mean"], gradients.mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(stats["second_moment"], np.square(gradients).mean(axis=0), atol=1e-7)


@pytest.mark.parametrize("sizes", [{"D": 0}, {"E": 0}, {"T": 0}], ids=str)
def test_a_parameter_without_entries_and_an_example_without_positions_have_statistics(sizes):
    w, x = _arguments(**{"T": 4, **sizes})
    loss = lambda w, x: jnp.sum(jnp.tanh(x @ w))
    for backend in ("cpu", "tpu"):
        stats = grad_stats(loss, ("mean", "variance", "norm"), backend=backend)(w, x)
        assert stats["mean"].shape == stats["variance"].shape == w.shape
        for found in stats.values():
            np.testing.assert_array_equal(found, np.zeros(found.shape))
