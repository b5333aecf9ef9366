"""check_examples: does the mean of the per-example gradients mean anything for this loss?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pegprof import check_examples
from tests.engine.cases import case
from tests.programs import PROGRAMS


def _arrays(*shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def _words(report):
    return " ".join(finding.cause for finding in report.findings).lower()


@pytest.mark.parametrize("name", ["mlp_regression", "tied_embedding", "layer_norm", "loss_masked_within_each_example"])
def test_a_model_whose_examples_do_not_interact_is_fine(name):
    loss, params, batch = PROGRAMS[name].make(jax.random.key(0), 5)
    report = check_examples(loss, params, batch)
    assert report.ok
    assert not report.findings
    assert str(report)


@pytest.mark.usefixtures("x64")
def test_a_gradient_that_cancels_is_no_finding():
    loss, params, batch = case("unused_parameter", 5)
    assert check_examples(loss, params, batch).ok


def test_batch_normalisation_is_found_and_named():
    W, out, x = _arrays((3, 4), (4, 2), (6, 3))

    def loss(p, x):
        h = x @ p["W"]
        h = (h - jnp.mean(h, axis=0)) * jax.lax.rsqrt(jnp.var(h, axis=0) + 1e-5)
        return jnp.mean(jnp.square(jax.nn.relu(h * p["scale"]) @ p["out"] - 1))

    report = check_examples(loss, {"W": W, "scale": jnp.ones(4), "out": out}, x)
    assert not report.ok
    assert any("W" in finding.parameter for finding in report.findings)
    assert all(finding.relative_difference > 1e-3 for finding in report.findings)
    assert "batch" in _words(report)
    assert "W" in str(report)


def test_a_denominator_that_counts_the_tokens_of_the_whole_batch_is_found():
    W, x = _arrays((3, 4), (6, 5, 3))
    mask = jnp.arange(5)[None, :] < jnp.array([1, 2, 3, 4, 5, 5])[:, None]

    def loss(p, batch):
        error = jnp.sum(jnp.square(jnp.tanh(batch["x"] @ p["W"]) - 1), axis=-1)
        return jnp.sum(error * batch["mask"]) / jnp.sum(batch["mask"])

    report = check_examples(loss, {"W": W}, {"x": x, "mask": mask})
    assert not report.ok
    assert any(word in _words(report) for word in ("denominator", "count", "divide", "mean"))
    assert not report.unvaried


def test_a_sum_over_the_batch_is_found():
    W, x = _arrays((3, 4), (6, 3))
    report = check_examples(lambda p, x: jnp.sum(jnp.square(jnp.tanh(x @ p) - 1)), W, x)
    assert not report.ok
    assert any(word in _words(report) for word in ("sum", "mean"))


def test_noise_drawn_for_the_whole_batch_from_one_key_is_found():
    W, out, x = _arrays((3, 4), (4, 2), (6, 3))

    def loss(p, x):
        h = jnp.tanh(x @ p["W"])
        kept = jax.random.bernoulli(jax.random.key(0), 0.5, h.shape)
        return jnp.mean(jnp.square(jnp.where(kept, h, 0.0) @ p["out"] - 1))

    report = check_examples(loss, {"W": W, "out": out}, x)
    assert not report.ok
    assert any(word in _words(report) for word in ("noise", "random", "key", "dropout"))


def test_examples_that_attend_to_each_other_are_found():
    W, x = _arrays((3, 4), (6, 3))

    def loss(p, x):  # a contrastive loss: every example is a negative of every other
        h = x @ p
        return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(h @ h.T)))

    assert not check_examples(loss, W, x).ok


def test_batch_leaves_that_do_not_vary_are_named():
    W, x = _arrays((3, 4), (6, 3))

    def loss(p, batch):
        return jnp.sum(jnp.square(batch["x"] @ p["W"]) * batch["weight"][:, None]) / jnp.sum(batch["weight"])

    report = check_examples(loss, {"W": W}, {"x": x, "weight": jnp.ones(6, jnp.float32)})
    assert any("weight" in name for name in report.unvaried)
    assert not any("'x'" in name for name in report.unvaried)
    assert "weight" in str(report)


def test_a_loss_of_bare_examples_cannot_let_them_interact():
    loss, params, batch = PROGRAMS["bare_example"].make(jax.random.key(0), 5)
    assert check_examples(loss, params, batch, keep_batch_dim=False).ok


def test_a_batch_that_is_counted_from_the_end_is_the_batch():
    W, x = _arrays((3, 4), (6, 3))
    loss = lambda W, x: jnp.sum(jnp.tanh(x @ W))
    assert check_examples(loss, W, x, batch_argnums=-1) == check_examples(loss, W, x)


# What is no number.


def _root(w, x):
    return jnp.mean(jnp.sqrt(x @ w["w"])) + jnp.mean(x) * w["b"] ** 2


def test_gradients_that_are_no_numbers_on_both_sides_are_no_finding_but_are_said():
    report = check_examples(_root, {"w": -jnp.ones(3), "b": jnp.ones(())}, 1 + jnp.arange(12.0).reshape(4, 3))
    assert (report.ok, report.nonfinite) == (True, ("w",))
    assert str(report).splitlines() == [
        "The mean of 4 per-example gradients is the gradient of the batch.",
        "Both are NaN or infinite in some entries, which says nothing about those: w.",
    ]


def test_where_no_entry_is_a_number_nothing_is_said_to_be_equal():
    report = check_examples(lambda w, x: jnp.mean(jnp.sqrt(x @ w)), -jnp.ones(3), 1 + jnp.arange(12.0).reshape(4, 3))
    assert (report.ok, report.nonfinite) == (True, ("params",))
    assert str(report) == "Nothing could be compared: the gradients of 4 examples are NaN or infinite in every entry."


def test_not_a_number_against_a_number_is_a_finding():
    def loss(w, x):
        return jnp.mean(x @ w / jnp.std(x @ w))  # of one example: 0

    report = check_examples(loss, jnp.array([1.0, 2.0, 4.0]), 1 + jnp.arange(12.0).reshape(4, 3))
    assert not report.ok
    assert report.findings[0].relative_difference == float("inf")
    assert "  params: one of them is NaN or infinite where the other is not" in str(report)
