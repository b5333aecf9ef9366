"""One tile of each kernel against the plain product, on the device that is here, before a plan relies on it.

Nobody who wrote these kernels had such a device. So the first plan in a process that could use kernels runs each once,
on small numbers. A kernel that does not compile, or is off, takes all kernels out of the plan, with a remark.
"""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pegprof.engine.accumulators import CENTRED, MEAN, SQUARE, SQUARE_NORM
from pegprof.engine.jaxpr import outside_trace
from pegprof.engine.kernels import switch
from pegprof.engine.kernels.backends import Backend, backend_of
from pegprof.engine.kernels.base import Operand
from pegprof.errors import first_line
from pegprof.targets.chips import Chip

B, T, D, E = 4, 24, 136, 200  # no multiples of a tile
TOLERANCE = 1e-4
"""The numbers are rounded to bfloat16, so that every product is exact and only its sum is rounded, in float32."""


def trusted_chip(backend: str) -> tuple[Chip | None, tuple[str, ...]]:
    """The chip whose kernels a plan may use, and remarks. On a device that is not here nothing can be checked."""
    chip = switch.chip_for(backend)
    if chip is None or not switch.is_present(chip):
        return chip, ()
    fault = find_fault(chip, switch.interprets(), backend_of(chip))
    if not fault:
        return chip, ()
    remark = f"no fused kernels: on {chip.name} {fault}"
    warnings.warn(f"{remark}. XLA's own operations are used instead. Please report this.", stacklevel=2)
    return None, (remark,)


@functools.cache
def find_fault(chip: Chip, interpret: bool, backend: Backend) -> str:
    """What is wrong with the kernels of a chip, or "" if nothing is. A plan is often made while tracing."""
    dtypes = (jnp.float32, jnp.bfloat16)
    faults = outside_trace(lambda: [_check(chip, interpret, backend, dtype) for dtype in dtypes])
    return next((fault for fault in faults if fault), "")


def _check(chip: Chip, interpret: bool, backend: Backend, dtype: Any) -> str:
    s, r = (_numbers(shape, seed, dtype) for seed, shape in enumerate([(B, 1, 1, T, D), (B, 1, 1, T, E)]))
    g = np.einsum("btd,bte->bde", *(np.asarray(x, np.float64)[:, 0, 0] for x in (s, r)))
    norms = np.square(g).sum((1, 2))
    expected = {"outer": [g.mean(0), np.square(g).mean(0), g.var(0), norms], "gram": [norms]}
    try:
        found = _run(backend, chip, interpret, s, r)
    except Exception as error:  # whatever a compiler or a driver throws
        return f"they do not run: {first_line(error)}"
    for name, values in expected.items():
        off = max(_relative_error(x, y) for x, y in zip(found[name], values, strict=True))
        if not off <= TOLERANCE:
            return f"the kernel {name} is off by {off:.1g} in {jnp.dtype(dtype).name}"
    return ""


def _relative_error(x: Any, y: np.ndarray) -> float:
    error = np.max(np.abs(np.asarray(x, np.float64) - y)) / np.max(np.abs(y))
    return float("inf") if np.isnan(error) else float(error)


def _run(backend: Backend, chip: Chip, interpret: bool, s: jax.Array, r: jax.Array) -> dict[str, list[Any]]:
    how: Any = dict(precision=None, chip=chip, interpret=interpret)

    @jax.jit
    def run(*arrays: jax.Array) -> dict[str, list[Any]]:
        operands = [Operand.stored(x, minor=True) for x in arrays]
        mean, square, spread, norms = backend.fold_outer(*operands, [MEAN, SQUARE, CENTRED, SQUARE_NORM], **how)
        entries = [x[0, 0, 0] for x in (mean, square, spread.square)]
        return {"outer": [*entries, norms], "gram": [backend.square_norms(*operands, **how)]}

    return jax.device_get(run(s, r))


def _numbers(shape: tuple[int, ...], seed: int, dtype: Any) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.bfloat16).astype(dtype)
