"""The bars of ``engine.py --check``: each gives values by what they are of, none of which may be above its limit."""

import dataclasses
import math
from collections.abc import Callable

from benchmarks.engine_results import NOISE, OURS, Results
from benchmarks.timing import geometric_mean
from pegprof.measure.worker.agreement import TOLERANCES

Values = dict[str, float | None]
MOMENTS, NORMS = frozenset({"mean", "second_moment"}), frozenset({"norm"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bar:
    what: str
    limit: float
    values: Callable[[Results], Values]
    stats: frozenset[str] | None = MOMENTS  # the statistics that it is for; None: any
    goal: float | None = None


def _times(kind: str = "") -> Callable[[Results], Values]:
    """Surgery's time by model, infinite where there is none although it was asked for."""

    def values(results: Results) -> Values:
        rows = [row for row in results.rows if not kind or kind in row.model.kinds]
        ours = {row.model.name: row.time_ratio(OURS) for row in rows if OURS in row.cells}
        return {name: math.inf if ratio is None else ratio for name, ratio in ours.items()}

    return values


def _mean_time(results: Results) -> Values:
    times = [t for t in _times()(results).values() if t is not None]
    return {"all models": geometric_mean(times)} if len(times) > 1 else {}


BARS = (
    Bar(what="time ÷ grad, geometric mean", limit=1.15, goal=1.05, values=_mean_time),
    Bar(what="time ÷ grad", limit=1.6, values=_times()),
    Bar(what="time ÷ grad, CNN and depthwise", limit=1.2, values=_times("convolution")),
    Bar(what="time ÷ grad, transformers with T ≥ D", limit=0.9, values=_times("T≥D")),
    Bar(what="time ÷ grad, scanned and rematerialised", limit=1.15, values=_times("scanned")),
    Bar(what="time ÷ grad, LSTM", limit=1.3, values=_times("recurrent")),
    Bar(what="time ÷ grad of norms, transformers", limit=1.3, values=_times("transformer"), stats=NORMS),
    Bar(
        what="time ÷ the best of vmap and micro_grad",
        limit=NOISE,
        values=lambda results: {row.model.name: row.time_against_others for row in results.rows},
        stats=None,
    ),
    Bar(
        what="temporaries ÷ what is allowed (1.1 × grad's, or grad's and one largest parameter)",
        limit=1.0,
        values=lambda results: {row.model.name: row.temp_against_allowed for row in results.rows},
        stats=None,
    ),
    Bar(
        what="error of the statistics",
        limit=TOLERANCES["float32"],
        values=lambda results: {row.model.name: row.cells[OURS].error for row in results.rows if OURS in row.cells},
        stats=None,
    ),
    Bar(
        what="compile time ÷ grad's",
        limit=2.5,
        values=lambda results: {"12 layers": results.extras.deep_compile_ratio if results.extras else None},
    ),
    Bar(
        what="seconds of tracing and planning",
        limit=3.0,
        values=lambda results: {"transformer-151m": results.extras.plan_s if results.extras else None},
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The bars in words: those that were missed, by what; those for which nothing was measured; the others."""

    missed: list[str]
    unmeasured: list[str]
    met: list[str]


def check_bars(results: Results) -> Outcome:
    """Hold what was measured against the bars that are for its statistics."""
    outcome = Outcome(missed=[], unmeasured=[], met=[])
    for bar in BARS:
        if bar.stats is not None and bar.stats != frozenset(results.stats):
            continue
        values = {name: value for name, value in bar.values(results).items() if value is not None}
        above = {name: value for name, value in values.items() if not value <= bar.limit}
        outcome.missed.extend(
            f"{bar.what}: {value:.3g} for {name}, the bar is {bar.limit:g}" for name, value in above.items()
        )
        if not values:
            outcome.unmeasured.append(bar.what)
        elif not above:
            worst = max(values, key=lambda name: values[name])
            outcome.met.append(f"{bar.what}: at most {values[worst]:.3g}, for {worst}; the bar is {bar.limit:g}")
    return outcome
