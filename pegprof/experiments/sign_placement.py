"""Where to put the sign: before both averages, between them, or after both.

Each of the three optimizers trains two tasks over learning rates and seeds; on the way of one of them the gradients'
noise is measured, with what a Gaussian would make of it.
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pegprof.experiments.base import Experiment, Finding, Rows, Run, Tables
from pegprof.experiments.figures import draw_losses, make_panels, name_ticks, style
from pegprof.experiments.tuning import best, bound, by_rate, is_ahead, words_at

SIGNS = ("micro_sign_sgd", "sign_sgd", "sign_ema")
TASKS = ("digits", "bytes")
BATCH = 32
STAGES = (0.0, 0.02, 0.1, 0.5, 1.0)  # of training
FULL: Mapping[str, Any] = {
    "steps": {"digits": 1500, "bytes": 800},
    "rates": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
    "seeds": (0, 1, 2),
    "batches": 64,
}
QUICK: Mapping[str, Any] = {
    "steps": {"digits": 300, "bytes": 60},
    "rates": (3e-4, 1e-3, 3e-3),
    "seeds": (0, 1),
    "batches": 12,
}
NOISE_RATE = 1e-3  # of the training on whose way the noise is measured, by sign_ema
GAUSSIAN_KURTOSIS = (2.5, 4.0)  # what we call near 3


def make_runs(quick: bool, tables: Tables) -> list[Run]:
    """Noise first, then whole sweeps seed by seed: what the time limit cuts off is the last seeds."""
    size = QUICK if quick else FULL
    noise = [
        Run(
            name=f"noise-{task}",
            settings={
                "task": task,
                "optimizer": "sign_ema",
                "rate": NOISE_RATE,
                "seed": 0,
                "batch": BATCH,
                "steps": size["steps"][task],
                "batches": size["batches"],
            },
        )
        for task in TASKS
    ]
    trainings = [
        Run(
            name=f"{task}-{sign}-{rate:g}-{seed}",
            settings={
                "task": task,
                "optimizer": sign,
                "rate": rate,
                "seed": seed,
                "batch": BATCH,
                "steps": size["steps"][task],
            },
        )
        for seed, task, sign, rate in itertools.product(size["seeds"], TASKS, SIGNS, size["rates"])
    ]
    return [*noise, *trainings]


def measure(run: Run) -> Tables:
    return {"noise": _measure_noise(run.settings)} if "batches" in run.settings else {"training": _train(run.settings)}


def _train(settings: Mapping[str, Any]) -> Rows:
    from pegprof.experiments.training import held_out_loss, train

    values: list[float] = []
    params: Any = None
    for step in _steps(train, settings):
        params = step.params
        values.append(bound(step.loss))
    tail = values[-max(1, len(values) // 10) :]
    return [{"train_loss": statistics.fmean(tail), "held_out_loss": bound(held_out_loss(settings["task"], params))}]


def _measure_noise(settings: Mapping[str, Any]) -> Rows:
    import jax

    from pegprof.experiments.noise import measure_noise
    from pegprof.experiments.tasks import TASKS as KNOWN
    from pegprof.experiments.training import train

    def noise_at(step: int, params: Any) -> dict[str, Any]:
        found = measure_noise(settings["task"], params, batch=settings["batch"], batches=settings["batches"], seed=9)
        return {"step": step, **found}

    stages = {round(stage * settings["steps"]) for stage in STAGES}
    rows = [noise_at(0, KNOWN[settings["task"]]().init(jax.random.key(settings["seed"])))]
    rows += [noise_at(step.number, step.params) for step in _steps(train, settings) if step.number in stages]
    return rows


def _steps(train: Any, settings: Mapping[str, Any]) -> Any:
    wanted = {key: settings[key] for key in ("rate", "steps", "batch", "seed")}
    return train(settings["task"], settings["optimizer"], **wanted)


# ---- what it shows ------------------------------------------------------------------------------------------------


def losses(tables: Tables, task: str, sign: str) -> dict[float, list[float]]:
    """The held-out losses of the seeds, by learning rate."""
    return by_rate(tables.get("training", []), task=task, optimizer=sign)


def judge(tables: Tables) -> list[Finding]:
    return [
        *(finding for task in TASKS if (finding := _judge_order(tables, task))),
        *_judge_noise(tables.get("noise", [])),
    ]


def _judge_order(tables: Tables, task: str) -> Finding | None:
    swept = [losses(tables, task, sign) for sign in ("sign_ema", "micro_sign_sgd")]
    late, early = (best(each) for each in swept)
    if late is None or early is None:
        return None
    partial = set(swept[0]) != set(swept[1])  # the time limit cut a sweep short: the best of few rates says nothing
    return Finding(
        claim="the sign after both averages, sign_ema, is ahead of the sign before them, micro_sign_sgd",
        measured=f"{task}: held-out loss at the best rate {words_at(late, swept[0])} against "
        + words_at(early, swept[1])
        + ("; not all rates were run" if partial else ""),
        verdict="does not show" if partial else is_ahead(late[1], early[1]),
    )


def _judge_noise(rows: Sequence[Mapping[str, Any]]) -> list[Finding]:
    if not rows:
        return []
    kept = [row["snr_after_sign"] / row["snr"] for row in rows]
    kurtosis = [row["kurtosis_50"] for row in rows]
    off = [row["snr_sign_of_mean"] / row["snr_sign_of_mean_predicted"] for row in rows]
    low, high = GAUSSIAN_KURTOSIS
    return [
        Finding(
            claim="the SNR of an example's gradient is low, and a sign lowers it (by 2/π = 0.64, if Gaussian)",
            measured=f"SNR {_range([row['snr'] for row in rows])}; a sign makes it {_range(kept)} times that, and "
            f"agrees with the mean on {_range([row['signs_agree'] for row in rows])} of it",
            verdict="agrees" if max(kept) < 1 else "disagrees",
        ),
        Finding(
            claim="gradients are near Gaussian, on which the argument rests",
            measured=f"median kurtosis {_range(kurtosis)}, where a Gaussian has 3",
            verdict="agrees" if all(low <= k <= high for k in kurtosis) else "disagrees",
        ),
        Finding(
            claim="the SNR after the sign of a batch's mean can be predicted from that of an example",
            measured=f"measured over predicted: {_range(off)}",
            verdict="agrees" if all(2 / 3 < ratio < 3 / 2 for ratio in off) else "disagrees",
        ),
    ]


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2g} to {max(values):.2g}"


def draw(tables: Tables) -> dict[str, Any]:
    return {"loss-by-rate": _draw_losses(tables), "noise-by-stage": _draw_noise(tables)}


def _draw_losses(tables: Tables) -> Any:
    figure, panels = make_panels(len(TASKS))
    for axes, task in zip(panels, TASKS, strict=True):
        for number, sign in enumerate(SIGNS):
            draw_losses(axes, losses(tables, task, sign), label=sign, **style(number))
        axes.set(title=task, xlabel="learning rate η at the start", ylabel="held-out loss (nats)", xscale="log")
        name_ticks(axes, sorted({row["rate"] for row in tables.get("training", [])}))
        axes.legend(frameon=False)
    return figure


def _draw_noise(tables: Tables) -> Any:
    figure, panels = make_panels(len(TASKS))
    lines = {
        "mean, no sign": lambda row: row["snr_mean"],
        "mean of signs": lambda row: row["snr_mean_of_signs"],
        "sign of mean": lambda row: row["snr_sign_of_mean"],
        "sign of mean, predicted": lambda row: row["snr_sign_of_mean_predicted"],
    }
    for axes, task in zip(panels, TASKS, strict=True):
        rows = [row for row in tables.get("noise", []) if row["task"] == task]
        for number, (label, value) in enumerate(lines.items()):
            axes.plot(range(len(rows)), [value(row) for row in rows], label=label, **style(number))
        axes.set(title=task, xlabel="step", ylabel=f"SNR of a batch of {BATCH}, µ²/σ²", yscale="log")
        axes.set_xticks(range(len(rows)), [str(row["step"]) for row in rows])  # stages, evenly: the last are far apart
        axes.legend(frameon=False)
    return figure


_COMPARED = (
    "A sign can stand before the average over the batch (`micro_sign_sgd`), between it and the average over the steps "
    "(`sign_sgd`), or after both (`sign_ema`). Each trains a perceptron on scikit-learn's digits and a two-layer "
    "transformer on the bytes of Python's standard library, at several learning rates that fall linearly to zero, with "
    f"batches of {BATCH} and b1 = 0.9; the loss is of data not trained on. Two means differ if they are more than two "
    "standard errors apart."
)
_NOISE = (
    "The noise is measured at several stages of one training, over the entries in which nearly every example has a "
    "gradient, beside what it would be if gradients were Gaussian (`pegprof/experiments/noise.py`). An SNR takes any "
    "mean for signal, also that of signs where skewed gradients make it point away from the mean gradient; so the "
    "share of the mean gradient on which the two agree stands beside it."
)

EXPERIMENT = Experiment(
    name="sign-placement",
    title="Where to put the sign",
    about=(_COMPARED, _NOISE),
    packages=("matplotlib", "sklearn"),
    make_runs=make_runs,
    measure=measure,
    draw=draw,
    judge=judge,
)
