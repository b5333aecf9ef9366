"""How the learning rate should grow with the batch: by η ∝ √B for Adam, by η ∝ B for its micro variants?

First each optimizer's rate is tuned at one batch size; from there both rules say the rates of all other batch sizes.
All runs see the same number of examples, and under the right rule their losses, against the examples seen, are the
same. A rule holds up to the batch size at which the curve leaves that of the reference.
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pegprof.experiments.base import Experiment, Finding, Rows, Run, Tables
from pegprof.experiments.figures import draw_losses, focus, graded_style, make_grid, make_panels, name_ticks, style
from pegprof.experiments.tuning import best, bound, by_rate, words_of_rate

TASK = "short-bytes"
OPTIMIZERS = ("adam", "micro_adam", "micro_adam_var", "micro_adam_msq")
RULES: Mapping[str, float] = {"η ∝ √B": 0.5, "η ∝ B": 1.0}
REFERENCE = 16  # the batch size at which rates are tuned
TUNED_SHARES = (1.0, 0.25)  # of the tuned rate: the second, far from where training gets unstable
SWEPT = 0  # the seed that rates are tuned with
CHECKPOINTS = 16  # points of a curve
SETTLED = 4  # of them, from which on curves are compared: before that they hang on the start alone
TOLERANCE = 0.1  # nats, on average over these points, by which a curve may differ from the reference
BETTER = 0.01  # nats, on average over the batch sizes, by which one rule must be nearer than the other
BREAK = 128  # where our sources expect the rules to stop
WARMUP = 0.1
SHOWN = 4.0  # nats above the lowest loss, in the figure
DISTANCES = (0.0, 0.05, 0.1, 0.3, 1.0, 3.0, 10.0)  # with a tick
FULL: Mapping[str, Any] = {
    "examples": 8192,
    "batches": (2, 4, 8, 16, 32, 64, 128, 256, 512),
    "rates": (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2),
    "seeds": {1.0: (0, 1, 2), 0.25: (0,)},
    "optimizers": OPTIMIZERS,
}
QUICK: Mapping[str, Any] = {
    "examples": 1024,
    "batches": (4, 16, 64),
    "rates": (2e-3, 8e-3),
    "seeds": {1.0: (0,)},
    "optimizers": ("adam", "micro_adam"),
}


def make_runs(quick: bool, tables: Tables) -> list[Run]:
    """The sweeps at the reference batch, then both rules from the tuned rates, seed by seed."""
    size = QUICK if quick else FULL
    sweep = [
        _make_run(size, optimizer, REFERENCE, rate, SWEPT)
        for rate, optimizer in itertools.product(size["rates"], size["optimizers"])  # neighbours share no program
    ]
    tuned = tune(tables)
    if len(tables.get("final", [])) < len(sweep):
        return sweep
    starts = [(seed, share) for share, seeds in size["seeds"].items() for seed in seeds]
    ruled = [
        _make_run(size, optimizer, batch, rate_by(rule, share * tuned[optimizer], batch), seed)
        for (seed, share), batch, optimizer, rule in itertools.product(
            sorted(starts), size["batches"], size["optimizers"], RULES
        )
    ]
    return list({run.name: run for run in (*sweep, *ruled)}.values())  # at the reference the rules are the same


def _make_run(size: Mapping[str, Any], optimizer: str, batch: int, rate: float, seed: int) -> Run:
    return Run(
        name=f"{optimizer}-b{batch}-{rate:g}-{seed}",
        settings={
            "optimizer": optimizer,
            "batch": batch,
            "rate": rate,
            "seed": seed,
            "examples": size["examples"],
        },
    )


def rate_by(rule: str, reference_rate: float, batch: int) -> float:
    """The rate that a rule has for a batch size, to six digits: it names a run.

    >>> rate_by("η ∝ B", 0.001, 32), rate_by("η ∝ √B", 0.001, 64)
    (0.002, 0.002)
    """
    return float(f"{reference_rate * (batch / REFERENCE) ** RULES[rule]:.6g}")


def tune(tables: Tables) -> dict[str, float]:
    """The best rate of each optimizer at the reference batch, by the seed that was swept with."""
    rows = [row for row in tables.get("final", []) if row["batch"] == REFERENCE]
    found = {name: best(by_rate(rows, optimizer=name, seed=SWEPT)) for name in OPTIMIZERS}
    return {name: each[0] for name, each in found.items() if each is not None}


def measure(run: Run) -> Tables:
    """The curve, point by point, and the loss of data not trained on at its end."""
    from pegprof.experiments.training import held_out_loss, train

    settings = run.settings
    steps = settings["examples"] // settings["batch"]
    wanted = {key: settings[key] for key in ("rate", "batch", "seed")}
    values: list[float] = []
    params: Any = None
    for step in train(TASK, settings["optimizer"], steps=steps, warmup=WARMUP, **wanted):
        params = step.params
        values.append(bound(step.loss))
    return {
        "curves": _curve(values, settings["batch"]),
        "final": [{"held_out_loss": bound(held_out_loss(TASK, params))}],
    }


def _curve(losses: Sequence[float], batch: int) -> Rows:
    """The mean loss between checkpoints, against the examples seen."""
    count = min(CHECKPOINTS, len(losses))
    ends = [round((i + 1) * len(losses) / count) for i in range(count)]
    return [
        {"examples_seen": end * batch, "loss": statistics.fmean(losses[start:end])}
        for start, end in itertools.pairwise([0, *ends])
    ]


# ---- what it shows ------------------------------------------------------------------------------------------------

Curve = dict[int, float]  # the loss by examples seen


def curves_of(tables: Tables, optimizer: str, batch: int, rate: float) -> dict[int, Curve]:
    """By seed; empty where there was no such run."""
    found: dict[int, Curve] = {}
    for row in tables.get("curves", []):
        if (row["optimizer"], row["batch"], row["rate"]) == (optimizer, batch, rate):
            found.setdefault(row["seed"], {})[row["examples_seen"]] = row["loss"]
    return found


def mean_curve(curves: Mapping[int, Curve]) -> Curve:
    """Over the seeds.

    >>> mean_curve({0: {16: 2.0, 32: 1.5}, 1: {16: 3.0, 32: 2.5}})
    {16: 2.5, 32: 2.0}
    """
    seen = next(iter(curves.values()), {})
    return {x: statistics.fmean(curve[x] for curve in curves.values()) for x in seen}


def distance(curve: Curve, reference: Curve) -> float:
    """The mean distance in nats over the points that both have, once settled."""
    both = sorted(curve.keys() & reference.keys())
    settled = both[len(both) * SETTLED // CHECKPOINTS :]
    return statistics.fmean(abs(curve[seen] - reference[seen]) for seen in settled)


def distances(tables: Tables, optimizer: str, rule: str, share: float) -> dict[int, dict[int, float]]:
    """How far the curves of a rule are from the reference, by batch size and seed."""
    tuned = tune(tables).get(optimizer)
    if tuned is None:
        return {}
    batches = sorted({row["batch"] for row in tables.get("curves", [])})
    curves = {batch: curves_of(tables, optimizer, batch, rate_by(rule, share * tuned, batch)) for batch in batches}
    reference = curves.get(REFERENCE, {})
    found = {
        batch: {seed: distance(curve, reference[seed]) for seed, curve in of_seeds.items() if seed in reference}
        for batch, of_seeds in curves.items()
    }
    return {batch: of_seeds for batch, of_seeds in found.items() if of_seeds}


def mean_distances(tables: Tables, optimizer: str, rule: str, share: float) -> dict[int, float]:
    found = distances(tables, optimizer, rule, share)
    return {batch: statistics.fmean(of_seeds.values()) for batch, of_seeds in found.items()}


def holds_between(found: Mapping[int, float]) -> tuple[int, int]:
    """The batch sizes, with the reference among them, over which the curves stay within the tolerance.

    >>> holds_between({4: 0.3, 8: 0.05, 16: 0.0, 32: 0.04, 64: 0.2, 128: 0.01})
    (8, 32)
    """

    def last_within(batches: Sequence[int]) -> int:
        within = list(itertools.takewhile(lambda batch: found[batch] <= TOLERANCE, batches))
        return within[-1] if within else REFERENCE

    return (
        last_within(sorted((b for b in found if b <= REFERENCE), reverse=True)),
        last_within(sorted(b for b in found if b >= REFERENCE)),
    )


def judge(tables: Tables) -> list[Finding]:
    found = {
        (optimizer, rule, share): mean_distances(tables, optimizer, rule, share)
        for optimizer, rule, share in itertools.product(OPTIMIZERS, RULES, TUNED_SHARES)
    }
    known = [
        (share, optimizer)
        for share, optimizer in itertools.product(TUNED_SHARES, OPTIMIZERS)
        if all(len(found[optimizer, rule, share]) > 1 for rule in RULES)  # more than the reference
    ]
    return [
        *(_judge_rule(found, optimizer, share, _words_of_tuned(tables, optimizer)) for share, optimizer in known),
        *(_judge_break(found, share) for share in TUNED_SHARES if (share, "micro_adam") in known),
    ]


Found = Mapping[tuple[str, str, float], Mapping[int, float]]


def _words_of_tuned(tables: Tables, optimizer: str) -> str:
    swept = [row for row in tables["final"] if row["batch"] == REFERENCE and row["seed"] == SWEPT]
    return words_of_rate(tune(tables)[optimizer], by_rate(swept, optimizer=optimizer))


def _judge_rule(found: Found, optimizer: str, share: float, tuned: str) -> Finding:
    """Which of the two rules keeps the curves nearer together over the batch sizes that are said to have one."""
    expected, other = ("η ∝ √B", "η ∝ B") if optimizer == "adam" else ("η ∝ B", "η ∝ √B")
    below = {rule: {b: far for b, far in found[optimizer, rule, share].items() if b < BREAK} for rule in RULES}
    mean = {rule: statistics.fmean(below[rule].values()) for rule in RULES}
    overall = {rule: statistics.fmean(found[optimizer, rule, share].values()) for rule in RULES}
    spans = {rule: holds_between(found[optimizer, rule, share]) for rule in RULES}
    measured = "; ".join(
        f"{rule}: {mean[rule]:.3f} nats on average below B = {BREAK} ({overall[rule]:.3f} over all), "
        f"within {TOLERANCE} for B = {spans[rule][0]} to {spans[rule][1]}"
        for rule in (expected, other)
    )
    apart = mean[other] - mean[expected]
    return Finding(
        claim=f"curves of {optimizer} differ less over batch sizes under {expected} than under {other}",
        measured=f"from {share:g} of the tuned rate ({tuned}), distance from the curve of B = {REFERENCE}, {measured}",
        verdict="does not show" if abs(apart) < BETTER else "agrees" if apart > 0 else "disagrees",
    )


def _judge_break(found: Found, share: float) -> Finding:
    """Where η ∝ B, for the micro variants, stops."""
    micro = [name for name in OPTIMIZERS if name != "adam" and found[name, "η ∝ B", share]]
    ends = {name: holds_between(found[name, "η ∝ B", share])[1] for name in micro}
    largest = max(batch for each in found.values() for batch in each)
    near_the_break = all(BREAK / 2 <= end < largest for end in ends.values())
    never = largest < BREAK or all(end == largest for end in ends.values())
    return Finding(
        claim=f"the micro variants' η ∝ B breaks at B ≥ {BREAK}",
        measured=f"from {share:g} of the tuned rate, the last batch within {TOLERANCE} nats: "
        + ", ".join(f"{name} {end}" for name, end in ends.items()),
        verdict="does not show" if never else "agrees" if near_the_break else "disagrees",
    )


def draw(tables: Tables) -> dict[str, Any]:
    return {"curves": _draw_curves(tables), "distance-by-batch": _draw_distances(tables)}


def _shown(tables: Tables) -> list[str]:
    return [name for name in OPTIMIZERS if any(row["optimizer"] == name for row in tables["curves"])]


def _draw_curves(tables: Tables) -> Any:
    """A row for each rule, a column for each optimizer, a line for each batch size, at the tuned rate."""
    shown = _shown(tables)
    figure, grid = make_grid(len(RULES), len(shown))
    tuned, batches = tune(tables), sorted({row["batch"] for row in tables.get("curves", [])})
    for axes_row, rule in zip(grid, RULES, strict=True):
        for axes, optimizer in zip(axes_row, shown, strict=True):
            for number, batch in enumerate(batches):
                curve = mean_curve(curves_of(tables, optimizer, batch, rate_by(rule, tuned.get(optimizer, 0.0), batch)))
                axes.plot(list(curve), list(curve.values()), label=f"B = {batch}", **graded_style(number, len(batches)))
            axes.set(title=f"{optimizer}, {rule}", xlabel="examples seen", ylabel="training loss (nats)")
            focus(axes, min(row["loss"] for row in tables["curves"]), SHOWN)
    figure.legend(
        *grid[0][0].get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=len(batches)
    )
    return figure


def _draw_distances(tables: Tables) -> Any:
    shown = _shown(tables)
    figure, panels = make_panels(len(shown))
    looks = list(itertools.product(RULES, TUNED_SHARES))
    for axes, optimizer in zip(panels, shown, strict=True):
        for number, (rule, share) in enumerate(looks):
            found = distances(tables, optimizer, rule, share)
            if found:
                losses = {batch: list(of_seeds.values()) for batch, of_seeds in found.items()}
                draw_losses(axes, losses, label=f"{rule}, {share:g} of the tuned rate", **style(number))
        axes.axhline(TOLERANCE, color="gray", linewidth=0.8)
        axes.set(title=optimizer, xlabel="batch size B", ylabel=f"distance from B = {REFERENCE} (nats)", xscale="log")
        axes.set_yscale("symlog", linthresh=TOLERANCE)  # up to the tolerance in a line, from there on by powers
        axes.set_yticks(DISTANCES, [f"{distance:g}" for distance in DISTANCES])
        axes.set_ylim(-TOLERANCE / 4, DISTANCES[-1])
        name_ticks(axes, sorted({row["batch"] for row in tables.get("curves", [])}))
    figure.legend(*panels[0].get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=len(looks))
    return figure


_COMPARED = (
    "Adam and its micro variants train a two-layer transformer on the bytes of Python's standard library, 32 at a "
    f"time, with batches of 2 to 512 examples and {FULL['examples']} examples in all: at a batch of 512 these are no "
    f"more than {FULL['examples'] // 512} steps, which no rate makes up for. The rate is tuned at a batch of "
    f"{REFERENCE} (one seed), and grows from there by η ∝ √B or by η ∝ B, with three seeds; the same again, with one, "
    "from a quarter of the tuned rate. It rises for a tenth of the training and then falls linearly to zero."
)
_DISTANCE = (
    "A rule is right where the losses against the examples seen are the same for all batch sizes. The distance is the "
    f"mean difference, in nats, from the same seed's curve at {REFERENCE}, over the last three quarters of the "
    f"training; error bars are standard deviations over the seeds. A rule reaches as far as the mean is at most "
    f"{TOLERANCE}. Which of the two is the better one goes by the averages of these distances, if they are at least "
    f"{BETTER:g} apart, however far a rule reaches: so one can be the better and still not hold. Our sources name "
    f"neither a measure nor a tolerance: both are ours. Rules are compared below B = "
    f"{BREAK}, where they are said to break; that was settled after a first look at the averages over all batch sizes, "
    "which stand beside it, and which the few steps of the largest batches dominate."
)

EXPERIMENT = Experiment(
    name="batch-scaling",
    title="How the learning rate grows with the batch",
    about=(_COMPARED, _DISTANCE),
    packages=("matplotlib",),
    make_runs=make_runs,
    measure=measure,
    draw=draw,
    judge=judge,
)
