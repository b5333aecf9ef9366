"""tied, staged: a table that is multiplied by and looked up in. Its gradient is a product P plus T rows L.

**tied** adds the rows into the product, in its place. As differentiated, an example's gradient is
steps(P) + steps'(zeros with T rows added). With steps' undone on the product that is

    steps'(undo steps'(steps(P)) with T rows added):

no V×D array for the lookup, and no pass to add it. Since steps only permute entries, they are left out of the loop over
the examples and applied to the summaries. A table used as it stands gains little, because XLA finds the first part by
itself; one that is transposed for one of its uses takes half the time on a CPU.

**staged** does that in two stages. The backward pass makes P first, at the logits, and L last, at the embedding. Until
both are there nothing can be squared, so the logits of the whole batch would be held through the backward pass. But L
is zero outside the T rows that an example looks up. With p its rows of P, kept as T×D, and l those of L,

    mean of phi(P + L) = (1/B) Σ_i (phi(P_i), without those rows) + (1/B) Σ_i phi(p_i + l_i), added at those rows:

the first part when P is made, the second at the end. Nothing is subtracted, so phi may be infinite. That is exact for
a mean over the examples and for norms; a variance about the mean is not of that kind.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pegprof.engine.accumulators import Accumulator, Moment, PerExample, SquareNorm, fold
from pegprof.engine.costs import Cost
from pegprof.engine.dtypes import widen
from pegprof.engine.jaxpr import Env, JaxprEqn, bind, equations_of, size_of, variables
from pegprof.engine.rules.base import Rule
from pegprof.engine.rules.folds import loop_cost, run_loop, unrolled
from pegprof.engine.sites import Site
from pegprof.engine.stages import Accumulators, Frontier, Stage, Summaries
from pegprof.engine.structures import Rows, Steps, Structure, Sum, can_invert, invert, permute, same_steps
from pegprof.engine.structures.lookups import Table, add_up_equal, ids_of, updates_of
from pegprof.engine.tails import Tail, leading_to


@dataclasses.dataclass(frozen=True, kw_only=True)
class TiedTable:
    """The two halves of a tied table's gradient: the products, and the lookups that add rows."""

    products: tuple[Structure, ...]
    lookups: tuple[JaxprEqn, ...]
    steps: Steps  # from the table as it is looked up in to the parameter

    @classmethod
    def of(cls, site: Site) -> "TiedTable":
        rows = [part for part in site.structures[0].parts if isinstance(part, Rows)]
        others = tuple(part for part in site.structures[0].parts if not isinstance(part, Rows))
        return cls(products=others, lookups=tuple(eqn for part in rows for eqn in part.lookups), steps=rows[0].steps)

    @property
    def table(self) -> Table:
        return Table.of(self.lookups[0])

    def product(self, env: Env) -> Any:
        """The sum of the products, as the table that is looked up in."""
        first, *rest = (invert(self.steps, permute(s.steps, env.read([s.source])[0])) for s in self.products)
        return sum(rest, start=first)

    def permuted(self, summaries: Sequence[Any], accumulators: Accumulators) -> list[Any]:
        """Summaries of the table as those of the parameter."""
        pairs = zip(accumulators, summaries, strict=True)
        return [x if a.per_example else jax.tree.map(lambda y: permute(self.steps, y), x) for a, x in pairs]


def _fits_tied(site: Site, accumulators: Accumulators) -> bool:
    """One gradient, a sum of lookups and of something else that the tail makes."""
    if len(site.structures) != 1 or site.unknown is not None:
        return False
    rows = [part for part in site.structures[0].parts if isinstance(part, Rows)]
    return (
        0 < len(rows) < len(site.structures[0].parts)
        and can_invert(rows[0].steps)
        and all(same_steps(part.steps, rows[0].steps) for part in rows)
        and all(a.takes_parts for a in accumulators)
    )


