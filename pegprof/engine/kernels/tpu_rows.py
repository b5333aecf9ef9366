"""Rows of a large array at given places, on a TPU: one copy a row, straight from memory to the result's block.

XLA's own gather of rows from a batch of arrays whose height is no multiple of 8 copies all of them first.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pegprof.engine.jaxpr import abstract
from pegprof.engine.kernels.base import KernelCost, priced, same_axes
from pegprof.engine.kernels.tpu import LANES, SUBLANES

CYCLES_PER_ROW = 100
"""What starting a copy and waiting for it may take, a guess; a core could do 4096 operations in each cycle."""


HELD_BYTES = 6 * 2**20
"""What the rows of one step may take on chip: the result twice, and the tiles that rows of 16 bits are picked from."""


def can_take(x: Any, K: int) -> bool:
    """Whether K rows can be copied: whole lanes of numbers of 32 or 16 bits, some of them at a time."""
    plain = x.dtype in (jnp.float32, jnp.int32, jnp.bfloat16) and x.shape[2] % LANES == 0 and x.shape[1] >= SUBLANES
    return plain and _rows_at_a_time(x, K) is not None


def _rows_at_a_time(x: Any, K: int) -> int | None:
    """The largest half, quarter and so on of K rows that fits; its ids must be whole lanes as well."""
    tile = SUBLANES * x.dtype.itemsize if x.dtype.itemsize < 4 else 0
    sizes = [K >> k for k in range(K.bit_length()) if K % (1 << k) == 0]
    fitting = [n for n in sizes if n * x.shape[2] * (8 + tile) <= HELD_BYTES and (n == K or n % LANES == 0)]
    return max(fitting, default=None)


def take_rows(x_BxVxT: jax.Array, ids_BxK: jax.Array, *, interpret: bool = False) -> jax.Array:
    """The rows ``x[b, ids[b, k]]``, [B, K, T]. Ids outside the array are moved to the nearest row.

    Rows of 16 bits lie in pairs, and cannot be copied one by one. There the eight rows of a tile are, and the right one
    is picked on chip. What is left of the array beyond its last whole tile is taken by XLA.
    """
    V = x_BxVxT.shape[1]
    ids_BxK = jnp.clip(ids_BxK, 0, V - 1)
    if x_BxVxT.dtype.itemsize == 4:
        return _copy_tiles(x_BxVxT, ids_BxK, rows=1, interpret=interpret)
    whole = V // SUBLANES * SUBLANES
    taken = _copy_tiles(x_BxVxT, jnp.minimum(ids_BxK, whole - 1), rows=SUBLANES, interpret=interpret)
    if whole == V:
        return taken
    rest = jnp.take_along_axis(x_BxVxT[:, whole:], jnp.maximum(ids_BxK - whole, 0)[:, :, None], axis=1)
    return jnp.where((ids_BxK < whole)[:, :, None], taken, rest)


def _copy_tiles(x_BxVxT: jax.Array, ids_BxK: jax.Array, *, rows: int, interpret: bool) -> jax.Array:
    """For each id the aligned ``rows`` rows that it is among, of which its own is kept."""
    B, _, T = x_BxVxT.shape
    K = ids_BxK.shape[1]
    n = _rows_at_a_time(x_BxVxT, K)
    assert n is not None
    zero, dtype = np.int32(0), x_BxVxT.dtype
    x_BxVxT, ids = same_axes([x_BxVxT, ids_BxK])

    def kernel(ids_ref: Any, x_ref: Any, out_ref: Any, tiles_ref: Any, arrived: Any) -> None:
        b = pl.program_id(0)

        def copy(k: Any, row: Any) -> Any:
            first = row if rows == 1 else pl.multiple_of(jax.lax.div(row, np.int32(rows)) * rows, rows)
            to = out_ref.at[0, pl.ds(k, 1), :] if rows == 1 else tiles_ref.at[k]
            return pltpu.make_async_copy(x_ref.at[b, pl.ds(first, rows), :], to, arrived)

        def pick(k: Any) -> None:
            tile = tiles_ref[k].astype(jnp.float32)
            own = jax.lax.broadcasted_iota(jnp.int32, tile.shape, 0) == jax.lax.rem(ids_ref[0, k], np.int32(rows))
            out_ref[0, pl.ds(k, 1), :] = jnp.sum(jnp.where(own, tile, 0.0), axis=0, keepdims=True)

        _loop(n, lambda k: copy(k, ids_ref[0, k]).start())
        _loop(n, lambda k: copy(k, zero).wait())
        if rows > 1:
            _loop(n, pick)

    moved = B * K * T * (rows * dtype.itemsize + 4)
    scratch = (n, rows, T) if rows > 1 else (1, SUBLANES, LANES)
    held = n * T * (8 + rows * dtype.itemsize)
    work = B * K * CYCLES_PER_ROW * 4096
    with priced("rows", KernelCost(flops=0, vector_flops=work, bytes=moved, held_bytes=held)):
        taken = pl.pallas_call(
            kernel,
            grid=(B, K // n),
            in_specs=[
                pl.BlockSpec((None, 1, n), lambda b, i: (b, zero, i), memory_space=pltpu.SMEM),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec((1, n, T), lambda b, i: (b, i, zero)),
            out_shape=abstract(x_BxVxT, (B, K, T), dtype if rows == 1 else jnp.float32),
            scratch_shapes=[pltpu.VMEM(scratch, dtype), pltpu.SemaphoreType.DMA],
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
            interpret=interpret,
            name="pegprof_rows",
        )(ids[:, None, :], x_BxVxT)
    return taken.astype(dtype)


def _loop(times: int, body: Any) -> None:
    jax.lax.fori_loop(np.int32(0), np.int32(times), lambda k, _: body(k), None)
