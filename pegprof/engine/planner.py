"""Trace -> Plan: a strategy for each site, by cost, and a pace for the whole program.

The costs are counted (``costs.py``), the rates of the backend turn them into seconds, and the cheapest wins. Everything
that was compared is in the plan.
"""

import dataclasses
import math
import numbers
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from pegprof.engine.contraction import contraction_of
from pegprof.engine.costs import Rates, frontier_bytes, gradient_bytes, rates_of
from pegprof.engine.early import with_early_parts
from pegprof.engine.hoist import hoist
from pegprof.engine.jaxpr import source_line, unbatchable_reason
from pegprof.engine.pace import Body, body_of, body_seconds
from pegprof.engine.plan import MATERIALISE, Candidate, Pace, Plan, PlanRow
from pegprof.engine.sites import Cut, Site, cut_program
from pegprof.engine.statistics import Quantity, Statistic, quantities_of, resolve
from pegprof.engine.strategies import STRATEGIES
from pegprof.engine.tails import Tail, example_dependent, variables
from pegprof.engine.trace import Loss, Roles, Trace, trace_example
from pegprof.errors import PegprofError

AS_FAST = 1.02
"""Estimates of time that are this close do not tell two paces apart. Then memory does: it is not free."""

REUSED_BYTES = 32 * 2**20
"""What a program may allocate anew in every run at no cost: glibc hands out larger blocks as fresh pages, each of which
the kernel has to clear. (Its largest M_MMAP_THRESHOLD, to which it moves by itself.)"""

AS_MUCH_MEMORY = 1.1
"""On a CPU, where fewer examples at a time cost little, the body may take this much of the plain gradient's memory."""

CHUNK_BYTES = 64 * 2**20
"""How much the gradients that a site holds at once may take, at the most."""


