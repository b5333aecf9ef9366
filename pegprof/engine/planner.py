"""Trace -> Plan: a strategy for each site, by cost, and a number of examples at a time for the whole program.

The costs are counted (``costs.py``), the rates of the backend turn them into seconds, and the cheapest wins. Everything
that was compared is in the plan.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Unpack

from pegprof.engine.accumulators import Accumulator
from pegprof.engine.checks.arguments import Loss, check_batch
from pegprof.engine.costs import (
    Body,
    Cost,
    arrays_of,
    body_of,
    body_seconds,
    frontier_bytes,
    gradient_bytes,
    rebuilt_bytes,
)
from pegprof.engine.jaxpr import source_line, unbatchable_reason, variables
from pegprof.engine.kernels.selfcheck import trusted_chip
from pegprof.engine.kernels.switch import resolve_backend
from pegprof.engine.mesh import automatic_axes, find_share, on_one_device
from pegprof.engine.options import Options, PlanArgs, takes_options
from pegprof.engine.passes.loops import hoist
from pegprof.engine.plan import CONSTANT, Candidate, Plan, PlanRow, Schedule
from pegprof.engine.rules import RULES, Strategy, find_strategy, strategies
from pegprof.engine.sites import Cut, Site, cut_program
from pegprof.engine.statistics import Statistic, accumulators_of, resolve
from pegprof.engine.structures.contraction import describe_contraction
from pegprof.engine.tails import example_dependent
from pegprof.engine.trace import Trace, trace_example
from pegprof.targets.chips import Chip, find_chip
from pegprof.targets.rates import Rates, rates_of

AS_FAST = 1.02
"""Estimates of time that are this close do not tell two schedules apart. Then memory does: it is not free."""

AS_FAST_BY_ESTIMATE = 1.15
"""Likewise for the strategies of a site on an accelerator, whose times are rougher. There, fewer bytes moved decide."""

REUSED_BYTES = 32 * 2**20
"""What a program may allocate anew in every run at no cost: glibc hands out larger blocks as fresh pages, each of which
the kernel has to clear. (Its largest M_MMAP_THRESHOLD, to which it moves by itself.)"""

AS_MUCH_MEMORY = 1.1
"""On a CPU, where fewer examples at a time cost little, the body may take this much of the plain gradient's memory."""

CHUNK_BYTES = 64 * 2**20
"""How much the gradients that a site holds at once may take on a CPU."""

CHUNK_SHARE = 0.05
"""The same elsewhere, as a share of what the body may have to store. Every chunk reads and writes the accumulators, so
that fewer chunks move fewer bytes; and they may always take as much as the site's frontier."""


@takes_options(PlanArgs)
def make_plan(
    loss: Loss,
    *args: Any,
    stats: Sequence[str | Statistic] | str | Statistic = ("mean", "second_moment"),
    **options: Unpack[PlanArgs],
) -> Plan:
    """What ``grad_stats`` with the same options would do for these arguments; nothing is computed.

    Args:
      loss: as for ``grad_stats``.
      *args: its arguments; ``jax.ShapeDtypeStruct`` in place of arrays will do.
      stats: and all further options: as for ``grad_stats``.

    Returns:
      A ``Plan``; ``print`` it.

    >>> import jax.numpy as jnp
    >>> plan = make_plan(lambda w, x: jnp.mean((x @ w) ** 2), jnp.ones((3, 2)), jnp.ones((8, 3)), backend="cpu")
    >>> plan.row("params").contraction, plan.row("params").strategy
    ('bi,bo->io', 'factored')
    """
    wanted, given = resolve(stats), Options(**options)

    def plan_for(*args: Any) -> Plan:
        trace = trace_example(loss, args, given)
        return plan_sites(trace, find_sites(trace, accumulators_of(wanted)), wanted)

    share = find_share(args, given)
    if share is None:
        return plan_for(*args)
    wanted = tuple(dataclasses.replace(stat, minimum_batch=1) for stat in wanted)  # others have examples too
    return dataclasses.replace(on_one_device(share, plan_for, args, given), devices=share.devices)


def find_sites(trace: Trace, accumulators: Sequence[Accumulator]) -> Cut:
    """The traced program, cut at its sites.

    An accumulator that looks at a whole gradient cannot be filled inside a loop over layers, which sees slices of it.
    """
    names = trace.gradient_names
    by_slices = all(a.takes_parts for a in accumulators)
    whole, parts = (names, ()) if by_slices else ((), names)
    closed = hoist(trace.closed, gradients=whole, parts=parts, depends=trace.depends)
    return cut_program(closed, names, trace.depends, inside_loops=by_slices)


