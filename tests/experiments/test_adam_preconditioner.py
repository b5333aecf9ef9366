"""The experiment on Adam's preconditioner: its moments against gradients whose law is known, its runs, its verdicts."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pegprof.experiments import adam_preconditioner, moments
from pegprof.experiments.adam_preconditioner import FULL, VARIANTS, judge, make_runs
from pegprof.experiments.tasks import Task
from pegprof.experiments.training import shape_of_rate, share_negative, train

MEAN, B = 0.5, 8


@pytest.fixture
def gaussian(monkeypatch):
    """Gradients of mean 0.5 in one layer and of mean 0 in another, of variance 1 in both."""

    def draw(rng, size, held_out):
        return jnp.asarray(rng.normal(size=(size, 2, 400)))

    def loss(params, x_Bx2xD):
        signal = (x_Bx2xD[:, 0] + MEAN) @ params["signal"]["w"]
        return jnp.mean(signal + x_Bx2xD[:, 1] @ params["noise"]["w"])

    task = Task(name="gaussian", init=None, loss=loss, draw=draw, keep_batch_dim=True)
    monkeypatch.setattr(moments, "TASKS", {"gaussian": lambda: task})


def test_moments_by_layer_are_what_the_law_of_the_gradients_says(gaussian):
    params = {layer: {"w": jnp.zeros(400)} for layer in ("signal", "noise")}
    rows = moments.measure_moments("gaussian", params, batch=B, batches=50, seed=0)
    noise, signal = sorted(rows, key=lambda row: row["layer"])
    assert (noise["layer"], signal["layer"]) == ("noise", "signal")
    assert signal["mean_squared"] == pytest.approx(MEAN**2, rel=0.05)
    assert signal["variance"] == pytest.approx(1, rel=0.05)
    assert signal["dominance"] == pytest.approx(MEAN**2 * B, rel=0.1)
    assert noise["mean_squared"] == pytest.approx(0, abs=0.01)
    assert 0.6 < noise["share_negative"] < 0.75  # a squared normal number is below its mean 68% of the time
    assert signal["share_negative"] < 0.4


def test_the_first_seed_sweeps_and_the_others_stay_near_the_best():
    runs = make_runs(False, {})
    assert len(runs) == len(FULL["seeds"]) + len(VARIANTS) * len(FULL["rates"])
    swept = [training(v, rate, 0, abs(rate - 8e-3)) for v in VARIANTS for rate in FULL["rates"]]
    more = make_runs(False, {"training": swept})[len(runs) :]
    assert {run.settings["rate"] for run in more} == {4e-3, 8e-3, 1.6e-2}
    assert {run.settings["seed"] for run in more} == {1, 2}
    assert len({run.name for run in make_runs(False, {"training": swept})}) == len(runs) + len(more)


def training(variant, rate, seed, loss, spikes=0, negative=0.1):
    return {
        "variant": variant,
        "rate": rate,
        "seed": seed,
        "held_out_loss": loss,
        "spikes": spikes,
        "share_negative": negative,
    }


def seeds(variant, losses, rate=4e-3, **more):
    return [training(variant, rate, seed, loss, **more) for seed, loss in enumerate(losses)]


def test_the_order_is_judged_at_each_ones_best_rate_with_all_its_seeds():
    rows = seeds("adam", [1.0, 1.01, 0.99]) + seeds("micro_adam", [1.2, 1.21, 1.19])
    rows += [training("micro_adam", 8e-3, 0, 0.5)]  # one lucky seed at a rate that the others did not run
    (finding,) = [finding for finding in judge({"training": rows}) if finding.claim == "Adam is ahead of micro_adam"]
    assert finding.verdict == "agrees"
    assert finding.measured.endswith("micro_adam 1.200 ± 0.010 (η = 0.004, the smallest tried, 3 seeds)")


@pytest.mark.parametrize(
    ("plain", "clipped", "verdict"), [(8, 1, "agrees"), (8, 7, "disagrees"), (0, 0, "does not show")]
)
def test_spikes_are_counted_where_both_were_run(plain, clipped, verdict):
    rows = seeds("micro_adam", [1.0, 1.0], spikes=plain) + seeds("micro_adam, clipped", [1.0, 1.0], spikes=clipped)
    rows += [training("micro_adam", 3.2e-2, 0, 1.0, spikes=100)]
    (finding,) = [finding for finding in judge({"training": rows}) if "spikes" in finding.claim]
    assert finding.verdict == verdict
    assert finding.measured.startswith(f"{2 * plain} spikes in 2 trainings")


def test_dominance_is_judged_by_the_median_layer_at_every_stage():
    rows = [
        {"step": step, "layer": layer, "dominance": dominance, "share_negative": 0.3}
        for step, values in {0: (2.0, 3.0, 0.1), 8: (0.2, 0.4, 5.0)}.items()
        for layer, dominance in zip("abc", values, strict=True)
    ]
    finding = judge({"moments": rows})[0]
    assert finding.verdict == "disagrees"
    assert finding.measured.endswith("2 after 0 steps, 0.4 after 8 steps")


def test_the_share_of_negative_entries_is_of_all_second_moments():
    nu = {"a": jnp.array([-1.0, 1.0]), "b": jnp.array([[1.0, 0.0]])}
    state = (optax.EmptyState(), optax.ScaleByAdamState(count=jnp.zeros([]), mu=nu, nu=nu))
    assert share_negative(state) == 0.25


def test_the_rate_rises_and_falls_in_lines():
    assert shape_of_rate(0, 0) == 1
    rates = [shape_of_rate(i / 100, 0.1) for i in range(100)]
    assert max(rates) == rates[10] == 1
    assert np.all(np.diff(rates[:11]) > 0)
    assert np.all(np.diff(rates[10:]) < 0)


def test_the_figures_name_layers_and_variants():
    rows = [{"step": 0, "layer": layer, "dominance": 2.0, "share_negative": 0.3} for layer in ("in", "out")]
    figures = adam_preconditioner.draw({"moments": rows, "training": seeds("adam", [1.0, 1.1])})
    axes = figures["moments-by-layer"].axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["in", "out"]
    assert figures["loss-by-rate"].axes[0].get_ylabel() == "held-out loss (nats)"


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_trains(variant):
    pytest.importorskip("sklearn", reason="pip install -e '.[experiments]'")
    optimizer, options = VARIANTS[variant]
    steps = list(train("digits", optimizer, options=options, rate=1e-2, steps=6, batch=4, seed=0))
    assert all(np.isfinite(step.loss) for step in steps)
    assert 0 <= share_negative(steps[-1].state) < 1
