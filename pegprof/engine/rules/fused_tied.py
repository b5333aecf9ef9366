"""fused_tied: the kernel for a table that is multiplied by and looked up in, as the two stages of ``staged``.

At the logits the kernel takes every accumulator of the product P without the rows that an example looks up: it sets the
operand's entries for these rows to zero, on chip, by comparing their numbers with the ids. That needs phi(0) = 0. The
rows themselves, p, are a small product of their own, of the entries of the operand that belong to them. At the
embedding the rows are completed and added, as for ``staged``.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pegprof.engine.accumulators import Moment, SquareNorm
from pegprof.engine.costs import Cost
from pegprof.engine.dtypes import wide_dtype
from pegprof.engine.facts import known
from pegprof.engine.jaxpr import Var, size_of
from pegprof.engine.jaxpr import primitives as p
from pegprof.engine.kernels import switch, tpu_rows
from pegprof.engine.kernels.backends import backend_of
from pegprof.engine.kernels.base import Operand
from pegprof.engine.kernels.blocks import stored
from pegprof.engine.kernels.layout import arrange
from pegprof.engine.rules.fused import (
    FUSED,
    Product,
    Values,
    as_cost,
    as_multiplied,
    evaluates,
    has_kernel,
    outer_of,
    product_of,
    replace_run,
    tile_of,
    values_in,
    written_bytes,
)
from pegprof.engine.rules.rows import at_zero
from pegprof.engine.rules.sums import STAGED, TiedTable, cost_of_rows, fits_staged
from pegprof.engine.sites import Site
from pegprof.engine.stages import Accumulators, Frontier, Stage, Summaries
from pegprof.engine.structures import Outer, Steps, Sum, invert, permute
from pegprof.engine.structures.lookups import ids_of
from pegprof.engine.tails import Tail
from pegprof.targets.chips import Chip


@dataclasses.dataclass(frozen=True, kw_only=True)
class TiedProduct:
    """The product of a tied table, and which of its operands the rows of the table come from."""

    product: Product
    steps: Steps  # that permute its result to the parameter
    side: int  # 0: s, 1: r

    @classmethod
    def of(cls, site: Site, tail: Tail) -> "TiedProduct | None":
        tied = TiedTable.of(site)
        structure, *others = tied.products
        if others or not isinstance(structure, Outer) or structure.source not in structure.start.outvars:
            return None
        product = product_of(tail, structure.start)
        letter = None if product is None else _row_letter(product, structure.steps, tied)
        if product is None or letter is None or not has_kernel(product):
            return None
        side = int(letter in product.contraction.r)
        rows = product.contraction.free((product.contraction.s, product.contraction.r)[side])
        plain = rows == letter and not product.contraction.groups
        return cls(product=product, steps=structure.steps, side=side) if plain else None


def _row_letter(product: Product, steps: Steps, tied: TiedTable) -> str | None:
    """The letter of the contraction that runs along the rows of the table; None if that is not plain to see."""
    letters: Sequence[str] = product.contraction.result
    for eqn in steps:
        if known(eqn) is not p.transpose_p:
            return None
        letters = [letters[axis] for axis in eqn.params["permutation"]]
    for eqn in reversed(tied.steps):
        if known(eqn) is not p.transpose_p:
            return None
        letters = [letters[eqn.params["permutation"].index(axis)] for axis in range(len(letters))]
    return letters[tied.table.indexed[0]] if len(tied.table.indexed) == 1 else None


def _fits(site: Site, accumulators: Accumulators, chip: Chip) -> bool:
    moments = [a for a in accumulators if isinstance(a, Moment)]
    if not fits_staged(site, accumulators) or not all(at_zero(a, jnp.float32) is None for a in moments):
        return False
    tied = TiedProduct.of(site, site.recomputing)
    return tied is not None and tile_of(tied.product, 1, accumulators, chip) is not None


def _stages(site: Site, accumulators: Accumulators, chunk: int, chip: Chip) -> Sequence[Stage]:
    table = TiedTable.of(site)

    def run(frontier: Frontier) -> Summaries:
        tied = TiedProduct.of(site, frontier.tail)
        assert tied is not None
        values = values_in(frontier)
        ids_BxT = _looked_up(table, frontier)
        summaries = _fold(tied, values, ids_BxT, accumulators, chip)
        placed = [
            x if a.per_example else invert(table.steps, permute(tied.steps, x))
            for a, x in zip(accumulators, summaries, strict=True)
        ]
        return [[*placed, _rows(tied, values, ids_BxT, chip)]]

    first, second = STAGED.stages_at(site, accumulators, chunk)
    return replace_run(first, run, chip), second


def _looked_up(table: TiedTable, frontier: Frontier) -> jax.Array:
    """The rows that each example looks up, by all lookups."""
    places = frontier.values_of([eqn.invars[1] for eqn in table.lookups])
    found = [ids_of(eqn, x, table.table) for eqn, x in zip(table.lookups, places, strict=True)]
    return jnp.concatenate(found, axis=1)


def _fold(tied: TiedProduct, values: Values, ids_BxT: jax.Array, accumulators: Accumulators, chip: Chip) -> list[Any]:
    """The product's summaries without the rows that are looked up."""
    product = as_multiplied(tied.product, chip)
    arrangement = arrange(product.contraction, chip)
    operands = list(product.operands(values, arrangement, chip))
    at = int(tied.side == int(not arrangement.swapped))  # whether the rows of the table are the kernel's columns
    how: dict[str, Any] = dict(precision=product.precision, chip=chip, interpret=switch.interprets())
    if chip.backend == "tpu":
        operands[at] = without_rows(operands[at], ids_BxT)
    elif at == 0:
        how["skip"] = _hits(ids_BxT, operands[0].D)
    else:
        operands[1] = _masked(operands[1], _hits(ids_BxT, operands[1].D))
    summaries = backend_of(chip).fold_outer(*operands, accumulators, **how)
    return [x if a.per_example else arrangement.take(x) for a, x in zip(accumulators, summaries, strict=True)]