def _rewritten(site: Site, tail: Tail) -> Tail:
    """A tail that makes the table before its steps, with the rows added into the product."""
    tied = TiedTable.of(site)
    sources = [part.source for part in tied.products]
    needed = leading_to(tail.equations, [*sources, *(v for eqn in tied.lookups for v in eqn.invars[1:])])
    made = {v for eqn in needed for v in eqn.outvars}
    used = [*(v for eqn in (*needed, *tied.lookups) for v in eqn.invars), *sources]
    taken = dict.fromkeys(v for v in variables(used) if v not in made)

    def run(*values: Any) -> Any:
        env = Env()
        env.write(taken, values)
        env.run(needed)
        total = tied.product(env)
        for eqn in tied.lookups:
            (total,) = bind(eqn, [total, *env.read(eqn.invars[1:])])
        return total

    equations, outputs = equations_of(run, list(taken))
    return dataclasses.replace(tail, equations=tuple(equations), outputs=tuple(outputs))


def _run_tied(site: Site, accumulators: Accumulators, frontier: Frontier, chunk: int) -> Summaries:
    rewritten = dataclasses.replace(frontier, tail=_rewritten(site, frontier.tail))
    (summaries,) = run_loop(accumulators, rewritten, chunk)
    return [TiedTable.of(site).permuted(summaries, accumulators)]


def _cost_tied(site: Site, accumulators: Accumulators, B: int, chunk: int) -> Cost:
    return loop_cost(_rewritten(site, site.tail), accumulators, B, chunk)


TIED = Rule(
    name="tied",
    loops=True,
    why="one product an example, the rows looked up added into it",
    structure=Sum,
    accumulators=(Accumulator,),
    fits=_fits_tied,
    run=_run_tied,
    cost=_cost_tied,
    recomputes=True,
)


class Product(NamedTuple):
    """One example's product, and the rows that it looks up: what the first stage folds over."""

    table: jax.Array
    ids_T: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowsKept(PerExample):
    """The rows of a product that the example looks up, [T, D]."""

    shape: Table

    def of_one(self, g: Product) -> jax.Array:  # type: ignore[override]
        return self.shape.flatten(g.table).at[g.ids_T].get(mode="clip")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MomentElsewhere(Accumulator):
    """A moment of the product in which the rows that an example looks up count as nothing.

    For phi that is not the same as a zero.
    """

    moment: Moment
    shape: Table

    def init(self, g: Any) -> jax.Array:
        return self.moment.init(g.table)

    def add(self, state: jax.Array, g: Product, n: Any) -> jax.Array:  # type: ignore[override]
        return state + jnp.where(looked_up(g, self.shape), 0, self.moment.phi(g.table))

    def finish(self, state: jax.Array, n: Any) -> jax.Array:
        return state / n


@dataclasses.dataclass(frozen=True, kw_only=True)
class SquareNormElsewhere(PerExample):
    """The squared norm of the product without the rows that the example looks up."""

    shape: Table

    def of_one(self, g: Product) -> jax.Array:  # type: ignore[override]
        return jnp.sum(jnp.where(looked_up(g, self.shape), 0, jnp.square(g.table)))


def looked_up(g: Product, shape: Table) -> jax.Array:
    """Whether an entry of the table is in a row that the example looks up."""
    looked_up_V = jnp.zeros(shape.V, bool).at[g.ids_T].set(True, mode="drop")
    return shape.unflatten(jnp.broadcast_to(looked_up_V[:, None], (shape.V, shape.D)))


def fits_staged(site: Site, accumulators: Accumulators) -> bool:
    if not _fits_tied(site, accumulators):
        return False
    lookups = TiedTable.of(site).lookups
    rows = sum(size_of(lookup.invars[2]) for lookup in lookups)
    return rows < size_of(site.tail.outputs[0]) and all(Table.of(e) == Table.of(lookups[0]) for e in lookups)


