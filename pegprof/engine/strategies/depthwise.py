"""depthwise: the weight gradient of a convolution with one channel a group, by shifting, multiplying and adding up.

There is no matrix product in the gradient of an example, only

    g[k, c] = Σ_t x[k, t, c] r[t, c]

for each tap k: an elementwise product and a sum over the positions, that XLA fuses. Its own grouped convolution is
written as a full one on a CPU, c times the work. One example at a time stays in the cache. With several channels a
group the small products of ``patches`` are faster.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pegprof.engine.costs import Cost
from pegprof.engine.jaxpr import JaxprEqn, dtype_of
from pegprof.engine.quantities import Values
from pegprof.engine.statistics import Quantity
from pegprof.engine.strategies import loop
from pegprof.engine.strategies.base import Frontier, Strategy
from pegprof.engine.strategies.patches import convolutions, cost_beside_convolutions, rule_for
from pegprof.engine.strategies.windows import POSITIONS, TAPS, Windows, in_result_layout, windows_of
from pegprof.engine.tails import Tail

_MOST_TAPS = 128
"""Each is a product and a sum of its own to compile."""


def _fits(tail: Tail, quantities: Sequence[Quantity]) -> bool:
    found = convolutions(tail)
    return bool(found) and all(_is_depthwise(windows_of(eqn)) for eqn in found) and loop.fits(tail, quantities)


def _is_depthwise(windows: Windows) -> bool:
    return windows.sizes["g"] > 1 and windows.sizes["n"] == windows.sizes["o"] == 1 and windows.taps <= _MOST_TAPS


def _run(tail: Tail, quantities: Sequence[Quantity], frontier: Frontier, chunk: int) -> list[Values]:
    return loop.run(tail, quantities, frontier, chunk, rule=rule_for(tail, by_shifts))


def by_shifts(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """A convolution of one example, in float32 at least, tap after tap."""
    windows = windows_of(eqn)
    wide = jnp.result_type(jnp.float32, *values, dtype_of(eqn.outvars[0]))
    x, r = windows.pick([jnp.asarray(value, wide) for value in values])
    letters = windows.moving
    r = jax.lax.transpose(r, [windows.resting.index(letter) for letter in letters])
    summed = [axis for axis, letter in enumerate(letters) if letter != "g"]
    sums = []
    for tap in itertools.product(*(range(shift.taps) for shift in windows.shifts)):
        copy = x
        for k, t, shift in zip(tap, POSITIONS, windows.shifts, strict=False):
            copy = shift.slice(copy, k, letters.index(t))
        sums.append(jnp.sum(copy * r, axis=summed))
    g = jnp.stack(sums).reshape(*(shift.taps for shift in windows.shifts), windows.sizes["g"])
    return [in_result_layout(g, TAPS[: len(windows.shifts)] + "g", windows, eqn)]


def _cost(tail: Tail, quantities: Sequence[Quantity], B: int, chunk: int) -> Cost:
    """A multiplication and an addition for each channel, tap and position."""
    cost = cost_beside_convolutions(tail, quantities)
    for eqn in convolutions(tail):
        cost += Cost(shift_flops=windows_of(eqn).flops)
    return cost * B


DEPTHWISE = Strategy(
    name="depthwise",
    why="one channel a group: shift, multiply, add up",
    fits=_fits,
    run=_run,
    cost=_cost,
    recomputes=True,
)
