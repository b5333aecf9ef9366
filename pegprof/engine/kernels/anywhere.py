"""Kernels beside an equivalent of XLA's own operations, so that a program with kernels runs and transforms anywhere.

A plan for a TPU may be followed on a CPU, and a user may differentiate statistics or batch them. A kernel does none of
that. The equivalent takes its place where the program is lowered for another platform, and in derivatives.
"""

from collections.abc import Callable
from typing import Any

import jax

from pegprof.engine.kernels import switch
from pegprof.targets.chips import Chip

PLATFORMS = {"tpu": "tpu", "gpu": "cuda"}


def kernel_or_plain(kernel: Callable[..., Any], plain: Callable[..., Any], chip: Chip) -> Callable[..., Any]:
    """A function that runs ``kernel`` on a chip's platform, and ``plain`` anywhere else."""
    in_turn = jax.custom_batching.sequential_vmap(kernel)

    @jax.custom_jvp
    def run(*values: Any) -> Any:
        if switch.interprets():
            return in_turn(*values)
        return jax.lax.platform_dependent(*values, **{PLATFORMS[chip.backend]: in_turn}, default=plain)

    @run.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        _, out_tangents = jax.jvp(plain, primals, tangents)
        return run(*primals), out_tangents

    return run
