"""The plan: one row for each parameter, as a person reads it, and as grad_stats follows it."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from pegprof import PegprofError, Statistic, grad_stats, make_plan
from pegprof.engine.facts import FACTS
from pegprof.engine.jaxpr import primitives
from pegprof.engine.plan import SCHEMA, Plan
from pegprof.engine.rules import SCHEDULES
from tests.engine.cases import case, only, truth
from tests.oracles import assert_stats_agree, loop_stats, quick_jit
from tests.programs import PROGRAMS

pytestmark = pytest.mark.smoke


def _model(params, batch):
    tokens, labels = batch
    h = params["embedding"][tokens]
    h = jnp.tanh(jnp.einsum("btd,dhk->bthk", h, params["heads"]))
    h = jnp.einsum("bthk,hkd->btd", h, params["out"]) + params["bias"]
    logits = jnp.mean(h @ params["embedding"].T, axis=1)
    return jnp.mean(jnp.square(logits[:, 0] - labels)) + params["unused"] * 0.5


def _arguments(B=8):
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    params = {
        "embedding": f32(500, 96),
        "heads": f32(96, 4, 24),
        "out": f32(4, 24, 96),
        "bias": f32(96),
        "unused": f32(),
    }
    return params, (jax.ShapeDtypeStruct((B, 10), jnp.int32), f32(B))


GOLDEN = """\
plan for mean, second_moment of 8 examples on cpu, all at once
parameter  shape    contraction                         T  strategy  flops    moved      bytes  why
bias       96       bto->o                              –  direct        0  3.0 KiB    3.0 KiB  the gradient is no larger than what it is made from
embedding  500×96   bti,bto->io + scatter-add bto->io  20  tied      7.7 M  7.5 MiB  187.5 KiB  one product an example, the rows looked up added into it
heads      96×4×24  bti,btop->iop                      10  loop      1.5 M  1.5 MiB   36.0 KiB  one product an example, every statistic from it
out        4×24×96  btij,bto->ijo                      10  loop      1.5 M  1.5 MiB   36.0 KiB  one product an example, every statistic from it
unused     scalar   –                                   –  constant      0      0 B        0 B  no example has a part in this gradient
"""  # noqa: E501


def test_a_plan_prints_one_row_for_each_parameter():
    assert str(make_plan(_model, *_arguments(), backend="cpu")) + "\n" == GOLDEN


def test_the_cost_of_a_loop_is_one_product_an_example_and_the_gradients_of_a_step_held():
    row = make_plan(_model, *_arguments(), backend="cpu").row("heads")
    assert (row.strategy, row.rank) == ("loop", 10)
    assert row.flops == 8 * 2 * 10 * 96 * 96
    assert row.bytes == 4 * 96 * 96


def test_an_outer_product_is_factored_with_one_product_for_each_moment():
    arguments = jnp.ones((3, 4)), jnp.ones((8, 3))
    loss = lambda w, x: jnp.mean(jnp.square(x @ w))
    one, two = (
        make_plan(loss, *arguments, stats=stats).row("params") for stats in (("mean",), ("mean", "second_moment"))
    )
    assert one.strategy == two.strategy == "factored"
    assert one.contraction == "bi,bo->io"
    assert one.rank == 1
    assert two.flops == 2 * one.flops == 2 * 8 * 2 * 3 * 4


def test_the_plan_prices_the_centred_form_of_a_variance_of_outer_products():
    loss, arguments = (lambda w, x: jnp.mean(jnp.square(x @ w))), (jnp.ones((3, 4)), jnp.ones((8, 3)))
    mean, variance = (
        make_plan(loss, *arguments, stats=name, backend="cpu").row("params") for name in ("mean", "variance")
    )
    assert mean.strategy == variance.strategy == "factored"
    assert variance.flops == 3 * mean.flops  # the mean's product, and two of centred factors


def test_what_no_rule_knows_is_named_with_its_equation_and_the_line_of_the_user(monkeypatch):
    assert make_plan(_model, *_arguments()).materialised == ()
    monkeypatch.delitem(FACTS, primitives.dot_general_p)
    plan = make_plan(_model, *_arguments())
    row = plan.row("out")
    assert row.strategy in SCHEDULES
    assert row.materialised
    assert row.why.startswith("no rule covers it: ")
    assert "dot_general" in row.why
    assert "test_plan.py:" in row.source
    assert row.source in row.why
    assert set(plan.materialised) == {"embedding", "heads", "out"}


def test_what_the_body_forms_in_full_by_an_operation_that_no_rule_knows_is_named_as_well():
    def loss(w, x):
        return jnp.mean(jnp.square(jnp.fft.rfft(w) * x[:, :1]).real)  # line + 1

    plan = make_plan(loss, jnp.ones(32), jnp.ones((4, 1)))
    (row,) = plan.rows
    assert plan.materialised == ("params",)
    assert row.why == f"no rule covers it: fft forms it ({row.source})"
    assert row.source.endswith(f"test_plan.py:{loss.__code__.co_firstlineno + 1}")


def test_gradients_that_are_formed_in_full_are_held_in_chunks_of_bounded_size(monkeypatch):
    only(monkeypatch)  # no rule at all
    monkeypatch.delitem(SCHEDULES, "loop")
    monkeypatch.setattr("pegprof.engine.planner.CHUNK_BYTES", 3 * 4 * 96 * 96)
    row = make_plan(_model, *_arguments(64), microbatch_size=64).row("heads")
    assert row.strategy == "batched"
    assert row.chunk == 3
    assert row.bytes == 3 * 4 * 96 * 96


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_chunks_that_do_not_divide_the_batch_change_nothing(chunk):
    loss, params, batch = case("tied_embedding", 5)
    plan = make_plan(loss, params, batch, stats=("mean", "variance", "norm"))
    formed = {row.parameter for row in plan.rows if row.strategy != "direct"}
    assert "table" in formed
    given = _with_strategy(plan, "batched", formed, chunk=chunk)
    actual = quick_jit(grad_stats(loss, plan.stats, plan=given))(params, batch)
    assert_stats_agree(actual, truth("tied_embedding", 5, plan.stats))


def test_what_a_rule_covers_is_not_called_materialised_though_its_tail_has_an_unknown_operation():
    loss, params, batch = case("a_lookup_with_dropout_made_anew", 5)
    row = make_plan(loss, params, batch, keep_batch_dim=False, backend="cpu").row("E")
    assert row.strategy == "segment"
    assert not row.materialised
    assert row.source == ""


def test_a_microbatch_size_shows_in_the_plan():
    plan = make_plan(_model, *_arguments(), microbatch_size=3)
    assert plan.microbatch_size == 3
    assert "3 at a time" in str(plan)


def test_a_program_that_cannot_be_batched_runs_one_at_a_time_and_the_plan_says_why():
    (name,) = [p.name for p in PROGRAMS.values() if "no_vmap" in p.tags][:1]
    loss, params, batch = case(name, 5)
    plan = make_plan(loss, params, batch, keep_batch_dim=PROGRAMS[name].keep_batch_dim)
    assert plan.microbatch_size == 1
    assert "one at a time" in str(plan)
    assert "callback" in plan.one_at_a_time


@pytest.mark.usefixtures("x64")
def test_parameters_whose_paths_read_the_same_have_a_row_each():
    params = {"a": {"b": jnp.ones((3, 4))}, "a/b": jnp.ones(3), "a/b (2)": jnp.ones(())}
    x = jnp.sin(jnp.arange(30.0)).reshape(5, 2, 3)

    def loss(p, x):
        return jnp.mean(jnp.square(jnp.tanh(x * p["a/b"]) @ p["a"]["b"])) * p["a/b (2)"]

    plan = make_plan(loss, params, x, stats=("mean", "variance"))
    assert [row.parameter for row in plan.rows] == ["a/b", "a/b (2)", "a/b (2) (2)"]
    assert [row.shape for row in plan.rows] == [(3, 4), (3,), ()]
    actual = grad_stats(loss, plan.stats, plan=plan)(params, x)
    assert_stats_agree(actual, loop_stats(loss, plan.stats, params, x))


def test_a_plan_for_other_parameters_is_refused():
    plan = make_plan(lambda w, x: jnp.mean(x @ w), jnp.ones(3), jnp.ones((4, 3)))
    with pytest.raises(PegprofError, match="no parameter W"):
        grad_stats(lambda p, x: jnp.mean(x @ p["W"]), plan=plan)({"W": jnp.ones(3)}, jnp.ones((4, 3)))


def _with_strategy(plan, strategy, parameters=None, **changed):
    """The plan with another strategy for some parameters, or for all."""

    def changed_row(row):
        wanted = parameters is None or row.parameter in parameters
        return dataclasses.replace(row, strategy=strategy, **changed) if wanted else row

    return dataclasses.replace(plan, rows=tuple(map(changed_row, plan.rows)))


def _squares(w, x):
    return jnp.mean(jnp.square(x @ w))


def test_a_plan_for_other_statistics_is_refused():
    arguments = jnp.ones((3, 4)), jnp.ones((8, 2, 3))
    plan = make_plan(_squares, *arguments, stats="norm", backend="tpu")
    assert plan.row("params").strategy == "fused"
    with pytest.raises(PegprofError, match="for norm, but asked for is mean") as raised:
        grad_stats(_squares, "mean", plan=plan)(*arguments)
    assert "make_plan" in raised.value.hint


def test_a_plan_for_the_same_statistics_in_another_order_is_followed():
    arguments = jnp.ones((3, 4)), jnp.ones((8, 3))
    plan = make_plan(_squares, *arguments, stats=("mean", "variance"))
    assert sorted(grad_stats(_squares, ("variance", "mean"), plan=plan)(*arguments)) == ["mean", "variance"]


def test_a_plan_for_parameters_of_another_shape_is_refused():
    plan = make_plan(_squares, jnp.ones((3, 5)), jnp.ones((8, 3)))
    with pytest.raises(PegprofError, match=r"params of shape \(3, 5\), but here it is \(3, 4\)"):
        grad_stats(_squares, plan=plan)(jnp.ones((3, 4)), jnp.ones((8, 3)))


def test_a_plan_for_examples_of_one_position_is_refused_for_examples_of_several():
    w, several = jnp.ones((3, 4)), jnp.ones((8, 2, 3))
    plan = make_plan(_squares, w, several[:, 0])
    assert plan.row("params").strategy == "factored"
    with pytest.raises(PegprofError, match="factored does not fit the gradient of params"):
        grad_stats(_squares, plan=plan)(w, several)


def test_a_plan_for_a_statistic_that_factors_is_refused_for_one_of_the_same_name_that_does_not():
    arguments = jnp.ones((3, 4)), jnp.ones((8, 3))
    plan = make_plan(_squares, *arguments, stats=Statistic.elementwise(jnp.abs, factor=jnp.abs, name="mine"))
    with pytest.raises(PegprofError, match=r"does not fit .* the statistics mine"):
        grad_stats(_squares, Statistic.elementwise(jnp.tanh, name="mine"), plan=plan)(*arguments)


@pytest.mark.parametrize("strategy", ["staged", "constant", "gram"])
def test_a_strategy_that_does_not_fit_is_refused_also_where_it_was_put_by_hand(strategy):
    loss, params, batch = case("tied_embedding", 5)
    plan = make_plan(loss, params, batch, stats=("mean", "variance"), backend="tpu")
    with pytest.raises(PegprofError, match=f"strategy {strategy} does not fit"):
        grad_stats(loss, plan.stats, plan=_with_strategy(plan, strategy))(params, batch)


def test_a_program_that_runs_one_example_at_a_time_is_not_told_to_run_several():
    loss, params, batch = case("callback_that_cannot_be_batched", 5)
    plan = dataclasses.replace(make_plan(loss, params, batch), microbatch_size=2)
    with pytest.raises(PegprofError, match="2 examples at a time, but here it is one"):
        grad_stats(loss, plan=plan)(params, batch)


def test_a_plan_with_an_unknown_strategy_is_refused():
    arguments = jnp.ones((3, 4)), jnp.ones((8, 3))
    loss = lambda w, x: jnp.mean(jnp.square(x @ w))
    plan = make_plan(loss, *arguments)
    plan = dataclasses.replace(plan, rows=(dataclasses.replace(plan.rows[0], strategy="factord"),))
    with pytest.raises(PegprofError, match="factored"):
        grad_stats(loss, plan=plan)(*arguments)


def test_a_plan_is_data_and_reads_back_with_every_number_it_was_made_with():
    plan = make_plan(_model, *_arguments(), backend="cpu")
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert str(again) == str(plan)
    assert plan.rates["bandwidth"] > 0
    assert {schedule.microbatch_size for schedule in plan.schedules} == {8, 4, 2, 1}
    assert all(row.candidates[0].strategy == row.strategy for row in plan.rows if row.strategy != "constant")


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"schema": 0}', f'{{"schema": {SCHEMA}, "rows": 3}}', "plan"])
def test_what_is_not_a_plan_is_refused_in_words(text):
    with pytest.raises(PegprofError, match="plan"):
        Plan.from_json(text)


def test_on_a_cpu_the_leanest_of_schedules_that_are_as_fast_is_taken_if_memory_is_touched_anew_in_every_run():
    plan = _plan_two_products(T=512, D=2048)
    most, (chosen,) = plan.schedules[0], _chosen(plan)
    assert chosen.seconds == pytest.approx(most.seconds, rel=0.02)
    assert chosen.bytes < most.bytes / 10


def test_on_a_cpu_a_program_of_a_few_mebibytes_finds_its_memory_warm_and_takes_the_fewest_steps():
    assert _plan_two_products(T=64, D=128).microbatch_size == 64


def _chosen(plan):
    return [schedule for schedule in plan.schedules if schedule.microbatch_size == plan.microbatch_size]


def _plan_two_products(*, T, D):
    w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((D, D), (64, T, D)))
    return make_plan(lambda w, x: jnp.mean(jnp.square(jnp.tanh(x @ w) @ w)), w, x, backend="cpu")


@pytest.mark.parametrize("backend", ["tpu", "gpu"])
def test_off_the_cpu_a_budget_that_all_fit_into_changes_nothing(backend):
    """There fewer at a time are for want of memory only, whatever the rates say of speed."""
    plan = make_plan(_model, *_arguments(64), backend=backend, memory_budget=2**50)
    assert plan.microbatch_size == 64


def test_a_memory_budget_makes_the_planner_run_fewer_at_a_time():
    free = make_plan(_model, *_arguments(64), backend="tpu")
    assert free.microbatch_size == 64
    (all_at_once,) = free.schedules
    tight = make_plan(_model, *_arguments(64), backend="tpu", memory_budget=int(all_at_once.bytes / 3))
    assert tight.microbatch_size < 64
    (chosen,) = _chosen(tight)
    assert chosen.bytes <= all_at_once.bytes / 3


def test_a_depthwise_convolution_has_its_products_counted():
    def loss(kernel, x):
        numbers = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=8)
        return jnp.mean(jnp.square(y))

    row = make_plan(loss, jnp.ones((3, 3, 1, 8)), jnp.ones((4, 16, 16, 8)), backend="cpu").row("params")
    assert row.strategy == "depthwise"
    assert row.flops == 4 * 2 * 9 * 16 * 16 * 8


def test_the_cheapest_candidate_by_the_rates_of_the_backend_is_chosen():
    for backend in ("cpu", "gpu", "tpu"):
        for row in make_plan(_model, *_arguments(), backend=backend).rows:
            seconds = [candidate.seconds for candidate in row.candidates]
            assert seconds == sorted(seconds)
