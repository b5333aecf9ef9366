"""fused_rows: the kernel for lookups in a small table, whose gradients are products with ones and zeros.

The gradient of an example is g[v] = Σ_t [id_t = v] u_t, the product of a matrix of ones and zeros with the cotangents.
The kernel compares ids with the numbers of its rows on chip. So every accumulator, the variance as well, takes one pass
over the cotangents, without a sort or a scatter. It multiplies by V·T entries where ``segment`` moves T rows. That pays
where a table has few more rows than an example has positions; the planner's prices decide.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pegprof.engine.accumulators import Centred, Moment, SquareNorm
from pegprof.engine.costs import Cost
from pegprof.engine.dtypes import wide_dtype
from pegprof.engine.jaxpr import Atom, dtype_of, shape_of
from pegprof.engine.kernels import switch
from pegprof.engine.kernels.backends import backend_of
from pegprof.engine.kernels.base import Operand
from pegprof.engine.kernels.base import Outer as KernelProduct
from pegprof.engine.rules.fused import FUSED, as_cost, kernel_dtypes, one_stage
from pegprof.engine.rules.rows import SEGMENT
from pegprof.engine.sites import Site
from pegprof.engine.stages import Accumulators, Frontier, Summaries
from pegprof.engine.structures import Rows, permute
from pegprof.engine.structures.lookups import ids_of, updates_of
from pegprof.targets.chips import Chip

EXACT = jax.lax.Precision.HIGHEST
"""A scatter-add rounds nothing but its sums. So must the product."""


def _taken(structure: Rows) -> list[Atom]:
    return [v for eqn in structure.lookups for v in eqn.invars[1:]]


def _operands(structure: Rows, taken_Bx: Sequence[Any]) -> tuple[Operand, Operand]:
    """Ones and zeros, [V, T] for each example, and the cotangents, [T, D]."""
    table, lookups = structure.table, structure.lookups
    triples = list(zip(lookups, taken_Bx[::2], taken_Bx[1::2], strict=True))
    ids_BxT = jnp.concatenate([ids_of(eqn, places, table) for eqn, places, _ in triples], axis=1)
    updates_BxTxD = jnp.concatenate([updates_of(eqn, updates, table) for eqn, _, updates in triples], axis=1)
    hits = Operand.of_ids(ids_BxT, table.V, updates_BxTxD.dtype)
    return hits, Operand.stored(updates_BxTxD[:, None, None], minor=True)


def _shapes(structure: Rows, B: int) -> KernelProduct:
    """The same as shapes, for choosing a tile and for pricing it."""
    found: list[tuple[Operand, Operand]] = []

    def trace(*taken_Bx: Any) -> Any:
        found.append(_operands(structure, taken_Bx))
        return [x.arrays for x in found[0]]

    taken = _taken(structure)
    arrays = jax.eval_shape(trace, *(jax.ShapeDtypeStruct((B, *shape_of(v)), dtype_of(v)) for v in taken))
    s, r = (dataclasses.replace(x, arrays=tuple(a)) for x, a in zip(found[0], arrays, strict=True))
    return KernelProduct(s=s, r=r)


def _fits(site: Site, accumulators: Accumulators, chip: Chip) -> bool:
    return SEGMENT.fits(site, accumulators) and all(
        isinstance(s, Rows) and _fits_one(s, accumulators, chip) for s in site.structures
    )


def _fits_one(structure: Rows, accumulators: Accumulators, chip: Chip) -> bool:
    dtypes = {jnp.dtype(dtype_of(eqn.invars[2])) for eqn in structure.lookups}
    if len(dtypes) > 1 or not dtypes <= kernel_dtypes():
        return False
    product = _shapes(structure, 1)
    empty = 0 in (*product.s.shape, *product.r.shape)
    return not empty and backend_of(chip).choose_tile(product, accumulators, chip, EXACT) is not None


def _run(site: Site, accumulators: Accumulators, frontier: Frontier, chip: Chip) -> Summaries:
    return [_of_rows(s, accumulators, frontier, chip) for s in site.structures if isinstance(s, Rows)]


def _of_rows(structure: Rows, accumulators: Accumulators, frontier: Frontier, chip: Chip) -> list[Any]:
    operands = _operands(structure, frontier.values_of(_taken(structure)))
    summaries = backend_of(chip).fold_outer(
        *operands, accumulators, precision=EXACT, chip=chip, interpret=switch.interprets()
    )

    def in_place(x: jax.Array) -> jax.Array:
        return permute(structure.steps, structure.table.unflatten(x[0, 0, 0]))

    return [x if a.per_example else jax.tree.map(in_place, x) for a, x in zip(accumulators, summaries, strict=True)]


def _cost(site: Site, accumulators: Accumulators, B: int, chip: Chip) -> Cost:
    """That of each table's kernel. Products that round nothing take several passes."""
    total = Cost()
    for structure in site.structures:
        assert isinstance(structure, Rows)
        product = _shapes(structure, B)
        backend = backend_of(chip)
        tile = backend.choose_tile(product, accumulators, chip, EXACT)
        cost = as_cost(backend.outer_cost(product, tile, accumulators, chip), 0)
        exact = wide_dtype(product.dtype) == product.dtype
        passes = chip.product_flops("float32") / chip.highest_flops if exact else 1.0
        total += dataclasses.replace(cost, matmul_flops=cost.matmul_flops * passes)
    return total


FUSED_ROWS = dataclasses.replace(
    FUSED,
    name="fused_rows",
    why="a kernel for a small table: a product with ones where a row is looked up",
    structure=Rows,
    accumulators=(Moment, Centred, SquareNorm),
    fits_on=_fits,
    cost_on=_cost,
    stages_on=one_stage(_run, plain=SEGMENT),
)
