"""What an optimizer needs is found out by watching it, whatever is wrapped around it."""

import jax
import jax.numpy as jnp
import optax
import pytest

import pegprof
from pegprof import PegprofError, optimizers
from pegprof.optimizers import needed_statistics
from tests.optimizers.problems import NAMES, RATE, make_params, make_stats

NEEDS = {
    "micro_adam": ("mean", "second_moment"),
    "micro_adam_var": ("mean", "variance"),
    "micro_adam_msq": ("mean", "mean_squared"),
    "adam_mix": ("mean", "variance", "mean_squared"),
    "micro_sign_sgd": ("sign_mean",),
    "sign_sgd": ("mean",),
    "sign_ema": ("mean",),
}
WRAPPERS = {
    "as it is": lambda make: make(RATE),
    "chain": lambda make: optax.chain(optax.scale(2.0), make(RATE)),
    "named_chain": lambda make: optax.named_chain(("ours", make(RATE))),
    "inject_hyperparams": lambda make: optax.inject_hyperparams(make)(RATE),
    "jit": lambda make: optax.GradientTransformationExtraArgs(make(RATE).init, jax.jit(make(RATE).update)),
}


def looking_up(*names):
    """An optimizer that adds up all that it looks up."""

    def update(updates, state, params=None, *, stats, **extra_args):
        total = sum(jnp.sum(leaf) for name in names for leaf in jax.tree.leaves(stats[name]))
        return jax.tree.map(lambda u: u + total, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def test_every_optimizer_has_its_needs_here():
    assert set(NEEDS) == set(NAMES)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", NAMES)
def test_an_optimizer_needs_what_its_formula_has_and_no_more(name, wrapper):
    opt = WRAPPERS[wrapper](optimizers.OPTIMIZERS[name])
    assert needed_statistics(opt, make_params()) == NEEDS[name]


def test_what_is_masked_needs_its_mean_to_pass_through():
    opt = optax.masked(optimizers.micro_sign_sgd(RATE), {"in": False, "out": True})
    assert needed_statistics(opt, make_params()) == ("mean", "sign_mean")


def test_apply_if_finite_needs_the_mean_to_look_at():
    opt = optax.apply_if_finite(optimizers.micro_sign_sgd(RATE), 3)
    assert needed_statistics(opt, make_params()) == ("mean", "sign_mean")


def test_two_optimizers_in_a_partition_need_what_both_need():
    opt = optax.partition(
        {"a": optimizers.micro_adam(RATE), "b": optimizers.micro_sign_sgd(RATE)}, {"in": "a", "out": "b"}
    )
    assert needed_statistics(opt, make_params()) == ("mean", "second_moment", "sign_mean")


@pytest.mark.parametrize("opt", [optax.adam(RATE), optax.sgd(RATE), optax.scale(0.1)], ids=["adam", "sgd", "scale"])
def test_optimizers_of_optax_need_the_mean_alone(opt):
    assert needed_statistics(opt, make_params()) == ("mean",)


def test_an_optimizer_that_does_nothing_needs_nothing():
    assert needed_statistics(optax.set_to_zero(), make_params()) == ()


def test_shapes_are_enough_and_nothing_is_computed():
    huge = jax.ShapeDtypeStruct((10**6, 10**6), jnp.float32)
    assert needed_statistics(optimizers.adam_mix(RATE), {"w": huge}) == NEEDS["adam_mix"]


def test_statistics_come_in_the_shapes_that_grad_stats_gives_them():
    opt = looking_up("norm", "norm_by_param", "snr")
    assert needed_statistics(opt, make_params("bfloat16"), batch_size=3) == ("mean", "snr", "norm", "norm_by_param")


def test_a_statistic_of_ones_own_is_known_once_it_is_given():
    cube = pegprof.Statistic.elementwise(lambda g: g**3, name="cube")
    with pytest.raises(PegprofError, match=r"unknown statistic 'cube'.*\n.*argument statistics"):
        needed_statistics(looking_up("cube"), make_params())
    assert needed_statistics(looking_up("cube"), make_params(), statistics=[cube]) == ("mean", "cube")


def test_a_mistyped_statistic_is_named_with_the_nearest():
    with pytest.raises(PegprofError, match="did you mean 'second_moment'"):
        needed_statistics(looking_up("second_momment"), make_params())


def test_an_optimizer_that_goes_over_all_statistics_is_told_to_name_them():
    def update(updates, state, params=None, *, stats, **extra_args):
        return dict(stats.items()), state

    opt = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    with pytest.raises(PegprofError, match="look them up by name"):
        needed_statistics(opt, make_params())


@pytest.mark.parametrize("name", [name for name in NAMES if NEEDS[name] != ("mean",)])
def test_what_is_missing_is_named_with_what_to_pass(name):
    opt, params = optimizers.OPTIMIZERS[name](RATE), make_params()
    stats = make_stats(params)
    with pytest.raises(PegprofError, match=rf"{name} needs the statistic .* given no statistics\nhint: .*grad_stats"):
        opt.update(stats["mean"], opt.init(params), params)
    with pytest.raises(PegprofError, match="have only 'mean'\nhint: ask grad_stats for it"):
        optimizers.update(opt, {"mean": stats["mean"]}, opt.init(params), params)


def test_a_mean_that_is_missing_and_used_is_asked_for_and_one_that_is_not_used_is_not():
    params, stats = make_params(), make_stats(make_params())
    adam, signs = optimizers.micro_adam(RATE), optimizers.micro_sign_sgd(RATE)
    with pytest.raises(PegprofError, match='ask grad_stats for "mean" as well'):
        optimizers.update(adam, {"second_moment": stats["second_moment"]}, adam.init(params), params)
    optimizers.update(signs, {"sign_mean": stats["sign_mean"]}, signs.init(params), params)


def test_multi_steps_is_refused_where_it_would_mix_batches_up():
    with pytest.raises(PegprofError, match=r"the second_moment of the last batch alone\nhint: .*microbatch_size"):
        needed_statistics(optax.MultiSteps(optimizers.micro_adam(RATE), 2), make_params())
    assert needed_statistics(optax.MultiSteps(optimizers.sign_ema(RATE), 2), make_params()) == ("mean",)


def test_a_wrapper_that_drops_the_statistics_is_found_out():
    dropped = optax.MultiSteps(optimizers.micro_adam(RATE), 2).gradient_transformation()
    with pytest.raises(PegprofError, match=r"was given no statistics\nhint: .*does not pass it on"):
        needed_statistics(dropped, make_params())
