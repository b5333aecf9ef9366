"""A step of training: what it computes, what it returns, and that surgery and vmap walk the same way."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pegprof
from pegprof import optimizers
from pegprof.models.problem import load_problem
from pegprof.optimizers import step as step_module
from tests.optimizers.problems import NAMES, RATE, assert_trees_close, loss, make_batch, make_params


def moments_by_vmap(loss, params, batch):
    g = jax.vmap(jax.grad(loss), in_axes=(None, 0))(params, batch)
    mean, second_moment = (jax.tree.map(lambda x, n=n: jnp.mean(x**n, axis=0), g) for n in (1, 2))
    return {"mean": mean, "second_moment": second_moment}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("mlp", {"width": 16, "inputs": 12, "dtype": "float64"}),
        pytest.param(
            "transformer-tiny",
            {"layers": 1, "width": 8, "seq_len": 6, "heads": 2, "vocab": 11, "dtype": "float64"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_hundred_steps_by_surgery_and_by_vmap_agree_step_by_step(model, options):
    problem = load_problem(model, options)
    opt = optimizers.micro_adam(1e-3)
    params = jax.tree.map(lambda p: p.astype(jnp.float64), problem.init(jax.random.key(0)))
    by_surgery = pegprof.train_step(problem.loss, opt, keep_batch_dim=problem.keep_batch_dim)

    @jax.jit
    def by_vmap(params, state, batch):
        stats = moments_by_vmap(problem.loss, params, batch)
        updates, state = opt.update(stats["mean"], state, params, stats=stats)
        return optax.apply_updates(params, updates), state

    make_batch = jax.jit(lambda key: problem.batch(key, 5))
    ours, theirs = (params, opt.init(params)), (params, opt.init(params))
    for key in jax.random.split(jax.random.key(1), 100):
        batch = make_batch(key)
        *ours, _ = by_surgery(*ours, batch)
        theirs = by_vmap(*theirs, batch)
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_learns(name):
    target, opt = make_params("float32"), optimizers.OPTIMIZERS[name](0.02)
    step = pegprof.train_step(loss, opt)
    params = jax.tree.map(lambda p: 0.5 * p + 0.1, target)
    state, values = opt.init(params), []
    for seed in range(60):
        x_BxD = jnp.asarray(np.random.default_rng(seed).normal(size=(32, 3)), jnp.float32)
        y_BxE = jnp.tanh(x_BxD @ target["in"]["W"] + target["in"]["b"]) @ target["out"]
        params, state, value = step(params, state, {"x": x_BxD, "y": y_BxE})
        values.append(float(value))
    assert np.mean(values[-10:]) < 0.5 * np.mean(values[:10])


def test_only_the_statistics_that_are_needed_are_asked_for(monkeypatch):
    asked, real = [], step_module.value_and_grad_stats

    def spy(loss, stats, **options):
        asked.extend(stat.name for stat in stats)
        return real(loss, stats, **options)

    monkeypatch.setattr(step_module, "value_and_grad_stats", spy)
    params, opt = make_params(), optimizers.micro_sign_sgd(RATE)
    pegprof.train_step(loss, opt).lower(params, opt.init(params), make_batch(0))
    assert asked == ["sign_mean"]


@pytest.mark.parametrize("make", [optax.adam, optax.sgd, lambda rate: optax.MultiSteps(optax.adam(rate), 2)])
def test_optimizers_of_optax_step_as_they_do_with_the_plain_gradient(make):
    opt, params = make(RATE), make_params()
    step, state = pegprof.train_step(loss, opt), opt.init(params)
    plain, plain_state = params, state
    for seed in range(4):
        params, state, value = step(params, state, make_batch(seed))
        expected, gradient = jax.value_and_grad(loss)(plain, make_batch(seed))
        updates, plain_state = opt.update(gradient, plain_state, plain)
        plain = optax.apply_updates(plain, updates)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert_trees_close(params, plain, rtol=1e-3, atol=1e-5)


def test_parameters_in_bfloat16_stay_so_and_so_does_the_state_of_optax():
    params = make_params("bfloat16")
    for opt in (optax.adam(RATE), optimizers.micro_adam(RATE)):
        state = opt.init(params)
        new_params, new_state, _ = pegprof.train_step(loss, opt)(params, state, make_batch(0))
        assert jax.tree.map(jnp.result_type, (new_params, new_state)) == jax.tree.map(jnp.result_type, (params, state))


def test_the_value_is_handed_on_to_those_that_want_it():
    opt = optax.chain(optimizers.micro_adam(RATE), optax.contrib.reduce_on_plateau(patience=1, cooldown=0))
    params = make_params()
    _, state, value = pegprof.train_step(loss, opt)(params, opt.init(params), make_batch(0))
    assert state[1].best_value == value


def test_aux_comes_back_example_by_example_and_a_key_is_split():
    def noisy(params, batch, key):
        noise = jax.random.normal(key, ())
        return loss(params, batch) + noise, {"noise": noise}

    opt, params, key = optimizers.micro_adam(RATE), make_params(), jax.random.key(3)
    step = pegprof.train_step(noisy, opt, has_aux=True, prng_argnum=2)
    new_params, _, (value, aux) = step(params, opt.init(params), make_batch(0, B=4), key)
    noise = [jax.random.normal(k, ()) for k in jax.random.split(key, 4)]
    np.testing.assert_allclose(aux["noise"], noise, rtol=1e-6)
    np.testing.assert_allclose(value, loss(params, make_batch(0, B=4)) + np.mean(noise), rtol=1e-5)
    without, _, _ = pegprof.train_step(loss, opt)(params, opt.init(params), make_batch(0, B=4))
    assert_trees_close(new_params, without, rtol=1e-5)


def test_microbatches_and_donation_change_nothing():
    opt, params = optimizers.micro_adam(RATE), make_params()
    plain = pegprof.train_step(loss, opt)(params, opt.init(params), make_batch(0))
    copies = jax.tree.map(jnp.copy, params)
    other = pegprof.train_step(loss, opt, microbatch_size=4, donate=True)(copies, opt.init(params), make_batch(0))
    assert_trees_close(other, plain, rtol=1e-4, atol=1e-7)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(copies))


def test_a_batch_that_is_counted_from_the_end_is_the_batch():
    opt, params = optimizers.micro_adam(RATE), make_params()
    plain, counted = (pegprof.train_step(loss, opt, batch_argnums=argnum) for argnum in (1, -1))
    arguments = params, opt.init(params), make_batch(0)
    assert_trees_close(counted(*arguments), plain(*arguments), rtol=1e-6)


def test_a_statistic_of_ones_own_reaches_the_optimizer():
    def update(updates, state, params=None, *, stats, **extra_args):
        return jax.tree.map(jnp.negative, stats["cube"]), state

    opt = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    cube = pegprof.Statistic.elementwise(lambda g: g**3, name="cube")
    params, batch = make_params(), make_batch(0)
    new_params, _, _ = pegprof.train_step(loss, opt, statistics=[cube])(params, (), batch)
    cubes = pegprof.grad_stats(loss, [cube])(params, batch)["cube"]
    assert_trees_close(new_params, jax.tree.map(lambda p, c: p - c, params, cubes), rtol=1e-5, atol=1e-6)


def test_a_batch_of_one_is_too_small_for_a_variance_and_the_error_says_so():
    opt, params = optimizers.micro_adam_var(RATE), make_params()
    with pytest.raises(pegprof.PegprofError, match="variance"):
        pegprof.train_step(loss, opt)(params, opt.init(params), make_batch(0, B=1))
