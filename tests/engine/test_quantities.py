"""Quantities one after the other and in chunks: what is equal, infinite or long."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pegprof.engine.quantities import Running, in_chunks, of_stack
from pegprof.engine.statistics import CENTRED, MEAN, SQUARE, Moment

QUANTITIES = (MEAN, CENTRED)
LOG = Moment(name="log", phi=lambda g: jnp.log(jnp.abs(g)))


def _in_chunks(quantities, g_Bx, size):
    def run(g_Bx):
        (values,), _ = in_chunks(lambda g_Bx, n: ([of_stack(quantities, g_Bx)], ()), g_Bx, len(g_Bx), size)
        return values

    return jax.jit(run)(g_Bx)


def _one_after_the_other(quantities, g_Bx):
    running = Running(quantities)

    def run(g_Bx):
        first = running.start(jax.ShapeDtypeStruct(g_Bx.shape[1:], g_Bx.dtype))
        numbers = jnp.arange(1, len(g_Bx) + 1, dtype=jnp.float32)
        total, _ = jax.lax.scan(lambda total, x: running.add(total, *x), first, (g_Bx, numbers))
        return running.finish(total, len(g_Bx))

    return jax.jit(run)(g_Bx)


def _draw(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("scale", [1, 1e25], ids=["", "with squares that overflow"])
def test_what_does_not_vary_keeps_its_value_and_has_no_variance(scale):
    g_Bx = jnp.broadcast_to(scale * _draw(64), (7, 64))
    for found in (
        _in_chunks(QUANTITIES, g_Bx, 1),
        _in_chunks(QUANTITIES, g_Bx, 2),
        _one_after_the_other(QUANTITIES, g_Bx),
    ):
        np.testing.assert_array_equal(found["mean"], g_Bx[0])
        np.testing.assert_array_equal(found["centred"], np.zeros(64))


@pytest.mark.parametrize("size", [1, 7])
def test_a_thousand_chunks_lose_no_more_than_rounding(size):
    g_Bx = 1 + _draw(1000 * size + size // 2, 5)
    truth = np.asarray(g_Bx, np.float64)
    found = _in_chunks((*QUANTITIES, SQUARE), g_Bx, size)
    np.testing.assert_allclose(found["mean"], truth.mean(axis=0), rtol=3e-6)
    np.testing.assert_allclose(found["square"], np.square(truth).mean(axis=0), rtol=3e-6)
    np.testing.assert_allclose(found["centred"], truth.var(axis=0), rtol=3e-6)


def test_a_mean_with_an_infinity_in_it_is_infinite_and_with_both_is_none():
    inf = np.inf
    g_Bx = jnp.asarray([[inf, 1, 1, inf, inf, 0], [inf, 1, -inf, 2, 3, 1], [inf, inf, 5, 2, -inf, 2]], jnp.float32)
    for found in (
        _in_chunks(QUANTITIES, g_Bx, 1),
        _in_chunks(QUANTITIES, g_Bx, 2),
        _one_after_the_other(QUANTITIES, g_Bx),
    ):
        np.testing.assert_array_equal(found["mean"], [inf, inf, -inf, inf, np.nan, 1])
        np.testing.assert_array_equal(np.isnan(found["centred"]), [True] * 5 + [False])
    np.testing.assert_array_equal(_in_chunks((LOG,), g_Bx, 1)["log"], [inf, inf, inf, inf, inf, -inf])
