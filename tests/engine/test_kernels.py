"""Fused kernels inside the engine: every program that they fit, by Pallas's interpreter, against the oracle."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pegprof
from pegprof import grad_stats, make_plan
from pegprof.engine.kernels import selfcheck, switch, tpu
from pegprof.engine.rules import RULES
from pegprof.targets.chips import CHIPS
from tests.engine.cases import case, only, tolerance, truth
from tests.oracles import assert_stats_agree, quick_jit
from tests.programs import PROGRAMS

KERNELS = [name for name, rule in RULES.items() if rule.is_kernel]
STATS = ("mean", "second_moment", "variance", "norm")
MOMENTS = ("mean", "second_moment", "sign_mean", "norm")


def run(name, stats, chip, monkeypatch):
    """The plan and the statistics of a program, by kernels wherever one fits."""
    only(monkeypatch, *KERNELS)
    program = PROGRAMS[name]
    loss, params, batch = case(name, 5)
    how = dict(keep_batch_dim=program.keep_batch_dim, backend=chip)
    with switch.interpreted(chip):
        plan = make_plan(loss, params, batch, stats=stats, **how)
        actual = quick_jit(grad_stats(loss, stats, plan=plan, **how))(params, batch) if plan.kernel_sites else None
    return plan, actual


@pytest.fixture
def x64_in_all_threads():
    """As ``x64``, also for callbacks, which XLA runs in threads of its own where a program takes long."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.usefixtures("x64_in_all_threads")
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_that_a_kernel_fits_is_right_by_it(name, monkeypatch):
    number = list(PROGRAMS).index(name)
    stats, chip = (STATS, MOMENTS, ("norm",))[number % 3], ("tpu-v5p", "h100", "tpu-v5e")[number // 3 % 3]
    _, actual = run(name, stats, chip, monkeypatch)
    if actual is not None:
        assert_stats_agree(actual, truth(name, 5, stats), tolerance(PROGRAMS[name]))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("chip", ["tpu-v5p", "h100"])
@pytest.mark.parametrize(
    ("rule", "names"),
    {
        "fused": ["separable_convolution"],
        "fused_rows": ["embedding_of_one_token", "weight_looked_up_by_the_example"],
        "fused_tied": ["tied_embedding", "transposed_tied_embedding"],
    }.items(),
)
def test_tables_and_convolutions_go_by_the_rules_that_are_for_them(rule, names, chip, monkeypatch):
    for name in names:
        plan, _ = run(name, MOMENTS, chip, monkeypatch)
        assert rule in {row.strategy for row in plan.rows}, (name, plan)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("chip", ["tpu-v5p", "h100"])
@pytest.mark.parametrize("name", [name for name in PROGRAMS if "embedding" in name or "lookup" in name])
def test_lookups_are_right_by_a_kernel_for_every_statistic(name, chip, monkeypatch):
    _, actual = run(name, STATS, chip, monkeypatch)
    if actual is not None:
        assert_stats_agree(actual, truth(name, 5, STATS), tolerance(PROGRAMS[name]))


@pytest.mark.parametrize("chip", ["tpu-v5p", "h100"])
@pytest.mark.parametrize(("V", "expected"), [(256, "fused_rows"), (32_000, "segment")])
def test_a_small_table_gets_a_kernel_and_a_large_one_a_scatter(V, expected, chip):
    loss = lambda table, ids: jnp.mean(jnp.sin(table[ids]))
    table, ids = jax.ShapeDtypeStruct((V, 256), jnp.float32), jax.ShapeDtypeStruct((16, 128), jnp.int32)
    assert make_plan(loss, table, ids, backend=chip).row("params").strategy == expected


def squares(w, x):
    return jnp.mean(jnp.square(x @ w))


W, X = jnp.arange(12.0).reshape(3, 4), jnp.linspace(-1, 1, 8 * 5 * 3).reshape(8, 5, 3)


def strategy(**how):
    return make_plan(squares, W, X, backend="tpu-v5e", **how).row("params").strategy


def test_kernels_are_on_unless_somebody_turns_them_off(monkeypatch):
    assert strategy() == "fused"
    with pegprof.kernels(False):
        assert strategy() != "fused"
        with pegprof.kernels(True):
            assert strategy() == "fused"
        assert strategy() != "fused"
    assert strategy() == "fused"
    monkeypatch.setenv("PEGPROF_KERNELS", "0")
    assert strategy() != "fused"


def test_no_kernel_is_planned_for_a_cpu():
    assert not make_plan(squares, W, X, backend="cpu").kernel_sites


def test_a_plan_with_kernels_runs_on_a_cpu_without_them():
    plan = make_plan(squares, W, X, stats=STATS, backend="tpu-v5e")
    assert plan.kernel_sites == ("params",)
    expected = grad_stats(squares, STATS, backend="cpu")(W, X)
    for enabled in (True, False):
        with pegprof.kernels(enabled):
            actual = jax.jit(grad_stats(squares, STATS, plan=plan))(W, X)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), actual, expected)


