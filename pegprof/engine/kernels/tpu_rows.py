"""Rows of a large array at given places, on a TPU: one copy a row, straight from memory to the result's block.

XLA's own gather of rows from a batch of arrays whose height is no multiple of 8 copies all of them first.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pegprof.engine.kernels.base import KernelCost, priced
from pegprof.engine.kernels.tpu import LANES

CYCLES_PER_ROW = 100
"""What starting a copy and waiting for it may take, a guess; a core could do 4096 operations in each cycle."""


def can_take(x: Any) -> bool:
    """Whether single rows can be copied: of 32 bits, and whole lanes."""
    return x.dtype in (jnp.float32, jnp.int32) and x.shape[2] % LANES == 0


def take_rows(x_BxVxT: jax.Array, ids_BxK: jax.Array, *, interpret: bool = False) -> jax.Array:
    """The rows ``x[b, ids[b, k]]``, [B, K, T]. Ids outside the array are moved to the nearest row."""
    B, V, T = x_BxVxT.shape
    K = ids_BxK.shape[1]
    zero = np.int32(0)

    def kernel(ids_ref: Any, x_ref: Any, out_ref: Any, arrived: Any) -> None:
        b = pl.program_id(0)

        def copy(k: Any, row: Any) -> Any:
            return pltpu.make_async_copy(x_ref.at[b, pl.ds(row, 1), :], out_ref.at[0, pl.ds(k, 1), :], arrived)

        _loop(K, lambda k: copy(k, ids_ref[0, k]).start())
        _loop(K, lambda k: copy(k, zero).wait())

    row_bytes = B * K * T * 4
    with priced("rows", KernelCost(flops=0, vector_flops=B * K * CYCLES_PER_ROW * 4096, bytes=2 * row_bytes)):
        return pl.pallas_call(
            kernel,
            grid=(B,),
            in_specs=[
                pl.BlockSpec((None, 1, K), lambda b: (b, zero, zero), memory_space=pltpu.SMEM),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec((1, K, T), lambda b: (b, zero, zero)),
            out_shape=jax.ShapeDtypeStruct((B, K, T), x_BxVxT.dtype),
            scratch_shapes=[pltpu.SemaphoreType.DMA],
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
            interpret=interpret,
            name="pegprof_rows",
        )(jnp.clip(ids_BxK, 0, V - 1)[:, None, :], x_BxVxT)


def _loop(times: int, body: Any) -> None:
    jax.lax.fori_loop(np.int32(0), np.int32(times), lambda k, _: body(k), None)