def make_plan(
    loss: Loss,
    *args: Any,
    stats: Sequence[str | Statistic] | str | Statistic = ("mean", "second_moment"),
    argnums: int | tuple[int, ...] = 0,
    batch_argnums: int | tuple[int, ...] = 1,
    keep_batch_dim: bool = True,
    has_aux: bool = False,
    prng_argnum: int | None = None,
    microbatch_size: int | None = None,
    backend: str | None = None,
    memory_budget: int | None = None,
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
    roles = Roles(
        argnums=argnums,
        batch_argnums=batch_argnums,
        keep_batch_dim=keep_batch_dim,
        has_aux=has_aux,
        prng_argnum=prng_argnum,
    )
    trace = trace_example(loss, args, roles)
    return plan_sites(
        trace,
        find_sites(trace),
        resolve(stats),
        microbatch_size=microbatch_size,
        backend=backend,
        memory_budget=memory_budget,
    )


def find_sites(trace: Trace) -> Cut:
    """The traced program, cut at its sites."""
    closed = hoist(trace.closed, gradients=trace.gradient_names, depends=trace.depends)
    return with_early_parts(cut_program(closed, trace.gradient_names, trace.depends))


def plan_sites(
    trace: Trace,
    cut: Cut,
    stats: Sequence[Statistic],
    *,
    microbatch_size: int | None,
    backend: str | None,
    memory_budget: int | None = None,
) -> Plan:
    """Choose a strategy for each site and a pace for the whole."""
    _check_batch(trace.B, stats, microbatch_size)
    where = backend or jax.default_backend()
    quantities = tuple(quantities_of(stats).values())
    planner = _Planner(trace=trace, cut=cut, quantities=quantities, backend=where, rates=rates_of(where))
    body = body_of(cut)
    reason = next(_unbatchable(trace), "")
    if reason:
        sizes = [1]
    elif microbatch_size is not None:
        sizes = [min(microbatch_size, trace.B)]
    else:
        sizes = _paces_to_try(trace.B, body, where, memory_budget)
    options = {size: planner.plan_at(size) for size in sizes}
    paces = [planner.pace(size, options[size], body) for size in sizes]
    best = _best_pace(paces, where, memory_budget)
    return Plan(
        rows=options[best.microbatch_size],
        stats=tuple(stat.name for stat in stats),
        batch=trace.B,
        microbatch_size=best.microbatch_size,
        backend=where,
        one_at_a_time=reason,
        paces=tuple(paces),
        rates=dataclasses.asdict(planner.rates),
    )


def _paces_to_try(B: int, body: Body, backend: str, memory_budget: int | None) -> list[int]:
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


def _best_pace(paces: Sequence[Pace], backend: str, memory_budget: int | None) -> Pace:
    """The largest that fits the budget, on a CPU the leanest of the fastest; if none fits, what needs least."""
    fitting = [pace for pace in paces if memory_budget is None or pace.bytes <= memory_budget]
    if not fitting:
        return min(paces, key=lambda pace: pace.bytes)
    if backend != "cpu":
        return fitting[0]
    least_s = min(pace.seconds for pace in fitting)
    fastest = [pace for pace in fitting if pace.seconds <= AS_FAST * least_s]
    return min(fastest, key=lambda pace: (max(pace.bytes, REUSED_BYTES), -pace.microbatch_size))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Planner:
    """What all choices for one program have in common."""

    trace: Trace
    cut: Cut
    quantities: tuple[Quantity, ...]
    backend: str
    rates: Rates

    def plan_at(self, examples: int) -> tuple[PlanRow, ...]:
        """The rows for some examples at a time, in the order of the parameters."""
        rows = {name: _constant_row(self.trace, name) for name in self.cut.constants()}
        for site in self.cut.sites():
            rows.update((row.parameter, row) for row in self.plan_site(site, examples))
        return tuple(rows[name] for name in self.trace.names)

    def plan_site(self, site: Site, examples: int) -> list[PlanRow]:
        """The rows of the parameters whose gradients are formed at a site: they share a strategy."""
        tail = site.tail
        room = min(CHUNK_BYTES, examples * frontier_bytes(tail))
        chunk = max(1, min(examples, room // max(1, gradient_bytes(tail))))
        candidates = self.candidates(tail, examples, chunk)
        best = candidates[0]
        made = contraction_of(tail, site.made_by)
        materialised = best.strategy == MATERIALISE
        return [
            PlanRow(
                parameter=name,
                shape=self.trace.shape_of(name),
                strategy=best.strategy,
                contraction=made.text,
                rank=made.rank,
                chunk=chunk,
                flops=best.flops * site.repeats * self.trace.B / examples / len(site.names),
                bytes=int(best.bytes_held) // len(site.names),
                why=self.reason(site, best.strategy),
                source=source_line(site.made_by) if materialised and site.made_by else "",
                candidates=candidates,
            )
            for name in site.names
        ]

    def candidates(self, tail: Tail, examples: int, chunk: int) -> tuple[Candidate, ...]:
        """The strategies that fit, cheapest first; what fits everything counts only where nothing else does."""
        fitting = [s for s in STRATEGIES.values() if s.fits(tail, self.quantities)]
        known = [s for s in fitting if s.name != MATERIALISE] or fitting
        if self.backend != "cpu":  # a CPU runs fewer examples at a time instead
            known = [s for s in known if s.frees_memory] or known
        costs = {s.name: s.cost(tail, self.quantities, examples, chunk) for s in known}
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
        return tuple(sorted(found, key=lambda candidate: candidate.seconds))

    def reason(self, site: Site, strategy: str) -> str:
        why = STRATEGIES[strategy].why
        if strategy == MATERIALISE and site.made_by:
            return f"{why}: {site.made_by.primitive.name} forms it ({source_line(site.made_by)})"
        return why

    def pace(self, examples: int, rows: Sequence[PlanRow], body: Body) -> Pace:
        """What the whole batch takes at a pace, by estimate."""
        by_name = {row.parameter: row for row in rows}
        sites = [(site, by_name[site.names[0]].candidates[0]) for site in self.cut.sites()]
        results = sum(4 * math.prod(row.shape) for row in rows) * len(self.quantities)
        several = examples < self.trace.B
        one_chunk = body_seconds(body, examples, self.rates)
        one_chunk += sum(candidate.seconds * site.repeats for site, candidate in sites)
        one_chunk += 3 * results / self.rates.bandwidth if several else 0.0  # merging reads two and writes one
        held = max((candidate.bytes_held for _, candidate in sites), default=0.0)
        return Pace(
            microbatch_size=examples,
            seconds=one_chunk * self.trace.B / examples,
            bytes=examples * body.live_bytes + held + results * (2 if several else 1),
        )


def _check_batch(B: int, stats: Sequence[Statistic], microbatch_size: Any) -> None:
    for stat in stats:
        if stat.minimum_batch > B:
            raise PegprofError(
                f"{stat.name} is not defined for a batch of {B}: {stat.formula}",
                where=stat.name,
                hint=f"give it at least {stat.minimum_batch} examples, or ask for another statistic",
            )
    if microbatch_size is not None and (not isinstance(microbatch_size, numbers.Integral) or microbatch_size < 1):
        raise PegprofError(f"microbatch_size is {microbatch_size!r}", hint="it is a whole number of examples, or None")


def _unbatchable(trace: Trace) -> Iterator[str]:
    """Why vmap cannot batch the program: of each equation that has a part of the example in it."""
    dependent = example_dependent(trace.closed.jaxpr, trace.depends)
    for eqn in trace.closed.jaxpr.eqns:
        if dependent.intersection(variables(eqn.invars)) and (reason := unbatchable_reason(eqn)):
            yield reason


def _constant_row(trace: Trace, name: str) -> PlanRow:
    why = "no example has a part in this gradient"
    return PlanRow(parameter=name, shape=trace.shape_of(name), strategy="constant", why=why)
