"""tied: a product plus a lookup in the same table; the lookup's rows are added into the product, in its place.

As differentiated, an example's gradient is chain(product) + chain'(zeros with T rows added to it). With chain' undone
on the product that is

    chain'(undo chain'(chain(product)) with T rows added to it):

no V×D array for the lookup, no pass to add it. And since a chain only moves entries, it is left out of the loop over
the examples, to move the results. A table used as it stands gains little, for XLA finds the first part by itself; one
that is transposed for one of its uses takes half the time on CPU.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from pegprof.engine.costs import Cost
from pegprof.engine.jaxpr import Env, JaxprEqn, Literal, trace
from pegprof.engine.quantities import Values, is_per_example
from pegprof.engine.statistics import Quantity
from pegprof.engine.strategies import loop
from pegprof.engine.strategies.base import Frontier, Strategy, bind_wide
from pegprof.engine.strategies.lookups import Chain, Term, can_undo, leading_to, move, same_steps, terms_of, undo
from pegprof.engine.tails import Tail, variables


def fits(tail: Tail, quantities: Sequence[Quantity]) -> bool:
    """One gradient, a sum of lookups and of something else that the tail makes."""
    if len(tail.outputs) != 1 or not loop.fits(tail, quantities):
        return False
    lookups, others = split_terms(tail)
    if not lookups or not others:
        return False
    chain = lookups[0].chain
    return can_undo(chain) and all(same_steps(t.chain, chain) for t in lookups)


def split_terms(tail: Tail) -> tuple[list[Term], list[Term]]:
    """The lookups, and the others."""
    terms = terms_of(tail, tail.outputs[0])
    return [t for t in terms if t.lookup], [t for t in terms if not t.lookup]


def _rewritten(tail: Tail) -> tuple[Tail, Chain]:
    """A tail with the rows added into the rest, and the chain that its gradient still has to go through."""
    terms, others = split_terms(tail)
    chain, lookups = terms[0].chain, [t.lookup for t in terms if t.lookup]
    needed = leading_to(tail, [*(t.source for t in others), *(v for eqn in lookups for v in eqn.invars[1:])])
    made = {v for eqn in needed for v in eqn.outvars}
    used = [*(v for eqn in (*needed, *lookups) for v in eqn.invars), *(t.source for t in others)]
    taken = dict.fromkeys(v for v in variables(used) if v not in made)

    def run(*values: Any) -> Any:
        env = Env()
        env.write(taken, values)
        env.run(needed, bind_wide)
        total = sum_of(others, chain, env)
        for eqn in lookups:
            (total,) = bind_wide(eqn, [total, *env.read(eqn.invars[1:])])
        return total

    jaxpr = trace(run, [v.aval for v in taken]).jaxpr
    named = dict(zip(jaxpr.invars, taken, strict=True))

    def renamed(eqn: JaxprEqn) -> JaxprEqn:
        return eqn.replace(invars=[v if isinstance(v, Literal) else named.get(v, v) for v in eqn.invars])

    return dataclasses.replace(tail, equations=tuple(map(renamed, jaxpr.eqns)), outputs=tuple(jaxpr.outvars)), chain


def sum_of(terms: Sequence[Term], chain: Chain, env: Env) -> Any:
    """The terms added up, as what ``chain`` makes a gradient of."""
    first, *rest = (undo(chain, move(t.chain, env.read([t.source])[0])) for t in terms)
    return sum(rest, start=first)


def _run(tail: Tail, quantities: Sequence[Quantity], frontier: Frontier, chunk: int) -> list[Values]:
    rewritten, chain = _rewritten(tail)
    (values,) = loop.LOOP.run(rewritten, quantities, frontier, chunk)
    return [{name: x if is_per_example(name) else move(chain, x) for name, x in values.items()}]


def _cost(tail: Tail, quantities: Sequence[Quantity], B: int, chunk: int) -> Cost:
    rewritten, _ = _rewritten(tail)
    return loop.LOOP.cost(rewritten, quantities, B, chunk)


TIED = Strategy(
    name="tied",
    why="one product an example, the rows looked up added into it",
    fits=fits,
    run=_run,
    cost=_cost,
    recomputes=True,
)
