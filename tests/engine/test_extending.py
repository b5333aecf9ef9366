"""The engine is extended from outside: a primitive, a statistic, an accumulator and a rule, each in one place.

Every test adds one thing, in this file, and holds its values against the loop on the programs of ``tests/programs``.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

import pegprof
from pegprof import Statistic, grad_stats, make_plan
from pegprof.engine import facts
from pegprof.engine.accumulators import Accumulator, Moment, PerExample
from pegprof.engine.costs import Cost
from pegprof.engine.rules import RULES, Rule
from pegprof.engine.structures import Outer
from tests.engine.cases import case, tolerance
from tests.oracles import Truth, assert_stats_agree, loop_stats, quick_jit
from tests.programs import PROGRAMS

pytestmark = pytest.mark.usefixtures("x64")

B = 5
NAMES = list(PROGRAMS)
PAIR = ("mean", "second_moment")


def _check(name: str, loss: Any, stats: Any, **options: Any) -> Truth:
    program = PROGRAMS[name]
    _, params, batch = case(name, B)
    expected = loop_stats(loss, stats, params, batch, keep_batch_dim=program.keep_batch_dim)
    found = quick_jit(grad_stats(loss, stats, keep_batch_dim=program.keep_batch_dim, **options))(params, batch)
    assert_stats_agree(found, expected, tolerance(program))
    return expected


# ---- a primitive ----------------------------------------------------------------------------------------------------

halve_p = Primitive("halve")  # linear and elementwise, and nothing that the engine has heard of
halve_p.def_impl(lambda x: x / 2)
halve_p.def_abstract_eval(lambda x: x)
ad.deflinear(halve_p, lambda cotangent: [halve_p.bind(cotangent)])
batching.defvectorized(halve_p)
mlir.register_lowering(halve_p, mlir.lower_fun(lambda x: x / 2, multiple_results=False))


def _with_halved_parameters(name: str) -> Any:
    """A loss in whose gradient the primitive follows every contraction."""
    loss, _, _ = case(name, B)
    return lambda params, batch: loss(jax.tree.map(halve_p.bind, params), batch)


@pytest.fixture
def halve_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "FACTS", dict(facts.FACTS))
    facts.def_elementwise(halve_p, linear=facts.jointly)


@pytest.mark.parametrize("name", NAMES[::24])
def test_a_primitive_that_nobody_registered_is_right(name):
    _check(name, _with_halved_parameters(name), PAIR)


@pytest.mark.usefixtures("halve_is_known")
@pytest.mark.parametrize("name", NAMES[::24])
def test_a_primitive_that_one_line_registers_is_right_too(name):
    _check(name, _with_halved_parameters(name), PAIR)


def test_what_nobody_registered_is_said_in_the_plan_and_one_line_changes_that(request):
    loss, (_, params, batch) = _with_halved_parameters("mlp_regression"), case("mlp_regression", B)
    unknown = make_plan(loss, params, batch)
    assert unknown.materialised
    assert "halve forms it" in unknown.row(unknown.materialised[0]).why
    request.getfixturevalue("halve_is_known")
    assert not make_plan(loss, params, batch).materialised


# ---- a statistic ----------------------------------------------------------------------------------------------------

ROOT = Moment(name="root", phi=lambda g: jnp.sqrt(jnp.abs(g)), factor=lambda x: jnp.sqrt(jnp.abs(x)))
ROOT_MEAN_SQUARE = Statistic(
    name="mean_root_squared",
    formula="(mean of √|g|)²",
    needs=(ROOT,),
    finish=lambda summaries, B: jnp.square(summaries[ROOT]),
    oracle=lambda g: np.mean(np.sqrt(np.abs(g)), axis=0) ** 2,
)


@pytest.mark.parametrize("name", NAMES[1::24])
def test_a_statistic_is_one_record(name):
    _check(name, case(name, B)[0], [ROOT_MEAN_SQUARE, "mean"])


# ---- an accumulator -------------------------------------------------------------------------------------------------


class Largest(Accumulator):
    """The largest |g| over the examples, entry by entry."""

    entrywise = True

    def init(self, g: Any) -> jax.Array:
        return jnp.zeros(g.shape, g.dtype)

    def add(self, state: jax.Array, g: jax.Array, n: Any) -> jax.Array:
        return jnp.maximum(state, jnp.abs(g))

    def merge(self, a: jax.Array, n: Any, b: jax.Array, m: Any) -> jax.Array:
        return jnp.maximum(a, b)


class Smallest(Accumulator):
    """The smallest g over the examples: zeros are no start for a merge."""

    entrywise = True

    def init(self, g: Any) -> jax.Array:
        return jnp.full(g.shape, jnp.inf, g.dtype)

    def add(self, state: jax.Array, g: jax.Array, n: Any) -> jax.Array:
        return jnp.minimum(state, g)

    def merge(self, a: jax.Array, n: Any, b: jax.Array, m: Any) -> jax.Array:
        return jnp.minimum(a, b)


class MeanDirection(Accumulator):
    """The mean of g / ‖g‖: no function of single entries, so it needs a parameter's whole gradient."""

    def init(self, g: Any) -> jax.Array:
        return jnp.zeros(g.shape, g.dtype)

    def add(self, state: jax.Array, g: jax.Array, n: Any) -> jax.Array:
        return state + g / jnp.maximum(jnp.sqrt(jnp.sum(jnp.square(g))), 1e-30)

    def finish(self, state: jax.Array, n: Any) -> jax.Array:
        return state / n

    def merge(self, a: jax.Array, n: Any, b: jax.Array, m: Any) -> jax.Array:
        return (a * n + b * m) / (n + m)


