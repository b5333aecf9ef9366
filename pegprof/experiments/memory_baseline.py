"""What a step of MicroAdam needs beside one of Adam, on the paper's own transformer: bytes by compilers, and measured.

A run is one call of ``pegprof.profile``: the whole training step, optimizer state included, for a device that need not
be here, or on this machine's CPU at a batch that fits.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from pegprof.experiments.base import Experiment, Finding, Run, Tables
from pegprof.experiments.figures import make_panels
from pegprof.units import format_bytes

OPTIMIZER = "micro_adam"
WAYS: Mapping[str, str] = {"grad": "Adam", "vmap": "MicroAdam, vmap", "surgery": "MicroAdam, surgery"}
FULL: Mapping[str, Any] = {
    "model": "transformer-151m",
    "compiled": {"batch": 64, "targets": ("tpu-v5p", "h100")},
    "measured": {"batch": 4},
}
QUICK: Mapping[str, Any] = {
    "model": "transformer-tiny",
    "compiled": {"batch": 64, "targets": ("tpu-v5p", "h100")},
    "measured": {"batch": 16},
}
NEAR = 1.05  # a ratio of bytes up to this is "no more"
PAPER_TIME, TIME_TOLERANCE = 1.17, 0.1  # what the paper has for vmap's time on an accelerator


def make_runs(quick: bool, tables: Tables) -> list[Run]:
    size = QUICK if quick else FULL
    compiled = [
        Run(name=f"compiled-{target}", settings={"model": size["model"], **size["compiled"], "targets": [target]})
        for target in size["compiled"]["targets"]
    ]
    measured = Run(name="measured-cpu", settings={"model": size["model"], **size["measured"], "targets": []})
    return [*compiled, measured]


def measure(run: Run) -> Tables:
    import pegprof

    settings = run.settings
    result = pegprof.profile(
        settings["model"],
        batch=settings["batch"],
        methods=tuple(WAYS),
        step=OPTIMIZER,
        targets=tuple(settings["targets"]),
        time=not settings["targets"],
    )
    return {"memory": [dataclasses.asdict(row) for row in result.rows]}


# ---- what it shows ------------------------------------------------------------------------------------------------


def judge(tables: Tables) -> list[Finding]:
    rows = tables.get("memory", [])
    targets = list(dict.fromkeys(row["target"] for row in rows))
    by_target = {target: {row["method"]: row for row in rows if row["target"] == target} for target in targets}
    return [
        *_judge_activations(rows),
        *(finding for target in targets for finding in _judge_bytes(target, by_target[target])),
        *(finding for target in targets for finding in _judge_time(target, by_target[target])),
    ]


def _judge_activations(rows: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Whether an example's activations outweigh its gradient, which has the size of the parameters."""
    return [
        Finding(
            claim="an example's activations, not its gradient, dominate memory",
            measured=f"{row['target']}: {format_bytes(row['activation_bytes_per_example'])} against "
            f"{format_bytes(row['parameter_bytes'])}",
            verdict="agrees" if row["activations_dominate"] else "disagrees",
        )
        for row in rows
        if row["activations_dominate"] is not None and row["method"] == "grad"
    ]


def _judge_bytes(target: str, rows: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Whole peaks: parameters, state, results and temporaries."""
    plain = rows.get("grad")
    if plain is None or not plain["peak_bytes"]:
        return []
    claims = {"vmap": "MicroAdam by vmap needs no more memory than Adam", "surgery": "nor does it by surgery"}
    found = {method: rows[method] for method in claims if method in rows and rows[method]["peak_bytes"]}
    return [
        Finding(
            claim=claims[method],
            measured=f"{target}, batch {row['batch']}: {format_bytes(row['peak_bytes'])} against "
            f"{format_bytes(plain['peak_bytes'])}, {row['peak_bytes'] / plain['peak_bytes']:.2f}x"
            + _temporaries(row, plain),
            verdict="agrees" if row["peak_bytes"] <= NEAR * plain["peak_bytes"] else "disagrees",
        )
        for method, row in found.items()
    ]


def _temporaries(row: Mapping[str, Any], plain: Mapping[str, Any]) -> str:
    if row["temp_bytes"] is None or not plain["temp_bytes"]:
        return ""
    return f"; temporaries {row['temp_bytes'] / plain['temp_bytes']:.2f}x"


def _judge_time(target: str, rows: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Where something was run."""
    ratios = {method: rows[method]["time_ratio"] for method in ("vmap", "surgery") if method in rows}
    claims = {"vmap": "MicroAdam by vmap takes 17% more time than Adam", "surgery": "by surgery almost no more"}
    near = {
        "vmap": lambda ratio: abs(ratio - PAPER_TIME) <= TIME_TOLERANCE,
        "surgery": lambda ratio: ratio <= NEAR,
    }
    return [
        Finding(
            claim=claims[method],
            measured=f"a step on {target}, batch {rows[method]['time_batch']}: {ratio:.2f}x of Adam's",
            verdict="agrees" if near[method](ratio) else "disagrees",
        )
        for method, ratio in ratios.items()
        if ratio is not None
    ]


def draw(tables: Tables) -> dict[str, Any]:
    """A bar for each way and target: what comes in and goes out, and the temporaries above it."""
    rows = [row for row in tables.get("memory", []) if row["peak_bytes"]]
    targets = list(dict.fromkeys(row["target"] for row in rows))
    figure, panels = make_panels(max(1, len(targets)))
    unit, unit_bytes = ("GiB", 2**30) if any(row["peak_bytes"] > 2**30 for row in rows) else ("MiB", 2**20)
    for axes, target in zip(panels, targets, strict=False):
        shown = [row for row in rows if row["target"] == target]
        temporaries = [(row["temp_bytes"] or 0) / unit_bytes for row in shown]
        kept = [row["peak_bytes"] / unit_bytes - temporary for row, temporary in zip(shown, temporaries, strict=True)]
        labels = [WAYS[row["method"]].replace(", ", ",\n") for row in shown]
        axes.bar(labels, kept, color="#0072B2", label="parameters, state, results", width=0.6)
        axes.bar(labels, temporaries, bottom=kept, color="#E69F00", hatch="//", label="temporaries", width=0.6)
        measured = [row["host_peak_bytes"] / unit_bytes if row["host_peak_bytes"] else None for row in shown]
        if all(measured):
            axes.plot(labels, measured, "kD", label="measured peak")
        axes.set(title=f"{target}, batch {shown[0]['batch']}", ylabel=f"memory ({unit})")
        axes.margins(y=0.4)  # room for the legend
        axes.legend(frameon=False, fontsize="small", loc="upper left")
    return {"memory": figure}


_COMPARED = (
    "One step of training, parameters and optimizer state included: Adam from the plain gradient, and MicroAdam with "
    "its second moment by vmap and by surgery. For a TPU and a GPU XLA's own compilers say what they would assign; on "
    "the CPU the step is run, in a process of its own, at a batch that fits."
)
_PEAKS = (
    f"A ratio of up to {NEAR} counts as no more. The 17% are the paper's for an accelerator; none was at hand here."
)

EXPERIMENT = Experiment(
    name="memory-baseline",
    title="What a step of MicroAdam needs",
    about=(_COMPARED, _PEAKS),
    packages=("matplotlib",),
    make_runs=make_runs,
    measure=measure,
    draw=draw,
    judge=judge,
    side_by_side=False,
)
