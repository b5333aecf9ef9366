"""Plan -> layers: how many positions of an example each matrix sees (T), how wide it is (D), and whether T ≥ D.

That is the paper's rule for activations to dominate. At each position a layer reads and writes some numbers; D is how
many positions it takes until the larger of the two, what it reads or what it writes, is as much as its parameters:

    a matrix D×E with D ≤ E           D·E / E = D, the width of the model where E is a multiple of it
    a convolution, k taps, i -> o     k·i·o / max(i, o)
    a table of V rows, looked up      V·E / E = V

So T ≥ D says that one example's activations there are at least as many as the parameters. T counts the positions of
every use of a parameter. Where the uses differ, as those of a tied embedding do, each is taken to see as many
positions, and D goes by what they read or write on average.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence

from pegprof.engine.plan import Plan, PlanRow

# Their gradient is no larger than what it is made from (biases, scales, positions), or no example has a part in it.
NO_MATRIX = ("direct", "constant")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """Parameters that are alike: the same shape, T and D, and names that differ in numbers or in one word."""

    name: str  # block_*/attention/{key,query,value}/kernel
    count: int
    shape: tuple[int, ...]
    T: int | None
    D: int | None

    @property
    def parameters(self) -> int:
        return self.count * math.prod(self.shape)

    @property
    def obeys_rule(self) -> bool | None:
        """Whether T ≥ D; None where either is unknown."""
        return None if self.T is None or self.D is None else self.T >= self.D


def find_layers(plan: Plan) -> tuple[Layer, ...]:
    """The matrices of a plan, those that are alike together, in the order of the plan."""
    matrices = [row for row in plan.rows if row.strategy not in NO_MATRIX]
    alike: dict[tuple[object, ...], list[PlanRow]] = {}
    for row in matrices:
        alike.setdefault((row.shape, row.rank, width(row.contraction, row.shape)), []).append(row)
    return tuple(
        Layer(name=name, count=count, shape=rows[0].shape, T=rows[0].rank, D=width(rows[0].contraction, rows[0].shape))
        for rows in alike.values()
        for name, count in name_together(row.parameter for row in rows)
    )


def width(contraction: str, shape: Sequence[int]) -> int | None:
    """D of a parameter, from the contraction that forms its gradient; None where that does not tell.

    >>> width("bti,btop->iop", (1024, 16, 64)), width("bti,bto->io", (1024, 4096)), width("bi,bo->io", (2048, 10))
    (1024, 1024, 10)
    >>> width("bti,bto->kio, k = 3×3 taps", (3, 3, 32, 64)), width("scatter-add bto->io", (32000, 512))
    (288, 32000)
    """
    uses = [_parameters_and_numbers(use, shape) for use in contraction.split(" + ")]
    known = [use for use in uses if use is not None]
    if len(known) < len(uses):
        return None
    parameters, numbers = (sum(column) for column in zip(*known, strict=True))
    return math.ceil(parameters / numbers)


def _parameters_and_numbers(use: str, shape: Sequence[int]) -> tuple[int, int] | None:
    """Of one use: the parameters of one layer, and how many numbers it reads or writes at a position."""
    einsum, _, taps = use.removeprefix("scatter-add ").partition(", k = ")
    operands, arrow, result = einsum.partition("->")
    if not arrow:
        return None
    if taps:
        sizes = [int(tap) for tap in re.findall(r"\d+", taps)]
        channels = _without(shape, sizes)
        return (math.prod([*sizes, *channels]), max(channels)) if channels else None
    size_of = _sizes(result, shape)
    if size_of is None:
        return None
    return math.prod(size_of.values()), max(math.prod(size_of.get(x, 1) for x in op) for op in operands.split(","))


def _without(shape: Sequence[int], taps: Sequence[int]) -> list[int]:
    """The channels of a kernel, in whatever order its axes come; nothing if the taps are not among them."""
    rest = list(shape)
    for tap in taps:
        if tap not in rest:
            return []
        rest.remove(tap)
    return rest[-2:]  # before these there is at most a stack of layers


def _sizes(result: str, shape: Sequence[int]) -> dict[str, int] | None:
    """The sizes of a contraction's letters, which leave out axes of size one; a stack of layers leads the shape."""
    long = [size for size in shape if size != 1]
    if len(result) > len(long):
        return None
    return dict(zip(result, long[len(long) - len(result) :], strict=True))


def name_together(names: Iterable[str]) -> list[tuple[str, int]]:
    """Names as few patterns, each with how many it stands for.

    >>> name_together(["block_0/up", "block_1/up", "out"])
    [('block_*/up', 2), ('out', 1)]
    >>> name_together([f"block_{i}/attention/{name}" for i in (0, 1) for name in ("key", "query")])
    [('block_*/attention/{key,query}', 4)]
    """
    patterns: dict[str, list[str]] = {}
    for name in names:
        patterns.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    found = [(pattern if len(same) > 1 else same[0], len(same)) for pattern, same in patterns.items()]
    return _merge_words(found)


def _merge_words(found: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Patterns that differ in one word of their paths, as one with the words in braces."""
    groups: list[list[tuple[str, int]]] = []
    for pattern, count in found:
        fitting = (group for group in groups if _differ_in_one_word([*(p for p, _ in group), pattern]))
        group = next(fitting, None)
        if group is None:
            groups.append([(pattern, count)])
        else:
            group.append((pattern, count))
    return [(_in_braces([p for p, _ in group]), sum(count for _, count in group)) for group in groups]


def _words(patterns: Sequence[str]) -> list[tuple[str, ...]]:
    """The different words at each place of some paths of one length."""
    columns = zip(*(pattern.split("/") for pattern in patterns), strict=True)
    return [tuple(dict.fromkeys(column)) for column in columns]


def _differ_in_one_word(patterns: Sequence[str]) -> bool:
    lengths = {pattern.count("/") for pattern in patterns}
    return lengths != {0} and len(lengths) == 1 and sum(len(words) > 1 for words in _words(patterns)) == 1


def _in_braces(patterns: Sequence[str]) -> str:
    return "/".join(words[0] if len(words) == 1 else "{" + ",".join(words) + "}" for words in _words(patterns))
