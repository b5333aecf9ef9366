"""Rules for outer products: factored, gram, batched_gram.

**factored**, for one position an example (T = 1). With g_i = s_i r_iᵀ and phi(xy) = phi(x)phi(y), as for squares,
signs, absolute values and powers,

    mean_i phi(g_i) = (1/B) Σ_i phi(s_i) phi(r_i)ᵀ = phi(S)ᵀ phi(R) / B:

one contraction over the batch, and no gradient of an example anywhere. Entries may be permuted afterwards, and scaled
by something that is the same for all examples. The variance is centred before it is squared, because a difference of
moments loses it to rounding where it is small. With s̄, r̄ the means of the factors, δ_i = s_i - s̄ and ε_i = r_i - r̄, a
gradient is g_i = s̄ r̄ᵀ + (s_i ε_iᵀ + δ_i r̄ᵀ), so

    variance = E[s² ε²] + 2 r̄ E[s δ ε] + r̄² E[δ²] - (mean - s̄ r̄)²:

two contractions beside that of the mean. What is subtracted is of the order of the variance itself.

**gram**, for norms alone, which need no product. With g = SᵀR, S: T×D, R: T×E,

    ‖g‖² = tr(RᵀS SᵀR) = ⟨S Sᵀ, R Rᵀ⟩:

two T×T arrays, and T²(D + E) multiplications instead of T·D·E. Groups that both operands share add up. The terms of the
scalar product may differ in sign, so the norm of a gradient that almost cancels over the positions is rounded more than
the gradient's own entries would be.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pegprof.engine.accumulators import SQUARE_NORM, Centred, Moment, Spread, SquareNorm, in_chunks
from pegprof.engine.arithmetic import contracted_size
from pegprof.engine.costs import Cost, frontier_bytes, gradient_bytes, tail_cost
from pegprof.engine.dtypes import wide_dtype, widen
from pegprof.engine.facts import is_linear_in, known, permutes
from pegprof.engine.jaxpr import Env, JaxprEqn, Var, bind, shape_of, size_of, variables
from pegprof.engine.jaxpr import primitives as p
from pegprof.engine.rules.base import Rule
from pegprof.engine.sites import Site
from pegprof.engine.stages import Accumulators, Frontier, Summaries
from pegprof.engine.structures import Outer
from pegprof.engine.tails import Tail, leading_to, makers

Factors = tuple[jax.Array, jax.Array]  # of all examples


def _fits(site: Site, accumulators: Accumulators) -> bool:
    tail = site.tail
    if len(tail.starts) != 1 or not all(isinstance(s, Outer) for s in site.structures):
        return False
    return (
        contracted_size(tail.starts[0]) == 1
        and only_scales(tail)
        and all(a.factor is not None for a in accumulators if isinstance(a, Moment))
        and (only_permutes(tail) or not any(isinstance(a, SquareNorm) for a in accumulators))
    )


def _own_values(tail: Tail) -> set[Var]:
    """The example's own values that the start of a tail may take: inputs, and what is made of them first."""
    (start,) = tail.starts
    own = {v for v, d in zip(tail.inputs, tail.depends, strict=True) if d}
    return own.union(v for eqn in leading_to(tail.equations, start.invars) for v in eqn.outvars)


def only_scales(tail: Tail) -> bool:
    """Whether the one start takes two values of the example, and what follows permutes or scales entries alike."""
    own = _own_values(tail)
    return own.issuperset(variables(tail.starts[0].invars)) and all(
        permutes(eqn) or _scales(eqn, own, tail) for eqn in _following(tail)
    )


def only_permutes(tail: Tail) -> bool:
    """Likewise, where what follows only permutes entries."""
    takes = _own_values(tail).issuperset(variables(tail.starts[0].invars))
    return takes and all(permutes(eqn) for eqn in _following(tail))


def _following(tail: Tail) -> list[JaxprEqn]:
    """The equations after the start."""
    (start,) = tail.starts
    before = {id(eqn) for eqn in (*leading_to(tail.equations, start.invars), start)}
    return [eqn for eqn in tail.equations if id(eqn) not in before]


def _scales(eqn: JaxprEqn, of_example: set[Var], tail: Tail) -> bool:
    """Whether an equation multiplies or divides a tail's value by something that is the same for all examples."""
    made = makers(tail.equations).keys() & set(variables(eqn.invars))
    is_scale = known(eqn) in (p.neg_p, p.mul_p, p.div_p) and is_linear_in(eqn, made)
    return is_scale and not of_example.intersection(variables(eqn.invars))


