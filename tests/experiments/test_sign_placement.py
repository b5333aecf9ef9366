"""The experiment on signs: its noise against gradients whose law is known, its runs and its verdicts."""

import jax.numpy as jnp
import numpy as np
import pytest

from pegprof.experiments import noise, sign_placement, training
from pegprof.experiments.sign_placement import judge, make_runs
from pegprof.experiments.tasks import Task

MEAN, B = 0.2, 8


@pytest.fixture
def gaussian(monkeypatch):
    """A task whose gradients are Gaussian of mean 0.2 and variance 1, entry by entry."""

    def draw(rng, size, held_out):
        return jnp.asarray(rng.normal(MEAN, 1.0, size=(size, 500)))

    task = Task(
        name="gaussian",
        init=lambda key: jnp.zeros(500),
        loss=lambda w, x: jnp.mean(x @ w),
        draw=draw,
        keep_batch_dim=True,
    )
    monkeypatch.setattr(noise, "TASKS", {"gaussian": lambda: task})
    return task


def test_the_noise_of_gaussian_gradients_is_what_their_law_says(gaussian):
    found = noise.measure_noise("gaussian", jnp.zeros(500), batch=B, batches=100, seed=0)
    x = MEAN**2
    assert found["snr"] == pytest.approx(x, rel=0.05)
    assert found["snr_after_sign"] == pytest.approx(noise.predict_sign_snr(np.array([x])), rel=0.05)
    assert found["snr_mean_of_signs"] == pytest.approx(found["snr_mean_of_signs_predicted"], rel=0.05)
    assert found["snr_sign_of_mean"] == pytest.approx(found["snr_sign_of_mean_predicted"], rel=0.05)
    assert found["kurtosis_50"] == pytest.approx(3, abs=0.15)
    assert found["share_dense"] == 1
    assert found["signs_agree"] > 0.95


def test_noise_comes_first_and_sweeps_are_whole_seed_by_seed():
    runs = make_runs(False, {})
    assert [run.name for run in runs[:2]] == ["noise-digits", "noise-bytes"]
    seeds = [run.settings["seed"] for run in runs[2:]]
    assert seeds == sorted(seeds)
    assert len({run.name for run in runs}) == len(runs)


def rows(sign, losses, rate=1e-3, task="bytes"):
    return [
        {"task": task, "optimizer": sign, "rate": rate, "seed": i, "held_out_loss": x} for i, x in enumerate(losses)
    ]


@pytest.mark.parametrize(
    ("late", "early", "verdict"),
    [
        ([1.0, 1.1], [2.0, 2.1], "agrees"),
        ([2.0, 2.1], [1.0, 1.1], "disagrees"),
        ([1.0, 2.0], [1.2, 2.2], "does not show"),
        ([1.0], [2.0], "does not show"),
    ],
)
def test_a_difference_counts_beyond_two_standard_errors_and_not_from_one_seed(late, early, verdict):
    tables = {"training": rows("sign_ema", late) + rows("micro_sign_sgd", early)}
    assert [finding.verdict for finding in judge(tables)] == [verdict]


def test_a_sweep_that_was_cut_short_has_no_verdict():
    tables = {"training": rows("sign_ema", [1.0, 1.1]) + rows("micro_sign_sgd", [2.0, 2.1])}
    tables["training"] += rows("micro_sign_sgd", [3.0, 3.1], rate=1e-2)
    (finding,) = judge(tables)
    assert finding.verdict == "does not show"
    assert finding.measured.endswith("; not all rates were run")


def test_each_sign_is_judged_at_its_own_best_rate():
    tables = {"training": rows("sign_ema", [1.0, 1.1]) + rows("sign_ema", [9.0, 9.0], rate=1e-2)}
    tables["training"] += rows("micro_sign_sgd", [5.0, 5.0]) + rows("micro_sign_sgd", [2.0, 2.1], rate=1e-2)
    (finding,) = judge(tables)
    late, early = finding.measured.split(" against ")
    assert late.endswith("1.050 ± 0.071 (η = 0.001, the smallest tried, 2 seeds)")
    assert early == "2.050 ± 0.071 (η = 0.01, the largest tried, 2 seeds)"


def test_the_figures_have_axes_with_names_and_a_line_for_each_sign():
    figures = sign_placement.draw({"training": rows("sign_ema", [1.0, 1.1]), "noise": []})
    axes = figures["loss-by-rate"].axes[1]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("learning rate η at the start", "held-out loss (nats)")
    assert [text.get_text() for text in axes.get_legend().get_texts()] == list(sign_placement.SIGNS)


@pytest.mark.parametrize(("name", "steps"), [("digits", 60), pytest.param("bytes", 8, marks=pytest.mark.slow)])
def test_a_task_learns_something_in_a_few_steps(name, steps):
    if name == "digits":
        pytest.importorskip("sklearn", reason="pip install -e '.[experiments]'")
    steps = list(training.train(name, "sign_ema", rate=3e-3, steps=steps, batch=8, seed=0))
    losses = [step.loss for step in steps]
    assert np.mean(losses[-4:]) < np.mean(losses[:4])
    assert np.isfinite(training.held_out_loss(name, steps[-1].params))
