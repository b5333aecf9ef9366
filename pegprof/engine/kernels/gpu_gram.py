"""Norms on NVIDIA GPUs by the Gram identity, in Pallas for Triton: ‖SᵀR‖² = ⟨S Sᵀ, R Rᵀ⟩ = Σ_{t,u} (s_t·s_u)(r_t·r_u).

One program owns one tile (t, u) of T×T, for one example and group. It fills that tile of both Gram matrices in its
registers, multiplies them entry by entry and writes the sum, one number. Both matrices are symmetric: tiles with u > t
count twice, those with u < t are left out.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pegprof.engine.jaxpr import abstract
from pegprof.engine.kernels.base import KernelCost, Operand, Outer, priced, same_axes
from pegprof.engine.kernels.gpu import (
    Span,
    common_dtype,
    divide,
    grid_mask,
    higher_precision,
    is_exact,
    load_operand,
    loop,
    multiply,
    power_of_two,
)
from pegprof.targets.chips import Chip


@dataclasses.dataclass(frozen=True, kw_only=True)
class GramTile:
    """T positions by T positions, from K columns at a step."""

    T: int
    K: int
    warps: int = 8
    stages: int = 3


def choose_tile(outer: Outer, chip: Chip, precision: Any = None) -> GramTile:
    """The largest tile that leaves no core idle. Two matrices of 128×128 take 128 registers of each of 256 threads."""
    exact = is_exact(outer.dtype, precision)
    K = 16 if exact else 128 // jnp.dtype(outer.dtype).itemsize  # a row of shared memory
    largest = min(64 if exact else 128, power_of_two(outer.T))
    tiles = [GramTile(T=n, K=K, warps=8 if n == 128 else 4) for n in (128, 64, 32, 16) if n <= largest]
    busy = (tile for tile in tiles if outer.B * outer.G * _pairs(outer, tile) >= chip.cores)
    return next(busy, tiles[-1])


def _pairs(outer: Outer, tile: GramTile) -> int:
    """How many tiles (t, u) with u ≥ t."""
    tiles = math.ceil(outer.T / tile.T)
    return tiles * (tiles + 1) // 2


def gram_cost(outer: Outer, chip: Chip, tile: GramTile | None = None) -> KernelCost:
    """What ``square_norms`` takes.

    Every tile loads its positions of both operands twice, through L2: once for its rows, once for its columns. Programs
    of one example run together, so main memory is read once.
    """
    tile = tile or choose_tile(outer, chip)
    size, columns = jnp.dtype(outer.dtype).itemsize, outer.X * outer.D + outer.Y * outer.E
    read = outer.s.read_bytes(1) + outer.r.read_bytes(1)
    programs = outer.B * outer.G * _pairs(outer, tile)
    return KernelCost(
        flops=2 * programs * tile.T * tile.T * columns,
        vector_flops=2 * programs * tile.T * tile.T,
        bytes=read + 4 * programs,
        cache_bytes=read * (1 + math.ceil(outer.T / tile.T)),
        held_bytes=8 * tile.T * tile.T + (tile.stages - 1) * 2 * tile.T * tile.K * size,
    )


def square_norms(
    s: Operand,
    r: Operand,
    *,
    precision: Any,
    chip: Chip,
    tile: GramTile | None = None,
    interpret: bool = False,
) -> jax.Array:
    """‖g_b‖² for each example, [B], summed over groups and outer axes; operands as for ``fold_outer``."""
    outer = Outer(s=s, r=r)
    tile = tile or choose_tile(outer, chip, precision)
    pairs = _pairs(outer, tile)
    wide = common_dtype(s, r, wide=True)
    taken = same_axes([*s.arrays, *r.arrays])
    kernel = functools.partial(
        _gram_kernel, outer=outer, tile=tile, dtype=common_dtype(s, r), wide=wide, precision=higher_precision(precision)
    )
    with priced("gram", gram_cost(outer, chip, tile)):
        partial_sums = pl.pallas_call(
            kernel,
            out_shape=abstract(taken[0], (outer.B, outer.G * pairs)).update(dtype=wide),
            grid=(outer.B * outer.G * pairs,),
            compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
            interpret=interpret,
            name="pegprof_gram",
        )(*taken)
    return jnp.maximum(jnp.sum(partial_sums, axis=1), 0)  # rounding may take a norm of zero below it


def _gram_kernel(*refs: Any, outer: Outer, tile: GramTile, dtype: Any, wide: Any, precision: Any) -> None:
    """One program: one tile of both Gram matrices of one example and group."""
    *operand_refs, norm_ref = refs
    s_refs, r_refs = operand_refs[: len(outer.s.arrays)], operand_refs[len(outer.s.arrays) :]
    tiles, pairs = math.ceil(outer.T / tile.T), _pairs(outer, tile)
    b, rest = divide(pl.program_id(0), outer.G * pairs)
    g, pair = divide(rest, pairs)
    t, u = _place(pair, tiles)
    spans = [Span.of(position, tile.T, outer.T) for position in (t, u)]

    def gram(operand: Operand, refs: Any) -> jax.Array:
        """Σ over an operand's outer axis and its columns of x_t·x_u. Masked columns are 0 in both."""
        chunks, axis = math.ceil(operand.D / tile.K), 1 if operand.minor else 0

        def step(k: Any, total: jax.Array) -> jax.Array:
            x, chunk = divide(k, chunks)
            columns = Span.of(chunk, tile.K, operand.D)
            left, right = (load_operand(operand, refs, (b, g, x), span, columns).astype(dtype) for span in spans)
            return total + multiply(left, right, ((axis,), (axis,)), precision, wide)

        return loop(operand.shape[2] * chunks, step, jnp.zeros((tile.T, tile.T), wide))

    product = gram(outer.s, s_refs) * gram(outer.r, r_refs)
    # Positions beyond the last are 0 in both matrices, unless the other position is infinite: 0 · inf is NaN.
    mask = grid_mask(spans[0].mask, spans[1].mask)
    product = product if mask is None else jnp.where(mask, product, jnp.zeros_like(product))
    total = jnp.sum(jnp.sum(product, axis=1), axis=0)
    plgpu.store(norm_ref.at[b, rest], jnp.where(t == u, total, 2 * total))


def _place(pair: Any, tiles: int) -> tuple[Any, Any]:
    """The tile (t, u), u ≥ t, of a number. Row a has tiles - a of them and row tiles - 1 - a has the a + 1 others."""
    a, c = divide(pair, tiles + 1)
    first = c < tiles - a
    t = jnp.where(first, a, tiles - 1 - a)
    return t, jnp.where(first, a + c, c - 1)
