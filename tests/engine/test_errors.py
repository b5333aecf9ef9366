"""What a user is told: what is wrong, where, and what to do about it."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from pegprof import PegprofError, Statistic, grad_stats, value_and_grad_stats


def _loss(params, batch):
    return jnp.mean(jnp.square(batch["x"] @ params["W"] - batch["y"][:, None]))


def _params():
    return {"W": jnp.ones((3, 4), jnp.float32)}


def _batch(B=5):
    return {"x": jnp.ones((B, 3), jnp.float32), "y": jnp.arange(B, dtype=jnp.float32)}


def _error(loss=_loss, params=None, batch=None, stats=("mean", "second_moment"), **options):
    """The error of making and calling the function; it may come with either."""
    with pytest.raises(PegprofError) as raised:
        grad_stats(loss, stats, **options)(
            _params() if params is None else params, _batch() if batch is None else batch
        )
    assert str(raised.value).strip()
    return raised.value


def _text(error):
    return f"{error.where} {error.what}".lower()


def test_a_loss_that_is_not_a_scalar():
    error = _error(lambda p, b: jnp.mean(b["x"] @ p["W"], axis=-1))
    assert "scalar" in error.what
    assert "(1,)" in _text(error)
    assert error.hint


def test_a_loss_that_returns_more_than_a_value_is_told_of_has_aux():
    error = _error(lambda p, b: (_loss(p, b), {"aux": b["x"]}))
    assert "has_aux" in error.hint


def test_batch_leaves_whose_leading_axes_differ():
    error = _error(batch={"x": jnp.ones((5, 3)), "y": jnp.ones(4)})
    assert "5" in _text(error)
    assert "4" in _text(error)
    assert "y" in _text(error)
    assert error.hint


def test_batch_arguments_whose_leading_axes_differ():
    with pytest.raises(PegprofError) as raised:
        grad_stats(lambda p, x, y: _loss(p, {"x": x, "y": y}), batch_argnums=(1, 2))(
            _params(), jnp.ones((5, 3)), jnp.ones(4)
        )
    assert "5" in _text(raised.value)
    assert "4" in _text(raised.value)


@pytest.mark.parametrize("argnum", [2, -3])
@pytest.mark.parametrize("option", ["argnums", "batch_argnums", "prng_argnum"])
def test_an_argument_that_was_not_given(option, argnum):
    error = _error(**{option: argnum})
    assert f"argument {argnum}" in error.what
    assert option in error.hint


@pytest.mark.parametrize("argnum", [1, -1])
def test_an_argument_that_is_both_parameters_and_batch(argnum):
    assert "both" in _error(argnums=argnum).what


def test_a_batch_leaf_without_a_leading_axis():
    error = _error(lambda p, b: _loss(p, b) * b["scale"], batch=_batch() | {"scale": jnp.float32(2.0)})
    assert "scale" in _text(error)


def test_an_empty_batch():
    error = _error(batch=_batch(0))
    assert "empty" in _text(error) or "no example" in _text(error)


@pytest.mark.parametrize("batch", [{}, None, ()])
def test_a_batch_without_arrays(batch):
    error = _error(lambda p, b: jnp.sum(p["W"]), batch=batch if batch is not None else {"nothing": None})
    assert "batch" in _text(error)


@pytest.mark.parametrize("stat", ["variance", "mean_squared", "snr"])
def test_one_example_has_no_variance(stat):
    error = _error(batch=_batch(1), stats=("mean", stat))
    assert stat in _text(error)
    assert "2" in f"{error.what} {error.hint}" or "two" in f"{error.what} {error.hint}"


def test_integer_parameters():
    error = _error(
        lambda p, b: _loss({"W": p["inner"]["W"] * p["inner"]["count"]}, b),
        params={"inner": {"W": jnp.ones((3, 4)), "count": jnp.arange(4)}},
    )
    assert "count" in _text(error)
    assert "int" in _text(error)
    assert error.hint


def test_complex_parameters():
    error = _error(lambda p, b: jnp.mean(jnp.abs(b["x"] @ p["W"])), params={"W": jnp.ones((3, 4), jnp.complex64)})
    assert "complex" in _text(error)


def test_an_unknown_statistic():
    error = _error(stats=("mean", "second_momnet"))
    assert "second_momnet" in error.what
    assert "second_moment" in error.hint


def test_two_statistics_of_one_name():
    assert "mean" in _error(stats=("mean", Statistic.elementwise(np.abs, name="mean"))).what


def _takes_bare_examples(params, example):
    hidden = params["W"].T @ example["x"]  # a batch of one has an axis too many here
    return jnp.sum(hidden) * example["y"]


def test_a_loss_that_cannot_take_a_batch_of_one_is_pointed_to_its_line_and_keep_batch_dim():
    error = _error(_takes_bare_examples)
    assert f"test_errors.py:{_takes_bare_examples.__code__.co_firstlineno + 1}" in str(error)
    assert "keep_batch_dim=False" in error.hint
    assert error.__cause__ is not None  # JAX's own words stay within reach


def test_the_same_loss_works_with_keep_batch_dim_false():
    stats = grad_stats(_takes_bare_examples, keep_batch_dim=False)(_params(), _batch())
    assert stats["mean"]["W"].shape == (3, 4)


def test_a_loss_with_the_batch_size_baked_in():
    def loss(params, batch):
        return jnp.mean(batch["x"].reshape(5, 3) @ params["W"])

    error = _error(loss)
    assert f"test_errors.py:{loss.__code__.co_firstlineno + 1}" in str(error)


def test_a_loss_that_wants_a_batch_is_not_given_bare_examples_silently():
    error = _error(lambda p, b: jnp.mean(b["x"] @ p["W"] - b["y"][:, None]), keep_batch_dim=False)
    assert "keep_batch_dim" in error.hint


def test_value_and_grad_stats_complains_in_the_same_words():
    loss = lambda p, b: b["x"] @ p["W"]
    with pytest.raises(PegprofError) as raised:
        value_and_grad_stats(loss)(_params(), _batch())
    assert raised.value.what == _error(loss).what


@pytest.mark.parametrize("size", [0, -1, 2.0, "2"])
def test_a_microbatch_has_at_least_one_example_and_only_whole_ones(size):
    assert f"microbatch_size is {size!r}" in str(_error(microbatch_size=size))


def _with_a_flag(params, batch, train):
    return _loss(params, batch) * (2 if train else 1)


def _with_a_length(params, batch, sizes):
    return _loss(params, batch) + jnp.sum(jnp.zeros(sizes["length"]))


@pytest.mark.parametrize(("loss", "value"), [(_with_a_flag, True), (_with_a_length, {"length": 3})])
def test_a_loss_that_needs_a_python_value_is_told_to_close_over_it(loss, value):
    with pytest.raises(PegprofError, match="argument 2") as raised:
        grad_stats(loss)(_params(), _batch(), value)
    assert f"test_errors.py:{loss.__code__.co_firstlineno + 1}" in raised.value.where
    assert "close over" in raised.value.hint
    assert raised.value.__cause__ is not None


def test_an_argument_that_is_a_string():
    with pytest.raises(PegprofError, match="argument 2: a str is no array") as raised:
        grad_stats(lambda params, batch, name: _loss(params, batch))(_params(), _batch(), "relu")
    assert "close over" in raised.value.hint


def test_the_error_of_a_loss_that_fails_on_everything_is_left_as_it_is():
    with pytest.raises(KeyError, match="V"):
        grad_stats(lambda params, batch, scale: _loss({"W": params["V"]}, batch) * scale)(_params(), _batch(), 2.0)


@pytest.mark.parametrize("shape", ["n, 3", "4, n, 3"], ids=["batch", "positions"])
def test_a_symbolic_shape_is_refused_in_words(shape):
    symbolic = jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape), jnp.float32)
    fn = jax.jit(grad_stats(lambda w, x: jnp.mean(jnp.sin(x @ w))))
    with pytest.raises(PegprofError) as raised:
        jax.export.export(fn)(jnp.ones((3, 2)), symbolic)
    assert f"argument 1 has the symbolic shape ({shape})" in raised.value.what
    assert "export the function once for each size" in raised.value.hint
