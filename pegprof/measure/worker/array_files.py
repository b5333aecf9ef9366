"""Arrays from one process to another, through a file that has no name.

All methods so get the same parameters and data, which are made once; and the statistics of one can be compared with
those of another, though each runs in a process of its own. The file is in the folder for temporary files, and goes when
the last process that has it open ends, however it ends.
"""

import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pegprof.measure.protocol import Slot

ALIGNMENT = 64


def save(file: int, arrays: Sequence[jax.Array]) -> list[Slot]:
    """Appends arrays to an open file.

    Raises:
      OSError: there is no room for them.
    """
    slots = []
    with os.fdopen(file, "r+b", buffering=0, closefd=False) as stream:
        for array in arrays:
            is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
            values = np.asarray(jax.random.key_data(array) if is_key else array)
            offset = -(-stream.seek(0, os.SEEK_END) // ALIGNMENT) * ALIGNMENT
            stream.seek(offset)
            _bytes_of(values).tofile(stream)
            slots.append(
                Slot(
                    offset=offset,
                    shape=values.shape,
                    dtype=values.dtype.name,
                    key_impl=str(jax.random.key_impl(array)) if is_key else None,
                )
            )
    return slots


def view(file: int, slot: Slot) -> np.ndarray:
    """An array of the file, as it stands there: nothing is read before it is used."""
    dtype, count = jnp.dtype(slot.dtype), int(np.prod(slot.shape))
    if not count:
        return np.zeros(slot.shape, dtype)
    with os.fdopen(file, "rb", closefd=False) as stream:
        raw = np.memmap(stream, np.uint8, "r", offset=slot.offset, shape=(count * dtype.itemsize,))
    return raw.view(dtype).reshape(slot.shape)


def load(file: int, slot: Slot, first: int | None = None) -> jax.Array:
    """An array of the file on the device; with ``first``, only so many of its rows."""
    values: Any = jax.device_put(np.array(view(file, slot)[:first] if first is not None else view(file, slot)))
    return jax.random.wrap_key_data(values, impl=slot.key_impl) if slot.key_impl else values


def _bytes_of(values: np.ndarray) -> np.ndarray:
    """Whatever the dtype: NumPy itself knows nothing of bfloat16."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
