"""Sites × statistics -> Plan: which strategy each parameter gets, what that costs, and why.

A plan is data: it prints as a table, and ``grad_stats(..., plan=...)`` follows it.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from pegprof.engine.contraction import contraction_of
from pegprof.engine.hoist import hoist
from pegprof.engine.jaxpr import dtype_of, source_line, unbatchable_reason
from pegprof.engine.sites import Cut, Site, cut_program
from pegprof.engine.statistics import CENTRED, Quantity, Statistic, quantities_of, resolve
from pegprof.engine.strategies import STRATEGIES
from pegprof.engine.tails import example_dependent, size, variables
from pegprof.engine.trace import Loss, Roles, Trace, trace_example
from pegprof.errors import PegprofError

CHUNK_BYTES = 64 * 2**20
"""How much one parameter's materialised gradients may take at once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRow:
    """How one parameter gets its statistics."""

    parameter: str
    shape: tuple[int, ...]
    strategy: str  # of the table, or "constant" where no example has a part in the gradient
    contraction: str = ""
    rank: int | None = None  # bounds the rank of one example's gradient: T, the positions of an example
    chunk: int = 1  # how many gradients are held at once, where the strategy holds some
    flops: float = 0.0  # of the whole batch, at this site
    bytes: int = 0  # held at this site beside its frontier and the results
    why: str = ""
    source: str = ""  # the user's line, where the gradients are materialised


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What ``grad_stats`` does for a loss, a batch size and some statistics.

    ``str(plan)`` is a table with one row for each parameter.
    """

    rows: tuple[PlanRow, ...]
    stats: tuple[str, ...]
    batch: int
    microbatch_size: int  # B: all at once
    backend: str
    one_at_a_time: str = ""  # why the program cannot be batched, if it cannot

    @property
    def materialised(self) -> tuple[str, ...]:
        """The parameters whose gradients are materialised, for want of a strategy."""
        return tuple(row.parameter for row in self.rows if row.strategy == "materialise")

    def row(self, parameter: str) -> PlanRow:
        for row in self.rows:
            if row.parameter == parameter:
                return row
        raise PegprofError(
            f"the plan has no parameter {parameter}",
            where=parameter,
            hint="it was made for another loss or other parameters: make it again with make_plan",
        )

    def __str__(self) -> str:
        head = f"plan for {', '.join(self.stats)} of {self.batch} examples on {self.backend}, {self._pace()}"
        columns = ("parameter", "shape", "contraction", "T", "strategy", "flops", "bytes", "why")
        cells = [
            (
                row.parameter,
                "×".join(map(str, row.shape)) or "scalar",
                row.contraction or "–",
                "–" if row.rank is None else str(row.rank),
                row.strategy,
                _short(row.flops),
                _short_bytes(row.bytes),
                row.why,
            )
            for row in self.rows
        ]
        widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
        right = {"T", "flops", "bytes"}
        lines = [
            "  ".join(
                cell.rjust(width) if name in right else cell.ljust(width)
                for name, cell, width in zip(columns, line, widths, strict=True)
            ).rstrip()
            for line in (columns, *cells)
        ]
        return "\n".join([head, *lines])

    def _pace(self) -> str:
        if self.one_at_a_time:
            return f"one at a time: {self.one_at_a_time}"
        return "all at once" if self.microbatch_size >= self.batch else f"{self.microbatch_size} at a time"


def _short(number: float) -> str:
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.1f} {unit}"
    return f"{number:.0f}"


def _short_bytes(number: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= scale:
            return f"{number / scale:.1f} {unit}"
    return f"{number} B"


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
    return plan_sites(trace, find_sites(trace), resolve(stats), microbatch_size=microbatch_size, backend=backend)


def find_sites(trace: Trace) -> Cut:
    """The traced program, cut at its sites."""
    closed = hoist(trace.closed, gradients=trace.gradient_names, depends=trace.depends)
    return cut_program(closed, trace.gradient_names, trace.depends)


def plan_sites(
    trace: Trace, cut: Cut, stats: Sequence[Statistic], *, microbatch_size: int | None, backend: str | None
) -> Plan:
    """Choose a strategy for each site and a pace for the whole."""
    _check_batch(trace.B, stats, microbatch_size)
    reason = next(_unbatchable(trace), "")
    pace = 1 if reason else min(microbatch_size or trace.B, trace.B)
    rows = {name: _constant_row(trace, name) for name in cut.constants()}
    for site in cut.sites():
        rows.update((row.parameter, row) for row in _plan_site(trace, site, quantities_of(stats), pace))
    if pace == 1 and trace.B > 1:
        why = "one example at a time: the gradient of one example is all there is"
        rows = {n: dataclasses.replace(r, strategy="loop", chunk=1, why=why) for n, r in rows.items()}
    return Plan(
        rows=tuple(rows[name] for name in trace.names),
        stats=tuple(stat.name for stat in stats),
        batch=trace.B,
        microbatch_size=pace,
        backend=backend or jax.default_backend(),
        one_at_a_time=reason,
    )


def _check_batch(B: int, stats: Sequence[Statistic], microbatch_size: int | None) -> None:
    for stat in stats:
        if stat.minimum_batch > B:
            raise PegprofError(
                f"{stat.name} is not defined for a batch of {B}: {stat.formula}",
                where=stat.name,
                hint=f"give it at least {stat.minimum_batch} examples, or ask for another statistic",
            )
    if microbatch_size is not None and microbatch_size < 1:
        raise PegprofError(f"microbatch_size is {microbatch_size}", hint="it is a number of examples, or None")


def _unbatchable(trace: Trace) -> Iterator[str]:
    """Why vmap cannot batch the program: of each equation that has a part of the example in it."""
    dependent = example_dependent(trace.closed.jaxpr, trace.depends)
    for eqn in trace.closed.jaxpr.eqns:
        if dependent.intersection(variables(eqn.invars)) and (reason := unbatchable_reason(eqn)):
            yield reason


def _constant_row(trace: Trace, name: str) -> PlanRow:
    why = "no example has a part in this gradient"
    return PlanRow(parameter=name, shape=trace.shape_of(name), strategy="constant", why=why)


def _plan_site(trace: Trace, site: Site, quantities: Sequence[Quantity], B: int) -> list[PlanRow]:
    """The rows of the parameters whose gradients are formed at a site: they share a strategy."""
    tail = site.tail
    strategy = next(s for s in STRATEGIES.values() if s.fits(tail, quantities))
    made = contraction_of(tail, site.made_by)
    gradient_bytes = sum(size(v) * max(4, dtype_of(v).itemsize) for v in tail.outputs)
    chunk = max(1, min(B, CHUNK_BYTES // max(1, gradient_bytes)))
    line = source_line(site.made_by) if site.made_by else ""
    why = strategy.why
    if strategy.name == "materialise":
        operation = site.made_by.primitive.name if site.made_by else "its last step"
        why = f"{why}: {operation} forms it ({line})"
    if strategy.name == "factored" and any(q.name == CENTRED.name for q in quantities):
        why = f"{why}; the variance is a difference of moments"
    return [
        PlanRow(
            parameter=name,
            shape=trace.shape_of(name),
            strategy=strategy.name,
            contraction=made.text,
            rank=made.rank,
            chunk=chunk,
            flops=B * site.repeats * made.flops * strategy.products(quantities) / len(site.names),
            bytes=strategy.gradients_held(B, chunk) * gradient_bytes // len(site.names),
            why=why,
            source=line if strategy.name == "materialise" else "",
        )
        for v, names in zip(tail.outputs, site.parameters, strict=True)
        for name in names
    ]
