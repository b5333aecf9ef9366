"""A contraction described once: index strings ('bti,bto->io'), the rank bound T, and what it costs.

The letters: b the batch, t u v contracted (positions), g shared by both operands (groups, heads), i j of the first
operand, o p of the second. Axes of size one are left out, so the batch of one that an example comes in never shows.
"""

import dataclasses
import math
import string
from collections.abc import Sequence

from pegprof.engine.flops import count_equation_flops
from pegprof.engine.jaxpr import JaxprEqn, Literal, primitives
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


def contraction_of(tail: Tail) -> Contraction:
    """How a tail forms its gradients; several starts are joined by a plus."""
    found = [_describe(eqn, tail) for eqn in tail.starts]
    ranks = [c.rank for c in found]
    return Contraction(
        text=" + ".join(dict.fromkeys(c.text for c in found)),
        rank=None if None in ranks or not ranks else sum(r for r in ranks if r is not None),
        flops=sum(count_equation_flops(eqn) for eqn in tail.equations),
    )


def _describe(eqn: JaxprEqn, tail: Tail) -> Contraction:
    depends = {v for v, d in zip(tail.inputs, tail.depends, strict=True) if d}
    batched = [not isinstance(v, Literal) and v in depends for v in eqn.invars]
    describe = _DESCRIBE.get(eqn.primitive)
    text, rank = describe(eqn, batched) if describe else (eqn.primitive.name, None)
    if eqn.primitive is primitives.dot_general_p:
        text = _follow_transpose(text, eqn, tail)
    return Contraction(text=text, rank=rank, flops=count_equation_flops(eqn))


def contracted_size(eqn: JaxprEqn) -> int:
    """The number of terms that a dot_general adds up."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)


def _describe_dot(eqn: JaxprEqn, batched: Sequence[bool]) -> tuple[str, int]:
    contracted, shared = eqn.params["dimension_numbers"]
    operands = []
    for side, (v, own) in enumerate(zip(eqn.invars, (_FIRST, _SECOND), strict=True)):
        names = {axis: _pick(_CONTRACTED, i) for i, axis in enumerate(contracted[side])}
        names |= {axis: _pick(_SHARED, i) for i, axis in enumerate(shared[side])}
        free = [axis for axis in range(len(v.aval.shape)) if axis not in names]
        names |= {axis: _pick(own, i) for i, axis in enumerate(free)}
        long = [axis for axis in range(len(v.aval.shape)) if v.aval.shape[axis] != 1]
        operands.append(
            (
                "b" * batched[side] + "".join(names[axis] for axis in long),
                "".join(names[axis] for axis in shared[0] if side == 0 and axis in long),
                "".join(names[axis] for axis in free if axis in long),
            )
        )
    (lhs, common, first), (rhs, _, second) = operands
    return f"{lhs},{rhs}->{common}{first}{second}", contracted_size(eqn)


def _pick(letters: str, i: int) -> str:
    return letters[i] if i < len(letters) else string.ascii_uppercase[i]


def _follow_transpose(text: str, eqn: JaxprEqn, tail: Tail) -> str:
    """The string in the parameter's own order, where a transpose follows the contraction at once."""
    (out,) = eqn.outvars
    users = [e for e in tail.equations if any(v is out for v in e.invars)]
    operands, _, letters = text.partition("->")
    if len(users) != 1 or users[0].primitive is not primitives.transpose_p or len(letters) != len(out.aval.shape):
        return text
    return f"{operands}->{''.join(letters[axis] for axis in users[0].params['permutation'])}"


def _describe_conv(eqn: JaxprEqn, batched: Sequence[bool]) -> tuple[str, int]:
    numbers = eqn.params["dimension_numbers"]
    taps = "×".join(str(eqn.outvars[0].aval.shape[axis]) for axis in numbers.out_spec[2:])
    positions = math.prod(eqn.invars[1].aval.shape[axis] for axis in numbers.rhs_spec[2:])
    lhs, rhs = ("b" * b for b in batched)
    return f"{lhs}ti,{rhs}to->kio, k = {taps} taps", positions


def _describe_scatter(eqn: JaxprEqn, batched: Sequence[bool]) -> tuple[str, int]:
    _, indices, updates = eqn.invars
    positions = math.prod(indices.aval.shape[:-1])
    return f"scatter-add {'b' * batched[2]}{'to' if len(updates.aval.shape) > 1 else 't'}->io", positions


_DESCRIBE = {
    primitives.dot_general_p: _describe_dot,
    primitives.conv_general_dilated_p: _describe_conv,
    primitives.scatter_add_p: _describe_scatter,
    primitives.jit_p: lambda eqn, _: ("sum over a loop", None),
}

