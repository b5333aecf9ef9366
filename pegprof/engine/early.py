"""Cut -> Cut: a mark where the first half of a site that ``late`` can part in two is known.

Nothing is done there unless the plan says so: see ``strategies/late.py``. The places that are looked up are known from
the start, but as differentiated their last step stands with the lookup's gradient, at the end: it is moved up.
"""

import dataclasses
from collections.abc import Collection, Iterable

from pegprof.engine.jaxpr import Atom, JaxprEqn, Var
from pegprof.engine.sites import Cut, EarlyPart, InnerLoop, Site
from pegprof.engine.strategies.late import LATE, Halves
from pegprof.engine.tails import is_number, variables

Step = JaxprEqn | Site | EarlyPart | InnerLoop


def with_early_parts(cut: Cut) -> Cut:
    """The same with an ``EarlyPart`` for each such site, right where the last of what its product takes is known."""
    waiting = [
        EarlyPart(site=step, inputs=Halves.of(step.tail).early.inputs)
        for step in cut.steps
        if isinstance(step, Site) and LATE.fits(step.tail, ())
    ]
    if not waiting:
        return cut
    made_by = {v: eqn for eqn in cut.steps if isinstance(eqn, JaxprEqn) for v in eqn.outvars}
    known: set[Atom] = {*cut.closed.jaxpr.invars, *cut.closed.jaxpr.constvars}
    steps: list[Step] = []
    moved: set[int] = set()

    def take(step: Step) -> None:
        steps.append(step)
        match step:
            case InnerLoop():
                known.update(step.loop.eqn.outvars)
            case JaxprEqn():
                known.update(step.outvars)

    for step in cut.steps:
        for part in list(waiting):
            missing = _missing(part.inputs, known, made_by) if known.issuperset(_numbers(part)) else None
            if missing is not None:
                for eqn in missing:
                    take(eqn)
                    moved.add(id(eqn))
                take(part)
                waiting.remove(part)
        if id(step) not in moved:
            take(step)
    return dataclasses.replace(cut, steps=tuple(steps))


def _numbers(part: EarlyPart) -> list[Var]:
    """What a product takes: all but the places that are looked up."""
    return [v for v in part.inputs if is_number(v)]


def _missing(wanted: Iterable[Var], known: Collection[Atom], made_by: dict[Var, JaxprEqn]) -> list[JaxprEqn] | None:
    """The equations still to be run until some variables are known, in order; None if there is more to it than that."""
    found: dict[int, JaxprEqn] = {}

    def visit(v: Var) -> bool:
        if v in known:
            return True
        eqn = made_by.get(v)
        if eqn is None or eqn.effects or not all(visit(u) for u in variables(eqn.invars)):
            return False
        found[id(eqn)] = eqn  # after all that it needs
        return True

    return list(found.values()) if all(visit(v) for v in wanted) else None
