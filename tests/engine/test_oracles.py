"""The oracle itself: what it compares, it must be able to tell apart."""

import jax
import numpy as np
import pytest

from tests.engine.cases import ALL_STATISTICS, truth
from tests.oracles import Truth, assert_stats_agree

pytestmark = pytest.mark.usefixtures("x64")

NAME = "mlp_regression"


def _spoilt(expected: Truth, stat: str, change) -> dict:
    """The truth, with one entry of one parameter changed."""
    actual = jax.tree.map(np.array, dict(expected))
    leaf = jax.tree.leaves(actual[stat])[-1]
    leaf.flat[0] = change(leaf.flat[0])
    return actual


def test_the_truth_agrees_with_itself():
    assert_stats_agree(dict(truth(NAME, 5)), truth(NAME, 5))


@pytest.mark.parametrize("stat", [stat.name for stat in ALL_STATISTICS])
def test_one_entry_that_is_off_by_a_millionth_of_the_largest_is_seen_and_named(stat):
    expected = truth(NAME, 5)
    largest = np.max(np.abs(jax.tree.leaves(expected[stat])[-1]))
    with pytest.raises(AssertionError, match=rf"{stat}.*\n?.*off by"):
        assert_stats_agree(_spoilt(expected, stat, lambda value: value + 1e-6 * largest), expected)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_not_finite_is_seen(wrong):
    expected = truth(NAME, 5)
    with pytest.raises(AssertionError, match="variance"):
        assert_stats_agree(_spoilt(expected, "variance", lambda _: wrong), expected)


def test_a_missing_statistic_a_wrong_shape_and_a_wrong_structure_are_seen():
    expected = truth(NAME, 5)
    with pytest.raises(AssertionError, match="statistics"):
        assert_stats_agree({"mean": expected["mean"]}, expected)
    with pytest.raises(AssertionError, match="shape"):
        assert_stats_agree({**expected, "mean": jax.tree.map(lambda leaf: leaf[None], expected["mean"])}, expected)
    with pytest.raises(AssertionError, match="structure"):
        assert_stats_agree({**expected, "mean": tuple(expected["mean"])}, expected)


def test_a_narrow_dtype_is_seen():
    expected = truth(NAME, 5)
    with pytest.raises(AssertionError, match="float16"):
        assert_stats_agree({**expected, "norm": expected["norm"].astype(np.float16)}, expected)


def test_an_entry_without_variance_has_an_snr_that_is_not_compared_but_may_not_look_ordinary():
    expected = truth("regulariser_without_the_batch", 5)
    actual = jax.tree.map(np.array, dict(expected))
    actual["snr"]["not_in_the_model"][:] = np.inf
    assert_stats_agree(actual, expected)
    actual["snr"]["not_in_the_model"][:] = 3.0
    with pytest.raises(AssertionError, match="no variance"):
        assert_stats_agree(actual, expected)
