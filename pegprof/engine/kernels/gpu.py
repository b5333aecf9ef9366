"""Kernels for NVIDIA GPUs, in Pallas for Triton: operands of all examples in, summaries of their gradients out.

One program owns one tile of the parameter. It forms that tile of g_b = Σ_t s[b,t,:]ᵀ r[b,t,:] for b = 1..B in turn and
hands it to the accumulators' own ``add``. Tile and states stay in registers: a gradient of an example never travels to
memory. Edges are masked where they are loaded, so nothing is padded in memory.

Why Triton: 128×128 entries with two states take 228 to 248 registers and spill none, on A100 and H100. Mosaic GPU
spills none either, and its clusters can share loads, which saves up to half of L2's traffic. But it is for Hopper,
takes float32 only if the positions are last, and its interpreter knows neither clusters nor turned operands: no test
here could tell a right kernel from one that hangs. ``benchmarks/gpu_kernels.py`` has the figures.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pegprof.engine.accumulators import Accumulator, Moment, SquareNorm, Summary
from pegprof.engine.dtypes import wide_dtype
from pegprof.engine.jaxpr import abstract
from pegprof.engine.kernels.base import KernelCost, Operand, Outer, priced, same_axes, states_of
from pegprof.targets.chips import Chip

REGISTERS = 2**16
"""Of 32 bits, in each core of every GPU since Kepler."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """What one program does: D × E entries, T positions at a step, in 32 × ``warps`` threads.

    ``stages`` - 1 steps are loaded ahead. The examples are cut into ``parts``, a divisor of B, whose summaries merge:
    so that a small parameter keeps all cores busy.
    """

    T: int
    D: int
    E: int
    warps: int = 8
    stages: int = 3
    parts: int = 1


def choose_tile(outer: Outer, accumulators: Sequence[Accumulator], chip: Chip, precision: Any = None) -> Tile | None:
    """The tile that takes the least time by the cost model; None if Triton cannot do it."""
    if chip.name in NOT_FOR_TRITON or any((*outer.s.whole, *outer.r.whole)):  # a block is a power of two
        return None
    tiles = _tiles(outer, _count_states(tuple(accumulators)), is_exact(outer.dtype, precision), chip)
    found = [tile for tile in tiles if shared_bytes(outer, tile) <= chip.on_chip_bytes]
    # Below 64×64 a product loads its operands from shared memory more often than the model knows.
    rows, columns = (min(64, power_of_two(axis)) for axis in (outer.D, outer.E))
    large = [tile for tile in found if rows <= tile.D and columns <= tile.E]
    return min(large or found, key=lambda tile: _seconds(outer, tile, accumulators, chip, precision), default=None)


NOT_FOR_TRITON = ("t4",)
"""XLA's Triton starts with Ampere."""


@functools.lru_cache
def _count_states(accumulators: tuple[Accumulator, ...]) -> int:
    return states_of(accumulators)


