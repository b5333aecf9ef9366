"""Jaxpr -> Jaxpr: inline every call, also inside scan bodies, and remove dead code.

What it computes stays the same. jit, remat, custom_jvp and custom_vjp are gone afterwards; scan, while and cond remain.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax

from pegprof.engine.facts import known
from pegprof.engine.jaxpr import ClosedJaxpr, JaxprEqn, at_line_of_call, bind, called_by, evaluate, prune, trace
from pegprof.engine.jaxpr import primitives as p


def flatten(closed: ClosedJaxpr, call: JaxprEqn | None = None) -> ClosedJaxpr:
    """The same program without calls and dead code.

    JAX's own functions, such as those of ``jax.random``, are calls whose equations know no line of the user's. They get
    the line of the call, and those of ``closed`` that of ``call``, if given.
    """
    rule = functools.partial(_flatten_equation, call=call)
    return prune(trace(lambda *args: evaluate(closed, args, rule), closed.in_avals))


def _flatten_equation(eqn: JaxprEqn, values: Sequence[Any], call: JaxprEqn | None = None) -> list[Any]:
    if call:
        eqn = at_line_of_call(eqn, call)
    if known(eqn) and (inner := called_by(eqn)):
        if eqn.primitive is p.remat_p:
            values = _remat_barrier(eqn, values)
        return evaluate(inner, values, functools.partial(_flatten_equation, call=eqn))
    if known(eqn) is p.scan_p:
        return bind(eqn, values, jaxpr=flatten(eqn.params["jaxpr"], call=eqn))
    if known(eqn) is p.name_p:
        return list(values)  # a name guides a checkpoint policy; after differentiation it has done its work
    if eqn.primitive is p.reshape_p and eqn.params["dimensions"] is not None:
        # reshape(x, sizes, dimensions) permutes the axes first: the input gradient of a grouped convolution, order="F".
        return bind(eqn, [jax.lax.transpose(values[0], eqn.params["dimensions"])], dimensions=None)
    return bind(eqn, values)


def _remat_barrier(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """What remat lowers to: a barrier, so that XLA doesn't merge the recomputation with the forward pass."""
    prevent = eqn.params["prevent_cse"]
    prevent = [prevent] * len(values) if isinstance(prevent, bool) else list(prevent)
    held = [i for i, prevented in enumerate(prevent) if prevented and eqn.params["differentiated"]]
    values = list(values)
    if held:
        for i, value in zip(held, jax.lax.optimization_barrier(tuple(values[i] for i in held)), strict=True):
            values[i] = value
    return values
