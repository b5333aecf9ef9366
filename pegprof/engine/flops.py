"""A closed Jaxpr in, the number of floating-point operations out.

Counted on the Jaxpr because XLA's ``cost_analysis`` counts the body of a scan once, whatever its length. Products and
convolutions are exact (``arithmetic.py``). Everything else is one operation an element, of the result for an
elementwise primitive, of the operand for a reduction: that includes ``exp`` and, far too low, matrix factorisations.
Moving data is free. Of a ``cond`` the dearest branch counts. The body of a ``while`` loop counts once, because the
number of its trips is not known.
"""

from pegprof.engine.arithmetic import result_size
from pegprof.engine.facts import FACTS, UNKNOWN
from pegprof.engine.jaxpr import ClosedJaxpr, Jaxpr, JaxprEqn, primitives, sub_jaxprs


def count_flops(closed_jaxpr: ClosedJaxpr) -> int:
    """The floating-point operations of one call; see the module for what is exact.

    >>> import jax, jax.numpy as jnp
    >>> x = jnp.ones((2, 3))
    >>> count_flops(jax.make_jaxpr(lambda x: x @ x.T)(x))
    24
    """
    return _of_jaxpr(closed_jaxpr.jaxpr)


def count_equation_flops(eqn: JaxprEqn) -> int:
    """The floating-point operations of one equation."""
    if count := FACTS.get(eqn.primitive, UNKNOWN).flops:
        return count(eqn)
    bodies = [_of_jaxpr(body) for body in sub_jaxprs(eqn)]
    if eqn.primitive is primitives.scan_p:
        return eqn.params["length"] * sum(bodies)
    if eqn.primitive is primitives.cond_p:
        return max(bodies)
    return sum(bodies) if bodies else result_size(eqn)


def _of_jaxpr(jaxpr: Jaxpr) -> int:
    return sum(count_equation_flops(eqn) for eqn in jaxpr.eqns)
