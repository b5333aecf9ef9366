"""The engine as people run it: in float32."""

import jax
import jax.numpy as jnp
import pytest

from pegprof import grad_stats
from pegprof.engine.statistics import resolve
from tests.engine.cases import ALL_STATISTICS
from tests.oracles import assert_stats_agree, loop_stats
from tests.programs import PROGRAMS

NAMES = list(PROGRAMS)[1::9]


def _assert_agrees_with_the_loop(name):
    program = PROGRAMS[name]
    loss, params, batch = program.make(jax.random.key(1), 5)
    stats = [stat for stat in ALL_STATISTICS if stat.name != "snr"]  # a ratio: rounding has no bound worth asserting
    actual = jax.jit(grad_stats(loss, stats, keep_batch_dim=program.keep_batch_dim))(params, batch)
    expected = loop_stats(loss, stats, params, batch, keep_batch_dim=program.keep_batch_dim)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(actual)} == {"float32"}
    assert_stats_agree(actual, expected, rtol=0.06 if "bf16" in program.tags else 1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_statistics_in_float32_agree_with_the_loop_within_its_rounding(name):
    _assert_agrees_with_the_loop(name)


@pytest.mark.full_compile
@pytest.mark.parametrize("name", NAMES[::4])
def test_in_code_as_fast_as_llvm_makes_it_they_do_so_too(name):
    _assert_agrees_with_the_loop(name)


def test_a_weight_that_is_rounded_to_eight_bits_has_gradients_that_are_not():
    """The gradient of a cast is cast too, as jax has it; nothing of an example's gradient is rounded below float32."""
    w, x = (jax.random.normal(jax.random.key(seed), shape) for seed, shape in enumerate([(3, 4), (5, 2, 3)]))

    def loss(w, x, cast=lambda w: w.astype(jnp.float8_e4m3fn).astype(jnp.float32)):
        return jnp.mean(jnp.tanh(x @ cast(w)) ** 2)

    actual = grad_stats(loss)(w, x)
    rounded = w.astype(jnp.float8_e4m3fn).astype(jnp.float32)
    expected = loop_stats(lambda w, x: loss(w, x, lambda w: w), resolve(["mean", "second_moment"]), rounded, x)
    assert_stats_agree(actual, expected, rtol=1e-4)