class Projection(PerExample):
    """The product of each example's gradient with a fixed vector: the order of the entries matters."""

    def of_one(self, g: jax.Array) -> jax.Array:
        return jnp.ravel(g) @ jnp.sin(jnp.arange(g.size, dtype=g.dtype))


def _unit_mean(g: np.ndarray) -> np.ndarray:
    norms = np.sqrt(np.sum(g**2, axis=tuple(range(1, g.ndim)), keepdims=True))
    return np.mean(g / np.maximum(norms, 1e-30), axis=0)


def _statistic(accumulator: Accumulator, name: str, oracle: Any, **more: Any) -> Statistic:
    finish = lambda summaries, B: summaries[accumulator]
    return Statistic(name=name, formula=name, needs=(accumulator,), finish=finish, oracle=oracle, **more)


NEW_KINDS = [
    _statistic(Largest(), "largest", lambda g: np.max(np.abs(g), axis=0)),
    _statistic(MeanDirection(), "direction", _unit_mean),
    _statistic(Smallest(), "smallest", lambda g: np.min(g, axis=0)),
    _statistic(
        Projection(),
        "projection",
        lambda g: g.reshape(len(g), -1) @ np.sin(np.arange(g[0].size)),
        scope="parameter",
    ),
]


@pytest.mark.parametrize("name", NAMES[2::8])
def test_accumulators_of_new_kinds_work_at_every_site(name):
    _check(name, case(name, B)[0], NEW_KINDS)


@pytest.mark.parametrize("name", [*NAMES[2::30], "scanned_layers_rematerialised", "rnn_by_scan"])
def test_accumulators_of_new_kinds_merge_over_microbatches(name):
    _check(name, case(name, B)[0], [*NEW_KINDS, "variance"], microbatch_size=2)


@pytest.mark.parametrize("name", NAMES[4::30])
def test_accumulators_of_new_kinds_work_beside_the_plans_for_accelerators(name):
    _check(name, case(name, B)[0], [*NEW_KINDS, "mean"], backend="tpu")


