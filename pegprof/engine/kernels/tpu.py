"""Kernels for TPUs, in Pallas: operands of all examples in, summaries of their gradients out.

``fold_outer`` forms a tile of one example's gradient after the other on chip, and adds it to the accumulators' states,
which stay on chip too. A gradient of an example never travels to memory. The states are the kernel's result blocks; the
grid runs over tiles first, then over the examples, then over their positions.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pegprof.engine.accumulators import Accumulator, Summary
from pegprof.engine.dtypes import wide_dtype
from pegprof.engine.jaxpr import abstract
from pegprof.engine.kernels.base import KernelCost, Operand, Outer, one_precision, priced, same_axes, states_of
from pegprof.targets.chips import Chip

LANES, SUBLANES = 128, 8

UNROLLED = 1024 * 256 * 512
"""How many multiplications of a product the compiler sees at once. It unrolls them: more compile longer, not faster.
Matrix units twice as wide want parts twice as wide."""

ROWS = 128
"""How many rows of an operand are evaluated at once, likewise."""

FULL = 1024
"""An axis up to this long may be one block, whatever its length."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """A block of one example's gradient, D×E, formed from T positions at a time."""

    T: int
    D: int
    E: int
    unrolled: int = UNROLLED

    @property
    def part(self) -> int:
        """How many columns are formed at a time."""
        sizes = [n for n in (512, 256, 128) if self.E % n == 0 and self.D * n * self.T <= self.unrolled]
        return max(sizes, default=128 if self.E % 128 == 0 else self.E)


