"""A convolution as shifted copies of one of its operands: what ``patches`` and ``depthwise`` share.

Along each axis a convolution makes entry k of its result from the pairs of entries v of lhs and t of rhs with

    e·v + low = s·k + d·t        e: lhs_dilation, d: rhs_dilation, s: window_strides, low: padding.

In the weight gradient of a layer lhs is the layer's input, rhs the cotangent of its output, k a tap of the kernel. So
tap k meets rhs, entry by entry, with a shifted copy of lhs: padded by low and dilated by e, read at s·k + d·t for each
t. Where d = 1 the roles may change: lhs meets a copy of rhs, padded by s·(K-1) - low, read at s·(K-1-k) + e·v for each
v. That is less work where rhs has fewer channels, or where lhs is dilated, as in transposed convolutions.

Axes go by letters: g groups, n channels of lhs, o of rhs, i features that both sum over, t u v positions, a b c taps.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pegprof.engine.jaxpr import JaxprEqn, shape_of

POSITIONS, TAPS = "tuvwxyz", "abcdefh"
COPY = 50
"""What it costs to put an entry into a patch, in multiplications of a matrix product."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shift:
    """Along one axis: tap k reads the padded operand at starts[k], starts[k] + step, ..., ``count`` entries in all."""

    starts: tuple[int, ...]
    step: int
    count: int
    low: int  # padding before the first entry; negative crops
    dilation: int
    size: int  # of the operand as it is

    @property
    def taps(self) -> int:
        return len(self.starts)

    @property
    def splits(self) -> bool:
        """Whether the taps are what lies between a position and the next, so that they are a reshape away."""
        close = self.taps > 1 and self.starts == tuple(range(self.taps))
        return close and (self.taps <= self.step or self.count == 1)

    @property
    def extent(self) -> int:
        """How long the padded operand has to be."""
        if self.splits:
            return self.count * max(self.step, self.taps)
        return max(self.starts) + (self.count - 1) * self.step + 1

    @property
    def padding(self) -> tuple[int, int, int]:
        dilated = self.dilation * (self.size - 1) + 1 if self.size else 0
        return self.low, self.extent - self.low - dilated, self.dilation - 1

    def slice(self, x: jax.Array, k: int, axis: int) -> jax.Array:
        """What tap k reads."""
        start = self.starts[k]
        return jax.lax.slice_in_dim(x, start, start + (self.count - 1) * self.step + 1, self.step, axis)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Windows:
    """A convolution in letters. ``shifted`` is the operand of which each tap reads another part: 0 or 1."""

    operands: tuple[str, str]
    result: str
    sizes: dict[str, int]  # of g, n, o and i
    shifted: int
    shifts: tuple[Shift, ...]

    @property
    def moving(self) -> str:
        """The letters of the operand that is shifted; channels and features of size one are left out."""
        return self._long(self.operands[self.shifted])

    @property
    def resting(self) -> str:
        """The letters of the other operand, likewise."""
        return self._long(self.operands[1 - self.shifted])

    @property
    def taps(self) -> int:
        return math.prod(shift.taps for shift in self.shifts)

    @property
    def positions(self) -> int:
        return math.prod(shift.count for shift in self.shifts)

    @property
    def flops(self) -> int:
        """A multiplication and an addition for each pair that meets, padding included."""
        return 2 * self.taps * self.positions * math.prod(self.sizes.values())

    @property
    def patch_entries(self) -> int:
        """The shifted copies for all taps, written one beside the other."""
        return self.taps * self.positions * math.prod(n for x, n in self.sizes.items() if x in self.moving)

    def pick(self, values: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
        """The operand to shift, padded, with the axes of ``moving``, and the other with those of ``resting``."""
        x, r = (self._in_letters(values[side], self.operands[side]) for side in (self.shifted, 1 - self.shifted))
        config = [(0, 0, 0)] * x.ndim
        for letter, shift in zip(POSITIONS, self.shifts, strict=False):
            config[self.moving.index(letter)] = shift.padding
        return jax.lax.pad(x, jnp.zeros((), x.dtype), config), r

    def _in_letters(self, x: jax.Array, letters: str) -> jax.Array:
        shape = iter(n for axis, n in enumerate(x.shape) if axis in self._space(letters))
        return x.reshape([self.sizes[a] if a in self.sizes else next(shape) for a in self._long(letters)])

    def _space(self, letters: str) -> list[int]:
        """The axes of an operand that are positions; groups share an axis with the letter that follows them."""
        return [axis for axis, letter in enumerate(letters.replace("g", "")) if letter in POSITIONS]

    def _long(self, letters: str) -> str:
        return "".join(a for a in letters if self.sizes.get(a) != 1)


def windows_of(eqn: JaxprEqn) -> Windows:
    """A convolution's letters and shifts, shifting the operand that makes less work."""
    (lhs, rhs), (out,) = map(shape_of, eqn.invars), map(shape_of, eqn.outvars)
    numbers, params = eqn.params["dimension_numbers"], eqn.params
    groups = params["feature_group_count"] * params["batch_group_count"]
    g = "g" if groups > 1 else ""
    by_batch, by_feature = g * (params["batch_group_count"] > 1), g * (params["feature_group_count"] > 1)
    positions, taps = POSITIONS[: len(lhs) - 2], TAPS[: len(lhs) - 2]
    operands = (
        _in_layout(numbers.lhs_spec, (by_batch + "n", by_feature + "i", *positions)),
        _in_layout(numbers.rhs_spec, (g + "o", "i", *positions)),
    )
    sizes = {
        "g": groups,
        "n": out[numbers.out_spec[0]],
        "o": out[numbers.out_spec[1]] // groups,
        "i": rhs[numbers.rhs_spec[1]],
    }
    make = functools.partial(
        Windows, operands=operands, result=_in_layout(numbers.out_spec, ("n", g + "o", *taps)), sizes=sizes
    )
    axes = [
        (lhs[v], rhs[t], out[k], s, d, e, low)
        for v, t, k, s, d, e, (low, _) in zip(
            numbers.lhs_spec[2:],
            numbers.rhs_spec[2:],
            numbers.out_spec[2:],
            params["window_strides"],
            params["rhs_dilation"],
            params["lhs_dilation"],
            params["padding"],
            strict=True,
        )
    ]
    choices = [make(shifted=0, shifts=tuple(_shift_lhs(*axis) for axis in axes))]
    if all(d == 1 for d in params["rhs_dilation"]):
        choices.append(make(shifted=1, shifts=tuple(_shift_rhs(*axis) for axis in axes)))
    return min(choices, key=lambda w: w.flops + 2 * COPY * w.patch_entries)


def _shift_lhs(V: int, T: int, K: int, s: int, d: int, e: int, low: int) -> Shift:
    return Shift(starts=tuple(range(0, s * K, s)), step=d, count=T, low=low, dilation=e, size=V)


def _shift_rhs(V: int, T: int, K: int, s: int, d: int, e: int, low: int) -> Shift:
    starts = tuple(reversed(range(0, s * K, s)))
    return Shift(starts=starts, step=e, count=V, low=s * (K - 1) - low, dilation=1, size=T)


def _in_layout(spec: Sequence[int], letters: Sequence[str]) -> str:
    """The letters of an array's axes: ``spec[j]`` is the axis that ``letters[j]`` name."""
    return "".join(x for _, x in sorted(zip(spec, letters, strict=True)))


def is_expressible(eqn: JaxprEqn) -> bool:
    """Whether there are letters for all axes, and entries along each."""
    shapes = [shape_of(v) for v in (*eqn.invars, *eqn.outvars)]
    return len(shapes[0]) - 2 <= len(TAPS) and all(0 not in shape for shape in shapes)


def in_result_layout(x: Any, letters: str, windows: Windows, eqn: JaxprEqn) -> jax.Array:
    """An array with these letters as the convolution would have returned it; single taps may be left out."""
    order = [letters.index(letter) for letter in windows.result if letter in letters]
    return jax.lax.transpose(x, order).reshape(shape_of(eqn.outvars[0]))
