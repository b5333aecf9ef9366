"""The engine as people run it: in float32, compiled by ``jax.jit`` as it comes, with all passes of XLA and LLVM."""

import jax
import jax.numpy as jnp
import pytest

from pegprof import grad_stats
from pegprof.engine.statistics import resolve
from tests.engine.cases import ALL_STATISTICS
from tests.oracles import assert_stats_agree, loop_stats
from tests.programs import PROGRAMS

NOT_COMPARABLE = {
    ("switch_by_a_class", "mean_squared"): "one example alone has a gradient of c: then mean² = variance / B, and of "
    "their difference only rounding is left, 10⁻⁸ of them, where 10⁻¹⁰ of the largest g² is asked for",
}
"""Statistics of programs that float32 does not hold to the tolerance below, and why. All others are compared."""

FEW = ("mean", "second_moment", "variance", "norm")
WITH_ALL_STATISTICS = list(PROGRAMS)[1::9]  # compiling all statistics takes twice the time

ALL_AND_A_FEW_QUICKLY = [  # together they take minutes
    pytest.param(name, marks=[] if name in WITH_ALL_STATISTICS else [pytest.mark.slow]) for name in PROGRAMS
]


@pytest.mark.full_compile
@pytest.mark.parametrize("name", ALL_AND_A_FEW_QUICKLY)
def test_every_program_in_float32_agrees_with_the_loop_within_its_rounding(name):
    program = PROGRAMS[name]
    loss, params, batch = program.make(jax.random.key(1), 5)
    stats = [
        stat
        for stat in ALL_STATISTICS
        if stat.name != "snr"  # a ratio: rounding has no bound worth asserting
        and (stat.name in FEW or name in WITH_ALL_STATISTICS)
        and (name, stat.name) not in NOT_COMPARABLE
    ]
    actual = jax.jit(grad_stats(loss, stats, keep_batch_dim=program.keep_batch_dim))(params, batch)
    expected = loop_stats(loss, stats, params, batch, keep_batch_dim=program.keep_batch_dim)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(actual)} == {"float32"}
    assert_stats_agree(actual, expected, rtol=0.06 if "bf16" in program.tags else 1e-4)


def test_what_is_not_compared_in_float32_is_a_program_and_a_statistic():
    names = {stat.name for stat in ALL_STATISTICS}
    assert all(name in PROGRAMS and stat in names and reason for (name, stat), reason in NOT_COMPARABLE.items())


def test_a_weight_that_is_rounded_to_eight_bits_has_gradients_that_are_not():
    """The gradient of a cast is cast too, as jax has it; nothing of an example's gradient is rounded below float32."""
    w, x = (jax.random.normal(jax.random.key(seed), shape) for seed, shape in enumerate([(3, 4), (5, 2, 3)]))

    def loss(w, x, cast=lambda w: w.astype(jnp.float8_e4m3fn).astype(jnp.float32)):
        return jnp.mean(jnp.tanh(x @ cast(w)) ** 2)

    actual = grad_stats(loss)(w, x)
    rounded = w.astype(jnp.float8_e4m3fn).astype(jnp.float32)
    expected = loop_stats(lambda w, x: loss(w, x, lambda w: w), resolve(["mean", "second_moment"]), rounded, x)
    assert_stats_agree(actual, expected, rtol=1e-4)
