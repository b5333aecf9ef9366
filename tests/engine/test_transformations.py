"""grad_stats under other transformations: the same statistics inside vmap, grad, jit, and without any."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pegprof import grad_stats
from tests.engine.cases import case, tolerance, truth
from tests.oracles import Truth, assert_stats_agree, loop_stats, quick_jit
from tests.programs import PROGRAMS

pytestmark = pytest.mark.usefixtures("x64")

STATS = ("mean", "second_moment", "norm")
SELECTION = [
    "mlp_regression",
    "regulariser_without_the_batch",
    "tied_embedding",
    "rnn_by_scan",
    "scanned_layers_rematerialised",
    "scanned_layers_with_a_weight_shared_by_all",
    "scanned_layers_with_a_regulariser",
    "penalty_carried_through_scanned_layers",
    "penalty_alone_on_a_parameter_of_scanned_layers",
    "penalty_alone_stacked_by_scanned_layers",
    "penalty_on_a_weight_shared_by_scanned_layers",
    "penalty_inside_a_loop_over_time",
    "penalty_in_a_branch_chosen_by_the_example",
    "ensemble_of_scanned_layers_with_penalties",
    "cond_with_a_predicate_that_differs",
    "convolution_2d_depthwise",
    "grouped_convolution_above_another",
    "reshape_in_fortran_order",
    "graph_attention_by_segments",
    "gradient_penalty",
    "bare_cond_with_a_shared_weight",
]


def _statistics(name: str, **options: Any) -> Any:
    return grad_stats(case(name, 3)[0], STATS, keep_batch_dim=PROGRAMS[name].keep_batch_dim, **options)


def _loop(name: str, params: Any, batch: Any) -> Truth:
    return loop_stats(case(name, 3)[0], STATS, params, batch, keep_batch_dim=PROGRAMS[name].keep_batch_dim)


def _at(tree: Any, i: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[i], tree)


@pytest.mark.parametrize("name", SELECTION)
def test_stacked_parameters_under_vmap_have_the_statistics_of_each(name):
    _, params, batch = case(name, 3)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, 0.7 * leaf]), params)
    found = quick_jit(jax.vmap(_statistics(name), in_axes=(0, None)))(stacked, batch)
    for i in range(2):
        assert_stats_agree(_at(found, i), _loop(name, _at(stacked, i), batch), tolerance(PROGRAMS[name]))


@pytest.mark.parametrize("name", SELECTION[::2])
def test_stacked_batches_under_vmap_have_the_statistics_of_each(name):
    _, params, batch = case(name, 3)
    order = jnp.array([1, 2, 2])  # as good as another batch, and right for tokens and edges too
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf[order]]), batch)
    found = quick_jit(jax.vmap(_statistics(name), in_axes=(None, 0)))(params, stacked)
    for i in range(2):
        assert_stats_agree(_at(found, i), _loop(name, params, _at(stacked, i)), tolerance(PROGRAMS[name]))


def _plain_statistics(name: str, params: Any, batch: Any) -> dict[str, Any]:
    """The same by vmap of the gradient, which JAX can differentiate."""
    loss = case(name, 3)[0]
    if PROGRAMS[name].keep_batch_dim:
        batch = jax.tree.map(lambda leaf: leaf[:, None], batch)
    gradients = jax.vmap(jax.grad(loss), in_axes=(None, 0))(params, batch)
    squares = sum(jnp.sum(jnp.square(g.reshape(g.shape[0], -1)), axis=1) for g in jax.tree.leaves(gradients))
    return {
        "mean": jax.tree.map(lambda g: jnp.mean(g, axis=0), gradients),
        "second_moment": jax.tree.map(lambda g: jnp.mean(jnp.square(g), axis=0), gradients),
        "norm": jnp.sqrt(squares),
    }


@pytest.mark.parametrize("name", SELECTION)
def test_a_function_of_the_statistics_has_the_derivative_that_it_has_with_plain_vmap(name):
    _, params, batch = case(name, 3)

    def of(statistics):
        def scalar(params):
            return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(statistics(params, batch)))

        return quick_jit(jax.grad(scalar))(params)

    found, expected = of(_statistics(name)), of(lambda params, batch: _plain_statistics(name, params, batch))
    for path, want in jax.tree_util.tree_leaves_with_path(expected):
        got = dict(jax.tree_util.tree_leaves_with_path(found))[path]
        atol = 1e-8 * max(1e-3, float(np.max(np.abs(want))))
        np.testing.assert_allclose(got, want, rtol=1e-8, atol=atol, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("name", SELECTION[::4])
def test_without_jit_they_are_the_same(name):
    _, params, batch = case(name, 3)
    assert_stats_agree(_statistics(name)(params, batch), truth(name, 3, STATS), tolerance(PROGRAMS[name]))


@pytest.mark.parametrize("microbatch_size", [1, 2])
@pytest.mark.parametrize("name", ["penalty_alone_on_a_parameter_of_scanned_layers", "tied_embedding"])
def test_stacked_parameters_under_vmap_in_microbatches(name, microbatch_size):
    _, params, batch = case(name, 3)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, 0.7 * leaf]), params)
    found = quick_jit(jax.vmap(_statistics(name, microbatch_size=microbatch_size), in_axes=(0, None)))(stacked, batch)
    for i in range(2):
        assert_stats_agree(_at(found, i), _loop(name, _at(stacked, i), batch), tolerance(PROGRAMS[name]))


def test_vmap_within_vmap_within_grad():
    name = "penalty_alone_on_a_parameter_of_scanned_layers"
    _, params, batch = case(name, 3)
    scales = jnp.array([[1.0, 0.5, 0.2], [0.9, 0.6, 0.3]])

    def of(statistics):
        at = lambda scale: statistics(jax.tree.map(lambda leaf: scale * leaf, params), batch)["mean"]
        total = lambda scales: sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(jax.vmap(jax.vmap(at))(scales)))
        return quick_jit(jax.grad(total))(scales)

    np.testing.assert_allclose(
        of(_statistics(name)), of(lambda params, batch: _plain_statistics(name, params, batch)), rtol=1e-8
    )
