"""What the backward pass keeps, against counts by hand, in bytes of an example; float32 has four."""

import jax
import jax.numpy as jnp
import pytest

from pegprof.measure.worker.residuals import trace_residuals
from pegprof.models.problem import load_problem

T, D, V = 5, 3, 7
W = jax.ShapeDtypeStruct((D, D), jnp.float32)
X = jax.ShapeDtypeStruct((2, T, D), jnp.float32)
TOKENS = jax.ShapeDtypeStruct((2, T), jnp.int32)
TABLE = jax.ShapeDtypeStruct((V, D), jnp.float32)
ONE = 4 * T * D  # bytes of one array like X


def kept(loss, params=W, batch=X):
    return trace_residuals(lambda params, batch: jnp.mean(loss(params, batch)), params, batch).bytes_per_example


def layers(w, x):
    for w_DxD in w:
        x = jnp.sin(x @ w_DxD)
    return x


def scanned_layers(w, x):
    return jax.lax.scan(lambda x, w_DxD: (jnp.sin(x @ w_DxD), None), x, w)[0]


STACK = jax.ShapeDtypeStruct((4, D, D), jnp.float32)


@pytest.mark.parametrize(
    ("loss", "params", "expected"),
    [
        pytest.param(lambda w, x: x @ w, W, 0, id="the batch and the parameters are there anyway"),
        pytest.param(lambda w, x: x.reshape(-1, D) @ w.T, W, 0, id="and so are views of them"),
        pytest.param(lambda w, x: jnp.sin(x @ w), W, ONE, id="the cosine"),
        pytest.param(lambda w, x: jax.jit(jnp.sin)(jax.jit(jnp.matmul)(x, w)), W, ONE, id="under jit"),
        pytest.param(lambda w, x: (x @ w) ** 2, W, ONE, id="one array, of two factors alike"),
        pytest.param(lambda w, x: (x @ w) * (x @ w).reshape(x.shape), W, 2 * ONE, id="two arrays though equal"),
        pytest.param(lambda w, x: (h := x @ w) * h.reshape(-1, D).reshape(h.shape), W, ONE, id="one array and a view"),
        pytest.param(lambda w, x: x @ jnp.sin(w), W, 0, id="what is made of parameters alone"),
        pytest.param(lambda w, x: x @ w * jnp.ones_like(x), W, 0, id="a constant"),
        pytest.param(lambda w, x: (x @ w) / jnp.max(x, -1, keepdims=True), W, 4 * T, id="a repeated array, once"),
        pytest.param(layers, STACK, 4 * ONE + 3 * ONE, id="layers: four cosines, three inputs"),
        pytest.param(scanned_layers, STACK, 4 * ONE + 4 * ONE, id="a scan keeps the first input as well"),
        pytest.param(jax.checkpoint(layers), STACK, 0, id="recomputed"),
    ],
)
def test_each_array_counts_once_and_what_is_there_anyway_not_at_all(loss, params, expected):
    assert kept(loss, params) == expected


def test_a_convolutional_network_keeps_the_signs_and_the_averages_of_each_layer():
    problem = load_problem("cnn")
    positions_times_channels = [32 * 32 * 32, 16 * 16 * 64, 8 * 8 * 128]
    expected = sum(
        n + 4 * n // 4 for n in positions_times_channels
    )  # a byte for each sign; a quarter is left of floats
    found = trace_residuals(problem.loss, problem.abstract_params(), problem.abstract_batch(2))
    assert expected <= found.bytes_per_example <= expected + 1024  # the loss keeps a few numbers of ten classes


def test_what_an_example_keeps_does_not_depend_on_how_many_there_are():
    problem = load_problem("transformer-tiny")
    params = problem.abstract_params()
    counts = {trace_residuals(problem.loss, params, problem.abstract_batch(B)).bytes_per_example for B in (1, 2, 64)}
    assert len(counts) == 1


def test_a_scan_over_layers_keeps_what_the_layers_written_out_do():
    counts = []
    for scan in (False, True):
        problem = load_problem("transformer-tiny", {"scan_layers": scan})
        counts.append(
            trace_residuals(problem.loss, problem.abstract_params(), problem.abstract_batch(2)).bytes_per_example
        )
    assert counts[1] == pytest.approx(counts[0], rel=0.01)


@pytest.mark.parametrize(
    ("loss", "looked_up"),
    [
        pytest.param(lambda w, t: w["a"][t], ("a",), id="by the example's integers"),
        pytest.param(lambda w, t: jnp.take(w["a"], t + 1, axis=0), ("a",), id="by what is computed of them"),
        pytest.param(lambda w, t: w["a"].astype(jnp.bfloat16)[t], ("a",), id="in another dtype"),
        pytest.param(lambda w, t: w["a"][t] @ w["b"].T, ("a",), id="not the other one"),
        pytest.param(lambda w, t: w["a"][jnp.arange(3)] * jnp.sum(t), (), id="the same rows for all examples"),
        pytest.param(lambda w, t: w["a"][jnp.argmax(t @ w["b"][:T])], (), id="what a router picks by its parameters"),
        pytest.param(
            lambda w, t: jax.lax.scan(lambda c, row: (c, row[t[:, 0] % D]), 0.0, w["a"])[1], ("a",), id="inside a loop"
        ),
    ],
)
def test_parameters_that_the_examples_integers_look_up_are_told_apart(loss, looked_up):
    params = {"a": TABLE, "b": TABLE}
    found = trace_residuals(lambda params, t: jnp.mean(loss(params, t).astype(jnp.float32)), params, TOKENS)
    assert found.looked_up == looked_up