def choose_tile(outer: Outer, accumulators: Sequence[Accumulator], chip: Chip, precision: Any = None) -> Tile | None:
    """The tile that takes the least time by its traffic and its products; None if no tile fits the chip.

    A TPU multiplies in passes of bfloat16, as many as ``precision`` asks for. That makes no difference to the tile.
    """
    found = [t for t in _tiles(outer, chip) if held_bytes(outer, t, accumulators) <= chip.on_chip_bytes * 3 // 4]
    return min(found, key=lambda t: _rank(outer, t, accumulators, chip), default=None)


def _tiles(outer: Outer, chip: Chip) -> Iterator[Tile]:
    T = outer.T if outer.T <= FULL else 512
    unrolled = UNROLLED * chip.matrix_width // LANES
    for D in _block_sizes(outer.D):
        for E in _block_sizes(outer.E):
            enough = outer.count(D, E) >= chip.cores  # both cores of a chip work, where there is enough to do
            if enough or (D <= LANES and E <= LANES):
                yield Tile(T=T, D=D, E=E, unrolled=unrolled)


def _block_sizes(n: int) -> list[int]:
    sizes = [size for size in (128, 256, 512, 1024, 2048) if size < n]
    return [*sizes, n] if n <= 2 * FULL else sizes


def _rank(outer: Outer, tile: Tile, accumulators: Sequence[Accumulator], chip: Chip) -> tuple[float, int]:
    cost = outer_cost(outer, tile, accumulators, chip)
    flops = 2 * outer.B * outer.count(tile.D, tile.E) * outer.T * tile.D * tile.E  # edges are computed and dropped
    times = (
        flops / chip.product_flops("float32"),
        cost.vector_flops / chip.vector_flops,
        cost.bytes / chip.bandwidth,
    )
    return max(times) + sum(times) / 10, cost.held_bytes  # of what overlaps well, less is still better


def held_bytes(outer: Outer, tile: Tile, accumulators: Sequence[Accumulator]) -> int:
    """On-chip memory: blocks of arrays and results, each twice while the next is on its way; operands; the product."""
    sides = _operand_bytes(outer.s, tile.T, tile.D) + _operand_bytes(outer.r, tile.T, tile.E)
    state = padded_bytes((tile.D, tile.E), outer.wide)
    product = state if outer.T > tile.T else 0
    part = padded_bytes((tile.D, tile.part), outer.wide)
    return sides + 2 * states_of(accumulators) * state + product + 3 * part


def _operand_bytes(operand: Operand, T: int, D: int) -> int:
    blocks = [padded_bytes(operand.block_of(i, T, D), x.dtype) for i, x in enumerate(operand.arrays)]
    evaluated = padded_bytes((T, D) if operand.minor else (D, T), operand.dtype) if operand.evaluate else 0
    return 2 * sum(blocks) + evaluated


def padded_bytes(shape: tuple[int, int], dtype: Any) -> int:
    """What a block takes on chip, where it is stored in tiles of 8×128 words."""
    size = jnp.dtype(dtype).itemsize
    rows = SUBLANES * max(1, 4 // size)
    return math.ceil(shape[0] / rows) * rows * math.ceil(shape[1] / LANES) * LANES * size


def outer_cost(outer: Outer, tile: Tile, accumulators: Sequence[Accumulator], chip: Chip) -> KernelCost:
    """Every tile reads its rows and columns of the operands for all examples; results are written once."""
    rows, columns = math.ceil(outer.D / tile.D), math.ceil(outer.E / tile.E)
    s_times, r_times = outer.Y * columns, outer.X * rows
    states = states_of(accumulators)
    evaluated = outer.s.steps * s_times * math.prod(outer.s.shape) + outer.r.steps * r_times * math.prod(outer.r.shape)
    return KernelCost(
        flops=2 * outer.B * outer.T * outer.entries,
        vector_flops=(1 + 2 * states) * outer.B * outer.entries + evaluated,
        bytes=outer.s.read_bytes(s_times) + outer.r.read_bytes(r_times) + 4 * states * outer.entries,
        held_bytes=held_bytes(outer, tile, accumulators),
    )


def fold_outer(
    s: Operand,
    r: Operand,
    accumulators: Sequence[Accumulator],
    *,
    precision: Any,
    chip: Chip,
    tile: Tile | None = None,
    interpret: bool = False,
) -> list[Summary]:
    """The summaries of B gradients g_b = Σ_t s_tᵀ r_t, for each group and each pair of outer axes.

    Args:
      s: [B, G, X, T, D] or [B, G, X, D, T].
      r: [B, G, Y, T, E] or [B, G, Y, E, T].
      accumulators: entrywise ones, and ``SquareNorm``.
      precision: of the product, as ``jax.lax.dot_general`` has it.
      chip: whose memory the tile is chosen for.

    Returns:
      For each accumulator its summary: arrays [G, X, Y, D, E], or [B] for what is kept of each example.
    """
    outer = Outer(s=s, r=r)
    tile = tile or choose_tile(outer, accumulators, chip)
    assert tile is not None
    kernel = _Kernel(
        outer=outer,
        tile=tile,
        running=[a for a in accumulators if not a.per_example],
        alone=[a for a in accumulators if a.per_example],
        precision=one_precision(precision, outer.dtype),
    )
    cost = outer_cost(outer, tile, accumulators, chip)
    states, alone = kernel.states.num_leaves, len(kernel.alone)
    count, none = kernel.count, (None, None, None)
    corner, taken = np.int32(0), same_axes([*s.arrays, *r.arrays])
    call = pl.pallas_call(
        kernel.run,
        grid=(count, outer.B, kernel.steps),
        in_specs=[*kernel.blocks(s, tile.D, rows=True), *kernel.blocks(r, tile.E, rows=False)],
        out_specs=[pl.BlockSpec((*none, tile.D, tile.E), lambda i, b, t: kernel.place(i))] * states
        + [pl.BlockSpec((None, None, SUBLANES, LANES), lambda i, b, t: (i, b, corner, corner))] * alone,
        out_shape=[abstract(taken[0], (outer.G, outer.X, outer.Y, outer.D, outer.E), outer.wide)] * states
        + [abstract(taken[0], (count, outer.B, SUBLANES, LANES), outer.wide)] * alone,
        scratch_shapes=kernel.scratch(),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=min(chip.on_chip_bytes, cost.held_bytes * 5 // 4 + 2**22),
        ),
        interpret=interpret,
        name="pegprof_outer",
    )
    with priced("outer", cost):
        results = call(*taken)
    finished = iter(jax.tree.unflatten(kernel.states, results[:states]))
    norms = iter(jnp.sum(x, axis=(0, 2, 3)) for x in results[states:])
    return [next(norms if a.per_example else finished) for a in accumulators]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kernel:
    """The program of one step of the grid: one tile, one example, some of its positions."""

    outer: Outer
    tile: Tile
    running: Sequence[Accumulator]
    alone: Sequence[Accumulator]
    precision: Any

    @property
    def count(self) -> int:
        return self.outer.count(self.tile.D, self.tile.E)

    @property
    def steps(self) -> int:
        """How many steps an example's positions take."""
        return math.ceil(self.outer.T / self.tile.T)

    @property
    def states(self) -> Any:
        shape = jax.ShapeDtypeStruct((self.tile.D, self.tile.E), self.outer.wide)
        return jax.tree.structure(jax.eval_shape(lambda: [a.init(shape) for a in self.running]))

    def place(self, i: Any) -> tuple[Any, ...]:
        """The group, outer axes, row and column of tile i."""
        outer, tile = self.outer, self.tile
        found = []
        for n in (math.ceil(outer.E / tile.E), math.ceil(outer.D / tile.D), outer.Y, outer.X):
            found.append(jax.lax.rem(i, np.int32(n)))  # of 32 bits also under x64, which no TPU has
            i = jax.lax.div(i, np.int32(n))
        column, row, y, x = found
        return i, x, y, row, column

    def blocks(self, operand: Operand, size: int, *, rows: bool) -> list[pl.BlockSpec]:
        """The blocks of an operand's arrays, along rows or columns of the tiles."""
        return [self._block(operand, array, size, rows=rows) for array in range(len(operand.arrays))]

    def _block(self, operand: Operand, array: int, size: int, *, rows: bool) -> pl.BlockSpec:
        shape = operand.arrays[array].shape
        block = operand.block_of(array, self.tile.T, size)

        def at(i: Any, b: Any, t: Any) -> tuple[Any, ...]:
            g, x, y, row, column = self.place(i)
            places = (b, g, x if rows else y, *self._in_order(operand, t, row if rows else column))
            moves = [n > 1 for n in shape[:3]] + [n > m for n, m in zip(shape[3:], block, strict=True)]
            return tuple(place if move else np.int32(0) for place, move in zip(places, moves, strict=True))

        return pl.BlockSpec((None, None, None, *block), at)

    @staticmethod
    def _in_order(operand: Operand, of_positions: Any, of_free: Any) -> tuple[Any, Any]:
        return (of_positions, of_free) if operand.minor else (of_free, of_positions)

    def scratch(self) -> list[Any]:
        """The two operands, where they are evaluated, and the product, where positions take several steps."""
        tile, small = self.tile, (SUBLANES, LANES)
        shapes = [
            (self._in_order(x, tile.T, size) if x.evaluate else small, x.dtype)
            for x, size in ((self.outer.s, tile.D), (self.outer.r, tile.E))
        ]
        shapes.append(((tile.D, tile.E) if self.steps > 1 else small, self.outer.wide))
        return [pltpu.VMEM(shape, dtype) for shape, dtype in shapes]

    def run(self, *refs: Any) -> None:
        s, r, tile = self.outer.s, self.outer.r, self.tile
        *taken_and_made, s_scratch, r_scratch, p_ref = refs
        taken = iter(taken_and_made)
        counts = (len(s.arrays), len(r.arrays), self.states.num_leaves, len(self.alone))
        s_refs, r_refs, outs, norms = (list(itertools.islice(taken, n)) for n in counts)
        i, b, t = (pl.program_id(axis) for axis in range(3))
        *_, row, column = self.place(i)

        @pl.when((b == 0) & (t == 0))
        def start_states() -> None:
            for ref in outs:
                ref[...] = jnp.zeros(ref.shape, ref.dtype)

        if norms:

            @pl.when(t == 0)
            def start_norms() -> None:
                for ref in norms:
                    ref[...] = jnp.zeros(ref.shape, ref.dtype)

        s_ref = self._evaluate(s, s_refs, s_scratch, t * tile.T, row * tile.D)
        r_ref = self._evaluate(r, r_refs, r_scratch, t * tile.T, column * tile.E)
        valid = self.outer.T - t * tile.T

        def product(at: Any) -> jax.Array:
            s_tile, r_tile = s_ref[...], r_ref[:, at] if r.minor else r_ref[at, :]
            if self.outer.T % tile.T:  # what lies beyond the last position is garbage
                s_tile = only(s_tile, valid, axis=0 if s.minor else 1)
                r_tile = only(r_tile, valid, axis=0 if r.minor else 1)
            if tile.E == 1:  # a product with one bfloat16 column does not lower
                s_tile, r_tile = s_tile.astype(self.outer.wide), r_tile.astype(self.outer.wide)
            numbers = (((0 if s.minor else 1,), (0 if r.minor else 1,)), ((), ()))
            return jax.lax.dot_general(
                s_tile, r_tile, numbers, precision=self.precision, preferred_element_type=self.outer.wide
            )

        def add(start: Any, at: Any, p: jax.Array) -> None:
            n = (b + 1).astype(jnp.float32)
            self._update(outs, at, lambda a, state: a.add(state, p, n))
            if norms:
                p = self._inside(p, row, column * tile.E + start)
            for a, ref in zip(self.alone, norms, strict=True):
                ref[...] += at_corner(a.of_one(p), ref.shape, ref.dtype)

        def part(j: Any, _: Any) -> None:
            start = pl.multiple_of(j * tile.part, tile.part)
            at = pl.ds(start, tile.part)
            if self.steps == 1:
                add(start, at, product(at))
                return
            p_ref[:, at] = product(at) + jnp.where(t == 0, 0, p_ref[:, at])

            @pl.when(t == self.steps - 1)
            def add_product() -> None:
                add(start, at, p_ref[:, at])

        def finish(j: Any, _: Any) -> None:
            at = pl.ds(pl.multiple_of(j * tile.part, tile.part), tile.part)
            self._update(outs, at, lambda a, state: a.finish(state, self.outer.B))

        parts = tile.E // tile.part
        _loop(parts, part)

        @pl.when((b == self.outer.B - 1) & (t == self.steps - 1))
        def finish_states() -> None:
            _loop(parts, finish)

    def _update(self, outs: Sequence[Any], at: Any, change: Callable[[Accumulator, Any], Any]) -> None:
        before = jax.tree.unflatten(self.states, [ref[:, at] for ref in outs])
        after = [change(a, state) for a, state in zip(self.running, before, strict=True)]
        for ref, x in zip(outs, jax.tree.leaves(after), strict=True):
            ref[:, at] = x

    def _inside(self, p: jax.Array, row: Any, start: Any) -> jax.Array:
        """Part of a tile, with zeros beyond the last row and the last column."""
        outer, tile = self.outer, self.tile
        p = only(p, outer.D - row * tile.D, axis=0) if outer.D % tile.D else p
        return only(p, outer.E - start, axis=1) if outer.E % tile.E else p

    def _evaluate(self, operand: Operand, refs: Sequence[Any], scratch: Any, position: Any, free: Any) -> Any:
        """The operand's block: as it is stored, or evaluated into memory on chip, some rows at a time."""
        evaluate = operand.evaluate
        if evaluate is None:
            return refs[0]
        rows, columns = scratch.shape
        height = ROWS if rows % ROWS == 0 else rows
        starts = self._in_order(operand, position, free)

        def some(k: Any, _: Any) -> None:
            at = pl.ds(pl.multiple_of(k * height, height), height)

            def index(*, free: bool) -> jax.Array:
                axis = self._in_order(operand, 0, 1).index(int(free))
                first = starts[axis] + (k * height if axis == 0 else 0)
                shape = (height, 1) if axis == 0 else (1, columns)
                return first + jax.lax.broadcasted_iota(jnp.int32, shape, axis)

            cut = [not whole and ref.shape[0] == rows > 1 for ref, whole in zip(refs, operand.whole, strict=True)]
            blocks = [ref[at, :] if c else ref[...] for ref, c in zip(refs, cut, strict=True)]
            value = evaluate(blocks, index).astype(operand.dtype)
            scratch[at, :] = jnp.broadcast_to(value, (height, columns))

        _loop(rows // height, some)
        return scratch


def _loop(times: int, body: Callable[[Any, Any], None]) -> None:
    jax.lax.fori_loop(np.int32(0), np.int32(times), body, None)


def only(x: jax.Array, n: Any, *, axis: int) -> jax.Array:
    """The first n entries along an axis, zeros after them. In float32: for few rows of bfloat16 Mosaic has no masks."""
    at = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
    return jnp.where(at < n, x.astype(wide_dtype(x.dtype)), 0).astype(x.dtype)


def at_corner(value: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """A number as the first entry of a block of zeros; a TPU stores no single numbers."""
    corner = sum(jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(len(shape))) == 0
    return jnp.where(corner, value, jnp.zeros((), dtype))