@pytest.mark.parametrize("chip", ["tpu-v5e", "a100"])
def test_statistics_by_kernels_are_batched_and_differentiated_as_without(chip):
    def total(w, x, backend):
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(grad_stats(squares, STATS, backend=backend)(w, x)))

    xs = jnp.stack([X, 2 * X])
    with switch.interpreted(chip):
        actual = jax.grad(total)(W, X, chip), jax.vmap(lambda x: grad_stats(squares, STATS, backend=chip)(W, x))(xs)
    expected = jax.grad(total)(W, X, "cpu"), jax.vmap(lambda x: grad_stats(squares, STATS, backend="cpu")(W, x))(xs)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), actual, expected)


@pytest.fixture
def fresh_selfcheck():
    selfcheck.find_fault.cache_clear()
    yield
    selfcheck.find_fault.cache_clear()


def broken(fold):
    """A kernel that forgets one example in a thousand."""
    return lambda s, r, kinds, **how: jax.tree.map(lambda x: x * 0.999, fold(s, r, kinds, **how))


def failing(fold):
    def fail(*_, **__):
        raise RuntimeError("Mosaic failed to compile TPU kernel: not today\nand a dump of it")

    return fail


@pytest.mark.usefixtures("fresh_selfcheck")
@pytest.mark.parametrize(
    ("breaks", "words"), [(broken, "the kernel outer is off by 0.00"), (failing, "do not run: .*not today")]
)
def test_a_kernel_that_is_off_is_found_before_it_is_used_and_replaced_with_a_remark(breaks, words, monkeypatch):
    monkeypatch.setattr(tpu, "fold_outer", breaks(tpu.fold_outer))
    with switch.interpreted("tpu-v5e"):
        with pytest.warns(UserWarning, match=words):
            plan = make_plan(squares, W, X, backend="tpu-v5e")
        assert not plan.kernel_sites
        (remark,) = plan.remarks
        assert remark in str(plan)
        with pytest.warns(UserWarning, match=words):
            actual = grad_stats(squares, STATS, backend="tpu-v5e")(W, X)
    expected = grad_stats(squares, STATS, backend="cpu")(W, X)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), actual, expected)


@pytest.mark.usefixtures("fresh_selfcheck")
@pytest.mark.parametrize("chip", ["tpu-v5p", "h100"])
def test_the_selfcheck_finds_nothing_in_kernels_that_are_right(chip):
    with switch.interpreted(chip), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert selfcheck.trusted_chip(chip) == (CHIPS[chip], ())


def test_a_plan_says_how_many_bytes_move():
    row = make_plan(squares, jnp.ones((256, 512)), jnp.ones((8, 64, 256)), backend="tpu-v5e").row("params")
    operands, results = 2 * 8 * 64 * (256 + 512), 2 * 4 * 256 * 512  # bfloat16, as a TPU multiplies; both statistics
    assert row.kernel
    assert operands + results <= row.bytes_moved <= 2.5 * (operands + results)
    assert "moved" in str(make_plan(squares, W, X))
