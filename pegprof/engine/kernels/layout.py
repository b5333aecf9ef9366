"""A contraction of two operands, as the kernels take it: which axes are positions, which are rows and columns.

Axes go by letters, one string for each operand and one for the result: "td,te->de". Letters that both operands and the
result have are groups; those that only the operands have are positions. The examples' axis comes first in each operand
and has no letter. A kernel takes operands of five axes, [B, G, X, T, D] with D last or [B, G, X, D, T] with T last. X
is for free axes that lie before the positions.
"""

import dataclasses
import math
import string
from collections.abc import Mapping, Sequence

import jax

from pegprof.engine.jaxpr import JaxprEqn, shape_of
from pegprof.targets.chips import Chip

LANES = 128  # the last axis of an array on a TPU is stored in rows of so many


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contraction:
    """The letters of two operands and of their product, with the size of each."""

    s: str
    r: str
    result: str
    sizes: Mapping[str, int]

    @property
    def groups(self) -> str:
        return "".join(a for a in self.s if a in self.r and a in self.result)

    @property
    def positions(self) -> str:
        return "".join(a for a in self.s if a in self.r and a not in self.result)

    def free(self, operand: str) -> str:
        return "".join(a for a in operand if a not in self.groups + self.positions)

    def size(self, letters: str) -> int:
        return math.prod(self.sizes[a] for a in letters)


def contraction_of(eqn: JaxprEqn) -> Contraction:
    """The letters of a ``dot_general`` of one example."""
    (lhs, rhs), (lhs_shape, rhs_shape) = [[""] * len(shape_of(v)) for v in eqn.invars], map(shape_of, eqn.invars)
    letters = iter(string.ascii_letters)
    contracted, shared = eqn.params["dimension_numbers"]
    for left, right in [*zip(*shared, strict=True), *zip(*contracted, strict=True)]:
        lhs[left] = rhs[right] = next(letters)
    lhs = [a or next(letters) for a in lhs]
    rhs = [a or next(letters) for a in rhs]
    groups = [lhs[axis] for axis in shared[0]]
    result = groups + [a for a in lhs if a not in rhs] + [a for a in rhs if a not in lhs]
    sizes = dict(zip([*lhs, *rhs], [*lhs_shape, *rhs_shape], strict=True))
    return Contraction(s="".join(lhs), r="".join(rhs), result="".join(result), sizes=sizes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """One operand's letters, and their order: [G, X, T, D] or [G, X, D, T]."""

    letters: str  # as the operand lies
    groups: str
    outer: str  # X
    positions: str
    inner: str  # D
    minor: bool  # whether D is last

    @property
    def parts(self) -> tuple[str, str, str, str]:
        last = (self.positions, self.inner) if self.minor else (self.inner, self.positions)
        return self.groups, self.outer, *last

    def has_whole_parts(self, labels: Sequence[str]) -> bool:
        """Whether a value with these letters has all or none of each part."""
        return all(set(part) <= set(labels) or not set(part) & set(labels) for part in self.parts)

    def put(self, x: jax.Array, labels: Sequence[str], *, batched: bool) -> jax.Array:
        """A value of all examples as [B, G, X, T, D] or [B, G, X, D, T], with size one where it has no letters."""
        x = x if batched else x[None]
        places = {a: axis for axis, a in enumerate(labels, start=1) if a}
        order = [places[a] for part in self.parts for a in part if a in places]
        x = x.reshape([n for axis, n in enumerate(x.shape) if axis == 0 or labels[axis - 1]])
        rank = {axis: i for i, axis in enumerate(sorted(order), start=1)}
        x = jax.lax.transpose(x, [0, *(rank[axis] for axis in order)])
        sizes = iter(x.shape[1:])
        shape = [math.prod(next(sizes) for a in part if a in places) for part in self.parts]
        return x.reshape(x.shape[0], *shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrangement:
    """A contraction as a kernel computes it: rows from one operand, columns from the other."""

    contraction: Contraction
    rows: Side
    columns: Side
    swapped: bool  # whether the rows come from r

    def take(self, x: jax.Array) -> jax.Array:
        """A summary [G, X, Y, D, E] with the axes of the product."""
        c = self.contraction
        letters = c.groups + self.rows.outer + self.columns.outer + self.rows.inner + self.columns.inner
        x = x.reshape([c.sizes[a] for a in letters])
        return jax.lax.transpose(x, [letters.index(a) for a in c.result])


def arrange(contraction: Contraction, chip: Chip) -> Arrangement:
    """The arrangement that reads both operands as they lie, by what XLA does on a chip."""
    place = _on_tpu if chip.backend == "tpu" else _on_gpu
    s, r = place(contraction, contraction.s), place(contraction, contraction.r)
    # A product needs no transposing on chip where the positions are last in the rows and first in the columns.
    swapped = (s.minor, r.minor) == (True, False)
    rows, columns = (r, s) if swapped else (s, r)
    return Arrangement(contraction=contraction, rows=rows, columns=columns, swapped=swapped)


def _on_tpu(c: Contraction, letters: str) -> Side:
    """XLA puts the positions last where the free axes would leave lanes empty, as heads do, or are very long."""
    free = c.free(letters)
    narrow = len(free) > 1 and c.sizes[free[-1]] % LANES != 0
    long = c.size(free) % LANES != 0 and c.size(c.positions) % LANES == 0
    minor = not (narrow or long or _free_first(c, letters))
    return Side(letters=letters, groups=c.groups, outer="", positions=c.positions, inner=free, minor=minor)


def _on_gpu(c: Contraction, letters: str) -> Side:
    """Arrays lie as they are written: free axes before the positions stay there."""
    free, minor = c.free(letters), not _free_first(c, letters)
    first = min((letters.index(a) for a in c.positions), default=0)
    outer = "".join(a for a in free if letters.index(a) < first) if minor else ""
    inner = "".join(a for a in free if a not in outer)
    return Side(letters=letters, groups=c.groups, outer=outer, positions=c.positions, inner=inner, minor=minor)


def _free_first(c: Contraction, letters: str) -> bool:
    """Whether all free axes come before all positions."""
    free = [letters.index(a) for a in c.free(letters)]
    positions = [letters.index(a) for a in c.positions]
    return bool(free) and bool(positions) and max(free) < min(positions)
