"""A contraction described once: index strings ('bti,bto->io'), the rank bound T, and what it costs.

The letters: b the batch, t u v contracted (positions), g shared by both operands (groups, heads), i j of the first
operand, o p of the second. Axes of size one are left out, so the batch of one that an example comes in never shows.
"""

import dataclasses
import math
import string
from collections.abc import Sequence

from pegprof.engine.facts import known
from pegprof.engine.flops import count_equation_flops
from pegprof.engine.jaxpr import JaxprEqn, Literal, primitives, shape_of
from pegprof.engine.tails import Tail

_CONTRACTED, _SHARED, _FIRST, _SECOND = "tuvw", "ghkl", "ijmn", "opqr"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contraction:
    """What forms a gradient.

    ``rank`` bounds the rank of one example's gradient: 1 means that it is an outer product.
    """

    text: str
    rank: int | None
    flops: float  # of one example


def contraction_of(tail: Tail, made_by: JaxprEqn | None) -> Contraction:
    """How a tail forms its gradients; several starts are joined by a plus. With no tail, what the body does last."""
    if not tail.starts:
        return Contraction(text=_describe_last_step(made_by), rank=None, flops=0.0)
    found = [_describe(eqn, tail) for eqn in tail.starts]
    ranks = [c.rank for c in found]
    return Contraction(
        text=" + ".join(dict.fromkeys(c.text for c in found)),
        rank=None if None in ranks else sum(r for r in ranks if r is not None),
        flops=sum(count_equation_flops(eqn) for eqn in tail.equations),
    )


def _describe(eqn: JaxprEqn, tail: Tail) -> Contraction:
    depends = {v for v, d in zip(tail.inputs, tail.depends, strict=True) if d}
    batched = [not isinstance(v, Literal) and v in depends for v in eqn.invars]
    describe = _DESCRIBE.get(known(eqn))
    text, rank = describe(eqn, batched, tail) if describe else (eqn.primitive.name, None)
    return Contraction(text=text, rank=rank, flops=count_equation_flops(eqn))


def contracted_size(eqn: JaxprEqn) -> int:
    """The number of terms that a dot_general adds up."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return math.prod(shape_of(eqn.invars[0])[axis] for axis in contracted)


def _describe_dot(eqn: JaxprEqn, batched: Sequence[bool], tail: Tail) -> tuple[str, int]:
    """The operands and the result, with letters given in the order of the parameter's own axes."""
    contracted, shared = eqn.params["dimension_numbers"]
    free = [
        [(side, axis) for axis in range(len(shape_of(v))) if axis not in (*contracted[side], *shared[side])]
        for side, v in enumerate(eqn.invars)
    ]
    result = [*((0, axis) for axis in shared[0]), *free[0], *free[1]]
    result = [result[axis] for axis in _order_in_parameter(eqn, tail)]
    first = next((side for side, axis in result if axis not in shared[0] or side == 1), 0)
    letters: dict[tuple[int, int], str] = {}

    def give(axes: Sequence[tuple[int, int]], alphabet: str) -> None:
        long = [(side, axis) for side, axis in axes if shape_of(eqn.invars[side])[axis] != 1]
        letters.update((axis, _pick(alphabet, i)) for i, axis in enumerate(long))

    give([axis for axis in result if axis in free[first]], _FIRST)
    give([axis for axis in result if axis in free[1 - first]], _SECOND)
    for side in (0, 1):
        give([(side, axis) for axis in contracted[side]], _CONTRACTED)
        give([(side, axis) for axis in shared[side]], _SHARED)

    def operand(side: int) -> str:
        axes = range(len(shape_of(eqn.invars[side])))
        return "b" * batched[side] + "".join(letters.get((side, axis), "") for axis in axes)

    text = f"{operand(first)},{operand(1 - first)}->{''.join(letters.get(axis, '') for axis in result)}"
    return text, contracted_size(eqn)


def _pick(letters: str, i: int) -> str:
    return letters[i] if i < len(letters) else string.ascii_uppercase[i]


def _order_in_parameter(eqn: JaxprEqn, tail: Tail) -> Sequence[int]:
    """The axes of a product in the order of the parameter, where a transpose follows it at once."""
    (out,) = eqn.outvars
    users = [e for e in tail.equations if any(v is out for v in e.invars)]
    if len(users) == 1 and known(users[0]) is primitives.transpose_p:
        return users[0].params["permutation"]
    return range(len(shape_of(out)))


def _describe_conv(eqn: JaxprEqn, batched: Sequence[bool], tail: Tail) -> tuple[str, int]:
    numbers = eqn.params["dimension_numbers"]
    taps = "×".join(str(shape_of(eqn.outvars[0])[axis]) for axis in numbers.out_spec[2:])
    positions = math.prod(shape_of(eqn.invars[1])[axis] for axis in numbers.rhs_spec[2:])
    lhs, rhs = ("b" * b for b in batched)
    return f"{lhs}ti,{rhs}to->kio, k = {taps} taps", positions


def _describe_scatter(eqn: JaxprEqn, batched: Sequence[bool], tail: Tail) -> tuple[str, int]:
    _, indices, updates = eqn.invars
    positions = math.prod(shape_of(indices)[:-1])
    return f"scatter-add {'b' * batched[2]}{'to' if len(shape_of(updates)) > 1 else 't'}->io", positions


def _describe_last_step(eqn: JaxprEqn | None) -> str:
    if eqn is None:
        return "the batch itself"
    if known(eqn) is not primitives.reduce_sum_p:
        return eqn.primitive.name
    shape, summed = shape_of(eqn.invars[0]), eqn.params["axes"]
    kept = [axis for axis in range(len(shape)) if axis not in summed and shape[axis] != 1]
    letters = {axis: _pick(_CONTRACTED, i) for i, axis in enumerate(a for a in summed if shape[a] != 1)}
    letters |= {axis: _pick(_SECOND, i) for i, axis in enumerate(kept)}
    return f"b{''.join(letters[axis] for axis in sorted(letters))}->{''.join(letters[axis] for axis in kept)}"


_DESCRIBE = {
    primitives.dot_general_p: _describe_dot,
    primitives.conv_general_dilated_p: _describe_conv,
    primitives.scatter_add_p: _describe_scatter,
    primitives.jit_p: lambda eqn, batched, tail: ("sum over a loop", None),
}
