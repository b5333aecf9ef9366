"""factored: the gradient of an example is an outer product, so a statistic of it is a product of statistics.

With g_i = s_i r_iᵀ and phi(xy) = phi(x)phi(y), as for squares, signs, absolute values and powers,

    mean_i phi(g_i) = (1/B) Σ_i phi(s_i) phi(r_i)ᵀ = phi(S)ᵀ phi(R) / B:

one contraction over the batch, no gradient of an example anywhere. Entries may move afterwards, and may be scaled by
something that is the same for all examples.

The variance is centred before it is squared, since a difference of moments loses it to rounding where it is small. With
s̄, r̄ the means of the factors, δ_i = s_i - s̄ and ε_i = r_i - r̄, a gradient is g_i = s̄ r̄ᵀ + (s_i ε_iᵀ + δ_i r̄ᵀ), so

    variance = E[s² ε²] + 2 r̄ E[s δ ε] + r̄² E[δ²] - (mean - s̄ r̄)²:

two contractions beside that of the mean. What is subtracted is of the order of the variance itself.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pegprof.engine.contraction import contracted_size
from pegprof.engine.costs import Cost, frontier_bytes, gradient_bytes, tail_cost
from pegprof.engine.facts import known
from pegprof.engine.jaxpr import Env, JaxprEqn, Literal, Var, bind
from pegprof.engine.jaxpr import primitives as p
from pegprof.engine.quantities import Values, widen
from pegprof.engine.statistics import Centred, Moment, Quantity, SquareNorm
from pegprof.engine.strategies.base import Frontier, Strategy, bind_wide
from pegprof.engine.tails import Tail, is_linear_in, only_moves_entries, variables


def _fits(tail: Tail, quantities: Sequence[Quantity]) -> bool:
    if len(tail.starts) != 1 or known(tail.starts[0]) is not p.dot_general_p or contracted_size(tail.starts[0]) != 1:
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
    is_scale = known(eqn) in (p.neg_p, p.mul_p, p.div_p) and is_linear_in(eqn, made)
    return is_scale and not depends.intersection(variables(eqn.invars))


def _run(tail: Tail, quantities: Sequence[Quantity], frontier: Frontier, chunk: int) -> list[Values]:
    (start,) = tail.starts
    env = Env()
    env.write(tail.inputs, frontier.values)
    factors = [widen(x) for x in env.read(start.invars)]
    batched = [_is_batched(v, tail, frontier) for v in start.invars]

    def of(quantity: Quantity) -> list[Any]:
        """The quantity of each of the tail's gradients."""
        match quantity:
            case Moment(factor=factor):
                assert factor is not None
                return _follow(tail, env, _contract(start, [factor(x) for x in factors], batched), factor)
            case Centred():
                return _follow(tail, env, _centred(start, factors, batched), jnp.square)
            case SquareNorm():
                return [_square_norms(start, factors, batched)] * len(tail.outputs)

    found = {q.name: of(q) for q in quantities}
    return [{name: values[k] for name, values in found.items()} for k in range(len(tail.outputs))]


def _centred(start: JaxprEqn, factors: Sequence[jax.Array], batched: Sequence[bool]) -> jax.Array:
    """The mean over the examples of (g - mean)² where a gradient is the start's product; see the module."""
    means = [jnp.mean(x, axis=0) if b else x for x, b in zip(factors, batched, strict=True)]
    apart = [x - jnp.expand_dims(m, 0) if b else None for x, m, b in zip(factors, means, batched, strict=True)]
    (s, r), (s_mean, r_mean), (delta, epsilon) = factors, means, apart

    def outer(x: jax.Array, y: jax.Array) -> jax.Array:
        return _contract(start, [x, y], (False, False))

    if delta is None or epsilon is None:  # a factor that does not vary is a scale
        spreads = [m * m if d is None else jnp.mean(d * d, axis=0) for m, d in zip(means, apart, strict=True)]
        return outer(*spreads) if any(batched) else jnp.zeros_like(outer(*spreads))
    shift = _contract(start, [s, r], batched) - outer(s_mean, r_mean)
    centred = (
        _contract(start, [s * s, epsilon * epsilon], batched)
        + _contract(start, [s * delta, 2 * jnp.expand_dims(r_mean, 0) * epsilon], batched)
        + outer(jnp.mean(delta * delta, axis=0), r_mean * r_mean)
    )
    return jnp.maximum(centred - shift * shift, 0)


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


def _follow(tail: Tail, env: Env, product: jax.Array, factor: Callable[[Any], Any]) -> list[Any]:
    """A quantity of the tail's gradients, from that of the start's product."""
    (start,) = tail.starts
    local = Env(env)
    local.write(start.outvars, [product])
    local.run([eqn for eqn in tail.equations if eqn is not start], lambda eqn, x: _step(eqn, x, factor, tail))
    return local.read(tail.outputs)


def _step(eqn: JaxprEqn, values: Sequence[Any], factor: Callable[[Any], Any], tail: Tail) -> list[Any]:
    """A step after the start: entries move as they are; a scale c becomes phi(c)."""
    if only_moves_entries(eqn):
        return bind_wide(eqn, values)
    if eqn.primitive is p.neg_p:
        return [values[0] * factor(jnp.full((), -1, values[0].dtype))]
    scales = [x if tail.makes(v) else factor(widen(x)) for x, v in zip(values, eqn.invars, strict=True)]
    return bind_wide(eqn, scales)


def _square_norms(start: JaxprEqn, factors: Sequence[jax.Array], batched: Sequence[bool]) -> jax.Array:
    """‖s rᵀ‖² = ‖s‖²‖r‖², for each group that both operands share."""
    totals = []
    for factor, b, groups in zip(factors, batched, start.params["dimension_numbers"][1], strict=True):
        x = jnp.square(factor) if b else jnp.square(factor)[None]
        axes = [axis + 1 for axis in groups]
        rest = [axis for axis in range(1, x.ndim) if axis not in axes]
        x = jnp.transpose(x, (0, *axes, *rest))
        totals.append(jnp.sum(x, axis=tuple(range(1 + len(axes), x.ndim))))
    product = totals[0] * totals[1]
    return jnp.sum(product, axis=tuple(range(1, product.ndim)))


def _is_batched(atom: Var | Literal, tail: Tail, frontier: Frontier) -> bool:
    return any(b for v, b in zip(tail.inputs, frontier.batched, strict=True) if v is atom)


def _cost(tail: Tail, quantities: Sequence[Quantity], B: int, chunk: int) -> Cost:
    """One product over the whole batch for each moment, two more for a variance, which needs the mean's as well."""
    products = sum(isinstance(q, Moment) for q in quantities) + 2 * sum(isinstance(q, Centred) for q in quantities)
    moved = B * frontier_bytes(tail) + gradient_bytes(tail)
    return (tail_cost(tail) * B + Cost(bytes_moved=moved)) * max(1, products)


FACTORED = Strategy(
    name="factored",
    why="an outer product: statistics of it are products of statistics",
    fits=_fits,
    run=_run,
    cost=_cost,
)