@pytest.mark.parametrize("name", ["mlp_regression", "tied_embedding", "scanned_layers_rematerialised"])
def test_what_is_kept_of_two_batches_merges_to_the_statistics_of_both(name):
    loss, params, batch = case(name, B)
    stats = [*NEW_KINDS, "mean", "variance", "norm"]
    first, second = jax.tree.map(lambda x: x[:2], batch), jax.tree.map(lambda x: x[2:], batch)
    kept = quick_jit(pegprof.accumulate_stats(loss, stats))
    merged = kept(params, first).merge(kept(params, second))
    assert int(merged.count) == B
    assert_stats_agree(quick_jit(lambda kept: kept.finish())(merged), loop_stats(loss, stats, params, batch))


def test_a_batch_too_small_for_a_statistic_may_be_merged_with_others():
    kept = pegprof.accumulate_stats(lambda w, x: jnp.mean(x @ w), "variance")
    total = kept(jnp.zeros(2), jnp.ones((1, 2)))
    for i in range(1, 4):
        total = total.merge(kept(jnp.zeros(2), jnp.full((1, 2), float(2 * i))))
    np.testing.assert_allclose(total.finish()["variance"], np.var([1, 2, 4, 6], ddof=1))


def test_what_is_kept_can_be_carried_through_a_scan_over_steps():
    loss = lambda w, x: jnp.mean(jnp.tanh(x @ w))
    w, x = jnp.ones((3, 4)), jnp.sin(jnp.arange(90.0)).reshape(3, 2, 5, 3)  # three steps of two examples
    kept = pegprof.accumulate_stats(loss, ("mean", "variance"))
    total, _ = jax.lax.scan(lambda total, x: (total.merge(kept(w, x)), None), kept(w, x[0]), x[1:])
    assert_stats_agree(total.finish(), loop_stats(loss, ("mean", "variance"), w, x.reshape(6, 5, 3)))


# ---- a rule ---------------------------------------------------------------------------------------------------------


def _largest_of_products(site: Any, accumulators: Any, frontier: Any, chunk: int) -> Any:
    """The largest |s rᵀ| of rank-one gradients, from a batched product."""
    (structure,) = site.structures
    gradients = frontier.map(lambda *values: structure.full(*values))
    return [[jnp.max(jnp.abs(gradients), axis=0) for _ in accumulators]]


LARGEST = NEW_KINDS[0]
LARGEST_RULE = Rule(
    name="largest_of_products",
    why="a test",
    structure=Outer,
    accumulators=(Largest,),
    fits=lambda site, accumulators: len(site.structures) == 1,
    run=_largest_of_products,
    cost=lambda site, accumulators, B, chunk: Cost(),
)


@pytest.mark.parametrize("name", NAMES[3::16])
def test_a_rule_is_one_record_and_changes_no_value(name, monkeypatch):
    monkeypatch.setitem(RULES, LARGEST_RULE.name, LARGEST_RULE)
    _check(name, case(name, B)[0], [LARGEST])


def test_a_rule_is_used_where_it_is_the_cheapest(monkeypatch):
    loss, params, batch = case("mlp_regression", B)
    assert LARGEST_RULE.name not in {row.strategy for row in make_plan(loss, params, batch, stats=LARGEST).rows}
    monkeypatch.setitem(RULES, LARGEST_RULE.name, LARGEST_RULE)
    plan = make_plan(loss, params, batch, stats=LARGEST)
    assert LARGEST_RULE.name in {row.strategy for row in plan.rows}
    assert {row.structure for row in plan.rows if row.strategy == LARGEST_RULE.name} == {"outer"}


def test_a_statistic_of_the_model_needs_an_accumulator_that_adds_up():
    stat = dataclasses.replace(NEW_KINDS[-1], scope="model")
    with pytest.raises(pegprof.PegprofError, match="does not add up over parameters"):
        grad_stats(lambda w, x: jnp.mean(x @ w), stat)