def without_rows(operand: Operand, ids_BxT: jax.Array) -> Operand:
    """An operand with zeros for the free entries that an example looks up, found on chip."""
    ids = ids_BxT[:, None, None, :, None] if operand.minor else ids_BxT[:, None, None, None, :]
    evaluate = operand.evaluate or (lambda blocks, index: blocks[0])

    def without(blocks: Sequence[Any], index: Callable[..., Any]) -> Any:
        *own, ids_block = blocks
        value = evaluate(own, index)
        equal = jnp.where(index(free=True) == ids_block, 1.0, 0.0)
        hit = jnp.max(equal, axis=0 if operand.minor else 1, keepdims=True)
        shape = jnp.broadcast_shapes(value.shape, hit.shape)
        return jnp.where(jnp.broadcast_to(hit, shape) > 0, jnp.zeros((), value.dtype), value)

    return dataclasses.replace(
        operand,
        arrays=(*operand.arrays, ids),
        evaluate=without,
        steps=operand.steps + 1,
        whole=(*operand.whole, True),
    )


def _hits(ids_BxT: jax.Array, V: int) -> jax.Array:
    """Whether an example looks a row up, [B, V]."""
    B, T = ids_BxT.shape
    examples = jnp.broadcast_to(jnp.arange(B, dtype=jnp.int32)[:, None], (B, T))
    return jnp.zeros((B, V), bool).at[examples, ids_BxT].set(True, mode="drop")


def _masked(operand: Operand, hits_BxV: jax.Array) -> Operand:
    """An operand with zeros for the free entries that an example looks up, written out."""
    (x,) = operand.arrays
    hit = hits_BxV[:, None, None, None, :] if operand.minor else hits_BxV[:, None, None, :, None]
    return Operand.stored(jnp.where(hit, jnp.zeros((), x.dtype), x), minor=operand.minor, written=True)


