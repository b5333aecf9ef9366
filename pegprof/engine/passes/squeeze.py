"""Jaxpr -> Jaxpr: hold every value without its axes of size one.

An example that comes as a batch of one carries an axis of size one through the whole program. Under ``vmap`` it stays
beside the batch axis. In a gather or scatter it is one more window axis, for which XLA flattens the operands, at
several times the memory; a vocabulary's gradient suffers most. Here each equation is applied without such axes: by the
rule in its facts, or else by putting the axes back, applying the equation and dropping them again.
"""

from collections.abc import Sequence
from typing import Any

from pegprof.engine.axes import expanded, squeezed
from pegprof.engine.facts import facts_of, known
from pegprof.engine.jaxpr import ClosedJaxpr, JaxprEqn, Literal, bind, primitives, prune, shape_of, start, trace


def squeeze(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same program, with the same inputs and outputs, without axes of size one in between."""

    def run(*args: Any) -> list[Any]:
        env = start(closed, [squeezed(x) for x in args])
        env.update({v: squeezed(x) for v, x in zip(closed.jaxpr.constvars, closed.consts, strict=True)})
        env.run(closed.jaxpr.eqns, _apply)
        outputs = zip(env.read(closed.jaxpr.outvars), closed.jaxpr.outvars, strict=True)
        return [expanded(x, shape_of(v)) for x, v in outputs]

    return prune(trace(run, closed.in_avals))


def _apply(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    rule = facts_of(eqn).squeeze
    if rule and (outputs := rule(eqn, values)) is not None:
        return outputs
    if known(eqn) is primitives.scan_p:
        eqn = eqn.replace(params={**eqn.params, "jaxpr": squeeze(eqn.params["jaxpr"])})
    full = [x if isinstance(v, Literal) else expanded(x, shape_of(v)) for x, v in zip(values, eqn.invars, strict=True)]
    return [squeezed(x) for x in bind(eqn, full)]
