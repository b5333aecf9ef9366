"""Each optimizer takes the steps of its formula, and is where it should be among the others."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pegprof
from pegprof import optimizers
from pegprof.optimizers import OPTIMIZERS
from tests.optimizers.formulas import ORACLES, ROOT
from tests.optimizers.problems import NAMES, RATE, assert_trees_close, loss, make_batch, make_params

STEPS, CLIP = 20, 3.0

pytestmark = pytest.mark.usefixtures("x64")

_gradient = jax.jit(jax.grad(loss))


def gradients_by_loop(params, batch):
    """The gradients of the examples, one after the other: [B, ...] for each parameter."""
    B = len(batch["x"])
    each = [_gradient(params, jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], batch)) for i in range(B)]
    return jax.tree.map(lambda *g: np.stack([np.asarray(x) for x in g]), *each)


def walk_by_formula(make_oracle, *, clip=None):
    """The parameters after each step of plain NumPy."""
    leaves, tree = jax.tree.flatten(jax.tree.map(np.asarray, make_params()))
    oracles = [make_oracle() for _ in leaves]
    for seed in range(STEPS):
        g = jax.tree.leaves(gradients_by_loop(jax.tree.unflatten(tree, leaves), make_batch(seed)))
        norm = np.sqrt(sum(np.sum(x.mean(axis=0) ** 2) for x in g))
        factor = min(1.0, clip / norm) if clip else 1.0
        leaves = [p - RATE * oracle.step(factor * x) for p, oracle, x in zip(leaves, oracles, g, strict=True)]
        yield jax.tree.unflatten(tree, leaves)


def walk(opt, **options):
    """The parameters after each step of ``train_step``."""
    step, params = pegprof.train_step(loss, opt, **options), make_params()
    state = opt.init(params)
    for seed in range(STEPS):
        params, state, _ = step(params, state, make_batch(seed))
        yield params


def assert_walks_agree(ours, theirs, rtol=1e-9):
    pairs = list(zip(ours, theirs, strict=True))
    assert len(pairs) == STEPS
    for a, b in pairs:
        assert_trees_close(a, b, rtol=rtol, atol=1e-12)


def test_every_optimizer_has_a_formula_in_plain_numpy():
    assert {name for name, _, _ in ORACLES} == set(NAMES)


@pytest.mark.parametrize(("name", "options", "make_oracle"), ORACLES, ids=[f"{n}-{o}" for n, o, _ in ORACLES])
def test_twenty_steps_are_those_of_the_formula(name, options, make_oracle):
    assert_walks_agree(walk(OPTIMIZERS[name](RATE, **options)), walk_by_formula(make_oracle))


@pytest.mark.parametrize("name", [name for name in NAMES if "clip" in inspect.signature(OPTIMIZERS[name]).parameters])
def test_clipping_scales_every_examples_gradient(name):
    options, make_oracle = next((options, oracle) for other, options, oracle in ORACLES if other == name)
    ours = walk(OPTIMIZERS[name](RATE, clip=CLIP, **options))
    assert_walks_agree(ours, walk_by_formula(make_oracle, clip=CLIP))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("sign_sgd", "sign_ema")])
def test_clipping_before_an_optimizer_scales_every_examples_gradient_too(name):
    options, make_oracle = next((options, oracle) for other, options, oracle in ORACLES if other == name)
    ours = walk(optax.chain(optax.clip_by_global_norm(CLIP), OPTIMIZERS[name](RATE, **options)))
    assert_walks_agree(ours, walk_by_formula(make_oracle, clip=CLIP))


def test_the_clipping_of_these_tests_is_of_some_steps_and_not_of_others():
    norms = []
    for seed in range(STEPS):
        g = gradients_by_loop(make_params(), make_batch(seed))
        norms.append(float(optax.tree.norm(jax.tree.map(lambda x: x.mean(axis=0), g))))
    assert min(norms) < CLIP < max(norms)


B = 6


@pytest.mark.parametrize(
    ("options", "other"),
    [
        ({}, optimizers.micro_adam(RATE)),
        ({"a": 0.0, "b": 1.0}, optimizers.micro_adam_var(RATE)),
        ({"a": 1.0, "b": 0.0, "eps": 0.0, "eps_root": ROOT}, optimizers.micro_adam_msq(RATE, eps=ROOT)),
        (
            {"a": 1.0, "b": 0.0, "eps": 0.0, "eps_root": ROOT, "block": 4},
            optimizers.micro_adam_msq(RATE, eps=ROOT, block=4),
        ),
        ({"b": 1 / B}, optax.adam(RATE)),
        ({"b": 1 / B, "clip": CLIP}, optax.chain(optax.clip_by_global_norm(CLIP), optax.adam(RATE))),
        ({"b": 1 / B, "weight_decay": 0.1}, optax.adamw(RATE, weight_decay=0.1)),
    ],
)
def test_the_others_are_points_of_the_mix(options, other):
    assert_walks_agree(walk(optimizers.adam_mix(RATE, **options)), walk(other), rtol=1e-7)


def test_without_momentum_the_sign_of_the_mean_and_of_its_average_are_the_same():
    assert_walks_agree(walk(optimizers.sign_sgd(RATE, b1=0.0)), walk(optimizers.sign_ema(RATE, b1=0.0)))


def test_a_negative_estimate_of_the_squared_mean_is_cut_off_and_stays_finite():
    opt, w = optimizers.micro_adam_msq(0.1, eps=1e-4), jnp.zeros(2)
    stats = {"mean": jnp.array([1e-3, 1e-3]), "mean_squared": jnp.array([-1.0, 1e-6])}
    updates, state = optimizers.update(opt, stats, opt.init(w), w)
    np.testing.assert_allclose(updates, [-0.1 * 1e-3 / 1e-2, -0.1 * 1e-3 / np.sqrt(1.01e-4)], rtol=1e-12)
    assert state[0].nu[0] < 0  # the average itself keeps its sign: cutting off each step would bias it


@pytest.mark.parametrize("name", NAMES)
def test_weight_decay_is_decoupled_and_may_be_masked(name):
    make, params = OPTIMIZERS[name], make_params()
    stats = pegprof.grad_stats(loss, optimizers.needed_statistics(make(RATE), params))(params, make_batch(0))
    stats.setdefault("mean", jax.tree.map(jnp.zeros_like, params))

    def updates_of(opt):
        return optimizers.update(opt, stats, opt.init(params), params)[0]

    plain = updates_of(make(RATE))
    decayed = updates_of(make(RATE, weight_decay=0.1, mask={"in": True, "out": False}))
    assert_trees_close(decayed["out"], plain["out"])
    expected = jax.tree.map(lambda u, p: u - RATE * 0.1 * p, plain["in"], params["in"])
    assert_trees_close(decayed["in"], expected)


@pytest.mark.parametrize("block", ["rows", 0, -1, 2.5])
def test_a_block_that_is_none_says_what_a_block_can_be(block):
    with pytest.raises(pegprof.PegprofError, match='a block is None, "tensor", "row" or a number'):
        optimizers.micro_adam_msq(RATE, block=block)
