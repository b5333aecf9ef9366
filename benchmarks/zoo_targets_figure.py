"""The figure of ``zoo_targets.py``: a panel for each target, a line for each model, what each method needs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pegprof.errors import PegprofError

# Colours of Okabe and Ito, told apart with any colour vision; the markers tell the same without colour.
STYLES: dict[str, dict[str, Any]] = {
    "grad": {"color": "#000000", "marker": "o"},
    "vmap": {"color": "#0072B2", "marker": "^"},
    "microbatch": {"color": "#009E73", "marker": "D"},
    "surgery": {"color": "#D55E00", "marker": "s"},
}
GIB = 2**30


def draw(rows: Sequence[dict[str, str]], targets: Sequence[str], batch: int, path: Path) -> None:
    """Writes the figure as PNG and as SVG. What does not fit is hollow; the line is what the device has."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PegprofError("the figure needs matplotlib", hint="pip install -e '.[bench]'") from error
    mpl.rcParams["svg.hashsalt"] = "pegprof"  # the same data give the same file
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(3 + 3 * len(targets), 1.8 + 0.36 * len(models)), layout="constrained")
    panels = figure.subplots(1, len(targets), sharey=True, squeeze=False)[0]
    for panel, target in zip(panels, targets, strict=True):
        _draw_panel(panel, [row for row in rows if row["target"] == target], models)
        panel.set_title(target)
        panel.set_xlabel("GiB")
    panels[0].set_yticks(range(len(models)), models)
    panels[0].set_ylim(len(models) - 0.5, -0.5)
    figure.suptitle(f"Peak memory at batch {batch}, by XLA's compiler for each device")
    figure.legend(handles=_legend(), loc="outside lower center", ncols=len(STYLES) + 3, frameon=False)
    figure.savefig(path.with_suffix(".png"), dpi=150)
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})


def _draw_panel(panel: Any, rows: Sequence[dict[str, str]], models: Sequence[str]) -> None:
    panel.set_xscale("log")
    panel.grid(axis="x", color="#dddddd", linewidth=0.6)
    panel.set_axisbelow(True)
    for row in rows:
        line = models.index(row["model"])
        if row["activations_dominate"] == "true" and row["method"] == "grad":
            panel.axhspan(line - 0.5, line + 0.5, color="#F0E442", alpha=0.25, linewidth=0)
        if row["peak_bytes"]:
            style = STYLES[row["method"]]
            offset = 0.15 * (list(STYLES).index(row["method"]) - 1.5)  # so that equal needs do not hide each other
            face = style["color"] if row["status"] == "ok" else "white"
            needs = int(row["peak_bytes"]) / GIB
            panel.plot(needs, line + offset, linestyle="", markersize=5, markerfacecolor=face, **style)
    if capacities := {int(row["capacity_bytes"]) for row in rows if row["capacity_bytes"]}:
        panel.axvline(min(capacities) / GIB, color="#555555", linestyle="--", linewidth=1)


def _legend() -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    return [
        *(Line2D([], [], linestyle="", label=method, **style) for method, style in STYLES.items()),
        Line2D([], [], linestyle="", marker="o", color="#555555", markerfacecolor="white", label="does not fit"),
        Line2D([], [], linestyle="--", color="#555555", linewidth=1, label="what the device has"),
        Patch(color="#F0E442", alpha=0.25, label="activations dominate"),
    ]
