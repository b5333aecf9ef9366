"""Accumulators by every schedule: one gradient after the other, a chunk at a time, all at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pegprof.engine.accumulators import CENTRED, MEAN, SQUARE, Moment, fold, in_chunks

LOG = Moment(name="log", phi=lambda g: jnp.log(jnp.abs(g)))


def _by_fold(accumulators, g_Bx, *, unroll=1):
    (summaries,) = fold(accumulators, lambda g: [g], g_Bx, len(g_Bx), unroll=unroll)
    return summaries


def _by_chunks(accumulators, g_Bx, *, size):
    of_chunk = lambda g_nx, n: [a.of_stack(g_nx) for a in accumulators]
    return in_chunks(of_chunk, accumulators, g_Bx, len(g_Bx), size)


def _by_stack(accumulators, g_Bx):
    return [a.of_stack(g_Bx) for a in accumulators]


MERGING = {
    "one after the other": _by_fold,
    "three in a step": functools.partial(_by_fold, unroll=3),
    "chunks of one": functools.partial(_by_chunks, size=1),
    "chunks of two": functools.partial(_by_chunks, size=2),
}
SCHEDULES = {**MERGING, "all at once": _by_stack}
BY_EVERY_SCHEDULE = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)


def _run(schedule, accumulators, g_Bx):
    """The summary of each accumulator."""
    summaries = jax.jit(functools.partial(schedule, accumulators))(g_Bx)
    return dict(zip(accumulators, summaries, strict=True))


def _draw(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


SCALES = pytest.mark.parametrize("scale", [1, 1e25], ids=["", "with squares that overflow"])


@pytest.mark.parametrize("schedule", MERGING.values(), ids=MERGING)
@SCALES
def test_what_does_not_vary_keeps_its_value_and_has_no_variance(scale, schedule):
    g_Bx = jnp.broadcast_to(scale * _draw(64), (7, 64))
    found = _run(schedule, (CENTRED,), g_Bx)[CENTRED]
    np.testing.assert_array_equal(found.mean, g_Bx[0])
    np.testing.assert_array_equal(found.square, np.zeros(64))


@SCALES
def test_what_does_not_vary_has_all_at_once_no_more_variance_than_the_rounding_of_its_mean(scale):
    """A sum of seven equal numbers is rounded, and so is a seventh of it."""
    g_Bx = jnp.broadcast_to(scale * _draw(64), (7, 64))
    mean, square = (np.asarray(x, np.float64) for x in _run(_by_stack, (CENTRED,), g_Bx)[CENTRED])
    g = np.asarray(g_Bx[0], np.float64)
    rounding = 7 * np.finfo(np.float32).eps * np.abs(g)
    assert np.all(np.abs(mean - g) <= rounding)
    assert np.all(square <= np.square(rounding))


@pytest.mark.parametrize("size", [1, 7])
def test_a_thousand_chunks_lose_no_more_than_rounding(size):
    g_Bx = 1 + _draw(1000 * size + size // 2, 5)
    _assert_rounded_only(_run(functools.partial(_by_chunks, size=size), (MEAN, CENTRED, SQUARE), g_Bx), g_Bx)


@pytest.mark.parametrize("schedule", [_by_fold, _by_stack], ids=["one after the other", "all at once"])
def test_a_thousand_examples_lose_no_more_than_rounding(schedule):
    g_Bx = 1 + _draw(1000, 5)
    _assert_rounded_only(_run(schedule, (MEAN, CENTRED, SQUARE), g_Bx), g_Bx)


def _assert_rounded_only(found, g_Bx):
    truth = np.asarray(g_Bx, np.float64)
    np.testing.assert_allclose(found[MEAN], truth.mean(axis=0), rtol=3e-6)
    np.testing.assert_allclose(found[CENTRED].mean, truth.mean(axis=0), rtol=3e-6)
    np.testing.assert_allclose(found[SQUARE], np.square(truth).mean(axis=0), rtol=3e-6)
    np.testing.assert_allclose(found[CENTRED].square, truth.var(axis=0), rtol=3e-6)


@BY_EVERY_SCHEDULE
def test_a_mean_with_an_infinity_in_it_is_infinite_and_with_both_is_none(schedule):
    inf = np.inf
    g_Bx = jnp.asarray([[inf, 1, 1, inf, inf, 0], [inf, 1, -inf, 2, 3, 1], [inf, inf, 5, 2, -inf, 2]], jnp.float32)
    found = _run(schedule, (MEAN, CENTRED, LOG), g_Bx)
    for mean in (found[MEAN], found[CENTRED].mean):
        np.testing.assert_array_equal(mean, [inf, inf, -inf, inf, np.nan, 1])
    np.testing.assert_array_equal(np.isnan(found[CENTRED].square), [True] * 5 + [False])
    np.testing.assert_array_equal(found[LOG], [inf, inf, inf, inf, inf, -inf])