def plan_sites(trace: Trace, cut: Cut, stats: Sequence[Statistic]) -> Plan:
    """Choose a strategy for each site, and how many examples run at a time."""
    options = trace.options
    check_batch(trace.B, stats, options.microbatch_size)
    backend = resolve_backend(options.backend)
    accumulators = accumulators_of(stats)
    chip, remarks = trusted_chip(backend)
    axes = automatic_axes()
    if chip and axes:
        chip, remarks = None, (f"no fused kernels: XLA cannot shard them over the mesh axes {', '.join(axes)}",)
    body, rates = body_of(cut), rates_of(backend)
    planner = _Planner(
        trace=trace,
        cut=cut,
        accumulators=accumulators,
        backend=backend,
        rates=rates,
        chip=chip,
        body=body,
        is_sharded=bool(axes),
    )
    reason = unbatchable(trace)
    if reason:
        sizes = [1]
    elif options.microbatch_size is not None:
        sizes = [min(options.microbatch_size, trace.B)]
    else:
        sizes = _sizes_to_try(trace.B, body, backend, options.memory_budget)
    rows = {size: planner.plan_at(size) for size in sizes}
    schedules = [planner.schedule(size, rows[size]) for size in sizes]
    best = _best_schedule(schedules, backend, options.memory_budget)
    return Plan(
        rows=rows[best.microbatch_size],
        stats=tuple(stat.name for stat in stats),
        batch=trace.B,
        microbatch_size=best.microbatch_size,
        backend=backend,
        one_at_a_time=reason,
        schedules=tuple(schedules),
        rates={name: float(rate) for name, rate in dataclasses.asdict(rates).items() if rate is not None},
        remarks=remarks,
    )


def _sizes_to_try(B: int, body: Body, backend: str, memory_budget: int | None) -> list[int]:
    """All at once, and halves of it: on a CPU for speed, elsewhere only for want of memory.

    Where a loop over time stacks what the plain gradient would add up, all at once takes more memory than that. On a
    CPU half of it is as fast, so it is not even tried there.
    """
    if memory_budget is not None:
        return _halves(B)
    if backend != "cpu":
        return [B]
    plain_bytes = B * (body.live_bytes - body.stacked_bytes)
    return [size for size in _halves(B) if size == 1 or size * body.live_bytes <= AS_MUCH_MEMORY * plain_bytes]


def _halves(B: int) -> list[int]:
    """
    >>> _halves(6)
    [6, 3, 1]
    """
    return [B >> k for k in range(B.bit_length())]


