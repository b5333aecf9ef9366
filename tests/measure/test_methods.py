"""Every method, for every statistic, against the oracle of the statistic's own table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pegprof.engine.statistics import STATISTICS, Statistic
from pegprof.errors import PegprofError
from pegprof.measure.worker import methods
from pegprof.models.problem import Problem

B = 6


def _problem(keep_batch_dim):
    return Problem(
        name="tanh",
        init=lambda key: {"w": jax.random.normal(key, (4, 3)), "b": jnp.zeros(3)},
        loss=lambda p, x: jnp.mean(jnp.tanh(x @ p["w"] + jnp.broadcast_to(p["b"], (*x.shape[:-1], 3))) ** 2),
        batch=lambda key, B: jax.random.normal(key, (B, 4)),
        keep_batch_dim=keep_batch_dim,
    )


def _options(stats, microbatch_size=1):
    return methods.Options(stats=stats, microbatch_size=microbatch_size, backend="cpu")


def _oracle(stat, grads):
    leaves, structure = jax.tree.flatten(grads)
    if stat.scope == "model":
        return stat.oracle(np.concatenate([np.reshape(g, (B, -1)) for g in leaves], axis=1))
    return jax.tree.unflatten(structure, [stat.oracle(np.asarray(g)) for g in leaves])


@pytest.mark.parametrize("keep_batch_dim", [True, False], ids=["batches of one", "bare examples"])
@pytest.mark.parametrize(
    ("name", "microbatch_size"), [("vmap", 1), ("microbatch", 1), ("microbatch", 2), ("surgery", 1)]
)
def test_a_method_gives_every_statistic_as_the_oracle_does(x64, name, microbatch_size, keep_batch_dim):
    problem, stats = _problem(keep_batch_dim), tuple(STATISTICS.values())
    params, batch = problem.init(jax.random.key(0)), problem.batch(jax.random.key(1), B)
    grads = jax.vmap(lambda x: jax.grad(problem.loss)(params, x[None]))(batch)
    found = jax.jit(methods.METHODS[name].make(problem, _options(stats, microbatch_size)))(params, batch)
    assert set(found) == set(STATISTICS)
    for stat in stats:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), found[stat.name], _oracle(stat, grads))


@pytest.mark.parametrize("name", ["vmap", "microbatch", "surgery"])
def test_a_batch_may_hold_random_keys_one_for_each_example(name):
    def loss(w, batch):
        noise = jax.vmap(lambda key: jax.random.normal(key, (4,)))(batch["key"])
        return jnp.mean(jnp.tanh((batch["x"] + noise) @ w))

    def make_batch(key, B):
        return {"x": jax.random.normal(key, (B, 4)), "key": jax.random.split(key, B)}

    problem = Problem(name="noisy", init=lambda key: jnp.ones(4), loss=loss, batch=make_batch)
    params, batch = problem.init(jax.random.key(0)), problem.batch(jax.random.key(1), B)
    grads = [jax.grad(loss)(params, jax.tree.map(lambda x, i=i: x[i : i + 1], batch)) for i in range(B)]
    found = jax.jit(methods.METHODS[name].make(problem, _options((STATISTICS["second_moment"],))))(params, batch)
    np.testing.assert_allclose(found["second_moment"], np.mean(np.square(grads), axis=0), rtol=1e-5)


@pytest.mark.parametrize("name", ["vmap", "microbatch", "surgery"])
def test_a_method_takes_the_mean_of_truth_values(x64, name):
    problem, positive = _problem(True), Statistic.elementwise(lambda g: g > 0, name="positive")
    params, batch = problem.init(jax.random.key(0)), problem.batch(jax.random.key(1), B)
    grads = jax.vmap(lambda x: jax.grad(problem.loss)(params, x[None]))(batch)
    found = jax.jit(methods.METHODS[name].make(problem, _options((positive,), 2)))(params, batch)["positive"]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), found, _oracle(positive, grads))


def test_grad_gives_the_mean_alone():
    problem = _problem(True)
    params, batch = problem.init(jax.random.key(0)), problem.batch(jax.random.key(1), B)
    found = methods.METHODS["grad"].make(problem, _options((STATISTICS["variance"],)))(params, batch)
    assert list(found) == ["mean"]


def test_a_variance_in_microbatches_survives_a_mean_far_from_zero():
    """Mean of squares minus square of mean would lose all digits here."""
    problem = Problem(
        name="offset",
        init=lambda key: {"w": jnp.zeros(3)},
        loss=lambda p, x: jnp.mean(x @ p["w"]),
        batch=lambda key, B: 1e4 + jax.random.normal(key, (B, 3)),
    )
    batch = problem.batch(jax.random.key(0), 8)
    fn = methods.METHODS["microbatch"].make(problem, _options((STATISTICS["variance"],)))
    expected = np.var(np.asarray(batch, np.float64), axis=0, ddof=1)
    np.testing.assert_allclose(fn(problem.init(None), batch)["variance"]["w"], expected, rtol=1e-2)


def test_statistics_of_bfloat16_gradients_are_float32():
    problem = Problem(
        name="bf16",
        init=lambda key: {"w": jnp.ones(3, jnp.bfloat16)},
        loss=lambda p, x: jnp.mean((x @ p["w"]) ** 2),
        batch=lambda key, B: jnp.ones((B, 3), jnp.bfloat16),
    )
    for name in ("vmap", "microbatch"):
        fn = methods.METHODS[name].make(problem, _options((STATISTICS["second_moment"],)))
        assert jax.eval_shape(fn, problem.init(None), problem.batch(None, 4))["second_moment"]["w"].dtype == jnp.float32


def test_the_note_says_what_an_example_was():
    options = _options((STATISTICS["mean"],))
    assert methods.METHODS["vmap"].about(_problem(True), options, B).notes == ("over batches of one",)
    about = methods.METHODS["microbatch"].about(_problem(False), options, B)
    assert (about.notes, about.microbatch_size) == (("1 at a time, over bare examples",), 1)


def test_surgery_says_how_many_parameters_it_materialises():
    options = _options((STATISTICS["mean"], STATISTICS["second_moment"]))
    assert methods.METHODS["surgery"].about(_problem(True), options, B).materialised_parameters == 0


def test_an_unknown_method_is_refused_with_the_nearest_name():
    with pytest.raises(PegprofError, match="did you mean 'vmap'"):
        methods.resolve(["vmpa"])
