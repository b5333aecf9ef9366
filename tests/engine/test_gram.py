"""gram alone against the oracle: norms without a product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pegprof
from pegprof import grad_stats, make_plan
from pegprof.engine.rules import outer
from tests.engine.cases import only
from tests.oracles import assert_stats_agree, loop_stats, quick_jit
from tests.programs.registry import score

pytestmark = pytest.mark.usefixtures("x64", "no_rank_promotion")

NORMS = ("norm", "norm_by_param")


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng((seed, *shape)).normal(size=shape))


LOSSES = {
    "dense": (lambda w, x: score(x @ w), (3, 5), (4, 3)),
    "one position": (lambda w, x: score(x @ w), (3, 5), (3,)),
    "transposed": (lambda w, x: score(x @ w.T), (5, 3), (4, 3)),
    "two axes of positions": (lambda w, x: score(x @ w), (3, 5), (2, 4, 3)),
    "heads": (lambda w, x: score(jnp.einsum("btd,dhk->bhtk", x, w)), (3, 2, 4), (5, 3)),
    "groups": (lambda w, x: score(jnp.einsum("btgd,gdk->btgk", x, w)), (2, 3, 4), (5, 2, 3)),
    "groups in the middle": (lambda w, x: score(jnp.einsum("btgd,dgk->btgk", x, w)), (3, 2, 4), (5, 2, 3)),
    "a matrix to a number": (lambda w, x: score(jnp.einsum("btij,ij->bt", x, w)), (3, 4), (5, 3, 4)),
}


def check(strategy, loss, params, batch, *, rtol=1e-8, **options):
    plan = make_plan(loss, params, batch, stats=NORMS, **options)
    assert {row.strategy for row in plan.rows} == {strategy}
    found = quick_jit(grad_stats(loss, NORMS, **options))(params, batch)
    assert_stats_agree(found, loop_stats(loss, NORMS, params, batch), rtol)


def two_layers(p, x):
    return score(jax.nn.gelu(x @ p["up"]) @ p["down"])  # gelu is recomputed from x @ up


BOTH = pytest.mark.parametrize("strategy", ["gram", "batched_gram"])


@BOTH
@pytest.mark.parametrize("name", LOSSES)
def test_norms_are_exact(monkeypatch, name, strategy):
    only(monkeypatch, strategy)
    loss, w, x = LOSSES[name]
    check(strategy, loss, draw(*w), draw(3, *x))


@BOTH
@pytest.mark.parametrize("B", [1, 5])
def test_operands_are_recomputed_and_chunks_need_not_divide_the_batch(monkeypatch, strategy, B):
    only(monkeypatch, strategy)
    monkeypatch.setattr(outer, "_HELD_BYTES", 2 * 2 * 4 * 4 * 4)  # two examples' T×T arrays
    check(strategy, two_layers, {"up": draw(3, 6), "down": draw(6, 5)}, draw(B, 4, 3))
    check(strategy, two_layers, {"up": draw(3, 6), "down": draw(6, 5)}, draw(B, 4, 3), microbatch_size=3)


@BOTH
def test_layers_of_a_scan_add_up(monkeypatch, strategy):
    only(monkeypatch, strategy)

    def loss(w, x):
        return score(jax.lax.scan(lambda h, layer: (jnp.tanh(h @ layer), None), x, w)[0])

    check(strategy, loss, draw(2, 6, 6), draw(3, 4, 6))


@BOTH
def test_the_norm_of_no_gradient_is_zero(monkeypatch, strategy):
    only(monkeypatch, strategy)
    x = draw(3, 4, 6).at[1].set(0).at[2, 2:].set(-draw(3, 4, 6)[2, :2])  # the last cancels over its positions
    found = grad_stats(lambda w, x: jnp.mean(jnp.sum(jnp.sin(x @ w), axis=1)), "norm")(draw(6, 6), x)
    assert np.all(np.isfinite(found["norm"]))
    assert found["norm"][1] == 0


@BOTH
def test_the_norm_of_an_example_without_positions_is_zero(monkeypatch, strategy):
    only(monkeypatch, strategy)
    check(strategy, lambda w, x: jnp.sum(jnp.tanh(x @ w)), draw(3, 4), draw(5, 0, 3))


@BOTH
def test_bfloat16_operands_are_added_up_in_float32(monkeypatch, strategy):
    only(monkeypatch, strategy)
    w, x = draw(8, 8).astype(jnp.bfloat16), jnp.ones((2, 300, 8), jnp.bfloat16)
    found = quick_jit(grad_stats(lambda w, x: jnp.sum((x @ w).astype(jnp.float32)), "norm"))(w, x)["norm"]
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, 300 * 8, rtol=1e-6)


def test_it_is_for_norms_alone(monkeypatch):
    only(monkeypatch, "gram", "batched_gram")
    loss, w, x = LOSSES["dense"]
    for stats in (("mean", "norm"), ("second_moment",), ("variance", "norm")):
        assert make_plan(loss, draw(*w), draw(3, *x), stats=stats).row("params").strategy == "loop"


@pytest.mark.parametrize(("T", "expected"), [(4, True), (1024, False)])
@pytest.mark.parametrize("backend", ["cpu", "gpu", "tpu"])
def test_the_planner_takes_it_where_positions_are_few(backend, T, expected):
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    for enabled in (True, False):
        with pegprof.kernels(enabled):
            plan = make_plan(lambda w, x: score(x @ w), f32(512, 512), f32(16, T, 512), stats="norm", backend=backend)
        assert ("gram" in plan.row("params").strategy) == expected, plan
        assert bool(plan.kernel_sites) == (enabled and backend != "cpu")
