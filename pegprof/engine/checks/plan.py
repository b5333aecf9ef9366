"""``check_plan``: whether a plan that a user gave is one for this program and these statistics."""

from collections.abc import Sequence

from pegprof.engine.checks.arguments import check_batch
from pegprof.engine.plan import CONSTANT, Plan, PlanRow
from pegprof.engine.planner import unbatchable
from pegprof.engine.rules import find_strategy, strategies
from pegprof.engine.sites import Cut
from pegprof.engine.statistics import Statistic, accumulators_of
from pegprof.engine.trace import Trace
from pegprof.errors import PegprofError, nearest
from pegprof.targets.chips import find_chip


def check_plan(given: Plan, trace: Trace, cut: Cut, stats: Sequence[Statistic]) -> Plan:
    """A plan from outside, if it is one for this program and these statistics. Any other may give wrong numbers."""
    check_batch(trace.B, stats, None)
    asked = [stat.name for stat in stats]
    if set(given.stats) != set(asked):
        raise _misfit(f"the plan is for {', '.join(given.stats)}, but asked for is {', '.join(asked)}")
    alone = given.one_at_a_time or unbatchable(trace)
    if alone and given.microbatch_size != 1:
        raise _misfit(f"the plan runs {given.microbatch_size} examples at a time, but here it is one: {alone}")
    for name in trace.names:
        _check_row(given.row(name), trace.shape_of(name))
    accumulators = accumulators_of(stats)
    for site in cut.sites():
        for strategy in {given.row(name).strategy for name in site.names}:
            if strategy == CONSTANT or not find_strategy(strategy).covers(site, accumulators, find_chip(given.backend)):
                what = f"the plan's strategy {strategy} does not fit the gradient of {site.names[0]}"
                raise _misfit(f"{what} and the statistics {', '.join(asked)}", where=site.names[0])
        given.at(site.key)
    return given


def _check_row(row: PlanRow, shape: tuple[int, ...]) -> None:
    if row.strategy not in strategies() and row.strategy != CONSTANT:
        raise PegprofError(
            f"the plan names an unknown strategy {row.strategy!r}", hint=nearest(row.strategy, strategies())
        )
    if row.shape != shape:
        raise _misfit(
            f"the plan is for a parameter {row.parameter} of shape {row.shape}, but here it is {shape}",
            where=row.parameter,
        )


def _misfit(what: str, where: str = "") -> PegprofError:
    hint = "make the plan anew with make_plan, for this loss, these shapes and these statistics"
    return PegprofError(what, where=where, hint=hint)
