"""How the figures of all experiments look: colours that every reader can tell apart, and shapes that say the same."""

from collections.abc import Sequence
from typing import Any

# Okabe and Ito's colours; markers and dashes tell the same without colour.
_COLORS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))


def make_panels(count: int, *, height: float = 3.6) -> tuple[Any, Sequence[Any]]:
    """A figure with a row of axes."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "pegprof"  # the same data give the same file
    figure = Figure(figsize=(4.6 * count, height), layout="constrained")
    panels = figure.subplots(1, count, squeeze=False)[0]
    for axes in panels:
        axes.grid(alpha=0.3)
    return figure, panels


def name_ticks(axes: Any, at: Sequence[float]) -> None:
    """Ticks where something was measured, with plain numbers, and nowhere else."""
    axes.set_xticks(at, [f"{x:g}" for x in at])
    axes.set_xticks([], minor=True)
    if at:  # with some room; a logarithmic axis would else go on to the next power of ten
        axes.set_xlim(min(at) * 0.8 if min(at) else -0.2, max(at) * 1.25)


def style(number: int) -> dict[str, Any]:
    """The look of the n-th of the things that are compared."""
    return {
        "color": _COLORS[number % len(_COLORS)],
        "marker": _MARKERS[number % len(_MARKERS)],
        "linestyle": _DASHES[number % len(_DASHES)],
        "markersize": 5,
    }
