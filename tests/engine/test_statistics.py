"""The table of statistics by itself: formulas against oracles, and the words of its errors."""

import jax.numpy as jnp
import numpy as np
import pytest

from pegprof import PegprofError, Statistic
from pegprof.engine.statistics import CENTRED, MEAN, SQUARE_NORM, STATISTICS, Moment, quantities_of, resolve
from tests.engine.cases import ALL_STATISTICS

pytestmark = pytest.mark.usefixtures("x64")


def _quantities(stat: Statistic, g: np.ndarray) -> dict[str, jnp.ndarray]:
    """What a site accumulates, from all gradients at once."""
    found = {}
    for quantity in quantities_of([stat]):
        if isinstance(quantity, Moment):
            found[quantity.name] = jnp.mean(quantity.phi(jnp.asarray(g)), axis=0)
        elif quantity == CENTRED:
            found[quantity.name] = jnp.asarray(np.mean((g - g.mean(axis=0)) ** 2, axis=0))
        else:
            assert quantity == SQUARE_NORM
            found[quantity.name] = jnp.asarray(np.sum(g.reshape(len(g), -1) ** 2, axis=1))
    return found


@pytest.mark.parametrize("B", [2, 5])
@pytest.mark.parametrize("stat", ALL_STATISTICS, ids=lambda stat: stat.name)
def test_finishing_the_quantities_gives_what_the_oracle_gives(stat, B):
    g = np.random.default_rng(0).normal(size=(B, 3, 4))
    expected = stat.oracle(g)
    assert expected.shape == ((3, 4) if stat.scope == "entry" else (B,))
    np.testing.assert_allclose(stat.finish(_quantities(stat, g), B), expected, rtol=1e-12)


@pytest.mark.parametrize("stat", ALL_STATISTICS, ids=lambda stat: stat.name)
def test_a_factor_form_says_the_same_as_phi(stat):
    x, y = np.random.default_rng(1).normal(size=(2, 6))
    for moment in (q for q in stat.needs if isinstance(q, Moment) and q.factor is not None):
        np.testing.assert_allclose(moment.phi(x * y), moment.factor(x) * moment.factor(y), rtol=1e-12)


def test_every_statistic_of_the_issue_is_in_the_table():
    named = "mean second_moment variance mean_squared sign_mean abs_mean fourth_moment snr norm norm_by_param"
    assert set(named.split()) <= set(STATISTICS)


def test_every_entry_stands_under_its_own_name_with_a_formula():
    for name, stat in STATISTICS.items():
        assert stat.name == name
        assert stat.formula


def test_statistics_that_divide_by_one_less_need_two_examples():
    assert {name for name, stat in STATISTICS.items() if stat.minimum_batch == 2} == {"variance", "mean_squared", "snr"}


def test_the_unbiased_mean_squared_is_unbiased():
    g = np.random.default_rng(2).normal(0.5, 1.0, size=(4, 200_000))
    assert abs(np.mean(STATISTICS["mean_squared"].oracle(g)) - 0.25) < 0.005
    assert abs(np.mean(STATISTICS["variance"].oracle(g)) - 1.0) < 0.01


def test_one_name_is_a_list_of_one():
    assert resolve("mean") == resolve(["mean"]) == (STATISTICS["mean"],)


def test_an_unknown_statistic_is_answered_with_the_nearest_name():
    with pytest.raises(PegprofError) as raised:
        resolve(["mean", "varience"])
    assert "varience" in raised.value.what
    assert "'variance'" in raised.value.hint


def test_a_name_like_no_other_is_answered_with_all_of_them():
    with pytest.raises(PegprofError) as raised:
        resolve("qqq")
    assert all(name in raised.value.hint for name in STATISTICS)


def test_asking_for_nothing_is_an_error():
    with pytest.raises(PegprofError, match="no statistic"):
        resolve([])


def test_asking_for_one_name_twice_is_an_error():
    with pytest.raises(PegprofError, match="not all different"):
        resolve(["mean", Statistic.elementwise(jnp.abs, name="mean")])


def test_a_users_statistic_is_called_after_its_function():
    def cube(g):
        return g**3

    assert Statistic.elementwise(cube).name == "cube"
    assert Statistic.elementwise(cube, name="third").name == "third"


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_a_users_function_gives_numbers_of_the_gradients_dtype(dtype):
    g = jnp.asarray([-2.0, 0.0, 3.0], dtype)
    for fn in (lambda x: x > 0, lambda x: (x > 0).astype(jnp.int8), lambda x: jnp.where(x > 0, np.float64(1), 0)):
        (moment,) = Statistic.elementwise(fn, name="positive", factor=fn).needs
        for found in (moment.phi(g), moment.factor(g)):
            assert found.dtype == dtype
            assert found.tolist() == [0, 0, 1]


def test_quantities_are_shared_and_the_mean_comes_with_the_centred():
    names = [quantity.name for quantity in quantities_of(resolve(["snr", "mean", "variance", "norm", "norm_by_param"]))]
    assert sorted(names) == ["centred", "mean", "square_norm"]
    assert MEAN in quantities_of(resolve("variance"))
