"""What stands before an optimizer scales its statistics as it scales the mean, or is refused.

The truth is in NumPy and float64: every example's gradient is multiplied by the factor, and statistics of these go to
the same optimizer with nothing before it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pegprof
from pegprof import PegprofError, optimizers
from pegprof.engine.statistics import STATISTICS
from pegprof.optimizers import OPTIMIZERS, needed_statistics
from tests.optimizers.problems import NAMES, RATE, assert_trees_close, loss, make_batch, make_params, make_stats

MICRO = [name for name in NAMES if needed_statistics(OPTIMIZERS[name](RATE), make_params()) != ("mean",)]
B, STEPS = 4, 2

micro = pytest.mark.parametrize("name", MICRO)


def make_gradients(seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: rng.normal(size=(B, *p.shape)), make_params())


def statistics_of(g):
    """All statistics that are shaped like the parameters, of gradients [B, ...]."""
    entries = {name: stat for name, stat in STATISTICS.items() if stat.scope == "entry"}
    return {name: jax.tree.map(lambda x, s=stat: jnp.asarray(s.oracle(x)), g) for name, stat in entries.items()}


def norm(tree):
    return np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(tree)))


def alike(factor):
    """Every parameter is multiplied by the same: a number, or a function of mean gradient and step."""
    fn = factor if callable(factor) else lambda mean, step: factor
    return lambda mean, params, step: jax.tree.map(lambda _: fn(mean, step), mean)


def by_part(inner, outer):
    return lambda mean, params, step: {"in": {"W": inner, "b": inner}, "out": outer}


def jitted(opt):
    return optax.GradientTransformationExtraArgs(opt.init, jax.jit(optax.with_extra_args_support(opt).update))


INNER = {"in": True, "out": False}
BEFORE = {
    "scale": (optax.scale(0.5), alike(0.5)),
    "a negative scale": (optax.scale(-2.0), alike(-2.0)),
    "clip_by_global_norm": (optax.clip_by_global_norm(1e-3), alike(lambda mean, step: 1e-3 / norm(mean))),
    "a clip that is not reached": (optax.clip_by_global_norm(1e3), alike(1.0)),
    "normalize_by_update_norm": (optax.normalize_by_update_norm(), alike(lambda mean, step: 1 / (norm(mean) + 1e-6))),
    "clip_by_block_rms": (
        optax.clip_by_block_rms(0.1),
        lambda mean, params, step: jax.tree.map(lambda m: 0.1 / np.sqrt(np.mean(m**2)), mean),
    ),
    "scale_by_trust_ratio": (
        optax.scale_by_trust_ratio(),
        lambda mean, params, step: jax.tree.map(lambda m, p: norm(p) / norm(m), mean, params),
    ),
    "masked": (optax.masked(optax.scale(0.5), INNER), by_part(0.5, 1.0)),
    "partition": (
        optax.partition({"a": optax.scale(0.5), "b": optax.scale(3.0)}, {"in": "a", "out": "b"}),
        by_part(0.5, 3.0),
    ),
    "frozen": (optax.masked(optax.set_to_zero(), INNER), by_part(0.0, 1.0)),
    "inject_hyperparams": (optax.inject_hyperparams(optax.scale)(step_size=0.5), alike(0.5)),
    "an injected schedule": (
        optax.inject_hyperparams(optax.scale)(step_size=lambda count: 1.0 / (count + 2)),
        alike(lambda mean, step: 1 / (step + 2)),
    ),
    "scale_by_schedule": (
        optax.scale_by_schedule(lambda count: 1.0 / (count + 2)),
        alike(lambda mean, step: 1 / (step + 2)),
    ),
    "apply_if_finite": (optax.apply_if_finite(optax.scale(0.5), 3), alike(0.5)),
    "conditionally_transform": (
        optax.conditionally_transform(optax.scale(0.5), lambda step: step >= 1),
        alike(lambda mean, step: 0.5 if step else 1.0),
    ),
    "two in a row": (
        optax.chain(optax.scale(0.5), optax.clip_by_global_norm(1e-3)),
        alike(lambda mean, step: 1e-3 / norm(mean)),
    ),
    "a sum with itself": (optax.stateless(lambda u, _: jax.tree.map(lambda x: 3 * x - 0.5 * x, u)), alike(2.5)),
    "an array of one number": (
        optax.stateless(lambda u, _: jax.tree.map(lambda x: x * jnp.sqrt(jnp.full_like(x, 4.0)), u)),
        alike(2.0),
    ),
    "a jit": (jitted(optax.scale(0.5)), alike(0.5)),
}


def walk(opt, stats_of_step):
    """The updates and the state after each of some steps; the parameters stay where they are."""
    params = make_params()
    state = opt.init(params)
    for step in range(STEPS):
        updates, state = optimizers.update(opt, stats_of_step(step), state, params)
        yield updates


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("before", BEFORE)
@micro
def test_statistics_are_those_of_gradients_that_are_scaled_alike(name, before):
    transformation, factors = BEFORE[before]

    def scaled(step):
        g = make_gradients(step)
        mean = jax.tree.map(lambda x: x.mean(axis=0), g)
        return statistics_of(jax.tree.map(np.multiply, g, factors(mean, make_params(), step)))

    opt = OPTIMIZERS[name](RATE)
    ours = walk(optax.chain(transformation, opt), lambda step: statistics_of(make_gradients(step)))
    for a, b in zip(ours, walk(opt, scaled), strict=True):
        assert_trees_close(a, b, rtol=1e-9, atol=1e-15)


@micro
def test_half_of_every_gradient_takes_the_same_step(name):
    """As with Adam: eps aside, the step does not depend on the size of the gradients."""
    options = {} if name == "micro_sign_sgd" else {"eps": 0.0}
    opt, params = OPTIMIZERS[name](RATE, **options), make_params()
    halved, stats = optax.chain(optax.scale(0.5), opt), make_stats(make_params())
    update = jax.jit(lambda opt, state: optimizers.update(opt, stats, state, params)[0], static_argnums=0)
    expected = update(opt, opt.init(params))
    finite = jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0), (update(halved, halved.init(params)), expected))
    assert_trees_close(*finite, rtol=1e-5)


@pytest.mark.usefixtures("x64")
def test_a_training_step_scales_the_statistics_too():
    params, steps = make_params(), []
    for before in (optax.identity(), optax.scale(0.5), optax.clip_by_global_norm(1e-3)):
        opt = optax.chain(before, optimizers.micro_adam(RATE, eps=1e-30))
        steps.append(pegprof.train_step(loss, opt)(params, opt.init(params), make_batch(0))[0])
    for other in steps[1:]:
        assert_trees_close(other, steps[0], rtol=1e-12)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "wrap", [lambda opt: optax.apply_if_finite(opt, 3), jitted, lambda opt: optax.named_chain(("a", opt))]
)
def test_what_is_around_both_changes_nothing(wrap):
    params, stats = make_params(), statistics_of(make_gradients(0))
    opt = optax.chain(optax.clip_by_global_norm(0.1), optimizers.micro_adam(RATE, eps=1.0))
    for wrapped in (wrap(opt), optax.chain(optax.clip_by_global_norm(0.1), wrap(optimizers.micro_adam(RATE, eps=1.0)))):
        assert_trees_close(
            optimizers.update(wrapped, stats, wrapped.init(params), params)[0],
            optimizers.update(opt, stats, opt.init(params), params)[0],
            rtol=1e-12,
        )


@pytest.mark.parametrize("name", STATISTICS)
@pytest.mark.parametrize("c", [0.5, -3.0, 0.0])
def test_every_statistic_says_how_it_scales(name, c):
    g, oracle = np.random.default_rng(0).normal(size=(B, 3, 2)), STATISTICS[name].oracle
    with np.errstate(divide="ignore", invalid="ignore"):
        np.testing.assert_allclose(STATISTICS[name].scaled(oracle(g), jnp.asarray(c)), oracle(c * g), rtol=1e-5)


def test_every_statistic_of_the_table_says_how_it_scales():
    assert all(statistic.scaled for statistic in STATISTICS.values())


# Where nothing is scaled, nothing changes.


UNTOUCHED = {
    "alone": lambda opt: opt,
    "identity": lambda opt: optax.chain(optax.identity(), opt),
    "a scale of one": lambda opt: optax.chain(optax.scale(1.0), opt),
    "masked": lambda opt: optax.masked(opt, INNER),
    "apply_if_finite": lambda opt: optax.apply_if_finite(opt, 3),
}


@pytest.mark.parametrize("wrap", UNTOUCHED)
@micro
def test_with_nothing_before_the_program_is_that_of_the_update_itself(name, wrap):
    opt, params = UNTOUCHED[wrap](OPTIMIZERS[name](RATE)), make_params()
    arguments = make_stats(params), opt.init(params)
    ours = jax.make_jaxpr(lambda stats, state: optimizers.update(opt, stats, state, params))(*arguments)
    theirs = jax.make_jaxpr(lambda stats, state: opt.update(stats["mean"], state, params, stats=stats))(*arguments)
    assert str(ours) == str(theirs)


def test_an_update_called_directly_takes_the_statistics_as_they_are():
    params, stats = make_params(), make_stats(make_params())
    plain = optimizers.micro_adam(RATE, eps=0.0)
    halved = optax.chain(optax.scale(0.5), plain)
    updates, _ = halved.update(stats["mean"], halved.init(params), params, stats=stats)
    expected, _ = plain.update(stats["mean"], plain.init(params), params, stats=stats)
    assert_trees_close(updates, jax.tree.map(lambda u: 0.5 * u, expected))


# Numbers that are hard.


def test_gradients_of_zero_are_clipped_to_zero():
    params, opt = make_params(), optax.chain(optax.clip_by_global_norm(0.1), optimizers.micro_adam(RATE))
    zeros = jax.tree.map(jnp.zeros_like, make_stats(params))
    updates, _ = optimizers.update(opt, zeros, opt.init(params), params)
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(updates))


def test_a_gradient_that_is_not_finite_breaks_what_it_would_break_with_adam_and_can_be_skipped():
    params, stats = make_params(), make_stats(make_params())
    opt = optax.chain(optax.clip_by_global_norm(0.1), optimizers.micro_adam(RATE))
    broken = {name: {**tree, "out": tree["out"].at[0].set(jnp.nan)} for name, tree in stats.items()}
    updates, _ = optimizers.update(opt, broken, opt.init(params), params)
    assert all(np.all(np.isnan(leaf)) for leaf in jax.tree.leaves(updates))  # the norm is not a number
    careful = optax.apply_if_finite(opt, 3)
    before = careful.init(params)
    updates, state = optimizers.update(careful, broken, before, params)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(updates))
    assert_trees_close(state.inner_state, before.inner_state)


def test_a_frozen_parameter_stays_frozen_where_its_gradient_is_not_finite():
    params, stats = make_params(), make_stats(make_params())
    opt = optax.chain(optax.masked(optax.set_to_zero(), INNER), optimizers.micro_adam(RATE))
    broken = {name: {**tree, "in": jax.tree.map(lambda x: x * jnp.inf, tree["in"])} for name, tree in stats.items()}
    updates, _ = optimizers.update(opt, broken, opt.init(params), params)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(updates["in"]))


def test_a_factor_is_rounded_as_the_mean_sees_it_and_keeps_its_precision():
    params = make_params("bfloat16")
    stats = make_stats(params)
    opt = optax.chain(optax.scale(0.3), optax.clip_by_global_norm(1e9), optimizers.micro_adam(RATE))
    updates, (*_, (state, _)) = jax.jit(lambda: optimizers.update(opt, stats, opt.init(params), params))()
    factor = float(jnp.bfloat16(0.3))
    expected = jax.tree.map(lambda s: (1 - 0.999) * factor**2 * s, stats["second_moment"])
    assert_trees_close(state.nu, expected, rtol=1e-5)
    assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("jit", [True, False])
def test_state_keeps_its_structure_and_its_dtypes(dtype, jit):
    before = (optax.inject_hyperparams(optax.scale)(step_size=0.5), optax.apply_if_finite(optax.scale(2.0), 3))
    opt, params = optax.chain(*before, optimizers.micro_adam(RATE)), make_params(dtype)
    state, stats = opt.init(params), make_stats(params)
    update = jax.jit(optimizers.update, static_argnums=0) if jit else optimizers.update
    _, new = update(opt, stats, state, params)
    kinds = [jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree) for tree in (new, state)]
    assert kinds[0] == kinds[1]


def test_updates_of_many_can_be_batched():
    opt = optax.chain(optax.clip_by_global_norm(0.1), optimizers.micro_adam(RATE, eps=1.0))
    params, each = make_params(), [make_stats(make_params(), seed) for seed in range(3)]

    def update(stats):
        return optimizers.update(opt, stats, opt.init(params), params)[0]

    together = jax.vmap(update)(jax.tree.map(lambda *x: jnp.stack(x), *each))
    for i, stats in enumerate(each):
        assert_trees_close(jax.tree.map(lambda x, i=i: x[i], together), update(stats), rtol=1e-5)


def test_an_optimizer_that_batches_another_is_followed_into_it():
    inner, w = optimizers.micro_adam(RATE, eps=1.0), jnp.ones((3, 2))

    def update(updates, state, params=None, *, stats):
        return jax.vmap(lambda u, state, stats: inner.update(u, state, stats=stats))(updates, state, stats)

    batched = optax.GradientTransformationExtraArgs(jax.vmap(inner.init), update)
    stats = make_stats(w)
    stats = {name: stats[name] for name in ("mean", "second_moment")}
    updates = [
        optimizers.update(opt, stats, opt.init(w), w)[0]
        for opt in (optax.chain(optax.scale(0.5), batched), optax.chain(optax.scale(0.5), inner))
    ]
    assert_trees_close(*updates, rtol=1e-6)


# What is no scaling is refused.

REFUSED = {
    "clip": optax.clip(1.0),
    "adaptive_grad_clip": optax.adaptive_grad_clip(0.1),
    "zero_nans": optax.zero_nans(),
    "add_decayed_weights": optax.add_decayed_weights(0.1),
    "trace": optax.trace(0.9),
    "ema": optax.ema(0.9),
    "add_noise": optax.add_noise(1.0, 0.5, 0),
    "centralize": optax.centralize(),
    "scale_by_sign": optax.scale_by_sign(),
    "scale_by_adam": optax.scale_by_adam(),
    "another of ours": optimizers.micro_adam(RATE),
    "masked": optax.masked(optax.clip(1.0), {"in": {"W": True, "b": False}, "out": False}),
    "a cond": optax.conditionally_transform(optax.clip(1.0), lambda step: step > 3),
    "another parameter's gradient": optax.stateless(
        lambda u, _: {**u, "in": {**u["in"], "W": u["out"][:3, :1] * u["in"]["W"]}}
    ),
}
TEXT = (
    r"takes the statistic '\w+' of the gradients that come in, and what stands before it does more to the mean "
    r"gradient of in/W than multiply it by a number: the statistic cannot follow\nhint: put it after \w+ in the chain; "
    r"for weight decay use the argument weight_decay, to clip use optax.clip_by_global_norm"
)


@pytest.mark.parametrize("before", REFUSED)
def test_more_than_a_scaling_is_refused_in_words(before):
    opt, params = optax.chain(REFUSED[before], optimizers.micro_adam(RATE)), make_params()
    with pytest.raises(PegprofError, match=f"micro_adam {TEXT}"):
        optimizers.update(opt, make_stats(params), opt.init(params), params)
    with pytest.raises(PegprofError, match=f"micro_adam {TEXT}"):
        needed_statistics(opt, params)


@micro
def test_every_optimizer_refuses_it_under_its_name_and_after_itself_it_may_stand(name):
    params = make_params()
    opt = optax.chain(optax.clip(1.0), OPTIMIZERS[name](RATE))
    with pytest.raises(PegprofError, match=f"{name} {TEXT}"):
        pegprof.train_step(loss, opt)(params, opt.init(params), make_batch(0))
    after = optax.chain(OPTIMIZERS[name](RATE), optax.clip(1.0), optax.add_decayed_weights(0.1), optax.trace(0.9))
    optimizers.update(after, make_stats(params), after.init(params), params)


def test_the_line_that_did_it_is_named():
    def square(updates, params):
        return jax.tree.map(lambda u: u * u, updates)

    opt, params = optax.chain(optax.stateless(square), optimizers.micro_adam(RATE)), make_params()
    with pytest.raises(PegprofError, match=r"test_scaling\.py:\d+.*square.*: micro_adam takes"):
        needed_statistics(opt, params)
    with pytest.raises(PegprofError, match=r"_adding\.py:\d+.*add_decayed_weights.*: micro_adam takes"):
        needed_statistics(optax.chain(optax.add_decayed_weights(0.1), optimizers.micro_adam(RATE)), params)


def test_optimizers_that_take_no_statistics_may_have_anything_before_them():
    params, batch = make_params(), make_batch(0)
    for name in set(NAMES) - set(MICRO):
        opt = optax.chain(optax.clip(0.1), optax.add_decayed_weights(0.1), OPTIMIZERS[name](RATE))
        pegprof.train_step(loss, opt).lower(params, opt.init(params), batch)
        optimizers.update(opt, make_stats(params), opt.init(params), params)


def test_several_steps_of_means_are_no_multiple_of_the_last():
    opt, params = optax.MultiSteps(optimizers.micro_adam(RATE), 2), make_params()
    with pytest.raises(PegprofError, match="than multiply it by a number"):
        optimizers.update(opt, make_stats(params), opt.init(params), params)


# Optimizers of one's own.


def reading(name, *, loop=False):
    """An optimizer that takes a statistic for its updates, or its sum if it is one for all parameters."""

    def update(updates, state, params=None, *, stats, **extra_args):
        if loop:
            found = jax.lax.map(lambda _: optimizers.look_up(stats, name, updates), jnp.arange(1))
            return jax.tree.map(lambda x: x[0], found), state
        found = optimizers.look_up(stats, name, updates, optimizer="mine")
        return (jax.tree.map(lambda u: u + jnp.sum(found), updates) if name == "norm" else found), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def all_statistics(params):
    return {
        **make_stats(params),
        "norm": jnp.arange(1.0, B + 1),
        "norm_by_param": jax.tree.map(lambda p: jnp.full(B, float(p.size)), params),
        "cube": params,
    }


@pytest.mark.parametrize("name", [name for name in STATISTICS if name != "norm"])
def test_an_optimizer_of_ones_own_looks_up_what_is_scaled_by_parameter(name):
    params, opt = make_params(), optax.chain(optax.masked(optax.scale(-0.5), INNER), reading(name))
    stats = all_statistics(params)
    updates, _ = optimizers.update(opt, stats, opt.init(params), params)
    expected = jax.tree.map(lambda s: STATISTICS[name].scaled(s, jnp.asarray(-0.5)), stats[name]["in"])
    assert_trees_close(updates, {"in": expected, "out": stats[name]["out"]})


@pytest.mark.parametrize(
    "before", ["scale", "clip_by_global_norm", "scale_by_schedule", "inject_hyperparams", "two in a row"]
)
def test_the_norm_over_all_parameters_scales_where_all_scale_alike(before):
    params, opt = make_params(), optax.chain(BEFORE[before][0], reading("norm"))
    stats = all_statistics(params)
    updates, _ = optimizers.update(opt, stats, opt.init(params), params)
    mean = jax.tree.map(np.asarray, stats["mean"])
    factors = BEFORE[before][1](mean, params, 0)
    assert_trees_close(updates, jax.tree.map(lambda m, c: c * m + abs(c) * 10, mean, factors), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("before", ["masked", "clip_by_block_rms"])
def test_the_norm_over_all_parameters_is_refused_where_they_scale_apart(before):
    params, opt = make_params(), optax.chain(BEFORE[before][0], reading("norm"))
    with pytest.raises(
        PegprofError, match=r"mine does not scale all parameters alike, .* 'norm' is one number for all"
    ):
        optimizers.update(opt, all_statistics(params), opt.init(params), params)


def test_the_norm_over_all_parameters_does_not_scale_with_some_of_them():
    params, stats = make_params(), all_statistics(make_params())
    alone = optax.masked(reading("norm"), INNER)
    updates, _ = optimizers.update(alone, stats, alone.init(params), params)
    assert_trees_close(updates["in"], jax.tree.map(lambda m: m + 10, stats["mean"]["in"]))
    opt = optax.chain(optax.scale(0.5), alone)
    with pytest.raises(PegprofError, match="does not scale all parameters alike"):
        optimizers.update(opt, stats, opt.init(params), params)


def test_a_statistic_of_ones_own_is_refused_where_it_would_have_to_scale():
    params, opt = make_params(), reading("cube")
    updates, _ = optimizers.update(opt, all_statistics(params), opt.init(params), params)
    assert_trees_close(updates, params)
    halved = optax.chain(optax.scale(0.5), opt)
    with pytest.raises(
        PegprofError, match=r"how the statistic 'cube' scales with it is not known\nhint: put it after mine"
    ):
        optimizers.update(halved, all_statistics(params), halved.init(params), params)


def test_a_lookup_inside_a_loop_is_refused():
    opt, params = optax.chain(optax.scale(0.5), reading("variance", loop=True)), make_params()
    with pytest.raises(PegprofError, match=r"looks statistics up inside a scan, .*\nhint: look them up before"):
        optimizers.update(opt, make_stats(params), opt.init(params), params)


# Needs.


def test_signs_need_the_mean_only_for_a_factor_that_is_made_from_it():
    signs, params = optimizers.micro_sign_sgd(RATE), make_params()
    assert needed_statistics(optax.chain(optax.scale(-1.0), signs), params) == ("sign_mean",)
    assert needed_statistics(optax.chain(optax.clip_by_global_norm(1.0), signs), params) == ("mean", "sign_mean")
    stats = {"sign_mean": make_stats(params)["sign_mean"]}
    flipped = optax.chain(optax.scale(-1.0), signs)
    updates, expected = (optimizers.update(opt, stats, opt.init(params), params)[0] for opt in (flipped, signs))
    assert_trees_close(updates, jax.tree.map(jnp.negative, expected))
    clipped = optax.chain(optax.clip_by_global_norm(1.0), signs)
    with pytest.raises(PegprofError, match='ask grad_stats for "mean" as well'):
        optimizers.update(clipped, stats, clipped.init(params), params)


def test_a_statistic_of_ones_own_has_a_name_of_its_own():
    opt, params = optimizers.micro_adam(RATE), make_params()
    wrong = pegprof.Statistic.elementwise(jnp.abs, name="second_moment")
    for call in (
        lambda: needed_statistics(opt, params, statistics=[wrong]),
        lambda: pegprof.train_step(loss, opt, statistics=[wrong]),
    ):
        with pytest.raises(
            PegprofError, match=r"'second_moment' is one of pegprof's own.*\nhint: give it a name of its own"
        ):
            call()
    cubes = [pegprof.Statistic.elementwise(lambda g: g**3, name="cube") for _ in range(2)]
    with pytest.raises(PegprofError, match=r"two statistics are named 'cube'\nhint: give each a name of its own"):
        pegprof.train_step(loss, opt, statistics=cubes)
    needed_statistics(opt, params, statistics=[STATISTICS["second_moment"]])
