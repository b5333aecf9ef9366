"""What must hold for any data: the engine against itself and against jax.grad."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pegprof import grad_stats
from tests.oracles import quick_jit
from tests.programs import PROGRAMS

pytestmark = pytest.mark.usefixtures("x64")

NAMES = (
    "mlp_regression",
    "tied_embedding",
    "scanned_layers_with_a_weight_shared_by_all",
    "rnn_by_scan",
    "convolution_2d",
)
MEANS = ("mean", "second_moment", "sign_mean", "abs_mean", "fourth_moment")
STATS = (*MEANS, "variance", "norm", "norm_by_param")
B = 6

few = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
names, seeds = st.sampled_from(NAMES), st.integers(0, 2**16)


@functools.cache
def _loss_and_stats(name):
    """The loss of a program with a factor c in front, and its statistics, compiled once for each batch size."""
    loss, _, _ = PROGRAMS[name].make(jax.random.key(0), B)

    def scaled(params, batch, c):
        return c * loss(params, batch)

    stats = quick_jit(grad_stats(scaled, STATS))
    return loss, lambda params, batch, c=1.0: stats(params, batch, jnp.asarray(c))


def _case(name, seed):
    _, params, batch = PROGRAMS[name].make(jax.random.key(seed), B)
    return params, batch


def _take(batch, index):
    return jax.tree.map(lambda leaf: leaf[index], batch)


def _assert_close(actual, expected, what):
    def compare(path, a, e):
        scale = max(np.max(np.abs(e)), 1e-12)
        error = np.max(np.abs(a - e)) / scale
        assert error < 1e-8, f"{what}{jax.tree_util.keystr(path)} off by {error:.2g}"

    jax.tree_util.tree_map_with_path(compare, actual, expected)


@few
@given(name=names, seed=seeds)
def test_the_mean_is_the_gradient_of_the_batch(name, seed):
    loss, stats = _loss_and_stats(name)
    params, batch = _case(name, seed)
    _assert_close(stats(params, batch)["mean"], jax.grad(loss)(params, batch), "mean")


@few
@given(name=names, seed=seeds, order=st.permutations(range(B)))
def test_permuting_the_examples_changes_nothing_but_the_order_of_the_norms(name, seed, order):
    _, stats = _loss_and_stats(name)
    params, batch = _case(name, seed)
    order = np.array(order)
    before, after = stats(params, batch), stats(params, _take(batch, order))
    for stat in ("norm", "norm_by_param"):
        before[stat] = _take(before[stat], order)
    _assert_close(after, before, "")


@few
@given(name=names, seed=seeds)
def test_two_parts_merged_are_the_whole(name, seed):
    _, stats = _loss_and_stats(name)
    params, batch = _case(name, seed)
    whole = stats(params, batch)
    first, second = stats(params, _take(batch, np.arange(2))), stats(params, _take(batch, np.arange(2, 6)))

    for stat in MEANS:
        merged = jax.tree.map(lambda a, b: (2 * a + 4 * b) / 6, first[stat], second[stat])
        _assert_close(merged, whole[stat], stat)
    for stat in ("norm", "norm_by_param"):
        merged = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), first[stat], second[stat])
        _assert_close(merged, whole[stat], stat)
    merged = jax.tree.map(  # within the parts, and between their means
        lambda va, vb, ma, mb: (va + 3 * vb + 2 * 4 / 6 * (ma - mb) ** 2) / 5,
        *(first["variance"], second["variance"], first["mean"], second["mean"]),
    )
    _assert_close(merged, whole["variance"], "variance")


@few
@given(name=names, seed=seeds)
def test_duplicating_every_example_leaves_the_means_alone(name, seed):
    _, stats = _loss_and_stats(name)
    params, batch = _case(name, seed)
    once, twice = stats(params, batch), stats(params, _take(batch, np.repeat(np.arange(B), 2)))
    for stat in MEANS:
        _assert_close(twice[stat], once[stat], stat)
    smaller = jax.tree.map(lambda v: v * (5 / 6) * (12 / 11), once["variance"])  # the same spread, over 2B - 1
    _assert_close(twice["variance"], smaller, "variance")


@few
@given(name=names, seed=seeds, c=st.floats(0.01, 100.0) | st.floats(-100.0, -0.01))
def test_scaling_the_loss_scales_each_statistic_by_its_power(name, seed, c):
    _, stats = _loss_and_stats(name)
    params, batch = _case(name, seed)
    before, after = stats(params, batch), stats(params, batch, c)
    even, odd = {"second_moment": c**2, "fourth_moment": c**4, "variance": c**2}, {"mean": c, "sign_mean": np.sign(c)}
    powers = even | odd | dict.fromkeys(("abs_mean", "norm", "norm_by_param"), abs(c))
    for stat, factor in powers.items():
        _assert_close(after[stat], jax.tree.map(lambda leaf, f=factor: f * leaf, before[stat]), stat)


@few
@given(name=names, seed=seeds)
def test_the_moments_keep_their_order(name, seed):
    _, stats = _loss_and_stats(name)
    found = stats(*_case(name, seed))

    def ordered(mean, absolute, second, fourth, variance):
        slack = 1 + 1e-12
        assert np.all(np.abs(mean) <= absolute * slack)
        assert np.all(absolute**2 <= second * slack)
        assert np.all(second**2 <= fourth * slack)
        assert np.all(variance >= 0)

    jax.tree.map(ordered, *(found[s] for s in ("mean", "abs_mean", "second_moment", "fourth_moment", "variance")))
