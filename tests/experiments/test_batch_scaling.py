"""The experiment on batch sizes: rates are tuned before rules are tried, and each rule is judged by its curves."""

import pytest

from pegprof.experiments import batch_scaling
from pegprof.experiments.batch_scaling import FULL, OPTIMIZERS, REFERENCE, RULES, judge, make_runs, rate_by

BATCHES = FULL["batches"]


def row(optimizer, batch, rate, seed=0, **values):
    return {"optimizer": optimizer, "batch": batch, "rate": rate, "seed": seed, **values}


def sweep(best=4e-3):
    """Final losses of a whole sweep, the lowest at one rate."""
    return [
        row(optimizer, REFERENCE, rate, held_out_loss=abs(rate - best))
        for optimizer in OPTIMIZERS
        for rate in FULL["rates"]
    ]


def test_first_of_all_rates_are_tuned_at_the_reference():
    runs = make_runs(False, {})
    assert {run.settings["batch"] for run in runs} == {REFERENCE}
    assert len(runs) == len(OPTIMIZERS) * len(FULL["rates"])


def test_then_both_rules_start_from_the_tuned_rate_and_from_a_quarter_of_it():
    runs = make_runs(False, {"final": sweep(best=4e-3)})
    assert len({run.name for run in runs}) == len(runs)
    of_512 = {run.settings["rate"] for run in runs if run.settings["batch"] == 512}
    assert of_512 == {rate_by(rule, base, 512) for rule in RULES for base in (4e-3, 1e-3)}
    assert {run.settings["batch"] for run in runs} == set(BATCHES)
    seeds = {(run.settings["rate"], run.settings["seed"]) for run in runs if run.settings["batch"] == 2}
    assert {seed for rate, seed in seeds if rate == rate_by("η ∝ B", 4e-3, 2)} == {0, 1, 2}
    assert {seed for rate, seed in seeds if rate == rate_by("η ∝ B", 1e-3, 2)} == {0}, "one shall do for the quarter"


def test_a_curve_is_compared_with_the_reference_of_its_own_seed():
    rate = rate_by("η ∝ B", 4e-3, 32)
    rows = [
        row("adam", batch, at, seed=seed, examples_seen=512 * i, loss=2.0 + seed + apart)
        for batch, at, apart in ((REFERENCE, 4e-3, 0.0), (32, rate, 0.25))
        for seed in (0, 1)
        for i in range(1, 17)
    ]
    found = batch_scaling.distances({"final": sweep(best=4e-3), "curves": rows}, "adam", "η ∝ B", 1.0)
    assert found == {REFERENCE: {0: 0.0, 1: 0.0}, 32: {0: 0.25, 1: 0.25}}


def test_a_tuned_rate_is_of_the_first_seed_whatever_the_others_found():
    tables = {"final": [*sweep(best=4e-3), row("adam", REFERENCE, 1e-3, seed=1, held_out_loss=-1.0)]}
    assert batch_scaling.tune(tables)["adam"] == 4e-3


def curves(right_rule, wrong_by=0.5, right_up_to=512):
    """All of the optimizers' curves are the same under one rule, and apart under the other."""
    rows = []
    for optimizer in OPTIMIZERS:
        for rule in RULES:
            for batch in BATCHES:
                right = batch == REFERENCE or (rule == right_rule(optimizer) and batch <= right_up_to)
                loss = 2.0 if right else 2.0 + wrong_by
                rate = rate_by(rule, 4e-3, batch)
                rows += [row(optimizer, batch, rate, examples_seen=512 * i, loss=loss) for i in range(1, 17)]
    return {"final": sweep(best=4e-3), "curves": rows}


def expected(optimizer):
    return "η ∝ √B" if optimizer == "adam" else "η ∝ B"


def test_each_optimizer_is_judged_by_the_rule_that_our_sources_expect_of_it():
    rules = judge(curves(expected))[: len(OPTIMIZERS)]
    assert [finding.verdict for finding in rules] == ["agrees"] * len(OPTIMIZERS)
    assert "(η = 0.004), distance" in rules[0].measured
    assert (
        "η ∝ √B: 0.000 nats on average below B = 128 (0.000 over all), within 0.1 for B = 2 to 512" in rules[0].measured
    )
    others = judge(curves(lambda optimizer: "η ∝ B"))[: len(OPTIMIZERS)]
    assert [finding.verdict for finding in others] == ["disagrees", "agrees", "agrees", "agrees"]


def test_what_happens_beyond_the_break_does_not_tell_the_rules_apart():
    rules = judge(curves(expected, right_up_to=64))[: len(OPTIMIZERS)]
    assert [finding.verdict for finding in rules] == ["agrees"] * len(OPTIMIZERS)
    assert "0.000 nats on average below B = 128 (0.167 over all), within 0.1 for B = 2 to 64" in rules[0].measured


def test_rules_that_are_equally_good_are_not_told_apart():
    assert judge(curves(expected, wrong_by=0.0))[0].verdict == "does not show"


@pytest.mark.parametrize(("right_up_to", "verdict"), [(512, "does not show"), (64, "agrees"), (16, "disagrees")])
def test_the_break_is_where_the_curves_leave_the_reference(right_up_to, verdict):
    finding = judge(curves(expected, right_up_to=right_up_to))[-1]
    assert finding.verdict == verdict
    assert f"micro_adam {right_up_to}" in finding.measured


def test_a_curve_has_the_same_points_at_every_batch_size():
    points = {batch: batch_scaling._curve([1.0] * (8192 // batch), batch) for batch in BATCHES}
    assert len({tuple(point["examples_seen"] for point in curve) for curve in points.values()}) == 1


def test_the_figures_have_a_panel_for_each_optimizer_and_rule():
    figures = batch_scaling.draw(curves(expected))
    assert len(figures["curves"].axes) == len(OPTIMIZERS) * len(RULES)
    assert figures["curves"].axes[0].get_title() == "adam, η ∝ √B"
    assert figures["distance-by-batch"].axes[0].get_xlabel() == "batch size B"


@pytest.mark.slow
def test_a_short_run_gives_a_curve_and_a_loss():
    run = make_runs(True, {})[0]
    tables = batch_scaling.measure(type(run)(name=run.name, settings={**run.settings, "examples": 64}))
    assert [point["examples_seen"] for point in tables["curves"]] == [16, 32, 48, 64]
    assert 0 < tables["final"][0]["held_out_loss"] < 10