def _run(site: Site, accumulators: Accumulators, frontier: Frontier, chunk: int) -> Summaries:
    tail = frontier.tail
    (start,) = tail.starts
    s, r = (widen(x) for x in frontier.values_of(start.invars))
    env = Env()
    env.write(tail.inputs, frontier.values)

    def summaries_of(accumulator: Any) -> list[Any]:
        """The summary of each of the tail's gradients."""
        match accumulator:
            case Moment(factor=factor):
                assert factor is not None
                return follow(tail, env, _mean(start, (factor(s), factor(r))), factor)
            case Centred():
                mean = _mean(start, (s, r))
                means = follow(tail, env, mean, lambda x: x)
                return list(map(Spread, means, follow(tail, env, _centred(start, (s, r), mean), jnp.square)))
            case SquareNorm():
                return [_square_norms(start, (s, r))] * len(tail.outputs)
        raise TypeError(accumulator)

    return [list(of_gradient) for of_gradient in zip(*map(summaries_of, accumulators), strict=True)]


def _mean(start: JaxprEqn, factors: Factors) -> jax.Array:
    """The start's product, averaged over the examples."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = start.params["dimension_numbers"]
    contract = ((0, *_shift(lhs_contract)), (0, *_shift(rhs_contract)))
    lhs, rhs = factors
    numbers = (contract, (_shift(lhs_batch), _shift(rhs_batch)))
    return bind(start, (lhs, rhs / rhs.shape[0]), dimension_numbers=numbers, preferred_element_type=lhs.dtype)[0]


def _shift(axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(axis + 1 for axis in axes)


def _centred(start: JaxprEqn, factors: Factors, mean: jax.Array) -> jax.Array:
    """The mean over the examples of (g - mean)² where a gradient is the start's product; see the module."""
    s, r = factors
    s_mean, r_mean = jnp.mean(s, axis=0), jnp.mean(r, axis=0)
    delta, epsilon = s - jnp.expand_dims(s_mean, 0), r - jnp.expand_dims(r_mean, 0)

    def outer(x: jax.Array, y: jax.Array) -> jax.Array:
        return bind(start, (x, y), preferred_element_type=x.dtype)[0]

    shift = mean - outer(s_mean, r_mean)
    centred = (
        _mean(start, (s * s, epsilon * epsilon))
        + _mean(start, (s * delta, 2 * jnp.expand_dims(r_mean, 0) * epsilon))
        + outer(jnp.mean(delta * delta, axis=0), r_mean * r_mean)
    )
    return jnp.maximum(centred - shift * shift, 0)


def follow(tail: Tail, env: Env, product: jax.Array, factor: Callable[[Any], Any]) -> list[Any]:
    """A summary of the tail's gradients, from that of the start's product."""
    (start,) = tail.starts
    local, made = Env(env), set(makers(tail.equations))
    local.write(start.outvars, [product])
    local.run(_following(tail), lambda eqn, values: _step(eqn, values, factor, made))
    return local.read(tail.outputs)


def _step(eqn: JaxprEqn, values: Sequence[Any], factor: Callable[[Any], Any], made: set[Var]) -> list[Any]:
    """A step after the start: entries are permuted as they are; a scale c becomes phi(c)."""
    if permutes(eqn):
        return bind(eqn, values)
    if eqn.primitive is p.neg_p:
        return [values[0] * factor(jnp.full((), -1, values[0].dtype))]
    scales = [
        x if isinstance(v, Var) and v in made else factor(widen(x)) for x, v in zip(values, eqn.invars, strict=True)
    ]
    return bind(eqn, scales)


def _square_norms(start: JaxprEqn, factors: Factors) -> jax.Array:
    """‖s rᵀ‖² = ‖s‖²‖r‖², for each group that both operands share."""
    totals = []
    for factor, groups in zip(factors, start.params["dimension_numbers"][1], strict=True):
        axes = _shift(groups)
        rest = [axis for axis in range(1, factor.ndim) if axis not in axes]
        x = jnp.transpose(jnp.square(factor), (0, *axes, *rest))
        totals.append(jnp.sum(x, axis=tuple(range(1 + len(axes), x.ndim))))
    product = totals[0] * totals[1]
    return jnp.sum(product, axis=tuple(range(1, product.ndim)))


def _cost(site: Site, accumulators: Accumulators, B: int, chunk: int) -> Cost:
    """One product over the whole batch for each moment, three for a variance."""
    products = sum(3 if isinstance(a, Centred) else isinstance(a, Moment) for a in accumulators)
    moved = B * frontier_bytes(site.tail) + gradient_bytes(site.tail)
    return (tail_cost(site.tail) * B + Cost(bytes_moved=moved)) * max(1, products)


FACTORED = Rule(
    name="factored",
    why="an outer product: statistics of it are products of statistics",
    structure=Outer,
    accumulators=(Moment, Centred, SquareNorm),
    fits=_fits,
    run=_run,
    cost=_cost,
)


_HELD_BYTES = 16 * 2**20  # how much the T×T arrays of a chunk of examples may take


