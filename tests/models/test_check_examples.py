"""check_examples: does the mean of the per-example gradients mean anything for this loss?"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pegprof
from pegprof import check_examples
from pegprof.models import causes
from pegprof.models import check_examples as check
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


def _line_of(loss, words):
    """Where the line of a loss with these words is, as a user would name it."""
    lines, start = inspect.getsourcelines(loss)
    return f"test_check_examples.py:{start + next(i for i, line in enumerate(lines) if words in line)}"


def _normalised(eps=0.0):
    """BatchNorm by a standard deviation, which is that of a batch of one as well: zero."""
    W, out, x = _arrays((3, 4), (4, 2), (6, 3))

    def loss(p, x):
        h = x @ p["W"]
        h = (h - h.mean(0)) / (h.std(0) + eps)
        return jnp.mean(jnp.square(jax.nn.relu(h) @ p["out"] - 1))

    return loss, {"W": W, "out": out}, x


def test_per_example_gradients_that_are_nan_where_the_batchs_are_not_are_a_finding():
    loss, params, x = _normalised()
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(jax.grad(loss)(params, x[:4])))
    report = check_examples(loss, params, x)
    assert not report.ok
    assert {finding.parameter for finding in report.findings} == {"W", "out"}
    assert "W: NaN in the per-example gradients, finite in the gradient of the batch" in str(report)
    assert "standard deviation or variance over the batch" in report.findings[0].cause
    assert _line_of(loss, "h.std(0)") in report.findings[0].cause
    assert not report.engine_findings


def test_a_gradient_that_is_nan_only_behind_a_root_is_found_at_its_line():
    loss, params, x = _normalised(eps=1e-3)  # forward all is finite: it is the root's derivative at 0 that is not
    report = check_examples(loss, params, x)
    assert not report.ok
    assert _line_of(loss, "h.std(0)") in report.findings[0].cause


def test_a_gradient_that_is_nan_alone_and_in_the_batch_is_never_agreement():
    W, x = _arrays((3, 4), (6, 3))

    def loss(p, x):
        h = x @ p["W"]
        return jnp.mean(h * jnp.log(h - 1e6)) + jnp.sum(p["b"])

    report = check_examples(loss, {"W": W, "b": jnp.ones(2)}, x)
    assert [finding.parameter for finding in report.findings] == ["W"]
    assert "W: NaN both in the per-example gradients and in the gradient of the batch" in str(report)
    assert "nothing can be compared" in report.findings[0].cause
    assert _line_of(loss, "jnp.log") in report.findings[0].cause
    assert not report.engine_findings


def test_nan_that_is_in_the_data_is_said_to_be_there():
    W, x = _arrays((3, 4), (6, 3))
    report = check_examples(lambda p, b: jnp.mean(jnp.tanh(b["x"] @ p)), W, {"x": x.at[1, 1].set(jnp.nan)})
    assert not report.ok
    assert "argument 1['x']" in report.findings[0].cause


@pytest.mark.parametrize("keep_batch_dim", [True, False])
def test_infinite_gradients_are_never_agreement(keep_batch_dim):
    W, x = _arrays((3, 4), (6, 3))
    loss = lambda p, x: jnp.mean(jnp.tanh(x @ p["W"])) + jnp.sum(jnp.sqrt(p["zero"]))
    report = check_examples(loss, {"W": W, "zero": jnp.zeros(1)}, x, keep_batch_dim=keep_batch_dim)
    assert [finding.parameter for finding in report.findings] == ["zero"]
    assert "zero: infinite both in the per-example gradients and in the gradient of the batch" in str(report)


def test_a_batch_whose_gradient_alone_is_infinite_is_found():
    W, x = _arrays((3, 4), (6, 3))
    loss = lambda w, x: jnp.mean(x @ w) * (jnp.inf if len(x) > 1 else 1.0)
    report = check_examples(loss, jnp.abs(W), jnp.abs(x))
    assert "params: infinite in the gradient of the batch, finite in the per-example gradients" in str(report)


def test_a_loss_of_bare_examples_whose_gradient_is_nan_is_not_fine():
    W, x = _arrays((3,), (6, 3))

    def loss(w, x):
        assert x.ndim == 1
        return (x @ w) * jnp.log(x @ w - 1e6)

    report = check_examples(loss, W, x, keep_batch_dim=False)
    assert not report.ok
    assert "params: NaN in the per-example gradients" in str(report)
    assert _line_of(loss, "jnp.log") in report.findings[0].cause


def test_a_loss_that_takes_bare_examples_only_is_not_said_to_be_compared_with_a_batch():
    loss, params, batch = PROGRAMS["bare_example"].make(jax.random.key(0), 5)
    assert "takes one example at a time" in str(check_examples(loss, params, batch, keep_batch_dim=False))


def _breaking(monkeypatch, **factors):
    """The engine as it is, but for some of its statistics."""
    right = check.grad_stats

    def grad_stats(loss, stats, **options):
        def fn(*args):
            found = right(loss, stats, **options)(*args)
            return {
                name: {**tree, "W": factors[name] * tree["W"]} if name in factors else tree
                for name, tree in found.items()
            }

        return fn

    monkeypatch.setattr(check, "grad_stats", grad_stats)


@pytest.mark.parametrize("statistic", ["mean", "second_moment"])
@pytest.mark.parametrize(("factor", "words"), [(1.5, "differs by 0.33 of its norm"), (np.nan, "NaN")])
def test_an_engine_that_is_wrong_is_blamed_and_the_loss_is_not(monkeypatch, statistic, factor, words):
    W, out, x = _arrays((3, 4), (4, 2), (6, 3))
    loss = lambda p, x: jnp.mean(jnp.square(jnp.tanh(x @ p["W"]) @ p["out"] - 1))
    _breaking(monkeypatch, **{statistic: factor})
    report = check_examples(loss, {"W": W, "out": out}, x)
    assert not report.ok
    assert not report.findings
    (finding,) = report.engine_findings
    assert (finding.parameter, finding.statistic) == ("W", statistic)
    text = str(report)
    assert f"W: {statistic} " in text
    assert words in text
    assert "The mean of 4 per-example gradients is the gradient of the batch." in text
    assert "bug in pegprof" in text
    for version in (f"pegprof {pegprof.__version__}", f"jax {jax.__version__}", "jax.vmap"):
        assert version in text
    assert "BatchNorm" not in text


def test_an_engine_and_a_loss_that_are_both_wrong_are_both_named(monkeypatch):
    W, x = _arrays((3, 4), (6, 3))
    _breaking(monkeypatch, mean=1.5)
    report = check_examples(lambda p, x: jnp.sum(jnp.tanh(x @ p["W"])), {"W": W}, x)
    assert report.findings[0].cause == "the loss is a sum over the examples, not their mean"
    assert [finding.statistic for finding in report.engine_findings] == ["mean"]


def test_the_engine_is_compared_as_it_runs_for_a_user_with_all_examples_at_once(monkeypatch):
    W, x = _arrays((3, 4), (6, 3))
    seen = []
    right = check.grad_stats
    monkeypatch.setattr(check, "grad_stats", lambda *args, **options: seen.append(options) or right(*args, **options))
    assert check_examples(lambda p, x: jnp.mean(jnp.tanh(x @ p)), W, x).ok
    assert seen[0].get("microbatch_size") is None


def _drop(p, x, key):
    h = jnp.tanh(x @ p["W"])
    kept = jax.random.bernoulli(key, 0.5, h.shape)
    return jnp.mean(jnp.square(jnp.where(kept, h, 0.0) @ p["out"] - 1))


@pytest.mark.parametrize("key", [jax.random.key, jax.random.PRNGKey])
def test_a_shared_key_is_named_with_the_line_that_draws_from_it(key):
    W, out, x = _arrays((3, 4), (4, 2), (6, 3))
    loss = lambda p, x: _drop(p, x, key(0))
    cause = check_examples(loss, {"W": W, "out": out}, x).findings[0].cause
    assert _line_of(_drop, "bernoulli") in cause
    assert "()" not in cause


def test_a_shared_key_in_a_loop_over_layers_is_found_too():
    W, out, x = _arrays((2, 3, 3), (3, 2), (6, 3))

    def loss(p, x):
        def layer(h, layer):
            w, key = layer
            h = jnp.tanh(h @ w)
            return jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h, 0.0), None

        h, _ = jax.lax.scan(layer, x, (p["W"], jax.random.split(jax.random.key(0), 2)))
        return jnp.mean(jnp.square(h @ p["out"] - 1))

    cause = check_examples(loss, {"W": W, "out": out}, x).findings[0].cause
    assert _line_of(loss, "bernoulli") in cause


def test_noise_that_is_the_same_for_every_example_is_not_blamed():
    W, x = _arrays((3, 4), (6, 3))

    def loss(p, x):
        h = x @ (p + 0.1 * jax.random.normal(jax.random.key(0), p.shape))
        return jnp.mean(jnp.square(h - h.mean(0)))

    assert "random key" not in _words(check_examples(loss, W, x))


def test_a_location_that_nobody_knows_leaves_no_empty_parentheses(monkeypatch):
    W, out, x = _arrays((3, 4), (4, 2), (6, 3))
    monkeypatch.setattr(causes, "source_line", lambda eqn: "")
    loss = lambda p, x: _drop(p, x, jax.random.key(0))
    cause = check_examples(loss, {"W": W, "out": out}, x).findings[0].cause
    assert "one random key; give" in cause
    loss, params, x = _normalised()
    assert "()" not in _words(check_examples(loss, params, x))


def test_a_key_that_is_split_by_example_is_no_cause_since_the_batch_has_other_noise():
    W, out, x = _arrays((3, 4), (4, 2), (6, 3))
    report = check_examples(_drop, {"W": W, "out": out}, x, jax.random.key(0), prng_argnum=2)
    assert report.ok
    assert "not compared" in str(report)


def test_a_key_that_is_split_by_example_but_draws_nothing_changes_nothing():
    W, x = _arrays((3, 4), (6, 3))
    loss = lambda w, x, key: jnp.sum(jnp.tanh(x @ w))
    assert not check_examples(loss, W, x, jax.random.key(0), prng_argnum=2).ok


def test_parameters_in_several_arguments_have_the_names_of_the_statistics():
    W, out, x = _arrays((3, 4), (4, 2), (6, 3))
    loss = lambda w, x, out: jnp.sum(jnp.tanh(x @ w) @ out)
    report = check_examples(loss, W, x, out, argnums=(0, 2))
    assert [finding.parameter for finding in report.findings] == ["0", "1"]


def test_the_loss_may_return_more_beside_its_value():
    W, x = _arrays((3, 4), (6, 3))
    assert check_examples(lambda w, x: (jnp.mean(jnp.tanh(x @ w)), x), W, x, has_aux=True).ok


def test_gradients_that_are_nan_on_both_sides_are_not_said_to_differ():
    (x,) = _arrays((4, 3))
    report = check_examples(lambda w, x: jnp.mean(jnp.tanh(x @ w)), jnp.ones(3), x.at[0, 0].set(jnp.nan))
    assert not report.ok
    assert str(report).startswith("The gradients are not finite, so they cannot be compared.")
