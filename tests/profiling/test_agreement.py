"""What counts as the same statistics."""

import jax.numpy as jnp
import numpy as np
import pytest

from pegprof.profiling.agreement import CHUNK, TOLERANCES, max_rel_error


def stats_of(**leaves):
    return {"mean": {name: np.asarray(values, np.float32) for name, values in leaves.items()}}


def test_nothing_to_compare_is_no_agreement():
    assert max_rel_error({"mean": np.ones(2)}, {"variance": np.ones(2)}) is None
    assert max_rel_error({"sign_mean": np.ones(2)}, {"sign_mean": np.ones(2)}) is None


def test_the_error_is_relative_to_the_largest_entry_of_its_parameter():
    assert max_rel_error(stats_of(w=[4.0, 1.0]), stats_of(w=[4.0, 2.0])) == pytest.approx(0.25)


def test_a_parameter_that_is_zero_but_for_rounding_is_no_disagreement():
    found = stats_of(w=[1.0], key_bias=[1e-9])
    assert max_rel_error(found, stats_of(w=[1.0], key_bias=[-2e-9])) < TOLERANCES["float32"]


def test_a_small_parameter_that_is_wrong_is_a_disagreement():
    assert max_rel_error(stats_of(w=[1.0], b=[1e-2]), stats_of(w=[1.0], b=[2e-2])) > TOLERANCES["float32"]


def test_only_shared_statistics_are_compared():
    assert max_rel_error({"mean": np.ones(2)}, {"mean": np.ones(2), "variance": np.zeros(2)}) == 0.0


def test_not_a_number_agrees_with_itself_only():
    assert max_rel_error(stats_of(w=[np.nan, 1]), stats_of(w=[np.nan, 1])) == 0.0
    assert max_rel_error(stats_of(w=[np.nan, 1]), stats_of(w=[1, 1])) == np.inf
    assert max_rel_error(stats_of(w=[1, 1]), stats_of(w=[np.inf, 1])) == np.inf


@pytest.mark.parametrize("place", [0, CHUNK - 1, CHUNK, 2 * CHUNK])
def test_a_large_parameter_is_compared_to_its_last_entry(place):
    expected, found = np.ones(2 * CHUNK + 1), np.ones(2 * CHUNK + 1)
    found[place] = 1.5
    assert max_rel_error(stats_of(w=found), stats_of(w=expected)) == pytest.approx(0.5)


def test_differences_of_bfloat16_are_not_rounded_to_bfloat16():
    one = jnp.ones(1, jnp.bfloat16)
    assert max_rel_error({"mean": one}, {"mean": one * 0 + 257 / 256}) == 0.0
    assert max_rel_error({"mean": one}, {"mean": np.array([1.001], np.float32)}) == pytest.approx(0.001, rel=1e-2)


def test_two_models_of_all_zeros_agree():
    assert max_rel_error(stats_of(w=[0.0]), stats_of(w=[0.0])) == 0.0
