"""Tail -> tail: round nothing below float32 on the way from the inputs to the gradients.

In: a tail as it was traced, perhaps in bfloat16. Out: the same tail, its equations rewritten one by one by the rules of
``dtypes.py``: products keep their narrow operands and give float32, all that follows runs in float32 or wider. An
equation without a rule keeps the dtypes that it was traced with.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from pegprof.engine.dtypes import is_real, wide_dtype
from pegprof.engine.facts import facts_of
from pegprof.engine.jaxpr import Atom, JaxprEqn, Literal, Var, bind, dtype_of, equations_of, variables
from pegprof.engine.tails import Tail


def bind_wide(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Apply an equation to operands that may be wider than it was traced for, and ask for float32 at least."""
    values = [
        jnp.asarray(x, None if hasattr(x, "dtype") else dtype_of(v)) for x, v in zip(values, eqn.invars, strict=True)
    ]
    if not any(is_real(x.dtype) for x in values):
        return bind(eqn, values)
    if rule := facts_of(eqn).widen:
        return rule(eqn, values)
    return bind(
        eqn, [x.astype(dtype_of(v)) if is_real(x.dtype) else x for x, v in zip(values, eqn.invars, strict=True)]
    )


def widen(tail: Tail) -> Tail:
    """The same tail with nothing narrower than float32 in it, as far as its equations have rules."""
    if _is_wide(tail):
        return tail
    wide: dict[Var, Atom] = {}  # what replaces each variable

    def replacement(atom: Atom) -> Atom:
        return wide.get(atom, atom) if isinstance(atom, Var) else atom

    equations: list[JaxprEqn] = []
    starts: list[JaxprEqn] = []
    for eqn in tail.equations:
        operands = [replacement(v) for v in eqn.invars]
        steps, outputs = equations_of(functools.partial(_apply, eqn, operands), variables(operands))
        wide.update(zip(eqn.outvars, outputs, strict=True))
        equations += steps
        if tail.starts_with(eqn):
            starts += [step for step in steps if step.primitive is eqn.primitive]
    return dataclasses.replace(
        tail, equations=tuple(equations), starts=tuple(starts), outputs=tuple(map(replacement, tail.outputs))
    )


def _is_wide(tail: Tail) -> bool:
    """Whether nothing is left to widen. What only equations without a rule take is as narrow as they were traced."""
    taken = {v for eqn in tail.equations if facts_of(eqn).widen for v in variables(eqn.invars)}
    taken.update(variables(tail.outputs))
    made = {v for eqn in tail.equations if facts_of(eqn).widen for v in eqn.outvars}
    return not any(is_real(dtype_of(v)) and wide_dtype(dtype_of(v)) != dtype_of(v) for v in made & taken)


def _apply(eqn: JaxprEqn, operands: Sequence[Atom], *values: Any) -> list[Any]:
    """An equation applied to operands, of which those that are variables have these values."""
    given = iter(values)
    return bind_wide(eqn, [v.val if isinstance(v, Literal) else next(given) for v in operands])