def _best_schedule(schedules: Sequence[Schedule], backend: str, memory_budget: int | None) -> Schedule:
    """The largest that fits the budget, on a CPU the leanest of the fastest; if none fits, what needs least."""
    fitting = [each for each in schedules if memory_budget is None or each.bytes <= memory_budget]
    if not fitting:
        return min(schedules, key=lambda each: each.bytes)
    if backend != "cpu":
        return fitting[0]
    least_s = min(each.seconds for each in fitting)
    fastest = [each for each in fitting if each.seconds <= AS_FAST * least_s]
    return min(fastest, key=lambda each: (max(each.bytes, REUSED_BYTES), -each.microbatch_size))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Planner:
    """What all choices for one program have in common."""

    trace: Trace
    cut: Cut
    accumulators: tuple[Accumulator, ...]
    backend: str
    rates: Rates
    chip: Chip | None  # whose kernels may be used
    body: Body
    is_sharded: bool  # whether XLA shards the program over axes of a mesh

    def plan_at(self, examples: int) -> tuple[PlanRow, ...]:
        """The rows for some examples at a time, in the order of the parameters."""
        why = "no example has a part in this gradient"
        rows = {
            name: PlanRow(parameter=name, shape=self.trace.shape_of(name), strategy=CONSTANT, why=why)
            for name in self.cut.constants()
        }
        for site in self.cut.sites():
            rows.update((row.parameter, row) for row in self.plan_site(site, examples))
        return tuple(rows[name] for name in self.trace.names)

    def plan_site(self, site: Site, examples: int) -> list[PlanRow]:
        """The rows of the parameters whose gradients are formed at a site."""
        chunk = max(1, min(examples, int(self.room_at(site, examples) // max(1, gradient_bytes(site.tail)))))
        if self.is_sharded:
            chunk = examples
        best, *_ = candidates = self.candidates(site, examples, chunk)
        contraction, rank = describe_contraction(site.tail, site.formed_by)
        unknown = None if best.strategy in RULES else site.unknown
        line = source_line(unknown) if unknown else ""
        why = f"no rule covers it: {unknown.primitive.name} forms it ({line})" if unknown else ""
        return [
            PlanRow(
                parameter=name,
                shape=self.trace.shape_of(name),
                strategy=best.strategy,
                site=site.key,
                structure=type(structure).__name__.lower(),
                contraction=contraction,
                rank=rank,
                chunk=chunk,
                flops=best.flops * site.repeats * self.trace.B / examples / len(site.names),
                bytes_moved=best.bytes_moved * site.repeats * self.trace.B / examples / len(site.names),
                bytes=int(best.bytes_held) // len(site.names),
                why=why or find_strategy(best.strategy).why,
                source=line,
                kernel=find_strategy(best.strategy).is_kernel,
                materialised=unknown is not None,
                candidates=candidates,
            )
            for structure, names in zip(site.structures, site.parameters, strict=True)
            for name in names
        ]

    def room_at(self, site: Site, examples: int) -> float:
        """How many bytes of gradients a site may hold at once."""
        frontier = examples * frontier_bytes(site.tail)
        if self.backend == "cpu":
            return min(CHUNK_BYTES, frontier)
        return max(frontier, CHUNK_SHARE * examples * self.body.live_bytes)

    def candidates(self, site: Site, examples: int, chunk: int) -> tuple[Candidate, ...]:
        """The strategies that fit, the one to take first, then the cheapest."""
        fitting = [s for s in strategies().values() if s.covers(site, self.accumulators, self.chip)]
        if self.is_sharded:  # in a loop over examples XLA would send a part of each gradient from device to device
            fitting = [s for s in fitting if not s.loops]
        if self.backend != "cpu":  # a CPU runs fewer examples at a time instead
            fitting = [s for s in fitting if s.frees_memory] or fitting
        costs = {s.name: self.cost_of(s, site, examples, chunk) for s in fitting}
        found = [
            Candidate(
                strategy=name,
                seconds=self.rates.seconds(cost),
                flops=cost.product_flops,
                bytes_moved=cost.bytes_moved,
                bytes_held=cost.bytes_held,
            )
            for name, cost in costs.items()
        ]
        found.sort(key=lambda candidate: candidate.seconds)
        if self.backend != "cpu":  # bytes decide where times are close
            close = [c for c in found if c.seconds <= AS_FAST_BY_ESTIMATE * found[0].seconds]
            best = min(close, key=lambda candidate: candidate.bytes_moved)
            found.sort(key=lambda candidate: candidate is not best)
        return tuple(found)

    def cost_of(self, strategy: Strategy, site: Site, examples: int, chunk: int) -> Cost:
        """What a strategy takes. A GPU's products take stored operands: what is rebuilt for them is written first."""
        cost = strategy.cost_at(site, self.accumulators, examples, chunk, self.chip)
        target = find_chip(self.backend)
        if strategy.recomputes and target is not None and target.backend == "gpu":
            cost += Cost(bytes_moved=2.0 * examples * rebuilt_bytes(site))
        return cost

    def schedule(self, examples: int, rows: Sequence[PlanRow]) -> Schedule:
        """What the whole batch takes with some examples at a time, by estimate."""
        by_site = {row.site: row.candidates[0] for row in rows if row.candidates}
        sites = [(site, by_site[site.key]) for site in self.cut.sites()]
        results = sum(4 * math.prod(row.shape) for row in rows) * arrays_of(self.accumulators)
        several = examples < self.trace.B
        one_chunk = body_seconds(self.body, examples, self.rates)
        one_chunk += sum(candidate.seconds * site.repeats for site, candidate in sites)
        one_chunk += 3 * results / self.rates.bandwidth if several else 0.0  # merging reads two and writes one
        held = max((candidate.bytes_held for _, candidate in sites), default=0.0)
        return Schedule(
            microbatch_size=examples,
            seconds=one_chunk * self.trace.B / examples,
            bytes=examples * self.body.live_bytes + held + results * (2 if several else 1),
        )


def unbatchable(trace: Trace) -> str:
    """Why vmap cannot batch the program, or "" if it can."""
    dependent = example_dependent(trace.closed.jaxpr, trace.depends)
    mixed = (eqn for eqn in trace.closed.jaxpr.eqns if dependent.intersection(variables(eqn.invars)))
    return next((reason for eqn in mixed if (reason := unbatchable_reason(eqn))), "")