def _stages(site: Site, accumulators: Accumulators, chunk: int) -> Sequence[Stage]:
    tied = TiedTable.of(site)
    sources, places = [part.source for part in tied.products], [eqn.invars[1] for eqn in tied.lookups]
    of_product: list[Accumulator] = [
        MomentElsewhere(moment=a, shape=tied.table) if isinstance(a, Moment) else SquareNormElsewhere(shape=tied.table)
        for a in accumulators
    ]
    of_product.append(RowsKept(shape=tied.table))

    def run_product(frontier: Frontier, _: Summaries) -> Summaries:
        return _run_product(tied, of_product, frontier, chunk)

    def run_rows(frontier: Frontier, before: Summaries) -> Summaries:
        ((*summaries, rows_BxTxD),) = before
        return [tied.permuted(_add_rows(tied, accumulators, summaries, rows_BxTxD, frontier), accumulators)]

    first = site.recomputing.part_that_makes([*sources, *places])
    second = site.recomputing.part_that_makes([v for eqn in tied.lookups for v in eqn.invars[1:]])
    return [
        Stage(site=site, tail=first, accumulators=of_product, run=run_product, is_last=False, recomputes=True),
        Stage(site=site, tail=second, accumulators=accumulators, run=run_rows, before=of_product),
    ]


def _run_product(tied: TiedTable, accumulators: Accumulators, frontier: Frontier, chunk: int) -> Summaries:
    """The first stage: the product's summaries without the rows looked up, and those rows."""
    tail = frontier.tail

    def product_of(example: Any) -> list[Product]:
        values = tail.run(*frontier.with_examples(example))
        env = Env()
        env.write(tail.outputs, values)
        places = values[len(tied.products) :]
        ids = [ids_of(e, jnp.asarray(x)[None], tied.table)[0] for e, x in zip(tied.lookups, places, strict=True)]
        return [Product(widen(tied.product(env)), jnp.concatenate(ids))]

    unroll = unrolled(tail, min(chunk, frontier.B))
    return fold(accumulators, product_of, frontier.examples(), frontier.B, unroll=unroll)


def _add_rows(
    tied: TiedTable, accumulators: Accumulators, before: Sequence[Any], rows_BxTxD: jax.Array, frontier: Frontier
) -> list[Any]:
    """The second stage: what is accumulated of the whole, from that of the product without the rows looked up."""
    table, B = tied.table, frontier.B
    operands = frontier.values_of(frontier.tail.outputs)
    triples = list(zip(tied.lookups, operands[0::2], operands[1::2], strict=True))
    ids_BxT = jnp.concatenate([ids_of(eqn, places, table) for eqn, places, _ in triples], axis=1)
    updates_BxTxD = jnp.concatenate([updates_of(eqn, widen(u), table) for eqn, _, u in triples], axis=1)
    ids_BxT, added_BxTxD = add_up_equal(ids_BxT, updates_BxTxD, table.V)
    rows_BxTxD = jnp.where((ids_BxT < table.V)[:, :, None], rows_BxTxD + added_BxTxD, 0)  # each row once

    def whole(accumulator: Accumulator, summary: Any) -> jax.Array:
        if isinstance(accumulator, Moment):
            phi_NxD = accumulator.phi(rows_BxTxD).reshape(-1, table.D) / B
            return table.unflatten(table.flatten(summary).at[ids_BxT.ravel()].add(phi_NxD, mode="drop"))
        return summary + jnp.sum(jnp.square(rows_BxTxD), axis=(1, 2))

    return [whole(a, summary) for a, summary in zip(accumulators, before, strict=True)]


def _cost_staged(site: Site, accumulators: Accumulators, B: int, chunk: int) -> Cost:
    """That of tied, and for each accumulator one more pass over the rows looked up."""
    return _cost_tied(site, accumulators, B, chunk) + cost_of_rows(site, accumulators, B)


def cost_of_rows(site: Site, accumulators: Accumulators, B: int) -> Cost:
    """The second stage: the rows looked up are added up, and added to each accumulator."""
    rows = 4.0 * B * sum(size_of(lookup.invars[2]) for lookup in TiedTable.of(site).lookups)
    return Cost(bytes_moved=(3 + 3 * len(accumulators)) * rows, bytes_held=2 * rows)


STAGED = Rule(
    name="staged",
    loops=True,
    why="the product's statistics at once, the rows looked up put right at the end",
    structure=Sum,
    accumulators=(Moment, SquareNorm),
    fits=fits_staged,
    cost=_cost_staged,
    recomputes=True,
    frees_memory=True,
    stages=_stages,
)
