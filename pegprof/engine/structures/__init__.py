"""Tail -> structures: what one example's gradient is at a site.

    Outer   a product of two factors, summed over T positions:  g = Σ_t s_t r_tᵀ
    Conv    the same for a convolution, for each of its taps
    Rows    rows of a lookup's table, the rest of which is zero
    Sum     several of these added up: a tied or reused weight
    Dense   anything else

A structure is matched once, from the equations. It is a description: rules (``rules/``) read it to do better than
forming each example's gradient. Each can give that gradient in full.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from pegprof.engine.facts import facts_of, known, permutes
from pegprof.engine.jaxpr import Atom, JaxprEqn, Var, shape_of
from pegprof.engine.jaxpr import primitives as p
from pegprof.engine.passes.widen import bind_wide
from pegprof.engine.structures.lookups import Table, adds_rows
from pegprof.engine.tails import Tail, leading_to, makers

Steps = tuple[JaxprEqn, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Structure:
    """One gradient of a tail, or a term of one: ``steps(source)``, where the steps only permute entries."""

    tail: Tail
    output: Atom  # the gradient
    source: Atom
    steps: Steps = ()

    @property
    def parts(self) -> tuple["Structure", ...]:
        return (self,)

    def full(self, *inputs: Any) -> Any:
        """One example's gradient, from its values of the tail's inputs."""
        return dataclasses.replace(self.tail, outputs=(self.output,)).run(*inputs)[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer(Structure):
    """A product. What is between ``start`` and ``source`` is linear, or brings in other values."""

    start: JaxprEqn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conv(Structure):
    """A convolution, likewise."""

    start: JaxprEqn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows(Structure):
    """Rows that lookups in one table add into zeros."""

    lookups: tuple[JaxprEqn, ...]

    @property
    def table(self) -> Table:
        return Table.of(self.lookups[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sum(Structure):
    """Several structures, added up after their steps."""

    terms: tuple[Structure, ...]

    @property
    def parts(self) -> tuple[Structure, ...]:
        return self.terms


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dense(Structure):
    """Nothing that rules know; ``unknown`` is an equation in it that the engine does not understand, if one is."""

    unknown: JaxprEqn | None = None


def match(tail: Tail) -> tuple[Structure, ...]:
    """The structure of each of a tail's gradients."""
    return tuple(_match(tail, output) for output in tail.outputs)


def unknown_equation(tail: Tail) -> JaxprEqn | None:
    """The first equation of a tail that is neither linear, nor a contraction, nor joins two values."""
    return next((eqn for eqn in tail.equations if not facts_of(eqn).continues_gradients), None)


def _match(tail: Tail, output: Atom) -> Structure:
    terms = [_match_term(tail, output, source, steps) for source, steps in _terms(tail, output)]
    if len(terms) == 1:
        return terms[0]
    rows = [term for term in terms if isinstance(term, Rows)]
    first = terms[0]
    alike = [r for r in rows if r.table == rows[0].table and same_steps(r.steps, rows[0].steps)]
    if isinstance(first, Rows) and len(alike) == len(terms):
        return dataclasses.replace(first, lookups=tuple(eqn for term in rows for eqn in term.lookups))
    return Sum(tail=tail, output=output, source=output, terms=tuple(terms))


def _match_term(tail: Tail, output: Atom, source: Atom, steps: Steps) -> Structure:
    place: Any = {"tail": tail, "output": output, "source": source, "steps": steps}
    equations = leading_to(tail.equations, [source])
    last = equations[-1] if equations else None
    if last is not None and adds_rows(last) and _is_zeros(tail, last.invars[0]):
        return Rows(**place, lookups=(last,))
    starts = [eqn for eqn in equations if tail.starts_with(eqn)]
    unknown = unknown_equation(tail)
    if len(starts) == 1 and unknown is None:
        if known(starts[0]) is p.dot_general_p:
            return Outer(**place, start=starts[0])
        if known(starts[0]) is p.conv_general_dilated_p:
            return Conv(**place, start=starts[0])
    return Dense(**place, unknown=unknown)


def _is_zeros(tail: Tail, atom: Atom) -> bool:
    """Whether a value is an input that is all zeros, perhaps converted."""
    made_by = makers(tail.equations)
    while isinstance(atom, Var) and atom in made_by and permutes(made_by[atom]):
        atom = made_by[atom].invars[0]
    return isinstance(atom, Var) and atom in tail.zeros


def _terms(tail: Tail, output: Atom) -> list[tuple[Atom, Steps]]:
    """The summands of a gradient, each as a value and the permuting steps that follow it."""
    made_by = makers(tail.equations)

    def terms(atom: Atom) -> list[tuple[Atom, Steps]]:
        eqn = made_by.get(atom) if isinstance(atom, Var) else None
        if eqn is not None and facts_of(eqn).adds:
            if all(shape_of(v) == shape_of(atom) for v in eqn.invars):
                return [term for v in eqn.invars for term in terms(v)]
        elif eqn is not None and permutes(eqn):
            return [(source, (*steps, eqn)) for source, steps in terms(eqn.invars[0])]
        return [(atom, ())]

    return terms(output)


def same_steps(a: Steps, b: Steps) -> bool:
    """Whether two chains of permutations do the same."""
    return len(a) == len(b) and all(
        x.primitive is y.primitive and x.params == y.params and shape_of(x.invars[0]) == shape_of(y.invars[0])
        for x, y in zip(a, b, strict=True)
    )


def permute(steps: Sequence[JaxprEqn], x: Any) -> Any:
    """Apply permuting steps."""
    for eqn in steps:
        (x,) = bind_wide(eqn, [x])
    return x


def can_invert(steps: Steps) -> bool:
    return all(facts_of(eqn).invert for eqn in steps)


def invert(steps: Steps, x: Any) -> Any:
    """The value that permuting steps make ``x`` of."""
    for eqn in reversed(steps):
        undo = facts_of(eqn).invert
        assert undo is not None
        x = undo(eqn, x)
    return x
