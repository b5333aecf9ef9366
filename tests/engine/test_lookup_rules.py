"""segment, tied and staged, each alone, against the oracle: every way in which rows of a table are looked up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pegprof import grad_stats, make_plan
from pegprof.engine.rules import SCHEDULES
from pegprof.engine.statistics import Statistic
from tests.engine.cases import ALL_STATISTICS, case, defined_for, only
from tests.oracles import assert_stats_agree, loop_stats, quick_jit
from tests.programs.registry import score

pytestmark = pytest.mark.usefixtures("x64", "no_rank_promotion")

COSINE = Statistic.elementwise(jnp.cos, name="cosine")
LOG = Statistic.elementwise(lambda g: jnp.log(jnp.abs(g)), name="log")
FEW = ("mean", "second_moment", "variance", "norm_by_param")
V, D, T = 11, 3, 6
FOLD = "the default fold"  # by any schedule


def check(strategy, parameter, loss, params, batch, *, stats=None, rtol=1e-8, **options):
    B = jax.tree.leaves(batch)[0].shape[0]
    stats = defined_for(B) if stats is None else stats
    row = make_plan(loss, params, batch, stats=stats, **options).row(parameter)
    assert (FOLD if row.strategy in SCHEDULES else row.strategy) == strategy, f"{row.strategy}: {row.why}"
    with np.errstate(divide="ignore"):
        truth = loop_stats(loss, stats, params, batch)
    assert_stats_agree(quick_jit(grad_stats(loss, stats, **options))(params, batch), truth, rtol)


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng((seed, *shape)).normal(size=shape))


def tokens(B, *shape, low=0, high=V, seed=1):
    return jnp.asarray(np.random.default_rng(seed).integers(low, high, (B, *shape)), jnp.int32)


def pooled(rows):
    return score(jnp.sum(jnp.tanh(jnp.cumsum(rows, axis=1)), axis=1))


def lookup(table, ids):
    return pooled(table[ids])


@pytest.mark.parametrize("B", [1, 5])
def test_a_lookup_is_exact_for_every_statistic(monkeypatch, B):
    only(monkeypatch, "segment")
    check("segment", "params", lookup, draw(V, D), tokens(B, T))


def test_rows_that_an_example_looks_up_again_are_added_up_before_phi(monkeypatch):
    only(monkeypatch, "segment")
    check("segment", "params", lookup, draw(V, D), tokens(4, T, high=2))
    check("segment", "params", lookup, draw(V, D), jnp.full((3, T), 7, jnp.int32))


@pytest.mark.parametrize("mode", ["fill", "clip", "promise_in_bounds", "drop"])
@pytest.mark.parametrize("wrap", [True, False])
def test_ids_out_of_range_are_dropped_or_clipped_as_the_lookup_says(monkeypatch, mode, wrap):
    only(monkeypatch, "segment")

    def loss(table, ids):
        rows = table.at[ids].get(mode=mode, fill_value=0.0, wrap_negative_indices=wrap)
        return pooled(rows)

    check("segment", "params", loss, draw(V, D), tokens(5, T, low=-2 * V, high=2 * V), stats=FEW)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int64, jnp.uint32])
def test_ids_may_be_any_whole_numbers(monkeypatch, dtype):
    only(monkeypatch, "segment")
    ids = tokens(4, T, high=2 * V).astype(dtype)
    loss = lambda p, i: pooled(p.at[i].get(mode="fill", fill_value=0.0))
    check("segment", "params", loss, draw(V, D), ids, stats=FEW)


SHAPES = {
    "one token": (lambda p, i: score(jnp.sin(p[i])), (V, D), ()),
    "numbers": (lambda p, i: score(jnp.sin(p[i])), (4 * V,), (T,)),
    "matrices": (lambda p, i: pooled(p[i]), (V, 2, D), (T,)),
    "a grid of tokens": (lambda p, i: score(jnp.sin(p[i])), (V, D), (2, 3)),
    "columns": (lambda p, i: score(jnp.sin(p[:, i])), (D, 25), (T,)),
    "transposed": (lambda p, i: pooled(p.T[i]), (D, V), (T,)),
    "two indices": (lambda p, i: score(jnp.sin(p[i[:, :3], i[:, 3:]])), (V, V, D), (T,)),
    "two indices, the second first": (lambda p, i: score(jnp.sin(p[i[:, :3], :, i[:, 3:]])), (V, D, V), (T,)),
    "reshaped": (lambda p, i: pooled(p.reshape(V, D)[i]), (V * D,), (T,)),
    "twice": (lambda p, i: pooled(p[i[:, :3]] * jnp.cos(p[i[:, 3:]])), (V, D), (T,)),
    "the same rows for all": (lambda p, i: score(p[jnp.array([1, 3, 1])][None, :, :] * i[:, None, None]), (V, D), ()),
    "summed": (lambda p, i: score(jnp.sum(p[i], axis=1)), (V, D), (T,)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_tables_and_ids_may_have_any_shape(monkeypatch, name):
    only(monkeypatch, "segment")
    loss, table, ids = SHAPES[name]
    check("segment", "params", loss, draw(*table), tokens(4, *ids), stats=FEW)


def test_tables_that_share_what_is_added_to_them_are_right_together(monkeypatch):
    only(monkeypatch, "segment")

    def loss(p, ids):
        return score(jnp.tanh(jnp.mean(p["small"][ids % 5] + p["large"][ids] + p["places"][None], axis=1)))

    params = {"small": draw(5, D), "large": draw(V, D), "places": draw(T, D)}
    assert {row.strategy for row in make_plan(loss, params, tokens(4, T)).rows} == {"segment", "direct"}
    check("segment", "large", loss, params, tokens(4, T), stats=FEW)


@pytest.mark.parametrize("high", [1, 2, V])
def test_a_function_that_is_not_zero_at_zero_counts_the_examples_that_do_not_touch_a_row(monkeypatch, high):
    only(monkeypatch, "segment")
    check("segment", "params", lookup, draw(V, D), tokens(5, T, high=high), stats=("mean", COSINE, "variance"))


def test_a_function_that_is_infinite_at_zero_is_so_only_where_an_example_does_not_touch_a_row(monkeypatch):
    only(monkeypatch, "segment")
    table, ids = draw(V, D), tokens(4, T).at[:, 0].set(2)
    found = quick_jit(grad_stats(lookup, LOG))(table, ids)["log"]
    with np.errstate(divide="ignore"):
        truth = loop_stats(lookup, LOG, table, ids)["log"]
    np.testing.assert_allclose(found, truth, rtol=1e-8)
    assert np.all(np.isfinite(truth[2]))
    assert not np.any(np.isnan(truth))


def test_a_function_may_depend_on_what_is_being_traced(monkeypatch):
    only(monkeypatch, "segment")
    table, ids = draw(V, D), tokens(3, T)

    def of(shift, table, ids):
        return grad_stats(lookup, Statistic.elementwise(lambda g: g + shift, name="shifted"))(table, ids)["shifted"]

    mean = quick_jit(grad_stats(lookup, "mean"))(table, ids)["mean"]
    np.testing.assert_allclose(quick_jit(of)(3.0, table, ids), mean + 3, rtol=1e-12)


def test_a_variance_that_is_small_beside_the_mean_is_not_lost(monkeypatch):
    only(monkeypatch, "segment")
    loss = lambda table, x: jnp.mean(jnp.sum(table[jnp.zeros((1, 2), int)] * x[:, None, None], axis=(1, 2)))
    x = 1.0 + 1e-9 * draw(6)
    found = quick_jit(grad_stats(loss, "variance"))(draw(V, D), x)["variance"]
    np.testing.assert_allclose(found[0], 4 * np.var(np.asarray(x), ddof=1), rtol=1e-5)
    assert not np.any(found[1:])


@pytest.mark.parametrize("microbatch_size", [2, 7])
def test_a_batch_may_come_in_chunks_that_do_not_divide_it(monkeypatch, microbatch_size):
    only(monkeypatch, "segment")
    check("segment", "params", lookup, draw(V, D), tokens(7, T), microbatch_size=microbatch_size, stats=FEW)


def test_bfloat16_rows_are_added_up_in_float32(monkeypatch):
    only(monkeypatch, "segment")
    table, ids = draw(500, D).astype(jnp.bfloat16), jnp.zeros((2, 300), jnp.int32)
    loss = lambda p, i: jnp.sum(p[i].astype(jnp.float32))
    found = quick_jit(grad_stats(loss, ("mean", "second_moment")))(table, ids)
    assert found["mean"].dtype == jnp.float32
    assert np.all(found["mean"][0] == 300)  # bfloat16 would stay at 256
    assert np.all(found["second_moment"][0] == 300**2)


def test_a_sum_with_something_else_is_no_lookup(monkeypatch):
    only(monkeypatch, "segment")
    loss = lambda p, i: lookup(p, i) + jnp.sum(jnp.square(p))
    assert make_plan(loss, draw(V, D), tokens(3, T)).row("params").strategy != "segment"


def _tied(p, ids, table, unembed):
    logits = jnp.tanh(table[ids[:, :-1]] @ p["W"]) @ unembed
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, 1:, None], axis=-1)
    return -jnp.mean(picked)


TIED = {
    "as it stands": (lambda p, i: _tied(p, i, p["E"], p["E"].T), (V, D)),
    "transposed": (lambda p, i: _tied(p, i, p["E"].T, p["E"]), (D, V)),
    "reshaped": (lambda p, i: _tied(p, i, p["E"].reshape(V, D), p["E"].reshape(V, D).T), (V * D,)),
    "scaled": (lambda p, i: _tied(p, i, p["E"] * 2.0, p["E"].T), (V, D)),
    "looked up twice": (lambda p, i: _tied(p, i, p["E"], p["E"].T) + pooled(p["E"][i[:, ::-1]]), (V, D)),
    "multiplied twice": (lambda p, i: _tied(p, i, p["E"], p["E"].T) + score(p["E"][i] @ p["E"].T), (V, D)),
}


@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize("name", TIED)
def test_a_tied_table_is_exact_for_every_statistic(monkeypatch, name, B):
    only(monkeypatch, "tied")
    loss, shape = TIED[name]
    params = {"E": draw(*shape), "W": draw(D, D)}
    strategy = FOLD if name == "scaled" else "tied"  # a scale does not only move entries
    check(strategy, "E", loss, params, tokens(B, T), stats=(*defined_for(B), COSINE))


def test_a_tied_table_alone_needs_no_other_rule(monkeypatch):
    only(monkeypatch, "tied")
    loss, shape = TIED["transposed"]
    check("tied", "E", loss, {"E": draw(*shape), "W": draw(D, D)}, tokens(5, T), microbatch_size=2)


def test_a_tied_table_in_bfloat16_has_its_products_in_float32(monkeypatch):
    only(monkeypatch, "tied")
    loss, shape = TIED["as it stands"]
    params = {"E": draw(*shape).astype(jnp.bfloat16), "W": draw(D, D).astype(jnp.bfloat16)}
    jaxpr = jax.make_jaxpr(grad_stats(loss))(params, tokens(3, T))
    assert "bf16[11,3] = dot_general" not in str(jaxpr)
    check("tied", "E", loss, params, tokens(3, T), stats=("mean", "second_moment", "variance"), rtol=0.1)


def test_the_planner_prefers_them_where_they_win():
    ids = jax.ShapeDtypeStruct((16, 64), jnp.int32)
    table = jax.ShapeDtypeStruct((16000, 128), jnp.float32)
    for backend in ("cpu", "gpu", "tpu"):
        plan = make_plan(lookup, table, ids, stats=ALL_STATISTICS, backend=backend)
        assert plan.row("params").strategy == "segment"
    loss, _ = TIED["as it stands"]
    params = {"E": table, "W": jax.ShapeDtypeStruct((128, 128), jnp.float32)}
    assert make_plan(loss, params, ids, backend="cpu").row("E").strategy == "tied"


def test_a_lookup_holds_no_gradient_of_an_example():
    ids = jax.ShapeDtypeStruct((16, 8), jnp.int32)
    table = jax.ShapeDtypeStruct((3000, 16), jnp.float32)
    jaxpr = str(jax.make_jaxpr(grad_stats(lookup, ("mean", "second_moment", "variance", "norm")))(table, ids))
    assert "[16,3000,16]" not in jaxpr


# staged: a tied table in two places.


LINEAR_STATS = ("mean", "second_moment", "sign_mean", "abs_mean", "fourth_moment", "norm", "norm_by_param")


def tied_model(params, batch):
    """A table that is looked up and, transposed, multiplied with; a layer in between."""
    ids, labels = batch
    h = jnp.tanh(params["table"][ids] @ params["layer"])
    logits = h @ params["table"].T
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0])


def tied_case(B=5, *, high=V):
    params = {"table": draw(V, D), "layer": draw(D, D)}
    return params, (tokens(B, T - 3, high=high), tokens(B, T - 3, seed=2))


@pytest.mark.parametrize("keep_batch_dim", [True, False])
@pytest.mark.parametrize("B", [1, 2, 5])
def test_rows_added_late_are_exact_for_all_that_is_a_mean_over_examples(B, keep_batch_dim):
    stats = (*LINEAR_STATS, COSINE)
    check("staged", "table", tied_model, *tied_case(B), stats=stats, backend="tpu", keep_batch_dim=keep_batch_dim)


def test_a_row_that_is_looked_up_twice_is_put_right_once():
    check("staged", "table", tied_model, *tied_case(high=2), stats=LINEAR_STATS, backend="tpu")


def test_rows_added_late_are_exact_in_chunks_of_examples():
    check("staged", "table", tied_model, *tied_case(7), stats=LINEAR_STATS, backend="tpu", microbatch_size=3)


@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_rows_added_late_count_alone_where_a_function_of_the_product_is_infinite(microbatch_size):
    def loss(table, ids):  # a unit that is dead in the product has a gradient where it is looked up
        h = jax.nn.relu(table[ids] - jnp.array([9.0, 0, 0])[None, None, :])
        return jnp.mean(jax.nn.log_softmax(h @ table.T)[..., 0] + jnp.sum(jnp.sin(table[ids]), axis=-1))

    table, ids = draw(V, D), tokens(5, T - 3, high=4).at[:, 0].set(2)
    options = {"backend": "tpu", "microbatch_size": microbatch_size}
    assert make_plan(loss, table, ids, stats=LOG, **options).row("params").strategy == "staged"
    with np.errstate(divide="ignore"):
        truth = loop_stats(loss, LOG, table, ids)["log"]
    np.testing.assert_allclose(quick_jit(grad_stats(loss, LOG, **options))(table, ids)["log"], truth, rtol=1e-8)
    assert np.all(np.isfinite(truth[2]))
    assert np.any(np.isneginf(truth))


def test_a_variance_is_not_put_right_late(monkeypatch):
    row = make_plan(tied_model, *tied_case(), stats=("variance",), backend="tpu").row("table")
    assert row.strategy != "staged"


def test_the_logits_are_not_held_through_the_backward_pass():
    """Before the last layer's own gradient is formed, the product is reduced, and nothing of V×T is used any more."""
    V_LARGE, B = 97, 4
    params = {"table": draw(V_LARGE, D), "layer": draw(D, D)}
    batch = (tokens(B, T), tokens(B, T, seed=2))
    jaxpr = jax.make_jaxpr(grad_stats(tied_model, backend="tpu"))(params, batch).jaxpr
    last_use = max(
        i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if getattr(v.aval, "shape", ()) == (B, T, V_LARGE)
    )
    rows_added = max(i for i, eqn in enumerate(jaxpr.eqns) if "scatter-add" in str(eqn.primitive))
    layer_formed = [i for i, eqn in enumerate(jaxpr.eqns) if any(v.aval.shape == (D, D) for v in eqn.outvars)]
    assert last_use < min(layer_formed) < rows_added


def test_a_product_that_is_the_same_for_all_examples_is_added_up_as_often_as_there_are_examples():
    loss, params, x = case("positions_looked_up_and_penalised_in_a_layer_of_one", 3)
    check("staged", "table", loss, params, x, stats=("mean", "second_moment"), backend="tpu")
