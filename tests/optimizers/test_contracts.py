"""What optax asks of every optimizer, of each in the table: state, jit, dtypes, wrappers, checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from pegprof import PegprofError, optimizers
from pegprof.optimizers import OPTIMIZERS
from tests.optimizers.problems import NAMES, RATE, assert_trees_close, make_params, make_stats

pytestmark = pytest.mark.usefixtures("no_rank_promotion")

every = pytest.mark.parametrize("name", NAMES)


def take_steps(opt, params, steps=3, *, jit=True):
    """Parameters and state after some steps on made-up statistics."""

    def step(params, state, stats):
        updates, state = optimizers.update(opt, stats, state, params)
        return optax.apply_updates(params, updates), state

    step, state = jax.jit(step) if jit else step, opt.init(params)
    for seed in range(steps):
        params, state = step(params, state, make_stats(params, seed))
    return params, state


def shapes_of(tree):
    return jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x), jnp.asarray(x).weak_type), tree)


@every
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_update_changes_neither_the_structure_nor_the_dtypes_of_the_state(name, dtype):
    opt, params = OPTIMIZERS[name](RATE), make_params(dtype)
    state = opt.init(params)
    new_params, new_state = take_steps(opt, params, 1)
    assert shapes_of(new_state) == shapes_of(state)
    assert shapes_of(new_params) == shapes_of(params)
    stats = make_stats(params)
    jax.lax.cond(True, lambda: optimizers.update(opt, stats, state, params)[1], lambda: state)  # branches must agree


@every
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_moments_are_in_float32_at_least_and_updates_in_the_dtype_of_the_gradient(name, dtype):
    opt, params = OPTIMIZERS[name](RATE), make_params(dtype)
    stats = make_stats(params)
    mean = optax.tree.cast(stats["mean"], dtype)
    updates, state = jax.jit(opt.update)(mean, opt.init(params), params, stats=stats)
    assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype(dtype)}
    moments = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
    assert {leaf.dtype for leaf in moments} == {jnp.dtype("float32")}


@pytest.mark.usefixtures("x64")
@every
def test_moments_of_float64_are_in_float64(name):
    opt, params = OPTIMIZERS[name](RATE), make_params("float64")
    _, state = take_steps(opt, params, 2)
    assert {leaf.dtype for leaf in jax.tree.leaves(state) if leaf.ndim} == {jnp.dtype("float64")}


def test_the_first_moment_may_be_kept_in_another_dtype():
    _, state = take_steps(optimizers.micro_adam(RATE, mu_dtype="bfloat16"), make_params(), 2)
    assert {leaf.dtype for leaf in jax.tree.leaves(state[0].mu)} == {jnp.dtype("bfloat16")}
    assert {leaf.dtype for leaf in jax.tree.leaves(state[0].nu)} == {jnp.dtype("float32")}


@every
def test_a_jitted_step_is_the_same_and_is_compiled_once(name):
    opt, params = OPTIMIZERS[name](RATE), make_params()
    assert_trees_close(take_steps(opt, params), take_steps(opt, params, jit=False), rtol=1e-5, atol=1e-7)
    step = jax.jit(lambda state, stats: optimizers.update(opt, stats, state, params)[1])
    state = opt.init(params)
    for seed in range(3):
        state = step(state, make_stats(params, seed))
    assert step._cache_size() == 1


@every
def test_a_chain_passes_the_statistics_on(name):
    params = make_params()
    halved = optax.chain(optax.identity(), OPTIMIZERS[name](RATE), optax.scale(0.5))
    assert_trees_close(take_steps(halved, params)[0], take_steps(OPTIMIZERS[name](RATE / 2), params)[0], rtol=1e-5)


@every
@pytest.mark.parametrize("mask", [{"in": False, "out": True}, {"in": {"W": True, "b": False}, "out": True}])
def test_masked_parameters_pass_through_and_the_rest_steps_as_if_alone(name, mask):
    opt, params = OPTIMIZERS[name](RATE), make_params()
    masked, stats = optax.masked(opt, mask), make_stats(params)
    updates, state = jax.jit(masked.update)(stats["mean"], masked.init(params), params, stats=stats)
    alone, _ = optimizers.update(opt, {k: v["out"] for k, v in stats.items()}, opt.init(params["out"]), params["out"])
    assert_trees_close(updates["out"], alone)
    assert_trees_close(updates["in"]["b"], stats["mean"]["in"]["b"])
    assert jax.tree.structure(state) == jax.tree.structure(masked.init(params))


@every
def test_a_partition_gives_each_parameter_its_own_optimizer(name):
    params, labels = make_params(), {"in": "plain", "out": "ours"}
    both = optax.partition({"ours": OPTIMIZERS[name](RATE), "plain": optax.sgd(RATE)}, labels)
    (ours, _), (alone, _) = take_steps(both, params), take_steps(OPTIMIZERS[name](RATE), params)
    assert_trees_close(ours["out"], alone["out"], rtol=1e-5)
    assert_trees_close(ours["in"], take_steps(optax.sgd(RATE), params)[0]["in"], rtol=1e-5)


@every
def test_hyperparameters_can_be_injected_and_changed(name):
    params = make_params()
    injected = optax.inject_hyperparams(OPTIMIZERS[name])(RATE)
    assert_trees_close(take_steps(injected, params)[0], take_steps(OPTIMIZERS[name](RATE), params)[0], rtol=1e-4)
    state, stats = injected.init(params), make_stats(params)
    state.hyperparams["learning_rate"] = jnp.asarray(0.0)
    updates, _ = jax.jit(injected.update)(stats["mean"], state, params, stats=stats)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(updates))


def test_a_block_is_injected_as_a_static_argument_and_the_error_says_so():
    inject, params = optax.inject_hyperparams, make_params()
    with pytest.raises(PegprofError, match='static_args="block"'):
        inject(optimizers.micro_adam_msq)(RATE, block=4).init(params)
    static = inject(optimizers.micro_adam_msq, static_args="block")(RATE, block=4, clip=0.1)
    plain = optimizers.micro_adam_msq(RATE, block=4, clip=0.1)
    assert_trees_close(take_steps(static, params)[0], take_steps(plain, params)[0], rtol=1e-4)


@every
def test_a_learning_rate_may_be_a_schedule(name):
    params, stats = make_params(), make_stats(make_params())
    opt = OPTIMIZERS[name](optax.piecewise_constant_schedule(RATE, {1: 0.0}))
    updates, state = optimizers.update(opt, stats, opt.init(params), params)
    plain = OPTIMIZERS[name](RATE)
    assert_trees_close(updates, optimizers.update(plain, stats, plain.init(params), params)[0])
    updates, _ = optimizers.update(opt, stats, state, params)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(updates))


@every
def test_a_gradient_that_is_not_finite_can_be_skipped(name):
    params, stats = make_params(), make_stats(make_params())
    opt = optax.apply_if_finite(OPTIMIZERS[name](RATE), max_consecutive_errors=3)
    before = opt.init(params)
    broken = jax.tree.map(lambda x: x.at[0].set(jnp.nan), stats)
    updates, state = jax.jit(opt.update)(broken["mean"], before, params, stats=broken)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(updates))
    assert_trees_close(state.inner_state, before.inner_state)
    updates, _ = jax.jit(opt.update)(stats["mean"], state, params, stats=stats)
    assert_trees_close(updates, optimizers.update(opt, stats, before, params)[0])


@every
def test_extra_arguments_of_others_and_parameters_are_not_needed(name):
    opt, params = OPTIMIZERS[name](RATE), make_params()
    stats = make_stats(params)
    opt.update(stats["mean"], opt.init(params), stats=stats, value=1.0)


@every
def test_the_parameters_in_a_state_can_be_mapped_over(name):
    opt, params = OPTIMIZERS[name](RATE), make_params()
    _, state = take_steps(opt, params)
    doubled = optax.tree.map_params(opt, lambda x: 2 * x, state)
    assert_trees_close(doubled[0].mu, jax.tree.map(lambda x: 2 * x, state[0].mu))


@every
def test_a_state_that_orbax_saved_goes_on_as_if_nothing_had_been(name, tmp_path):
    opt, params = OPTIMIZERS[name](optax.linear_schedule(RATE, 0.0, 10)), make_params()
    params, state = take_steps(opt, params)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", {"params": params, "state": state})
        checkpointer.wait_until_finished()
        shapes = jax.eval_shape(lambda: {"params": params, "state": opt.init(params)})
        restored = checkpointer.restore(tmp_path / "step", shapes)
    assert jax.tree.structure(restored["state"]) == jax.tree.structure(state)
    stats = make_stats(params, 9)
    went_on = optimizers.update(opt, stats, state, params)
    again = optimizers.update(opt, stats, restored["state"], restored["params"])
    for a, b in zip(jax.tree.leaves(went_on), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
