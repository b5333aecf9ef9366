"""Tail -> tail: rebuild operands from one residual that is stored anyway.

A product's operand is often an elementwise function of something that the backward pass stores: gelu(h) of h, a
normalised x of x. XLA fuses that function into the plain gradient's contraction and never stores its result. A loop
over the examples has its operands stored: gelu(h) beside h, for the whole batch. So the elementwise equations that lead
to such an operand from a single value of its size become the tail's prelude. They run again, for one example at a time,
which costs next to nothing beside the product.
"""

import dataclasses
from collections.abc import Iterator, Mapping

from pegprof.engine.dtypes import holds_all_of
from pegprof.engine.facts import facts_of, known
from pegprof.engine.jaxpr import Jaxpr, JaxprEqn, Var, dtype_of, size_of, variables
from pegprof.engine.jaxpr import primitives as p
from pegprof.engine.tails import Tail

_SMALL = 1 / 4
"""A value of at most this share of an operand's size is stored anyway: a mean and a scale beside a normalised value."""

Steps = dict[int, JaxprEqn]  # equations by their position in the program


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
    """Prepend elementwise equations that rebuild operands from one residual that is stored anyway."""
    prelude: Steps = {}
    for v, depends in zip(tail.inputs, tail.depends, strict=True):
        if depends:
            prelude |= _steps_from_residual(v, ancestry)
    if not prelude:
        return tail
    steps = tuple(prelude[i] for i in sorted(prelude))
    made = {v for eqn in steps for v in eqn.outvars}
    taken = [v for eqn in steps for v in variables(eqn.invars)]
    inputs = tuple(dict.fromkeys(v for v in (*tail.inputs, *taken) if v not in made))
    return dataclasses.replace(tail, prelude=steps, inputs=inputs, depends=(True,) * len(inputs))


def _steps_from_residual(v: Var, ancestry: Ancestry) -> Steps:
    """The equations that make a value from its furthest single large ancestor that something else uses too."""
    found: Steps = {}
    for steps, large in _walk_back(v, ancestry):
        if len(large) == 1 and any(user not in steps for user in ancestry.used_by[next(iter(large))]):
            found = steps
        elif found and _widens(*(eqn for i, eqn in steps.items() if i not in found)):
            found = steps  # the residual itself is something narrower, widened: XLA stores that
    return found


def _widens(*equations: JaxprEqn) -> bool:
    """Whether the one equation makes the same numbers in a wider dtype."""
    if len(equations) != 1 or known(equations[0]) is not p.convert_element_type_p:
        return False
    (eqn,) = equations
    return holds_all_of(dtype_of(eqn.outvars[0]), dtype_of(eqn.invars[0]))


def _walk_back(v: Var, ancestry: Ancestry) -> Iterator[tuple[Steps, set[Var]]]:
    """Each cheap way to make a value, one equation longer than the last, with the large values that it starts from.

    The large value that is made last goes next, so that each is reached after all its users.
    """
    steps: Steps = {}
    large = {v}
    while large and all(u in ancestry.made_by for u in large):
        last = max(large, key=lambda u: ancestry.made_by[u][0])
        i, eqn = ancestry.made_by[last]
        if not facts_of(eqn).cheap:
            return
        steps = {**steps, i: eqn}
        large = (large - {last}) | {u for u in variables(eqn.invars) if size_of(u) > _SMALL * size_of(v)}
        yield steps, large
