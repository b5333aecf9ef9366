"""The child of ``test_tpu_kernels.py``: every kernel compiled for one TPU that is not here, what they take as JSON.

Runs as ``python -m tests.engine.tpu_compiles NAME`` in the environment of its device, which libtpu reads as it loads.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pegprof.engine.accumulators import CENTRED, MEAN, SQUARE, SQUARE_NORM
from pegprof.engine.kernels import tpu, tpu_gram, tpu_rows
from pegprof.engine.kernels.base import Operand
from pegprof.measure.worker.place import Place
from pegprof.targets.chips import CHIPS, Chip

Case = tuple[str, Callable[..., Any], list[jax.ShapeDtypeStruct]]

HELD = re.compile(r'pegprof_held_bytes="(\d+)",pegprof_kernel="(\w+)"')
USED = re.compile(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"')


def cases(chip: Chip) -> Iterator[Case]:
    """What to compile: names, functions, arguments. No size is a multiple of a tile."""
    how: Any = dict(precision=None, chip=chip)

    def stored(s: Any, r: Any, *, s_minor: bool = True) -> tuple[Operand, Operand]:
        return Operand.stored(s, minor=s_minor), Operand.stored(r, minor=True)

    def moments(s: Any, r: Any) -> Any:
        return tpu.fold_outer(*stored(s, r), [MEAN, SQUARE], **how)

    def spread(s: Any, r: Any) -> Any:
        return tpu.fold_outer(*stored(s, r, s_minor=False), [CENTRED, SQUARE_NORM], **how)

    def column(s: Any, r: Any) -> Any:
        return tpu.fold_outer(Operand.stored(s, minor=False), Operand.stored(r, minor=False), [MEAN, SQUARE], **how)

    def gram(s: Any, r: Any) -> Any:
        return tpu_gram.square_norms(*stored(s, r, s_minor=False), **how)

    def lookups(ids: Any, r: Any) -> Any:
        pair = Operand.of_ids(ids, 300, r.dtype), Operand.stored(r, minor=True)
        return tpu.fold_outer(*pair, [MEAN, CENTRED], precision=jax.lax.Precision.HIGHEST, chip=chip)

    for dtype in ("float32", "bfloat16"):
        abstract = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(shape, dtype)

        def evaluated(h: Any, mean: Any, scale: Any, ids: Any, r: Any, dtype: Any = dtype) -> Any:
            operand = evaluated_operand(h, mean, scale, ids, dtype)
            return tpu.fold_outer(operand, Operand.stored(r, minor=True), [MEAN, SQUARE], **how)

        long = [abstract(4, 1, 1, 136, 1100), abstract(4, 1, 1, 1100, 200)]  # two steps for an example
        ids = jax.ShapeDtypeStruct((4, 1, 1, 1, 256), "int32")
        leaves = [jax.ShapeDtypeStruct(shape, "float32") for shape in EVALUATED]
        yield f"moments {dtype}", moments, [abstract(4, 1, 1, 100, 136), abstract(4, 1, 1, 100, 200)]
        yield f"moments of rank one {dtype}", moments, [abstract(4, 2, 1, 1, 136), abstract(4, 2, 1, 1, 200)]
        yield f"spread and norms {dtype}", spread, long
        yield f"evaluated {dtype}", evaluated, [*leaves, ids, abstract(4, 1, 1, 256, 200)]
        yield f"lookups {dtype}", lookups, [jax.ShapeDtypeStruct((4, 100), "int32"), abstract(4, 1, 1, 100, 200)]
        yield f"gram {dtype}", gram, long
        yield f"few rows {dtype}", spread, [abstract(4, 1, 1, 3, 1100), abstract(4, 1, 1, 1100, 200)]
        yield f"one column {dtype}", column, [abstract(4, 1, 1, 136, 100), abstract(4, 1, 1, 1, 100)]
        rows = [abstract(4, 1003, 128), jax.ShapeDtypeStruct((4, 19), "int32")]
        yield f"rows {dtype}", tpu_rows.take_rows, rows


EVALUATED = [(4, 1, 1, 300, 256), (4, 1, 1, 1, 256), (1, 1, 1, 300, 1)]


def evaluated_operand(h: Any, mean: Any, scale: Any, ids: Any, dtype: Any) -> Operand:
    """gelu((h - mean)·scale) with the positions last, zeros for entries that are among the ids."""

    def evaluate(blocks: Any, index: Any) -> jax.Array:
        h, mean, scale, ids = blocks
        hit = jnp.max(jnp.where(index(free=True) == ids, 1.0, 0.0), axis=1, keepdims=True)
        value = jax.nn.gelu((h - mean) * scale)
        return jnp.where(jnp.broadcast_to(hit, value.shape) > 0, jnp.zeros_like(value), value)

    return Operand(
        arrays=(h, mean, scale, ids),
        evaluate=evaluate,
        shape=h.shape,
        dtype=jnp.dtype(dtype),
        minor=False,
        steps=12,
        whole=(False, False, False, True),
    )


def compile_all(name: str) -> dict[str, dict[str, Any]]:
    """For each case what the kernel said that it holds on chip, and what the compiler gave it there."""
    place, found = Place(name), {}
    for case, run, arguments in cases(CHIPS[name]):
        text = jax.jit(run).lower(*map(place.put, arguments)).compile().as_text() or ""
        (call,) = (line for line in text.splitlines() if "pegprof_kernel=" in line and "tpu_custom_call" in line)
        ((held, kernel),) = HELD.findall(call)
        found[case] = {"kernel": kernel, "held_bytes": int(held), "used_bytes": sum(map(int, USED.findall(call)))}
    return found


if __name__ == "__main__":
    print(json.dumps(compile_all(sys.argv[1])))  # noqa: T201 - what the parent reads
