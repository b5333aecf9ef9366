"""Tail -> tail: take the value that the backward pass keeps anyway, and recompute from it what the tail needs.

A matrix product's operand is often an elementwise function of something that is kept for the backward pass: gelu(h)
of h, a normalised x of x. XLA fuses that function into the plain gradient's contraction and never stores its result.
A tail that loops over the examples has its operands stored: gelu(h) beside h, for the whole batch. So the elementwise
equations that lead to such an operand from a single value of its size become the tail's prelude. They run again, for
one example at a time, which costs next to nothing beside the product.
"""

import dataclasses
from collections.abc import Mapping

from pegprof.engine.facts import known
from pegprof.engine.jaxpr import Jaxpr, JaxprEqn, Primitive, Var, primitives
from pegprof.engine.squeeze import ELEMENTWISE
from pegprof.engine.tails import Tail, size, variables

p = primitives

_CHEAP: frozenset[Primitive] = ELEMENTWISE | {
    *(p.broadcast_in_dim_p, p.reshape_p, p.squeeze_p, p.transpose_p, p.iota_p, p.scatter_add_p)
}
_SMALL = 1 / 4
"""What is at most this part of an operand is stored without regret: a mean and a scale beside a normalised value."""


@dataclasses.dataclass(frozen=True)
class Ancestry:
    """Where the values of a Jaxpr come from and go to."""

    made_by: Mapping[Var, tuple[int, JaxprEqn]]
    used_by: Mapping[Var, list[int]]

    @classmethod
    def of(cls, jaxpr: Jaxpr) -> "Ancestry":
        used_by: dict[Var, list[int]] = {}
        for i, eqn in enumerate(jaxpr.eqns):
            for v in variables(eqn.invars):
                used_by.setdefault(v, []).append(i)
        return cls({v: (i, eqn) for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}, used_by)


def with_prelude(tail: Tail, ancestry: Ancestry) -> Tail:
    """The same tail with its operands recomputed from what is kept anyway, where that is one value of their size."""
    prelude: dict[int, JaxprEqn] = {}
    for v, depends in zip(tail.inputs, tail.depends, strict=True):
        if depends:
            prelude |= _recomputation(v, ancestry)
    if not prelude:
        return tail
    steps = tuple(prelude[i] for i in sorted(prelude))
    made = {v for eqn in steps for v in eqn.outvars}
    taken = [v for eqn in steps for v in variables(eqn.invars)]
    inputs = tuple(dict.fromkeys(v for v in (*tail.inputs, *taken) if v not in made))
    return dataclasses.replace(tail, prelude=steps, inputs=inputs, depends=(True,) * len(inputs))


def _recomputation(v: Var, ancestry: Ancestry) -> dict[int, JaxprEqn]:
    """The equations that make a value from the furthest single value of its size that something else uses too.

    Of the large values still to be made, the one made last is taken next, so that each is met after all its users.
    """
    steps: dict[int, JaxprEqn] = {}
    best: dict[int, JaxprEqn] = {}
    waiting = {v}
    while all(u in ancestry.made_by for u in waiting):
        last = max(waiting, key=lambda u: ancestry.made_by[u][0])
        i, eqn = ancestry.made_by[last]
        if known(eqn) not in _CHEAP:
            break
        steps[i] = eqn
        waiting = (waiting - {last}) | {u for u in variables(eqn.invars) if size(u) > _SMALL * size(v)}
        if not waiting:
            break
        if len(waiting) == 1 and any(user not in steps for user in ancestry.used_by[next(iter(waiting))]):
            best = dict(steps)
    return best
