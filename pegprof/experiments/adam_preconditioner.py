"""What should be under Adam's root: the squared mean of the gradients, or their variance?

Adam and its micro variants train at tuned rates, with and without clipping and averages over blocks; on the way of one
of them µ² and σ² are measured layer by layer.
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pegprof.experiments.base import Experiment, Finding, Rows, Run, Tables
from pegprof.experiments.figures import draw_losses, focus, graded_style, make_panels, name_ticks, style
from pegprof.experiments.tuning import best, bound, by_rate, is_ahead, words_at

TASK, BATCH, WARMUP = "short-bytes", 32, 0.05
STAGES = (0.0, 0.02, 0.1, 0.5, 1.0)  # of training
CLIP = 1e-2
VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "adam": ("adam", {}),
    "micro_adam": ("micro_adam", {}),
    "micro_adam_var": ("micro_adam_var", {}),
    "micro_adam_msq": ("micro_adam_msq", {}),
    "micro_adam, clipped": ("micro_adam", {"clip": CLIP}),
    "micro_adam_var, clipped": ("micro_adam_var", {"clip": CLIP}),
    "micro_adam_msq, rows": ("micro_adam_msq", {"block": "row"}),
    "micro_adam_msq, tensors": ("micro_adam_msq", {"block": "tensor"}),
}
SPIKE, BEFORE = 0.5, 20  # a spike is so many nats above the mean of so many steps before it
SHOWN = 1.0  # nats above the lowest loss, in the figure
FULL: Mapping[str, Any] = {
    "steps": 800,
    "rates": (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2),
    "seeds": (0, 1, 2),
    "batches": 32,
}
QUICK: Mapping[str, Any] = {"steps": 40, "rates": (4e-3, 1.6e-2), "seeds": (0,), "batches": 4}


def make_runs(quick: bool, tables: Tables) -> list[Run]:
    """The moments, then a sweep with the first seed, then the other seeds around the best rates."""
    size = QUICK if quick else FULL
    first, *others = size["seeds"]
    moments = [
        Run(
            name=f"moments-{seed}",
            settings={"seed": seed, "rate": 4e-3, "steps": size["steps"], "batches": size["batches"]},
        )
        for seed in size["seeds"]
    ]
    sweep = [_make_run(size, variant, rate, first) for rate, variant in itertools.product(size["rates"], VARIANTS)]
    if len(tables.get("training", [])) < len(sweep):
        return [*moments, *sweep]
    near = {variant: _near_best(tables, variant, size) for variant in VARIANTS}
    more = [_make_run(size, variant, rate, seed) for seed in others for variant in VARIANTS for rate in near[variant]]
    return [*moments, *sweep, *more]


def _near_best(tables: Tables, variant: str, size: Mapping[str, Any]) -> Sequence[float]:
    """The best rate of the first seed and its neighbours."""
    rows = [row for row in tables["training"] if row["seed"] == size["seeds"][0]]
    found = best(by_rate(rows, variant=variant))
    i = size["rates"].index(found[0]) if found else 0
    return size["rates"][max(0, i - 1) : i + 2]


def _make_run(size: Mapping[str, Any], variant: str, rate: float, seed: int) -> Run:
    settings = {"variant": variant, "rate": rate, "seed": seed, "steps": size["steps"]}
    return Run(name=f"{variant.replace(', ', '-')}-{rate:g}-{seed}", settings=settings)


def measure(run: Run) -> Tables:
    return {"training": _train(run.settings)} if "variant" in run.settings else {"moments": _moments(run.settings)}


def _train(settings: Mapping[str, Any]) -> Rows:
    from pegprof.experiments.training import held_out_loss, share_negative, train

    optimizer, options = VARIANTS[settings["variant"]]
    values: list[float] = []
    last: Any = None
    for step in train(TASK, optimizer, options=options, batch=BATCH, warmup=WARMUP, **_common(settings)):
        last = step
        values.append(bound(step.loss))
    return [
        {
            "held_out_loss": bound(held_out_loss(TASK, last.params)),
            "spikes": count_spikes(values),
            "share_negative": share_negative(last.state),
        }
    ]


def _moments(settings: Mapping[str, Any]) -> Rows:
    import jax

    from pegprof.experiments.moments import measure_moments
    from pegprof.experiments.tasks import TASKS
    from pegprof.experiments.training import train

    def moments_at(step: int, params: Any) -> Rows:
        found = measure_moments(TASK, params, batch=BATCH, batches=settings["batches"], seed=settings["seed"] + 9)
        return [{"step": step, **row} for row in found]

    stages = {round(stage * settings["steps"]) for stage in STAGES}
    rows = moments_at(0, TASKS[TASK]().init(jax.random.key(settings["seed"])))
    for step in train(TASK, "adam", batch=BATCH, warmup=WARMUP, **_common(settings)):
        if step.number in stages:
            rows += moments_at(step.number, step.params)
    return rows


def _common(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: settings[key] for key in ("rate", "steps", "seed")}


def count_spikes(losses: Sequence[float]) -> int:
    """How often the loss leaves what it was before; neighbours count once.

    >>> count_spikes([1.0] * 20 + [2.0, 2.0] + [1.0] * 5 + [3.0])
    2
    """
    high = [losses[i] > statistics.fmean(losses[i - BEFORE : i]) + SPIKE for i in range(BEFORE, len(losses))]
    return sum(now and not before for before, now in itertools.pairwise([False, *high]))


# ---- what it shows ------------------------------------------------------------------------------------------------


def losses(tables: Tables, variant: str) -> dict[float, list[float]]:
    """Of the rates that most seeds were run at."""
    found = by_rate(tables.get("training", []), variant=variant)
    most = max((len(values) for values in found.values()), default=0)
    return {rate: values for rate, values in found.items() if len(values) == most}


def judge(tables: Tables) -> list[Finding]:
    order = [
        _judge_order(tables, "micro_adam_msq", "adam", "micro_adam_msq is slightly ahead of Adam"),
        _judge_order(tables, "adam", "micro_adam", "Adam is ahead of micro_adam"),
        _judge_order(tables, "adam", "micro_adam_var", "Adam is ahead of micro_adam_var"),
        _judge_order(
            tables,
            "micro_adam_msq, tensors",
            "micro_adam_msq",
            "(an open question there) averages over whole tensors make micro_adam_msq better",
        ),
        _judge_order(
            tables, "micro_adam_msq, rows", "micro_adam_msq", "(an open question there) averages over rows do"
        ),
    ]
    return [
        *_judge_dominance(tables.get("moments", [])),
        *(finding for finding in order if finding),
        *_judge_spikes(tables.get("training", [])),
        *_judge_negative(tables),
    ]


def _judge_order(tables: Tables, ahead: str, behind: str, claim: str) -> Finding | None:
    first, second = best(losses(tables, ahead)), best(losses(tables, behind))
    if first is None or second is None:
        return None
    tried = {row["rate"] for row in tables["training"]}
    return Finding(
        claim=claim,
        measured=f"held-out loss at the best rate: {ahead} {words_at(first, tried)}, "
        f"{behind} {words_at(second, tried)}",
        verdict=is_ahead(first[1], second[1]),
    )


def _judge_dominance(rows: Sequence[Mapping[str, Any]]) -> list[Finding]:
    if not rows:
        return []
    steps = sorted({row["step"] for row in rows})
    medians = {
        step: statistics.median(
            row["dominance"] for row in rows if row["step"] == step and row["dominance"] is not None
        )
        for step in steps
    }
    within = [value > 1 for value in medians.values()]
    return [
        Finding(
            claim="µ² dominates Adam's preconditioner, µ² + σ²/B",
            measured=f"µ² over σ²/B at B = {BATCH}, median of the layers: "
            + ", ".join(f"{value:.2g} after {step} steps" for step, value in medians.items()),
            verdict="agrees" if all(within) else "disagrees",
        )
    ]


def _judge_spikes(rows: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """At the same rates and seeds, with and without clipping."""
    counts: dict[str, dict[tuple[float, int], int]] = {}
    for row in rows:
        counts.setdefault(row["variant"], {})[row["rate"], row["seed"]] = row["spikes"]
    plain, clipped = counts.get("micro_adam", {}), counts.get("micro_adam, clipped", {})
    both = plain.keys() & clipped.keys()
    if not both:
        return []
    before, after = sum(plain[key] for key in both), sum(clipped[key] for key in both)
    return [
        Finding(
            claim=f"micro_adam has spikes in its loss, and clipping at {CLIP:g} cures them",
            measured=f"{before} spikes in {len(both)} trainings over all rates, {after} with clipping",
            verdict="does not show" if not before else "agrees" if after <= before / 2 else "disagrees",
        )
    ]


def _judge_negative(tables: Tables) -> list[Finding]:
    """How much there is for ReLU to cut off."""
    batchwise = [row["share_negative"] for row in tables.get("moments", [])]
    averaged = [row["share_negative"] for row in tables.get("training", []) if row["variant"] == "micro_adam_msq"]
    if not batchwise or not averaged:
        return []
    return [
        Finding(
            claim="estimates of µ² are often negative, which ReLU(v) + ε must mend",
            measured=f"negative: {min(batchwise):.0%} to {max(batchwise):.0%} of a layer's entries in a batch; "
            f"{min(averaged):.0%} to {max(averaged):.0%} of all entries of the moving average at the end",
            verdict="agrees" if max(averaged) > 0 else "does not show",
        )
    ]


def draw(tables: Tables) -> dict[str, Any]:
    return {"loss-by-rate": _draw_losses(tables), "moments-by-layer": _draw_moments(tables)}


def _draw_losses(tables: Tables) -> Any:
    figure, panels = make_panels(2)
    families = ([v for v in VARIANTS if "," not in v], [v for v in VARIANTS if v != "adam" and "var" not in v])
    for axes, variants, title in zip(
        panels, families, ("as they are", "clipped, or averaged over blocks"), strict=True
    ):
        for variant in variants:
            found = by_rate(tables.get("training", []), variant=variant)
            draw_losses(axes, found, label=variant, **style(list(VARIANTS).index(variant)))
        axes.set(title=title, xlabel="largest learning rate η", ylabel="held-out loss (nats)", xscale="log")
        name_ticks(axes, sorted({row["rate"] for row in tables.get("training", [])}))
        focus(axes, min((row["held_out_loss"] for row in tables.get("training", [])), default=0.0), SHOWN)
        axes.legend(frameon=False, fontsize="small")
    return figure


def _draw_moments(tables: Tables) -> Any:
    figure, panels = make_panels(2)
    rows = tables.get("moments", [])
    steps, layers = sorted({row["step"] for row in rows}), list(dict.fromkeys(row["layer"] for row in rows))
    shown = {"dominance": "µ² over σ²/B", "share_negative": "share of negative estimates of µ²"}
    for axes, (value, label) in zip(panels, shown.items(), strict=True):
        for number, step in enumerate(steps):
            means = [
                statistics.fmean(
                    row[value]
                    for row in rows
                    if row["layer"] == layer and row["step"] == step and row[value] is not None
                )
                for layer in layers
            ]
            axes.plot(
                means, range(len(layers)), label=f"step {step}", **graded_style(number, len(steps)) | {"linestyle": ""}
            )
        axes.set_yticks(range(len(layers)), layers, fontsize="small")
        axes.set(xlabel=label)
        axes.invert_yaxis()
    panels[0].set_xscale("symlog", linthresh=0.1)
    if values := [row["dominance"] for row in rows if row["dominance"] is not None]:
        panels[0].set_xlim(min(0.0, *values) * 1.2, max(values) * 1.5)
    panels[0].axvline(1, color="gray", linewidth=0.8)
    panels[1].set_yticklabels([])
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    return figure


_COMPARED = (
    "Adam's second moment has the expectation µ² + σ²/B. `micro_adam` has µ² + σ² instead, `micro_adam_var` σ² alone, "
    "`micro_adam_msq` an unbiased estimate of µ² alone. Each trains a two-layer transformer on the bytes of Python's "
    f"standard library, 32 at a time, in batches of {BATCH}; the rate rises for a twentieth of the training and falls "
    "linearly to zero. The first seed sweeps the rates, the others repeat the best one and its neighbours; a variant "
    "is judged at its own best rate by the loss of data not trained on. Two means differ if they are more than two "
    "standard errors apart."
)
_ELSE = (
    f"A spike is a loss {SPIKE} nats above the mean of the {BEFORE} steps before it; clipping is at a global norm of "
    f"the mean gradient of {CLIP:g}. Averages over blocks are taken of the moving average, before ReLU cuts it off. "
    "µ² and σ² are measured on the way of a training by Adam."
)

EXPERIMENT = Experiment(
    name="adam-preconditioner",
    title="What should be under Adam's root",
    about=(_COMPARED, _ELSE),
    packages=("matplotlib",),
    make_runs=make_runs,
    measure=measure,
    draw=draw,
    judge=judge,
)