def _rows(tied: TiedProduct, values: Values, ids_BxK: jax.Array, chip: Chip) -> jax.Array:
    """The rows of each example's product that it looks up, [B, K, D]: of the operand's entries that belong to them.

    The entries are taken along the axis of the table as the operand lies, so that no copy of it is made.
    """
    product = as_multiplied(tied.product, chip)
    sides = product.sides(arrange(product.contraction, chip))
    side, other = (dataclasses.replace(sides[k], outer="", inner=_free(product, k)) for k in _order(tied))
    source, of_other = (product.sources[k] for k in _order(tied))
    if not evaluates(side, source, chip):
        source = stored(source.operand, source.labels)
    found = values([leaf.value for leaf in source.leaves])
    frames = [side.put(x, leaf.labels, batched=b)[:, 0, 0] for leaf, (x, b) in zip(source.leaves, found, strict=True)]
    of_rows = 1 if side.minor else 0  # the axis of one example's frame that runs along the table

    chosen = [_take(x, ids_BxK, 1 + of_rows, chip) for x in frames]

    def entries(ids_K: jax.Array, *chosen: jax.Array) -> jax.Array:
        if source.is_stored:
            return chosen[0]
        positions = jnp.arange(product.contraction.size(side.positions), dtype=jnp.int32)
        along = [jnp.expand_dims(positions, of_rows), jnp.expand_dims(ids_K, 1 - of_rows)]
        value = source.evaluate(chosen, lambda letter: along[letter in side.inner])
        return jnp.broadcast_to(value, jnp.broadcast_shapes(*(x.shape for x in along)))

    axes = [0 if len(x) > 1 else None for x in chosen]
    own = [x if axis == 0 else x[0] for x, axis in zip(chosen, axes, strict=True)]
    factor = jax.vmap(entries, in_axes=(0, *axes))(ids_BxK, *own).astype(product.dtype)
    assert isinstance(of_other.operand, Var)
    ((x, batched),) = values([of_other.operand])
    x = other.put(x, of_other.labels, batched=batched)[:, 0, 0].astype(product.dtype)
    return jnp.einsum(
        f"{'btk' if side.minor else 'bkt'},{'btd' if other.minor else 'bdt'}->bkd",
        factor,
        x,
        precision=product.precision,
        preferred_element_type=wide_dtype(product.dtype),
    )


def _take(x: jax.Array, ids_BxK: jax.Array, axis: int, chip: Chip) -> jax.Array:
    """The entries of [B, V, T] or [B, T, V] that each example's ids name along V, if that is not of size one."""
    if x.shape[axis] == 1:
        return x
    if len(x) == 1:
        return jnp.moveaxis(jnp.take(x[0], ids_BxK, axis=axis - 1, mode="clip"), axis - 1, 0)
    if axis == 1 and chip.backend == "tpu" and tpu_rows.can_take(x, ids_BxK.shape[1]):
        return tpu_rows.take_rows(x, ids_BxK, interpret=switch.interprets())
    return jax.vmap(lambda x, ids_K: jnp.take(x, ids_K, axis=axis - 1, mode="clip"))(x, ids_BxK)


def _order(tied: TiedProduct) -> tuple[int, int]:
    return tied.side, 1 - tied.side


def _free(product: Product, k: int) -> str:
    c = product.contraction
    return c.free((c.s, c.r)[k])


def _cost(site: Site, accumulators: Accumulators, B: int, chip: Chip) -> Cost:
    """The kernel, the product that makes the rows, and the second stage."""
    tied = TiedProduct.of(site, site.recomputing)
    assert tied is not None
    outer, tile = outer_of(tied.product, B, chip), tile_of(tied.product, B, accumulators, chip)
    kernel = backend_of(chip).outer_cost(outer, tile, accumulators, chip)
    rows = sum(size_of(eqn.invars[2]) for eqn in TiedTable.of(site).lookups)
    small = Cost(batched_flops=2.0 * B * rows * outer.T, bytes_moved=8.0 * B * rows)
    cost = as_cost(kernel, written_bytes(outer))
    return cost + small + cost_of_rows(site, accumulators, B)


FUSED_TIED = dataclasses.replace(
    FUSED,
    name="fused_tied",
    why="a kernel for the product, the rows looked up put right at the end",
    structure=Sum,
    accumulators=(Moment, SquareNorm),
    fits_on=_fits,
    cost_on=_cost,
    stages_on=_stages,
    frees_memory=True,
)
