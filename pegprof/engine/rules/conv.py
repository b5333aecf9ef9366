"""Rules for convolutions: patches, depthwise. Both form one example's weight gradient at a time, without XLA's own.

**patches**: with the shifted copies of the input for all taps side by side, x_kxtxn, the gradient of an example is

    g[k, n, o] = Σ_t x[k, t, n] r[t, o]:

one product for all taps. XLA's own convolution of a single example is far slower than that on a CPU. The copies are
made an axis at a time, so that a 7×7 kernel takes 14 slices and not 49; each slice is one contiguous block where the
taps come first. For a 1×1 kernel they are the input itself.

**depthwise**: with one channel a group there is no matrix product, only

    g[k, c] = Σ_t x[k, t, c] r[t, c]

for each tap k: an elementwise product and a sum over the positions, which XLA fuses. Its own grouped convolution is
written as a full one on a CPU, c times the work. With several channels a group, patches are faster.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pegprof.engine.accumulators import Accumulator
from pegprof.engine.costs import Cost, accumulate_cost, frontier_bytes, gradient_bytes, tail_cost
from pegprof.engine.facts import known
from pegprof.engine.jaxpr import JaxprEqn, bind, dtype_of, shape_of
from pegprof.engine.jaxpr import Rule as Evaluation
from pegprof.engine.jaxpr import primitives as p
from pegprof.engine.rules.base import Rule
from pegprof.engine.rules.folds import run_loop
from pegprof.engine.sites import Site
from pegprof.engine.stages import Accumulators, Frontier, Summaries
from pegprof.engine.structures import Conv
from pegprof.engine.tails import Tail

# ---- convolutions as shifted copies --------------------------------------------------------------------------------
#
# Along each axis a convolution makes entry k of its result from the pairs of entries v of lhs and t of rhs with
#
#     e·v + low = s·k + d·t        e: lhs_dilation, d: rhs_dilation, s: window_strides, low: padding.
#
# In the weight gradient of a layer lhs is the layer's input, rhs the cotangent of its output, k a tap of the kernel. So
# tap k meets rhs, entry by entry, with a shifted copy of lhs: padded by low and dilated by e, read at s·k + d·t for all
# t. Where d = 1 the roles may change: lhs meets a copy of rhs, padded by s·(K-1) - low, read at s·(K-1-k) + e·v for all
# v. That is less work where rhs has fewer channels, or where lhs is dilated, as in transposed convolutions.
#
# Axes go by letters: g groups, n channels of lhs, o of rhs, i features that both sum over, t u v positions, a b c taps.

POSITIONS, TAPS = "tuvwxyz", "abcdefh"
COPY = 50  # what it costs to put an entry into a patch, in multiplications of a matrix product


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

    @property
    def patch_letters(self) -> tuple[str, str]:
        """The letters of what ``patches_of`` returns."""
        letters: list[str] = []
        picked = jax.ShapeDtypeStruct([self._padded_size(a) for a in self.moving], jnp.float32)
        jax.eval_shape(lambda x: letters.append(_patches(x, self)[1]), picked)
        return letters[0], self.resting

    def _padded_size(self, letter: str) -> int:
        return self.sizes[letter] if letter in self.sizes else self.shifts[POSITIONS.index(letter)].extent

    def pick(self, values: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
        """The operand to shift, padded, with the axes of ``moving``, and the other with those of ``resting``."""
        x, r = (self._in_letters(values[side], self.operands[side]) for side in (self.shifted, 1 - self.shifted))
        config = [(0, 0, 0)] * x.ndim
        for letter, shift in zip(POSITIONS, self.shifts, strict=False):
            config[self.moving.index(letter)] = shift.padding
        return jax.lax.pad(x, jnp.zeros((), x.dtype), config), r

    def _in_letters(self, x: jax.Array, letters: str) -> jax.Array:
        """An operand with an axis for each letter; groups share an axis with the letter that follows them."""
        shape = (n for n, letter in zip(x.shape, letters.replace("g", ""), strict=True) if letter in POSITIONS)
        return x.reshape([self.sizes[a] if a in self.sizes else next(shape) for a in self._long(letters)])

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


_MOST_SLICES = 32
"""Of an axis with more taps the copies are gathered: that takes longer to run, and no time to compile."""


def convolutions(tail: Tail) -> list[JaxprEqn]:
    """The convolutions that start a tail and can be written as shifted copies."""
    return [eqn for eqn in tail.starts if known(eqn) is p.conv_general_dilated_p and is_expressible(eqn)]


def evaluation_of(tail: Tail, convolve: Evaluation) -> Evaluation:
    """How to apply a tail's equations: the convolutions that start it by ``convolve``, the others as they stand."""
    special = convolutions(tail)

    def apply(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
        return convolve(eqn, values) if any(eqn is start for start in special) else bind(eqn, values)

    return apply


def _fits(site: Site, accumulators: Accumulators) -> bool:
    return site.unknown is None and bool(convolutions(site.tail))


def _run(convolve: Evaluation, site: Site, accumulators: Accumulators, frontier: Frontier, chunk: int) -> Summaries:
    return run_loop(accumulators, frontier, chunk, evaluation_of(frontier.tail, convolve))


def by_patches(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """A convolution of one example, in float32 at least."""
    windows = windows_of(eqn)
    common = jnp.result_type(*values)
    x, r = patches_of(windows, [jnp.asarray(value, common) for value in values])
    letters, resting = windows.patch_letters
    result = "".join(letter for letter in windows.result if letter in letters + resting)
    wide = jnp.result_type(jnp.float32, x.dtype, dtype_of(eqn.outvars[0]))
    text = f"{letters},{resting}->{result}"
    product = jnp.einsum(text, x, r, precision=eqn.params["precision"], preferred_element_type=wide)
    return [in_result_layout(product, result, windows, eqn)]


def patches_of(windows: Windows, values: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The shifted operand's copies for all taps, and the other operand: see ``Windows.patch_letters``."""
    x, r = windows.pick(values)
    return _patches(x, windows)[0], r


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


def _cost(site: Site, accumulators: Accumulators, B: int, chunk: int) -> Cost:
    """A product an example; the patches are written and read, and half of them are written twice."""
    cost = cost_beside_convolutions(site.tail, accumulators)
    for eqn in convolutions(site.tail):
        windows = windows_of(eqn)
        flops = {"batched_flops" if windows.sizes["g"] > 1 else "matmul_flops": windows.flops}
        patch_bytes = windows.patch_entries * dtype_of(eqn.invars[windows.shifted]).itemsize
        copied = 0 if windows.taps == 1 else patch_bytes
        cost += Cost(**flops, bytes_moved=3 * copied, bytes_held=copied)
    return cost * B


def cost_beside_convolutions(tail: Tail, accumulators: Accumulators) -> Cost:
    """What the loop over the examples takes for one of them, its convolutions left out."""
    special = convolutions(tail)
    others = tuple(eqn for eqn in tail.equations if not any(eqn is start for start in special))
    passing = Cost(bytes_moved=frontier_bytes(tail), steps=1, bytes_held=gradient_bytes(tail))
    return tail_cost(dataclasses.replace(tail, equations=others)) + accumulate_cost(tail, accumulators) + passing


PATCHES = Rule(
    name="patches",
    loops=True,
    why="a convolution as one product an example, of the input's patches",
    structure=Conv,
    accumulators=(Accumulator,),
    fits=_fits,
    run=functools.partial(_run, by_patches),
    cost=_cost,
    recomputes=True,
)


_MOST_TAPS = 128  # each is a product and a sum of its own to compile


def _fits_depthwise(site: Site, accumulators: Accumulators) -> bool:
    found = convolutions(site.tail)
    return site.unknown is None and bool(found) and all(_is_depthwise(windows_of(eqn)) for eqn in found)


def _is_depthwise(windows: Windows) -> bool:
    return windows.sizes["g"] > 1 and windows.sizes["n"] == windows.sizes["o"] == 1 and windows.taps <= _MOST_TAPS


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


def _cost_depthwise(site: Site, accumulators: Accumulators, B: int, chunk: int) -> Cost:
    """A multiplication and an addition for each channel, tap and position."""
    cost = cost_beside_convolutions(site.tail, accumulators)
    for eqn in convolutions(site.tail):
        cost += Cost(shift_flops=windows_of(eqn).flops)
    return cost * B


DEPTHWISE = Rule(
    name="depthwise",
    loops=True,
    why="one channel a group: shift, multiply, add up",
    structure=Conv,
    accumulators=(Accumulator,),
    fits=_fits_depthwise,
    run=functools.partial(_run, by_shifts),
    cost=_cost_depthwise,
    recomputes=True,
)
