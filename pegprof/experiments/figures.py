"""How the figures of all experiments look: colours that every reader can tell apart, and shapes that say the same."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

# Okabe and Ito's colours; markers and dashes tell the same without colour.
_COLORS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)), (0, (7, 3)))


def make_panels(count: int, *, height: float = 3.6) -> tuple[Any, Sequence[Any]]:
    """A figure with a row of axes."""
    figure, (panels,) = make_grid(1, count, height=height)
    return figure, panels


def make_grid(rows: int, columns: int, *, height: float = 3.6) -> tuple[Any, Any]:
    """A figure with rows of axes, in an array."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "pegprof"  # the same data give the same file
    figure = Figure(figsize=(4.6 * columns, height * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.grid(alpha=0.3)
    return figure, grid


def name_ticks(axes: Any, at: Sequence[float]) -> None:
    """Ticks where something was measured, with plain numbers, and nowhere else."""
    axes.set_xticks(at, [f"{x:g}" for x in at])
    axes.set_xticks([], minor=True)
    if at:  # with some room; a logarithmic axis would else go on to the next power of ten
        axes.set_xlim(min(at) * 0.8 if min(at) else -0.2, max(at) * 1.25)


def draw_losses(axes: Any, losses: Mapping[Any, Sequence[float]], **look: Any) -> None:
    """A line through the means of the seeds, with their standard deviations as error bars."""
    means = [statistics.fmean(values) for values in losses.values()]
    spreads = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in losses.values()]
    axes.errorbar(list(losses), means, yerr=spreads, capsize=3, **look)


def focus(axes: Any, lowest: float, span: float) -> None:
    """Shows the losses that matter; what is far above, because training failed, would press them together."""
    top = axes.get_ylim()[1]
    axes.set_ylim(lowest - 0.08 * span, min(top, lowest + span))
    if top > lowest + span:
        axes.text(0.99, 0.98, "some are above", transform=axes.transAxes, ha="right", va="top", fontsize="small")


def style(number: int) -> dict[str, Any]:
    """The look of the n-th of the things that are compared."""
    return {"color": _COLORS[number % len(_COLORS)], **_shape(number)}


def graded_style(number: int, count: int) -> dict[str, Any]:
    """The look of the n-th of so many sizes, from dark to light."""
    import matplotlib as mpl

    return {"color": mpl.colormaps["viridis"](0.9 * number / max(1, count - 1)), **_shape(number)}


def _shape(number: int) -> dict[str, Any]:
    return {
        "marker": _MARKERS[number % len(_MARKERS)],
        "linestyle": _DASHES[number % len(_DASHES)],
        "markersize": 5,
    }
