"""factored: the gradient of an example is an outer product, so a statistic of it is a product of statistics.

With g_i = s_i r_iᵀ and phi(xy) = phi(x)phi(y), as for squares, signs, absolute values and powers,

    mean_i phi(g_i) = (1/B) Σ_i phi(s_i) phi(r_i)ᵀ = phi(S)ᵀ phi(R) / B:

one contraction over the batch, no gradient of an example anywhere. Entries may move afterwards, and may be scaled by
something that is the same for all examples.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pegprof.engine.contraction import contracted_size
from pegprof.engine.costs import Cost, frontier_bytes, gradient_bytes, tail_cost
from pegprof.engine.jaxpr import Env, JaxprEqn, Literal, Var, bind
from pegprof.engine.jaxpr import primitives as p
from pegprof.engine.quantities import Values, widen
from pegprof.engine.statistics import MEAN, SQUARE, Centred, Moment, Quantity, SquareNorm
from pegprof.engine.strategies.base import Frontier, Strategy, bind_wide
from pegprof.engine.tails import Tail, is_linear_in, only_moves_entries, variables


def _fits(tail: Tail, quantities: Sequence[Quantity]) -> bool:
    if len(tail.starts) != 1 or tail.starts[0].primitive is not p.dot_general_p or contracted_size(tail.starts[0]) != 1:
        return False
    (start,) = tail.starts
    depends = {v for v, d in zip(tail.inputs, tail.depends, strict=True) if d}
    steps = [eqn for eqn in tail.equations if eqn is not start]
    moved = all(only_moves_entries(eqn) for eqn in steps)
    scaled = all(only_moves_entries(eqn) or _scales(eqn, depends, tail) for eqn in steps)
    return (
        depends.issuperset(variables(start.invars))
        and scaled
        and all(q.factor is not None for q in quantities if isinstance(q, Moment))
        and (moved or not any(isinstance(q, SquareNorm) for q in quantities))
    )


def _scales(eqn: JaxprEqn, depends: set[Var], tail: Tail) -> bool:
    """Whether an equation multiplies or divides a tail's value by something that is the same for all examples."""
    made = {v for v in variables(eqn.invars) if tail.makes(v)}
    is_scale = eqn.primitive in (p.neg_p, p.mul_p, p.div_p) and is_linear_in(eqn, made)
    return is_scale and not depends.intersection(variables(eqn.invars))


def _run(tail: Tail, quantities: Sequence[Quantity], frontier: Frontier, chunk: int) -> list[Values]:
    moments = {q.name: q for q in quantities if isinstance(q, Moment)}
    if any(isinstance(q, Centred) for q in quantities):
        moments |= {MEAN.name: MEAN, SQUARE.name: SQUARE}
    found = {name: _mean_of(tail, moment, frontier) for name, moment in moments.items()}

    def of(quantity: Quantity, k: int) -> Any:
        match quantity:
            case Moment():
                return found[quantity.name][k]
            case Centred():  # no gradient is at hand to take the mean away from: it must be a difference
                return jnp.maximum(found[SQUARE.name][k] - jnp.square(found[MEAN.name][k]), 0)
            case SquareNorm():
                return _square_norms(tail, frontier)

    return [{q.name: of(q, k) for q in quantities} for k in range(len(tail.outputs))]


def _mean_of(tail: Tail, moment: Moment, frontier: Frontier) -> list[Any]:
    """The mean over the examples of phi of the tail's gradients."""
    factor = moment.factor
    assert factor is not None
    (start,) = tail.starts
    env = Env()
    env.write(tail.inputs, frontier.values)
    batched = [_is_batched(v, tail, frontier) for v in start.invars]
    env.write(start.outvars, [_contract(start, [factor(widen(x)) for x in env.read(start.invars)], batched)])
    for eqn in tail.equations:
        if eqn is not start:
            env.write(eqn.outvars, _follow(eqn, env.read(eqn.invars), factor, tail))
    return env.read(tail.outputs)


def _contract(start: JaxprEqn, factors: Sequence[jax.Array], batched: Sequence[bool]) -> jax.Array:
    """The start's product, averaged over the examples."""
    wide = factors[0].dtype
    if not all(batched):
        means = [jnp.mean(x, axis=0) if b else x for x, b in zip(factors, batched, strict=True)]
        return bind(start, means, preferred_element_type=wide)[0]
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = start.params["dimension_numbers"]
    contract = ((0, *(a + 1 for a in lhs_contract)), (0, *(a + 1 for a in rhs_contract)))
    shared = (tuple(a + 1 for a in lhs_batch), tuple(a + 1 for a in rhs_batch))
    lhs, rhs = factors
    mean = (lhs, rhs / rhs.shape[0])
    return bind(start, mean, dimension_numbers=(contract, shared), preferred_element_type=wide)[0]


def _follow(eqn: JaxprEqn, values: Sequence[Any], factor: Callable[[Any], Any], tail: Tail) -> list[Any]:
    """A step after the start: entries move as they are; a scale c becomes phi(c)."""
    if only_moves_entries(eqn):
        return bind_wide(eqn, values)
    if eqn.primitive is p.neg_p:
        return [values[0] * factor(jnp.full((), -1, values[0].dtype))]
    scales = [x if tail.makes(v) else factor(widen(x)) for x, v in zip(values, eqn.invars, strict=True)]
    return bind_wide(eqn, scales)


def _square_norms(tail: Tail, frontier: Frontier) -> jax.Array:
    """‖s rᵀ‖² = ‖s‖²‖r‖², for each group that both operands share."""
    (start,) = tail.starts
    env = Env()
    env.write(tail.inputs, frontier.values)
    totals = []
    for v, groups in zip(start.invars, start.params["dimension_numbers"][1], strict=True):
        x = jnp.square(widen(env.read([v])[0]))
        x = x if _is_batched(v, tail, frontier) else x[None]
        axes = [axis + 1 for axis in groups]
        rest = [axis for axis in range(1, x.ndim) if axis not in axes]
        x = jnp.transpose(x, (0, *axes, *rest))
        totals.append(jnp.sum(x, axis=tuple(range(1 + len(axes), x.ndim))))
    product = totals[0] * totals[1]
    return jnp.sum(product, axis=tuple(range(1, product.ndim)))


def _is_batched(atom: Var | Literal, tail: Tail, frontier: Frontier) -> bool:
    return any(b for v, b in zip(tail.inputs, frontier.batched, strict=True) if v is atom)


def _cost(tail: Tail, quantities: Sequence[Quantity], B: int, chunk: int) -> Cost:
    """One product over the whole batch for each moment; a variance takes two."""
    names = {q.name for q in quantities if isinstance(q, Moment)}
    if any(isinstance(q, Centred) for q in quantities):
        names |= {MEAN.name, SQUARE.name}
    moved = B * frontier_bytes(tail) + gradient_bytes(tail)
    return (tail_cost(tail) * B + Cost(bytes_moved=moved)) * max(1, len(names))


FACTORED = Strategy(
    name="factored",
    why="an outer product: statistics of it are products of statistics",
    fits=_fits,
    run=_run,
    cost=_cost,
)
