"""A contraction described once, for people: index strings ('bti,bto->io') and the rank bound T.

The letters: b the batch, t u v contracted (positions), g shared by both operands (groups, heads), i j of the first
operand, o p of the second. Axes of size one are left out, so the batch of one that an example comes in never shows.
"""

import math
import string
from collections.abc import Sequence

from pegprof.engine.arithmetic import contracted_size
from pegprof.engine.facts import known
from pegprof.engine.jaxpr import JaxprEqn, Literal, primitives, shape_of
from pegprof.engine.tails import Tail

_CONTRACTED, _SHARED, _FIRST, _SECOND = "tuvw", "ghkl", "ijmn", "opqr"


def describe_contraction(tail: Tail, formed_by: JaxprEqn | None) -> tuple[str, int | None]:
    """How a tail forms its gradients, and a bound on the rank of one example's: 1 means an outer product.

    Several starts are joined by a plus. Without a tail it is what the body does last.
    """
    if not tail.starts:
        return _describe_last_step(formed_by), None
    found = [_describe(eqn, tail) for eqn in tail.starts]
    ranks = [rank for _, rank in found if rank is not None]
    return " + ".join(dict.fromkeys(text for text, _ in found)), sum(ranks) if len(ranks) == len(found) else None


def _describe(eqn: JaxprEqn, tail: Tail) -> tuple[str, int | None]:
    depends = {v for v, d in zip(tail.inputs, tail.depends, strict=True) if d}
    made = {v for e in tail.equations for v in e.outvars}  # an operand may be converted first
    batched = [not isinstance(v, Literal) and (v in depends or v in made) for v in eqn.invars]
    match known(eqn):
        case primitives.dot_general_p:
            return _describe_dot(eqn, batched, tail)
        case primitives.conv_general_dilated_p:
            return _describe_conv(eqn, batched)
        case primitives.scatter_add_p:
            return _describe_scatter(eqn, batched)
        case primitives.jit_p:
            return "sum over a loop", None
    return eqn.primitive.name, None


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


def _describe_conv(eqn: JaxprEqn, batched: Sequence[bool]) -> tuple[str, int]:
    numbers = eqn.params["dimension_numbers"]
    taps = "×".join(str(shape_of(eqn.outvars[0])[axis]) for axis in numbers.out_spec[2:])
    positions = math.prod(shape_of(eqn.invars[1])[axis] for axis in numbers.rhs_spec[2:])
    lhs, rhs = ("b" * b for b in batched)
    return f"{lhs}ti,{rhs}to->kio, k = {taps} taps", positions


def _describe_scatter(eqn: JaxprEqn, batched: Sequence[bool]) -> tuple[str, int]:
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
