"""gram: norms alone need no product. With an example's gradient g = SᵀR, S: T×D, R: T×E,

    ‖g‖² = tr(RᵀS SᵀR) = ⟨S Sᵀ, R Rᵀ⟩:

two T×T arrays, T²(D + E) multiplications in place of T·D·E. Groups that both operands share add up. The terms of the
scalar product may differ in sign, so the norm of a gradient that almost cancels over the positions is rounded more
than the gradient's own entries would be.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pegprof.engine.contraction import contracted_size
from pegprof.engine.costs import Cost, chunks, frontier_bytes
from pegprof.engine.facts import known
from pegprof.engine.jaxpr import Env, JaxprEqn, Var, shape_of
from pegprof.engine.jaxpr import primitives as p
from pegprof.engine.quantities import Values, in_chunks, wide_dtype
from pegprof.engine.statistics import SQUARE_NORM, Quantity, SquareNorm
from pegprof.engine.strategies.base import Frontier, Strategy
from pegprof.engine.strategies.lookups import terms_of
from pegprof.engine.tails import Tail

_HELD_BYTES = 16 * 2**20
"""How much the T×T arrays of a chunk of examples may take."""


def _fits(tail: Tail, quantities: Sequence[Quantity]) -> bool:
    """Only norms, of gradients that are one product each, its entries moved at most."""
    return all(isinstance(q, SquareNorm) for q in quantities) and None not in _products(tail)


def _products(tail: Tail) -> list[JaxprEqn | None]:
    """For each gradient, the product that it is."""
    return [_product(tail, v) for v in tail.outputs] or [None]


def _product(tail: Tail, output: Var) -> JaxprEqn | None:
    first, *rest = terms_of(tail, output)
    made_by = [eqn for eqn in tail.starts if any(v is first.source for v in eqn.outvars)]
    return made_by[0] if made_by and not rest and known(made_by[0]) is p.dot_general_p else None


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
        wide = wide_dtype(x.dtype)
        numbers = (((last,), (last,)), (batch, batch))
        grams.append(jax.lax.dot_general(x, x, numbers, precision=eqn.params["precision"], preferred_element_type=wide))
    return jnp.maximum(jnp.sum(grams[0] * grams[1]), 0)  # rounding may take a norm of zero below it


def _norms_of_example(tail: Tail, inputs: Sequence[Any]) -> list[jax.Array]:
    env = Env()
    env.write(tail.inputs, inputs)
    env.run(tail.prelude)
    return [_square_norm(eqn, env.read(eqn.invars)) for eqn in _products(tail) if eqn]


def _run_looped(tail: Tail, quantities: Sequence[Quantity], frontier: Frontier, chunk: int) -> list[Values]:
    norms = jax.lax.map(lambda x: _norms_of_example(tail, frontier.with_examples(x)), frontier.examples())
    return [{SQUARE_NORM.name: norm_B} for norm_B in norms]


def _run_batched(tail: Tail, quantities: Sequence[Quantity], frontier: Frontier, chunk: int) -> list[Values]:
    axes = [0 if b else None for b in frontier.batched]

    def of_chunk(examples: list[Any], n: int) -> tuple[list[Values], list[jax.Array]]:
        values = frontier.with_examples(examples)
        return [], jax.vmap(lambda *v: _norms_of_example(tail, v), in_axes=axes, axis_size=n)(*values)

    _, norms = in_chunks(of_chunk, frontier.examples(), frontier.B, _chunk(tail))
    return [{SQUARE_NORM.name: norm_B} for norm_B in norms]


def _chunk(tail: Tail) -> int:
    return max(1, int(_HELD_BYTES // max(1, _one(tail).bytes_held)))


def _one(tail: Tail) -> Cost:
    """One example: two T×T products for each group, written, read, multiplied and added up."""
    cost = Cost(bytes_moved=frontier_bytes(tail))
    for eqn in _products(tail):
        assert eqn is not None
        _, (shared, _) = eqn.params["dimension_numbers"]
        T, groups = contracted_size(eqn), math.prod(shape_of(eqn.invars[0])[axis] for axis in shared)
        entries = sum(math.prod(shape_of(v)) for v in eqn.invars)  # T·(D + E) for each group
        grams = 2 * T * T * groups
        cost += Cost(matmul_flops=2.0 * T * entries, other_flops=grams, bytes_moved=8 * grams, bytes_held=4 * grams)
    return cost


def _cost_looped(tail: Tail, quantities: Sequence[Quantity], B: int, chunk: int) -> Cost:
    return (_one(tail) + Cost(steps=1)) * B


def _cost_batched(tail: Tail, quantities: Sequence[Quantity], B: int, chunk: int) -> Cost:
    one = _one(tail)
    batched = dataclasses.replace(one, matmul_flops=0.0, batched_flops=one.matmul_flops)
    held = min(B, _chunk(tail)) * one.bytes_held
    return dataclasses.replace(batched * B, bytes_held=held) + Cost(steps=chunks(B, _chunk(tail)))


GRAM = Strategy(
    name="gram",
    why="norms alone: ⟨SSᵀ, RRᵀ⟩, one example after the other",
    fits=_fits,
    run=_run_looped,
    cost=_cost_looped,
    recomputes=True,
)
BATCHED_GRAM = Strategy(
    name="batched_gram",
    why="norms alone: ⟨SSᵀ, RRᵀ⟩ of a chunk of examples at once",
    fits=_fits,
    run=_run_batched,
    cost=_cost_batched,
    recomputes=True,
)
