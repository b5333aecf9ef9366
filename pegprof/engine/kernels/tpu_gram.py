"""Norms on TPUs by the Gram identity, in Pallas: ‖SᵀR‖² = ⟨S Sᵀ, R Rᵀ⟩ = Σ_{t,u} (s_t·s_u)(r_t·r_u).

The grid runs over the examples, then over tiles of T×T, then over chunks of the columns of S and after them of R. Both
tiles of T×T are filled on chip, multiplied entry by entry and added up there. Nothing of that size is ever stored.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pegprof.engine.jaxpr import abstract
from pegprof.engine.kernels.base import KernelCost, Operand, Outer, one_precision, priced, same_axes
from pegprof.engine.kernels.tpu import LANES, SUBLANES, at_corner, only, padded_bytes
from pegprof.targets.chips import Chip

POSITIONS = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class GramTile:
    """T positions by T positions, from K columns at a time."""

    T: int
    K: int


def choose_tile(outer: Outer, chip: Chip) -> GramTile:
    T = min(outer.T, POSITIONS)
    tiles = [GramTile(T=T, K=K) for K in (1024, 512, 256, 128)]
    return next((t for t in tiles if _held_bytes(outer, t) <= chip.on_chip_bytes * 3 // 4), tiles[-1])


def _held_bytes(outer: Outer, tile: GramTile) -> int:
    block = max(padded_bytes((tile.T, tile.K), outer.dtype), padded_bytes((tile.K, tile.T), outer.dtype))
    return 8 * block + 4 * padded_bytes((tile.T, tile.T), outer.wide)


def _chunks(outer: Outer, tile: GramTile) -> tuple[int, int]:
    """How many chunks of columns S and R have."""
    return outer.X * math.ceil(outer.D / tile.K), outer.Y * math.ceil(outer.E / tile.K)


def gram_cost(outer: Outer, chip: Chip) -> KernelCost:
    """Every tile reads its positions of both operands twice, once where there is but one tile."""
    tile = choose_tile(outer, chip)
    tiles = math.ceil(outer.T / tile.T)
    columns = outer.X * outer.D + outer.Y * outer.E
    size = jnp.dtype(outer.dtype).itemsize
    reads = 2 * tiles if tiles > 1 else 1
    return KernelCost(
        flops=2 * outer.B * outer.G * outer.T * outer.T * columns,
        vector_flops=2 * outer.B * outer.G * outer.T * outer.T,
        bytes=outer.B * outer.G * outer.T * columns * size * reads,
        held_bytes=_held_bytes(outer, tile),
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
    """‖g_b‖² for each example, [B], summed over groups and outer axes; operands as for ``fold_outer``, and stored."""
    outer = Outer(s=s, r=r)
    precision = one_precision(precision, outer.dtype)
    tile = tile or choose_tile(outer, chip)
    tiles = math.ceil(outer.T / tile.T)
    of_s, of_r = _chunks(outer, tile)
    cost = gram_cost(outer, chip)
    sides = [_Side(outer, tile, s.minor, outer.D, 0, of_s), _Side(outer, tile, r.minor, outer.E, of_s, of_r)]

    def kernel(*refs: Any) -> None:
        *blocks, out_ref, s_gram, r_gram = refs
        _, _, t, u, k = (pl.program_id(axis) for axis in range(5))
        pairs = [blocks[0:2], blocks[2:4]] if tiles > 1 else [[blocks[0]] * 2, [blocks[1]] * 2]

        @pl.when((t == 0) & (u == 0) & (k == 0))
        def start_norm() -> None:
            out_ref[...] = jnp.zeros(out_ref.shape, out_ref.dtype)

        for side, (x_ref, y_ref), gram in zip(sides, pairs, (s_gram, r_gram), strict=True):

            @pl.when((u >= t) & (k >= side.first) & (k < side.first + side.chunks))
            def add_chunk(side: Any = side, x_ref: Any = x_ref, y_ref: Any = y_ref, gram: Any = gram) -> None:
                x, y = side.valid(x_ref[...], t, k), side.valid(y_ref[...], u, k)
                axis = 1 if side.minor else 0
                product = jax.lax.dot_general(
                    x, y, (((axis,), (axis,)), ((), ())), precision=precision, preferred_element_type=outer.wide
                )
                gram[...] = jnp.where(k == side.first, product, gram[...] + product)

        @pl.when((u >= t) & (k == of_s + of_r - 1))
        def add_tile() -> None:
            total = jnp.sum(s_gram[...] * r_gram[...]) * jnp.where(t == u, 1, 2).astype(outer.wide)
            out_ref[...] += at_corner(total, out_ref.shape, out_ref.dtype)

    operands, specs = [], []
    for x, side in zip((s, r), sides, strict=True):
        for which in (0, 1) if tiles > 1 else (0,):
            operands.append(x.arrays[0])
            specs.append(pl.BlockSpec(side.block, functools.partial(side.at, which)))
    operands = same_axes(operands)
    call = pl.pallas_call(
        kernel,
        grid=(outer.B, outer.G, tiles, tiles, of_s + of_r),
        in_specs=specs,
        out_specs=pl.BlockSpec((None, None, SUBLANES, LANES), lambda b, g, t, u, k: (b, g, np.int32(0), np.int32(0))),
        out_shape=abstract(operands[0], (outer.B, outer.G, SUBLANES, LANES), outer.wide),
        scratch_shapes=[pltpu.VMEM((tile.T, tile.T), outer.wide)] * 2,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary", "arbitrary", "arbitrary"),
            vmem_limit_bytes=min(chip.on_chip_bytes, cost.held_bytes * 5 // 4 + 2**22),
        ),
        interpret=interpret,
        name="pegprof_gram",
    )
    with priced("gram", cost):
        partial_sums = call(*operands)
    return jnp.maximum(jnp.sum(partial_sums, axis=(1, 2, 3)), 0)  # rounding may take a norm of zero below it


@dataclasses.dataclass(frozen=True)
class _Side:
    """One operand of the kernel: its blocks, and when in the grid they are due."""

    outer: Outer
    tile: GramTile
    minor: bool
    columns: int
    first: int  # the step at which its first chunk is due
    chunks: int

    @property
    def block(self) -> tuple[Any, ...]:
        K = min(self.tile.K, self.columns)
        return (None, None, None, *((self.tile.T, K) if self.minor else (K, self.tile.T)))

    def at(self, which: int, b: Any, g: Any, t: Any, u: Any, k: Any) -> tuple[Any, ...]:
        """The block of positions t, or u, in step k; outside its turn the nearest one, so that none is fetched."""
        chunk = jnp.clip(k - self.first, 0, self.chunks - 1)
        per_axis = np.int32(math.ceil(self.columns / self.tile.K))
        outer, column = jax.lax.div(chunk, per_axis), jax.lax.rem(chunk, per_axis)
        position = u if which else t
        return (b, g, outer, position, column) if self.minor else (b, g, outer, column, position)

    def valid(self, x: jax.Array, position: Any, k: Any) -> jax.Array:
        """A block with zeros beyond the last position and the last column."""
        rows, columns = (0, 1) if self.minor else (1, 0)
        if self.outer.T % self.tile.T:
            x = only(x, self.outer.T - position * self.tile.T, axis=rows)
        if self.columns > self.tile.K and self.columns % self.tile.K:
            column = jax.lax.rem(k - self.first, np.int32(math.ceil(self.columns / self.tile.K)))
            x = only(x, self.columns - column * self.tile.K, axis=columns)
        return x