def _fits_gram(site: Site, accumulators: Accumulators) -> bool:
    """Gradients that are one product each, with their entries permuted at most."""
    return all(isinstance(s, Outer) and s.source in s.start.outvars for s in site.structures)


def _products(site: Site) -> list[JaxprEqn]:
    return [s.start for s in site.structures if isinstance(s, Outer)]


def _square_norm(eqn: JaxprEqn, operands: Sequence[Any]) -> jax.Array:
    """⟨S Sᵀ, R Rᵀ⟩ of one example, added up over the groups that S and R share."""
    contracted, shared = eqn.params["dimension_numbers"]
    grams = []
    for side, x in enumerate(operands):
        x = jnp.asarray(x)
        free = tuple(a for a in range(x.ndim) if a not in (*contracted[side], *shared[side]))
        x = jax.lax.transpose(x, (*shared[side], *contracted[side], *free))
        groups, T = x.shape[: len(shared[side])], contracted_size(eqn)
        x = x.reshape(*([math.prod(groups)] if groups else []), T, math.prod(x.shape[x.ndim - len(free) :]))
        last, batch = x.ndim - 1, tuple(range(x.ndim - 2))
        numbers = (((last,), (last,)), (batch, batch))
        wide = wide_dtype(x.dtype)
        grams.append(jax.lax.dot_general(x, x, numbers, precision=eqn.params["precision"], preferred_element_type=wide))
    return jnp.maximum(jnp.sum(grams[0] * grams[1]), 0)  # rounding may take a norm of zero below it


def _norms_of_example(site: Site, frontier: Frontier, values: Sequence[Any]) -> list[jax.Array]:
    products = _products(site)
    part = frontier.tail.part_that_makes([v for eqn in products for v in eqn.invars])
    needed = [values[frontier.tail.inputs.index(v)] for v in part.inputs]
    operands = part.run(*needed)
    return [_square_norm(eqn, operands[2 * i : 2 * i + 2]) for i, eqn in enumerate(products)]


def _run_gram(site: Site, accumulators: Accumulators, frontier: Frontier, chunk: int) -> Summaries:
    def of_example(example: list[Any]) -> list[jax.Array]:
        return _norms_of_example(site, frontier, frontier.with_examples(example))

    _, norms = jax.lax.scan(lambda _, x: (None, of_example(x)), None, frontier.examples(), frontier.B)
    return [[norm_B] for norm_B in norms]


def _run_batched_gram(site: Site, accumulators: Accumulators, frontier: Frontier, chunk: int) -> Summaries:
    def of_chunk(examples: list[Any], n: int) -> list[jax.Array]:
        return frontier.map(lambda *values: _norms_of_example(site, frontier, values), examples, n)

    kinds = [SQUARE_NORM] * len(site.structures)
    return [[norm_B] for norm_B in in_chunks(of_chunk, kinds, frontier.examples(), frontier.B, _chunk(site))]


def _chunk(site: Site) -> int:
    return max(1, int(_HELD_BYTES // max(1, _one(site).bytes_held)))


def _one(site: Site) -> Cost:
    """One example: two T×T products for each group, written, read, multiplied and added up."""
    cost = Cost(bytes_moved=frontier_bytes(site.tail))
    for eqn in _products(site):
        _, (shared, _) = eqn.params["dimension_numbers"]
        T, groups = contracted_size(eqn), math.prod(shape_of(eqn.invars[0])[axis] for axis in shared)
        entries = sum(map(size_of, eqn.invars))  # T·(D + E) for each group
        grams = 2 * T * T * groups
        cost += Cost(matmul_flops=2.0 * T * entries, other_flops=grams, bytes_moved=8 * grams, bytes_held=4 * grams)
    return cost


def _cost_gram(site: Site, accumulators: Accumulators, B: int, chunk: int) -> Cost:
    return (_one(site) + Cost(steps=1)) * B


def _cost_batched_gram(site: Site, accumulators: Accumulators, B: int, chunk: int) -> Cost:
    one = _one(site)
    batched = dataclasses.replace(one, matmul_flops=0.0, batched_flops=one.matmul_flops)
    held = min(B, _chunk(site)) * one.bytes_held
    return dataclasses.replace(batched * B, bytes_held=held) + Cost(steps=math.ceil(B / _chunk(site)))


GRAM = Rule(
    name="gram",
    loops=True,
    why="norms alone: ⟨SSᵀ, RRᵀ⟩, one example after the other",
    structure=Outer,
    accumulators=(SquareNorm,),
    fits=_fits_gram,
    run=_run_gram,
    cost=_cost_gram,
    recomputes=True,
)
BATCHED_GRAM = dataclasses.replace(
    GRAM,
    name="batched_gram",
    why="norms alone: ⟨SSᵀ, RRᵀ⟩ of a chunk of examples at once",
    run=_run_batched_gram,
    cost=_cost_batched_gram,
)
