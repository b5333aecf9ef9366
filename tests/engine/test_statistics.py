"""The table of statistics by itself: formulas against oracles, and the words of its errors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pegprof import PegprofError, Statistic, grad_stats
from pegprof.engine.accumulators import CENTRED, MEAN, SQUARE_NORM, Accumulator, Moment, Spread, Summary
from pegprof.engine.statistics import STATISTICS, accumulators_of, finish, resolve
from pegprof.result.settings import FORMULAS
from tests.engine.cases import ALL_STATISTICS
from tests.oracles import assert_stats_agree, loop_stats

pytestmark = pytest.mark.usefixtures("x64")


def _summaries(stat: Statistic, g: np.ndarray) -> dict[Accumulator, Summary]:
    """What a site accumulates, from all gradients at once."""
    found: dict[Accumulator, Summary] = {}
    for accumulator in stat.needs:
        if isinstance(accumulator, Moment):
            found[accumulator] = jnp.mean(accumulator.phi(jnp.asarray(g)), axis=0)
        elif accumulator == CENTRED:
            mean = g.mean(axis=0)
            found[accumulator] = Spread(jnp.asarray(mean), jnp.asarray(np.mean((g - mean) ** 2, axis=0)))
        else:
            assert accumulator == SQUARE_NORM
            found[accumulator] = jnp.asarray(np.sum(g.reshape(len(g), -1) ** 2, axis=1))
    return found


@pytest.mark.parametrize("B", [2, 5])
@pytest.mark.parametrize("stat", ALL_STATISTICS, ids=lambda stat: stat.name)
def test_finishing_the_summaries_gives_what_the_oracle_gives(stat, B):
    g = np.random.default_rng(0).normal(size=(B, 3, 4))
    expected = stat.oracle(g)
    assert expected.shape == ((3, 4) if stat.scope == "entry" else (B,))
    np.testing.assert_allclose(stat.finish(_summaries(stat, g), B), expected, rtol=1e-12)


@pytest.mark.parametrize("stat", ALL_STATISTICS, ids=lambda stat: stat.name)
def test_a_factor_form_says_the_same_as_phi(stat):
    x, y = np.random.default_rng(1).normal(size=(2, 6))
    for moment in (a for a in stat.needs if isinstance(a, Moment) and a.factor is not None):
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
        resolve(["mean", "variance", "mean"])


def test_a_users_statistic_is_called_after_its_function():
    def cube(g):
        return g**3

    assert Statistic.elementwise(cube).name == "cube"
    assert Statistic.elementwise(cube, name="third").name == "third"


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_a_users_function_gives_numbers_of_the_gradients_dtype(dtype):
    g = jnp.asarray([-2.0, 0.0, 3.0], dtype)
    for fn in (lambda x: x > 0, lambda x: (x > 0).astype(jnp.int8), lambda x: jnp.where(x > 0, np.float64(1), 0)):
        (moment,) = Statistic.elementwise(fn, name="positive").needs
        assert moment.phi(g).dtype == dtype
        assert moment.phi(g).tolist() == [0, 0, 1]
    (moment,) = Statistic.elementwise(lambda x: x != 0, name="not_zero", factor=lambda x: x != 0).needs
    assert moment.factor(g).dtype == dtype
    assert moment.factor(g).tolist() == [1, 0, 1]


def test_accumulators_are_shared_and_the_mean_comes_with_the_centred():
    shared = accumulators_of(resolve(["snr", "mean", "variance", "norm", "norm_by_param"]))
    assert sorted(map(repr, shared)) == sorted(map(repr, (CENTRED, SQUARE_NORM)))
    assert accumulators_of(resolve("mean")) == (MEAN,)
    centred = CENTRED.of_stack(jnp.asarray([[1.0, 2.0], [3.0, 6.0]]))
    (mean,) = finish(STATISTICS["mean"], (CENTRED,), [[centred]], 2)
    assert mean.tolist() == [2, 4]


# ---- statistics of users ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "phi",
    [
        lambda g: g / jnp.linalg.norm(g),
        lambda g: g - jnp.mean(g),
        lambda g: jnp.cumsum(g).reshape(g.shape),
        jnp.sort,
        lambda g: g * jnp.arange(g.size).reshape(g.shape),
        lambda g: jnp.where(g == jnp.max(g), 1.0, 0.0),
        lambda g: jax.random.normal(jax.random.key(0), g.shape),
        lambda g: jax.nn.softmax(g, axis=-1),
    ],
    ids=["unit", "centred", "cumsum", "sort", "position", "largest", "random", "softmax"],
)
def test_a_function_that_looks_at_several_entries_is_refused(phi):
    with pytest.raises(
        PegprofError, match=r"'mine' is not elementwise: it gives .* alone, and .* beside other numbers"
    ):
        Statistic.elementwise(phi, name="mine")


@pytest.mark.parametrize(
    ("phi", "said"),
    [
        (lambda g: 1.0, r"gives shape \(\) for an array of shape \(6,\)"),
        (jnp.cumsum, r"gives shape \(6,\) for an array of shape \(2, 3\)"),
        (lambda g: g.no_such_method(), "fails for an array of shape .*: AttributeError"),
        (lambda g: jax.nn.softmax(g, axis=1), "fails for an array of shape .*: ValueError"),
    ],
    ids=["constant", "flat", "error", "axis"],
)
def test_a_function_that_does_not_map_arrays_to_arrays_is_refused(phi, said):
    with pytest.raises(PegprofError, match=said):
        Statistic.elementwise(phi, name="mine")


@pytest.mark.parametrize("factor", [lambda x: x**2, lambda x: jnp.abs(x) ** 3, lambda x: x**3 + 0.1])
def test_a_factor_that_is_none_is_refused(factor):
    with pytest.raises(PegprofError, match=r"the factor of the statistic 'cube' is none: phi\(.*\) is .*, factor"):
        Statistic.elementwise(lambda g: g**3, name="cube", factor=factor)


def test_functions_that_are_infinite_undefined_or_of_truth_values_are_fine():
    Statistic.elementwise(lambda g: jnp.log(jnp.abs(g)), name="log")
    Statistic.elementwise(jnp.sqrt, name="root")
    Statistic.elementwise(lambda g: g > 0.5, name="large")
    with jax.debug_nans(True):
        Statistic.elementwise(lambda g: g / jnp.abs(g), name="sign", factor=lambda g: g / jnp.abs(g))


def _of_moment(name, phi, factor=None):
    moment = Moment(name=name, phi=phi, factor=factor)
    return Statistic(
        name="mine",
        formula=f"mean of {name}",
        needs=(moment,),
        finish=lambda summaries, _: summaries[moment],
        oracle=lambda g: np.mean(np.asarray(phi(g)), axis=0),
    )


def test_a_moment_that_a_user_wrote_is_tried_where_it_is_used():
    with pytest.raises(PegprofError, match="not elementwise"):
        grad_stats(lambda w, x: jnp.mean(x @ w), [_of_moment("unit", lambda g: g / jnp.linalg.norm(g))])
    with pytest.raises(PegprofError, match="the factor"):
        resolve([_of_moment("wrong", jnp.tanh, factor=jnp.tanh)])


@pytest.mark.parametrize("name", ["mean", "square", "sign", "abs", "fourth", "centred", "square_norm"])
def test_a_moment_of_a_user_may_have_the_name_of_a_built_in_one(name):
    stats = [*(s for s in STATISTICS.values()), _of_moment(name, jnp.tanh)]
    w, x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2))), jnp.arange(15.0).reshape(5, 3)
    loss = lambda w, x: jnp.mean(jnp.sin(x @ w))
    for microbatch_size in (None, 2):
        found = grad_stats(loss, stats, microbatch_size=microbatch_size)(w, x)
        assert_stats_agree(found, loop_stats(loss, stats, w, x))


def test_two_moments_of_one_name_are_two():
    one, other = _of_moment("mine", jnp.tanh), dataclasses.replace(_of_moment("mine", jnp.cos), name="other")
    assert len(accumulators_of([one, other])) == 2
    assert len(accumulators_of([one, dataclasses.replace(one, name="again")])) == 1
    w, x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2))), jnp.arange(15.0).reshape(5, 3)
    loss = lambda w, x: jnp.mean(jnp.sin(x @ w))
    assert_stats_agree(grad_stats(loss, [one, other])(w, x), loop_stats(loss, [one, other], w, x))


def test_a_name_of_the_table_is_pegprofs_own():
    with pytest.raises(PegprofError, match="'second_moment' is a statistic of pegprof's own: mean of g²"):
        resolve([Statistic.elementwise(jnp.abs, name="second_moment")])
    assert resolve([STATISTICS["mean"]]) == resolve("mean")


def test_the_names_that_the_command_line_knows_without_jax_are_those_of_the_table():
    assert {name: stat.formula for name, stat in STATISTICS.items()} == FORMULAS
