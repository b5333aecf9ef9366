"""What counts as the same statistics."""

import jax.numpy as jnp
import numpy as np
import pytest

from pegprof.measure.worker.agreement import CHUNK, TOLERANCES, NonFinite, find_nonfinite, max_rel_error


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


def test_where_nothing_is_finite_nothing_is_compared():
    assert max_rel_error(stats_of(w=[np.nan, np.inf]), stats_of(w=[np.nan, np.inf])) is None
    assert max_rel_error(stats_of(w=[np.nan], b=[]), stats_of(w=[np.nan], b=[])) is None
    assert max_rel_error(stats_of(w=[np.nan], b=[2.0]), stats_of(w=[np.nan], b=[1.0])) == 1.0
    both = {**stats_of(w=[1.0]), "second_moment": {"w": np.array([np.inf])}}
    assert max_rel_error(both, both) == 0.0


def test_infinities_of_other_signs_and_not_a_number_are_not_the_same():
    for a, b in [(np.inf, -np.inf), (np.inf, np.nan), (np.nan, -np.inf)]:
        assert max_rel_error(stats_of(w=[a, 1]), stats_of(w=[b, 1])) == np.inf


@pytest.mark.parametrize(
    ("stats", "words"),
    [
        ({"mean": [1.0, 2.0]}, ""),
        ({"mean": [np.nan, 2.0]}, "NaN in the statistics of 1 of 2 parameters: a"),
        ({"mean": [1.0, np.inf]}, "infinite values in the statistics of 1 of 2 parameters: b"),
        ({"mean": [1.0, 2.0], "second_moment": [1.0, -np.inf]}, "infinite values in the statistics of 1 of 2 parame"),
        ({"mean": [np.nan, np.inf]}, "NaN and infinite values in the statistics of all 2 parameters"),
        ({"mean": [1.0, 2.0], "norm": [np.nan]}, "NaN in norm"),
        ({"snr": [np.nan, np.inf]}, ""),  # where a gradient does not vary
    ],
)
def test_what_is_not_finite_is_said_with_its_parameters(stats, words):
    trees = {name: [np.array([1.0, x], np.float32) for x in values] for name, values in stats.items()}
    assert str(find_nonfinite(trees, ("a", "b")) or "").startswith(words)
    assert bool(find_nonfinite(trees, ("a", "b"))) == bool(words)


def test_of_many_parameters_that_are_not_finite_some_are_named():
    found = NonFinite(nan=True, infinite=False, parameters=tuple("abcdef"), total=9)
    assert str(found) == "NaN in the statistics of 6 of 9 parameters: a, b, c, ..."
    assert str(NonFinite(nan=True, infinite=False, parameters=("w",), total=1)) == "NaN in the statistics"


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
