"""patches: a convolution's weight gradient as one matrix product an example.

With the shifted copies of the input for all taps side by side, x_kxtxn, the gradient of an example is

    g[k, n, o] = Σ_t x[k, t, n] r[t, o]:

one product for all taps. XLA's own convolution of a single example is far slower than that on a CPU. The copies are
made an axis at a time, so that a 7×7 kernel takes 14 slices and not 49; each slice is one contiguous block where the
taps come first. For a 1×1 kernel they are the input itself.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pegprof.engine.costs import Cost, accumulate_cost, frontier_bytes, gradient_bytes, tail_cost
from pegprof.engine.facts import known
from pegprof.engine.jaxpr import JaxprEqn, Rule, dtype_of
from pegprof.engine.jaxpr import primitives as p
from pegprof.engine.quantities import Values
from pegprof.engine.statistics import Quantity
from pegprof.engine.strategies import loop
from pegprof.engine.strategies.base import Frontier, Strategy, bind_wide
from pegprof.engine.strategies.windows import (
    POSITIONS,
    TAPS,
    Shift,
    Windows,
    in_result_layout,
    is_expressible,
    windows_of,
)
from pegprof.engine.tails import Tail

_MOST_SLICES = 32
"""Of an axis with more taps the copies are gathered: that takes longer to run, and no time to compile."""


def convolutions(tail: Tail) -> list[JaxprEqn]:
    """The convolutions that start a tail and can be written as shifted copies."""
    return [eqn for eqn in tail.starts if known(eqn) is p.conv_general_dilated_p and is_expressible(eqn)]


def rule_for(tail: Tail, convolve: Rule) -> Rule:
    """As the loop applies a tail's equations, but the convolutions that start it by ``convolve``."""
    special = convolutions(tail)

    def rule(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
        return convolve(eqn, values) if any(eqn is start for start in special) else bind_wide(eqn, values)

    return rule


def _fits(tail: Tail, quantities: Sequence[Quantity]) -> bool:
    return loop.fits(tail, quantities) and bool(convolutions(tail))


def _run(tail: Tail, quantities: Sequence[Quantity], frontier: Frontier, chunk: int) -> list[Values]:
    return loop.run(tail, quantities, frontier, chunk, rule=rule_for(tail, by_patches))


def by_patches(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """A convolution of one example, in float32 at least."""
    windows = windows_of(eqn)
    x, r = windows.pick(_same_dtype(values))
    x, letters = _patches(x, windows)
    result = "".join(letter for letter in windows.result if letter in letters + windows.resting)
    wide = jnp.result_type(jnp.float32, x.dtype, dtype_of(eqn.outvars[0]))
    text = f"{letters},{windows.resting}->{result}"
    product = jnp.einsum(text, x, r, precision=eqn.params["precision"], preferred_element_type=wide)
    return [in_result_layout(product, result, windows, eqn)]


def _same_dtype(values: Sequence[Any]) -> list[jax.Array]:
    dtype = jnp.result_type(*values)
    return [jnp.asarray(x, dtype) for x in values]


def _patches(x: jax.Array, windows: Windows) -> tuple[jax.Array, str]:
    """The copies for all taps, with a letter for the taps of each axis that has several.

    They are put where the result has them: first, or behind the channels of the operand. Then the product needs no
    transposing of what is large.
    """
    letters, result = windows.moving, windows.result
    channels = "n" if windows.shifted == 0 else "o"
    behind = channels if channels in letters and result.endswith(tuple(TAPS)) else ""
    shifts = {tap: (t, shift) for tap, t, shift in zip(TAPS, POSITIONS, windows.shifts, strict=False)}
    for tap in sorted(shifts, key=result.index, reverse=True):
        x, letters = _copies(x, letters, *shifts[tap], tap, behind)
    return x, letters


def _copies(x: jax.Array, letters: str, t: str, shift: Shift, tap: str, behind: str) -> tuple[jax.Array, str]:
    """The copies for the taps along the axis t."""
    axis = letters.index(t)
    if shift.taps == 1:
        return shift.slice(x, 0, axis), letters
    if shift.splits:  # position and tap are the quotient and the remainder
        x = x.reshape(*x.shape[:axis], shift.count, -1, *x.shape[axis + 1 :])
        return jax.lax.slice_in_dim(x, 0, shift.taps, axis=axis + 1), letters.replace(t, t + tap)
    if shift.taps > _MOST_SLICES:
        read_KxT = np.add.outer(shift.starts, shift.step * np.arange(shift.count))
        return jnp.take(x, read_KxT, axis=axis), letters.replace(t, tap + t)
    at = letters.index(behind) + 1 if behind else 0
    copies = [shift.slice(x, k, axis) for k in range(shift.taps)]
    return jnp.stack(copies, axis=at), letters[:at] + tap + letters[at:]


def _cost(tail: Tail, quantities: Sequence[Quantity], B: int, chunk: int) -> Cost:
    """A product an example; the patches are written and read, and half of them are written twice."""
    cost = cost_beside_convolutions(tail, quantities)
    for eqn in convolutions(tail):
        windows = windows_of(eqn)
        flops = {"batched_flops" if windows.sizes["g"] > 1 else "matmul_flops": windows.flops}
        patch_bytes = windows.patch_entries * dtype_of(eqn.invars[windows.shifted]).itemsize
        copied = 0 if windows.taps == 1 else patch_bytes
        cost += Cost(**flops, bytes_moved=3 * copied, bytes_held=copied)
    return cost * B


def cost_beside_convolutions(tail: Tail, quantities: Sequence[Quantity]) -> Cost:
    """What the loop over the examples takes for one of them, its convolutions left out."""
    special = convolutions(tail)
    others = tuple(eqn for eqn in tail.equations if not any(eqn is start for start in special))
    passing = Cost(bytes_moved=frontier_bytes(tail), steps=1, bytes_held=gradient_bytes(tail))
    return tail_cost(dataclasses.replace(tail, equations=others)) + accumulate_cost(tail, len(quantities)) + passing


PATCHES = Strategy(
    name="patches",
    why="a convolution as one product an example, of the input's patches",
    fits=_fits,
    run=_run,
    cost=_cost,
    recomputes=True,
)