def _tiles(outer: Outer, states: int, exact: bool, chip: Chip) -> Iterator[Tile]:
    # An entry takes a register for the product and one for each state. Of 255 registers a thread, 192 are left beside
    # addresses and operands; with 8 warps that is 128×128 for two states. What doesn't run on tensor cores holds its
    # operands in registers too, and gets 96. Triton wants powers of two, and at least 16 of each axis.
    room = 96 if exact or outer.T == 1 else 192
    # 128 bytes of positions are a step: the widest row of shared memory that tensor cores read without conflicts.
    # Longer steps spill; the full-precision product is unrolled over a step, so it takes a short one.
    T = 16 if exact else min(128 // jnp.dtype(outer.dtype).itemsize, power_of_two(outer.T))
    rows, columns = ([n for n in (16, 32, 64, 128, 256) if n <= power_of_two(axis)] for axis in (outer.D, outer.E))
    for D, E in itertools.product(rows, columns):
        # The fewest warps that have the registers: then small programs share a core, and hide each other's waits.
        warps = next((w for w in (4, 8) if (1 + states) * D * E <= room * 32 * w), None)
        if warps is None:
            continue
        whole = Tile(T=max(T, 16), D=D, E=E, warps=warps)
        # Parts keep all cores busy where tiles are few. Their summaries take memory: not where tiles are many.
        parts = [n for n in range(2, outer.B + 1) if outer.B % n == 0 and n * outer.count(D, E) <= 4 * chip.cores]
        yield from (dataclasses.replace(whole, parts=n) for n in (1, *parts))


def power_of_two(n: int) -> int:
    """The smallest one that Triton multiplies and that is at least n."""
    return max(16, 1 << (n - 1).bit_length())


def is_exact(dtype: Any, precision: Any) -> bool:
    """Whether a product runs in full float32 or wider, for which there are no tensor cores."""
    if jnp.dtype(dtype).itemsize < 4:
        return False
    return jnp.dtype(dtype).itemsize > 4 or higher_precision(precision) is lax.Precision.HIGHEST


def _seconds(outer: Outer, tile: Tile, accumulators: Sequence[Accumulator], chip: Chip, precision: Any) -> float:
    """Products, then what is done to the entries, while loads run ahead; some cores idle in the last wave."""
    cost = outer_cost(outer, tile, accumulators, chip)
    programs = tile.parts * outer.count(tile.D, tile.E)
    idle = math.ceil(programs / chip.cores) * chip.cores / programs
    padded = programs / tile.parts * tile.D * tile.E * outer.B  # entries, with those beyond the edges
    steps = math.ceil(outer.T / tile.T) * tile.T if outer.T > 1 else 0
    rate = matmul_rate(outer.dtype, precision, chip)
    vector = (1 + 2 * _count_states(tuple(accumulators))) * padded / chip.vector_flops
    merging = 0 if tile.parts == 1 else (tile.parts + 1) * result_bytes(outer, accumulators) / chip.bandwidth
    loads = cost.cache_bytes / (chip.cache_bandwidth or chip.bandwidth)
    # Products wait for nothing but their loads, which run ahead; where T = 1 nothing runs ahead far enough.
    busy = max(2 * padded * steps / rate + vector, loads) if outer.T > 1 else vector + loads
    return max(busy * idle, cost.bytes / chip.bandwidth) + merging


def matmul_rate(dtype: Any, precision: Any, chip: Chip) -> float:
    """Flops a second of products."""
    if is_exact(dtype, precision):
        return chip.highest_flops
    return chip.float32_flops if jnp.dtype(dtype).itemsize == 4 else chip.bfloat16_flops


def result_bytes(outer: Outer, accumulators: Sequence[Accumulator]) -> int:
    return 4 * _count_states(tuple(accumulators)) * outer.entries


def outer_cost(outer: Outer, tile: Tile, accumulators: Sequence[Accumulator], chip: Chip) -> KernelCost:
    """What ``fold_outer`` takes.

    - flops: 2·B·T for each entry; vector_flops: 1 + 2 for each state, for each entry and example, and what operands
      take that are evaluated.
    - cache_bytes: every program loads its columns of s and r, so s once for each column of tiles, r once for each row.
    - bytes: programs that run at the same time march over the examples together. What several of them load comes from
      main memory once, and from L2 for the others. So each wave of programs reads its own columns of s and r, and all
      waves read them once if both operands fit half of L2. Results are written once for each part of the examples.
    """
    rows, columns = math.ceil(outer.D / tile.D), math.ceil(outer.E / tile.E)
    s_times, r_times = outer.Y * columns, outer.X * rows
    states = _count_states(tuple(accumulators))
    norms = any(a.per_example for a in accumulators)
    evaluated = outer.s.steps * s_times * math.prod(outer.s.shape) + outer.r.steps * r_times * math.prod(outer.r.shape)
    written = tile.parts * result_bytes(outer, accumulators) + norms * 4 * outer.B * outer.count(tile.D, tile.E)
    return KernelCost(
        flops=2 * outer.B * outer.T * outer.entries,
        vector_flops=(1 + 2 * (states + norms)) * outer.B * outer.entries + evaluated,
        bytes=_read_bytes(outer, tile, states, chip) + written,
        cache_bytes=outer.s.read_bytes(s_times) + outer.r.read_bytes(r_times),
        held_bytes=4 * (1 + states) * tile.D * tile.E + shared_bytes(outer, tile),
    )


def shared_bytes(outer: Outer, tile: Tile) -> int:
    """At most: a step of positions for each stage; after the loop a result, on its way to where its threads store it.

    And 1 KiB in which sums of warps meet.
    """
    steps = tile.stages * tile.T * (tile.D + tile.E) * jnp.dtype(outer.dtype).itemsize if outer.T > 1 else 0
    return max(steps, 4 * tile.D * tile.E) + 2**10


def _read_bytes(outer: Outer, tile: Tile, states: int, chip: Chip) -> int:
    """Of both operands from main memory, by all waves."""
    s_bytes, r_bytes = outer.s.read_bytes(1), outer.r.read_bytes(1)
    at_once = chip.cores * _resident(outer, tile, states)
    rows, columns = math.ceil(outer.D / tile.D), math.ceil(outer.E / tile.E)
    tiles, pairs = rows * columns, outer.X * outer.Y
    if s_bytes + r_bytes <= chip.cache_bytes // 2 or outer.count(tile.D, tile.E) <= at_once:
        return s_bytes + r_bytes
    if tiles <= at_once:  # y runs faster than x: s is read once, r again in every wave
        return s_bytes + r_bytes * min(outer.X, math.ceil(pairs * tiles / at_once))
    # A wave is a block of the grid of tiles, ``band`` along the shorter side.
    waves, band = tiles / at_once, min(BAND, rows, columns)
    other = min(at_once / band, max(rows, columns))
    down, across = (band, other) if rows <= columns else (other, band)
    return int(waves * (s_bytes * outer.Y * min(1, down / rows) + r_bytes * outer.X * min(1, across / columns)))


def _resident(outer: Outer, tile: Tile, states: int) -> int:
    """How many programs a core runs at the same time, by their registers."""
    threads = 32 * tile.warps
    registers = min(255, (1 + states) * tile.D * tile.E // threads + 56)
    return max(1, min(REGISTERS // (threads * registers), 2048 // threads))


def fold_outer(
    s: Operand,
    r: Operand,
    accumulators: Sequence[Accumulator],
    *,
    precision: Any,
    chip: Chip,
    skip: jax.Array | None = None,
    tile: Tile | None = None,
    interpret: bool = False,
) -> list[Summary]:
    """Summaries of the gradients g_b[g,x,y] = Σ_t s[b,g,x,t,:]ᵀ r[b,g,y,t,:] over the examples.

    Args:
      s: [B, G, X, T, D] or [B, G, X, D, T].
      r: [B, G, Y, T, E] or [B, G, Y, E, T].
      accumulators: entrywise ones, and ``SquareNorm``.
      precision: of the product, as the equation of a ``dot_general`` holds it.
      chip: what the tile is chosen for.
      skip: [B, D] bool. These rows of an example's gradient add nothing, in all groups; for ``Moment`` and
        ``SquareNorm`` only.
      tile: what one program does; ``choose_tile`` decides if not given.
      interpret: run on the CPU, for tests.

    Returns:
      One summary for each accumulator, of arrays [G, X, Y, D, E], or [B] for ``SquareNorm``.
    """
    _check(accumulators, skip)
    outer = Outer(s=s, r=r)
    tile = tile or choose_tile(outer, accumulators, chip, precision)
    if tile is None:
        raise NotImplementedError(f"a fused kernel on {chip.name}")
    entrywise = [a for a in accumulators if not a.per_example]
    norms = len(entrywise) < len(accumulators)
    part = outer.B // tile.parts

    g = jax.ShapeDtypeStruct((tile.D, tile.E), common_dtype(s, r, wide=True))
    leaves, tree = jax.tree.flatten(jax.eval_shape(lambda: [a.finish(a.init(g), part) for a in entrywise]))
    whole = (tile.parts, outer.G, outer.X, outer.Y, outer.D, outer.E)
    taken = same_axes([*s.arrays, *r.arrays, *([] if skip is None else [skip])])
    results = [abstract(taken[0], whole, leaf.dtype) for leaf in leaves]
    if norms:
        results.append(abstract(taken[0], (outer.B, outer.count(tile.D, tile.E)), g.dtype))

    kernel = functools.partial(
        _outer_kernel,
        outer=outer,
        tile=tile,
        accumulators=entrywise,
        dtypes=(common_dtype(s, r), g.dtype),
        norms=norms,
        skips=skip is not None,
        precision=higher_precision(precision),
    )
    with priced("outer", outer_cost(outer, tile, accumulators, chip)):
        arrays = pl.pallas_call(
            kernel,
            out_shape=results,
            grid=(tile.parts * outer.count(tile.D, tile.E),),
            compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
            interpret=interpret,
            name="pegprof_outer",
        )(*taken)
    each_norm = jnp.sum(arrays[-1], axis=1) if norms else None
    summaries = iter(jax.tree.unflatten(tree, arrays[: len(leaves)]))
    return [each_norm if a.per_example else _merge_parts(a, next(summaries), tile.parts, part) for a in accumulators]


def _check(accumulators: Sequence[Accumulator], skip: Any) -> None:
    taken = Accumulator if skip is None else (Moment, SquareNorm)
    for a in accumulators:
        if not (a.entrywise or isinstance(a, SquareNorm)) or not isinstance(a, taken):
            raise NotImplementedError(f"{a} in a fused kernel{'' if skip is None else ' that skips rows'}")


def _merge_parts(kind: Accumulator, stacked: Summary, parts: int, size: int) -> Summary:
    """The summary of all examples from those of ``parts`` sets of ``size``, which are stacked."""
    first, *others = [jax.tree.map(lambda x, w=w: x[w], stacked) for w in range(parts)]
    for w, other in enumerate(others, 1):
        first = kind.merge(first, w * size, other, size)
    return first


def common_dtype(s: Operand, r: Operand, *, wide: bool = False) -> Any:
    """What operands are multiplied in: tensor cores take two of a kind. Or, if ``wide``, what their product is."""
    if s.dtype == r.dtype and not wide:
        return s.dtype
    return jnp.promote_types(wide_dtype(s.dtype), wide_dtype(r.dtype))


def higher_precision(precision: Any) -> Any:
    """One precision for both operands: of two, Triton would take the lower; XLA takes the higher, and so do we."""
    if not isinstance(precision, tuple):
        return precision
    order = [None, lax.Precision.DEFAULT, lax.Precision.HIGH, lax.Precision.HIGHEST]
    return max(precision, key=order.index)


def _outer_kernel(
    *refs: Any,
    outer: Outer,
    tile: Tile,
    accumulators: Sequence[Accumulator],
    dtypes: tuple[Any, Any],
    norms: bool,
    skips: bool,
    precision: Any,
) -> None:
    """One program: a tile of the parameter, over one part of the examples."""
    s_refs, r_refs, rest = _split(refs, len(outer.s.arrays), len(outer.r.arrays))
    skip_ref = rest.pop(0) if skips else None
    norm_ref = rest.pop() if norms else None
    part, steps = outer.B // tile.parts, math.ceil(outer.T / tile.T)
    at = _place(outer, tile)
    start = at.part * part  # the first example
    entries = grid_mask(at.rows.mask, at.columns.mask)
    dtype, wide = dtypes
    zeros = jnp.zeros((tile.D, tile.E), wide)

    def operands(b: Any, t: Any, T: int) -> tuple[jax.Array, jax.Array]:
        """The blocks of some positions of example b. Beyond the last position both are 0."""
        positions = Span.of(t, T, outer.T)
        x = load_operand(outer.s, s_refs, (b, at.g, at.x), positions, at.rows)
        y = load_operand(outer.r, r_refs, (b, at.g, at.y), positions, at.columns)
        return x.astype(dtype), y.astype(dtype)

    def product(b: Any, t: Any) -> jax.Array:
        """What the t-th step of positions adds to the tile of example b."""
        x, y = operands(b, t, tile.T)
        contract = ((0 if outer.s.minor else 1,), (0 if outer.r.minor else 1,))
        return multiply(x, y, contract, precision, wide)

    def vectors(b: Any) -> tuple[jax.Array, jax.Array]:
        """Both operands of example b where T = 1, as a column and as a row."""
        x, y = operands(b, b * 0, 1)
        return x.reshape(tile.D, 1).astype(wide), y.reshape(1, tile.E).astype(wide)

    def add(b: Any, p: jax.Array, states: list[Any]) -> list[Any]:
        """The states after example b of this part, whose tile is p."""
        n = (b + 1).astype(jnp.float32)
        kept = None
        if skip_ref is not None:
            skipped = load_masked(skip_ref.at[start + b, at.rows.slice], at.rows.mask)
            kept = jnp.broadcast_to(jnp.logical_not(skipped)[:, None], p.shape)
        # The states come first: a norm's squares beside them and p would be more than there are registers.
        after = [a.add(state, p, n) for a, state in zip(accumulators, states, strict=True)]
        if norm_ref is not None:
            counted = both(entries, kept)
            only = p if counted is None else jnp.where(counted, p, zeros)
            plgpu.store(norm_ref.at[start + b, at.tile], jnp.sum(jnp.sum(only * only, axis=1), axis=0))
        return after if kept is None else jax.tree.map(lambda x, old: jnp.where(kept, x, old), after, states)

    def step(k: Any, carry: Any) -> Any:
        """One loop over examples and steps, so that loads run ahead from one example into the next."""
        p, states = carry
        b, t = divide(k, steps)
        p = p + product(start + b, t)
        if steps == 1:
            return zeros, add(b, p, states)
        last = t == steps - 1
        return lax.cond(last, lambda p, x: (zeros, add(b, p, x)), lambda p, x: (p, x), p, states)

    def rank_one(first: Any, count: int, states: list[Any]) -> list[Any]:
        """Some examples where T = 1. All are loaded before the first is added: there is nothing else to hide waits."""
        for u, (x, y) in enumerate([vectors(start + first + u) for u in range(count)]):
            states = add(first + u, x * y, states)
        return states

    states = [a.init(jax.ShapeDtypeStruct(zeros.shape, wide)) for a in accumulators]
    if outer.T == 1:
        ahead = next(n for n in (4, 2, 1) if part % n == 0)
        states = loop(part // ahead, lambda k, states: rank_one(k * ahead, ahead, states), states)
    else:
        _, states = loop(part * steps, step, (zeros, states))
    summaries = [a.finish(state, part) for a, state in zip(accumulators, states, strict=True)]
    for ref, x in zip(rest, jax.tree.leaves(summaries), strict=True):
        plgpu.store(
            ref.at[at.part, at.g, at.x, at.y, at.rows.slice, at.columns.slice], x, mask=as_mask(entries, x.shape)
        )


def _split(refs: Sequence[Any], *counts: int) -> list[list[Any]]:
    """The first some, the next some, the rest."""
    ends = [0, *itertools.accumulate(counts), len(refs)]
    return [list(refs[start:end]) for start, end in itertools.pairwise(ends)]


class Span(NamedTuple):
    """Some indices of an axis: which, as a slice, and which of them exist; None if all do, wherever the slice is."""

    start: Any
    size: int
    mask: jax.Array | None

    @classmethod
    def of(cls, number: Any, size: int, limit: int) -> "Span":
        start = number * size
        return cls(start, size, None if limit % size == 0 else start + lax.iota(np.int32, size) < limit)

    @property
    def slice(self) -> Any:
        return pl.ds(self.start, self.size)


class _Place(NamedTuple):
    """Which part of the examples and which tile is this program's."""

    part: Any
    tile: Any
    g: Any
    x: Any
    y: Any
    rows: Span
    columns: Span


BAND = 12
"""Programs that run together cover a block of this many tiles on one side, about the root of the number of cores."""


def _place(outer: Outer, tile: Tile) -> _Place:
    part, number = divide(pl.program_id(0), outer.count(tile.D, tile.E))
    rows, columns = math.ceil(outer.D / tile.D), math.ceil(outer.E / tile.E)
    rest, inner = divide(number, rows * columns)
    rest, y = divide(rest, outer.Y)
    g, x = divide(rest, outer.X)
    i, j = _in_bands(inner, rows, columns) if rows <= columns else reversed(_in_bands(inner, columns, rows))
    return _Place(part, number, g, x, y, Span.of(i, tile.D, outer.D), Span.of(j, tile.E, outer.E))


def _in_bands(number: Any, short: int, long: int) -> tuple[Any, Any]:
    """Place of a tile in a grid that is run through in bands along the long side, across each band first."""
    if short <= BAND:
        along, across = divide(number, short)
        return across, along
    band, within = divide(number, BAND * long)
    width = jnp.minimum(BAND, short - band * BAND).astype(jnp.int32)
    return band * BAND + lax.rem(within, width), lax.div(within, width)


def divide(number: Any, by: int) -> tuple[Any, Any]:
    """Quotient and remainder of numbers that are not negative; Triton cannot compile Python's own operators."""
    return lax.div(number, np.int32(by)), lax.rem(number, np.int32(by))


def loop(length: int, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    """A loop whose index is of 32 bits, in 64-bit mode too."""
    return lax.fori_loop(0, length, lambda k, carry: body(k.astype(np.int32), carry), carry)


def grid_mask(rows: jax.Array | None, columns: jax.Array | None) -> jax.Array | None:
    """Which entries of a block exist."""
    return both(None if rows is None else rows[:, None], None if columns is None else columns[None, :])


def both(a: jax.Array | None, b: jax.Array | None) -> jax.Array | None:
    """Where both masks hold; None is a mask that holds everywhere."""
    if a is None or b is None:
        return b if a is None else a
    return a & b


def as_mask(mask: jax.Array | None, shape: tuple[int, ...]) -> jax.Array | None:
    return None if mask is None else jnp.broadcast_to(mask, shape)


def load_masked(ref: Any, mask: jax.Array | None) -> jax.Array:
    """What lies there, 0 where masked."""
    if mask is None:
        return plgpu.load(ref)
    return plgpu.load(ref, mask=as_mask(mask, ref.shape), other=jnp.zeros((), ref.dtype))


def load_operand(operand: Operand, refs: Sequence[Any], lead: Sequence[Any], positions: Span, free: Span) -> jax.Array:
    """A block [positions, free] of an operand, or [free, positions] if that is how it lies; 0 where there is none."""
    spans = (positions, free) if operand.minor else (free, positions)
    mask = grid_mask(spans[0].mask, spans[1].mask)
    if operand.evaluate is None:
        return load_masked(refs[0].at[*lead, spans[0].slice, spans[1].slice], mask)

    def load(ref: Any) -> jax.Array:
        """A block of one array; of an axis of size one always the same."""
        *outer, rows, columns = ref.shape
        once = Span(lead[0] * 0, 1, None)
        at = [i if n > 1 else i * 0 for i, n in zip(lead, outer, strict=True)]
        down, across = (span if n > 1 else once for span, n in zip(spans, (rows, columns), strict=True))
        return load_masked(ref.at[*at, down.slice, across.slice], grid_mask(down.mask, across.mask))

    def index(*, free: bool) -> jax.Array:
        axis = int(free == operand.minor)
        span = spans[axis]
        return span.start + lax.broadcasted_iota(np.int32, (1, span.size) if axis else (span.size, 1), axis)

    value = operand.evaluate([load(ref) for ref in refs], index).astype(operand.dtype)
    value = jnp.broadcast_to(value, (spans[0].size, spans[1].size))
    return value if mask is None else jnp.where(mask, value, jnp.zeros_like(value))


def multiply(x: jax.Array, y: jax.Array, contract: Any, precision: Any, wide: Any) -> jax.Array:
    return lax.dot_general(x, y, (contract, ((), ())), precision=precision, preferred_element_type=wide)
