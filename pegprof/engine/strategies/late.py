"""late: as ``tied``, but the product is reduced where it is made, and the rows looked up are added at the end.

The backward pass makes a tied table's product P first, at the logits, and its lookup's rows L last, at the embedding.
Until both are there nothing can be squared, so the logits of the whole batch would be held through the backward pass.
But L is zero outside the T rows that an example looks up. With p its rows of P, kept as T×D, and l those of L,

    mean of phi(P + L) = (1/B) Σ_i (phi(P_i), but for those rows) + (1/B) Σ_i phi(p_i + l_i), added at those rows:

the first part when P is made, the second at the end. Nothing is taken away again, so phi may be infinite. That is exact
for whatever is a mean over the examples, and for norms; a variance about the mean is not of that kind.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pegprof.engine.costs import Cost
from pegprof.engine.jaxpr import Env, JaxprEqn
from pegprof.engine.quantities import Values, is_per_example, of_same, widen
from pegprof.engine.statistics import Centred, Moment, Quantity
from pegprof.engine.strategies import loop, tied
from pegprof.engine.strategies.base import Frontier, Strategy, bind_wide, run_wide
from pegprof.engine.strategies.lookups import (
    Chain,
    Table,
    Term,
    add_up_equal,
    ids_of,
    move,
    part_of,
    updates_of,
)
from pegprof.engine.tails import Tail, size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Halves:
    """A tail in two: what makes the product and the places looked up, and what makes the rows added there."""

    early: Tail
    late: Tail
    products: tuple[Term, ...]
    lookups: tuple[JaxprEqn, ...]
    chain: Chain

    @classmethod
    def of(cls, tail: Tail) -> "Halves":
        terms, products = tied.split_terms(tail)
        lookups = tuple(t.lookup for t in terms if t.lookup)
        sources, places = [t.source for t in products], [eqn.invars[1] for eqn in lookups]
        return cls(
            early=part_of(tail, [*sources, *places]),
            late=part_of(tail, [v for eqn in lookups for v in eqn.invars[1:]]),
            products=tuple(products),
            lookups=lookups,
            chain=terms[0].chain,
        )

    @property
    def table(self) -> Table:
        return Table.of(self.lookups[0])

    def product_and_rows(self, outputs: list[Any]) -> loop.Outputs:
        """One example's product, as a table, without the rows looked up, which are kept; from the early half's."""
        env = Env()
        env.write(self.early.outputs, outputs)
        product = tied.sum_of(self.products, self.chain, env)
        places = outputs[len(self.products) :]
        ids = [ids_of(eqn, jnp.asarray(x)[None], self.table)[0] for eqn, x in zip(self.lookups, places, strict=True)]
        ids_T = jnp.concatenate(ids)
        rows_TxD = self.table.flatten(product).at[ids_T].get(mode="clip")
        return loop.Outputs(gradients=[product], left_out=self._looked_up(ids_T), kept=widen(rows_TxD))

    def _looked_up(self, ids_T: jax.Array) -> jax.Array:
        """Whether an entry of the table is in a row that is looked up."""
        table = self.table
        looked_up_V = jnp.zeros(table.V, bool).at[ids_T].set(True, mode="drop")
        return table.unflatten(jnp.broadcast_to(looked_up_V[:, None], (table.V, table.D)))


def _fits(tail: Tail, quantities: Sequence[Quantity]) -> bool:
    if any(isinstance(q, Centred) for q in quantities) or not tied.fits(tail, quantities):
        return False
    terms, _ = tied.split_terms(tail)
    lookups = [t.lookup for t in terms if t.lookup]
    rows = sum(size(lookup.invars[2]) for lookup in lookups)
    return rows < size(tail.outputs[0]) and all(Table.of(e) == Table.of(lookups[0]) for e in lookups)


def run_early(
    halves: Halves, quantities: Sequence[Quantity], frontier: Frontier, chunk: int
) -> tuple[Values, jax.Array]:
    """The quantities of the product without the rows looked up, and those rows, [B, T, D]."""
    (values,), rows_BxTxD = loop.run_keeping(
        halves.early, quantities, frontier, chunk, bind_wide, halves.product_and_rows
    )
    return values, rows_BxTxD


def run_early_of_one(halves: Halves, quantities: Sequence[Quantity], inputs: Sequence[Any]) -> tuple[Values, jax.Array]:
    """The same for one example."""
    outputs = halves.product_and_rows(run_wide(halves.early, inputs))
    (product,) = outputs.gradients
    return of_same(quantities, product, outputs.left_out), outputs.kept


def run_late(
    halves: Halves, quantities: Sequence[Quantity], early: Values, rows_BxTxD: jax.Array, frontier: Frontier
) -> Values:
    """The quantities of the whole, from those of the product without the rows looked up."""
    table, B = halves.table, frontier.B
    axes = [0 if b else None for b in frontier.batched]

    def operands_of(*inputs: Any) -> list[Any]:
        return [jnp.asarray(x) for x in run_wide(halves.late, inputs)]

    operands = jax.vmap(operands_of, in_axes=axes, axis_size=B)(*frontier.values)
    pairs = list(zip(halves.lookups, operands[0::2], operands[1::2], strict=True))
    ids_BxT = jnp.concatenate([ids_of(eqn, places, table) for eqn, places, _ in pairs], axis=1)
    updates_BxTxD = jnp.concatenate([updates_of(eqn, widen(updates), table) for eqn, _, updates in pairs], axis=1)
    ids_BxT, added_BxTxD = add_up_equal(ids_BxT, updates_BxTxD, table.V)
    rows_BxTxD = jnp.where((ids_BxT < table.V)[:, :, None], rows_BxTxD + added_BxTxD, 0)  # each row once

    def of(quantity: Quantity) -> jax.Array:
        value = early[quantity.name]
        if isinstance(quantity, Moment):
            phi_NxD = quantity.phi(rows_BxTxD).reshape(-1, table.D) / B
            whole = table.flatten(value).at[ids_BxT.ravel()].add(phi_NxD, mode="drop")
            return move(halves.chain, table.unflatten(whole))
        return value + jnp.sum(jnp.square(rows_BxTxD), axis=(1, 2))

    return {q.name: of(q) for q in quantities}


def run_late_of_one(
    halves: Halves, quantities: Sequence[Quantity], early: Values, rows_TxD: jax.Array, inputs: Sequence[Any]
) -> Values:
    """The same for one example."""
    frontier = Frontier(values=inputs, batched=[False] * len(inputs), B=1)
    values = run_late(halves, quantities, early, rows_TxD[None], frontier)
    return {name: x.reshape(()) if is_per_example(name) else x for name, x in values.items()}


def _run(tail: Tail, quantities: Sequence[Quantity], frontier: Frontier, chunk: int) -> list[Values]:
    """Both halves, one after the other: where the site cannot be parted."""
    halves = Halves.of(tail)
    early, rows_BxTxD = run_early(halves, quantities, frontier.of(tail, halves.early), chunk)
    return [run_late(halves, quantities, early, rows_BxTxD, frontier.of(tail, halves.late))]


def _cost(tail: Tail, quantities: Sequence[Quantity], B: int, chunk: int) -> Cost:
    """That of tied, and for each quantity one more pass over the rows looked up."""
    terms, _ = tied.split_terms(tail)
    rows = 4.0 * sum(size(t.lookup.invars[2]) for t in terms if t.lookup)
    extra = Cost(bytes_moved=(3 + 3 * len(quantities)) * rows)
    return tied.TIED.cost(tail, quantities, B, chunk) + extra * B + Cost(bytes_held=2 * B * rows)


LATE = Strategy(
    name="late",
    why="the product's statistics at once, the rows looked up put right at the end",
    fits=_fits,
    run=_run,
    cost=_cost,
    recomputes=True,
    frees_memory=True,
)
