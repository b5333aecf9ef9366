"""loop: one example's gradient at a time, all quantities from the same product.

Where the product is of few positions, adding the gradient to the quantities takes as long as forming it. The loop is
then unrolled: the gradients of a few examples are added in one pass over each quantity.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pegprof.engine.costs import Cost, accumulate_cost, frontier_bytes, gradient_bytes, tail_cost
from pegprof.engine.facts import known
from pegprof.engine.jaxpr import Rule
from pegprof.engine.jaxpr import primitives as p
from pegprof.engine.quantities import Running, Values
from pegprof.engine.statistics import Quantity
from pegprof.engine.strategies.base import Frontier, Strategy, bind_wide, run_wide
from pegprof.engine.tails import LINEAR, Tail, size

_KNOWN = LINEAR | {p.jit_p, p.scatter_add_p, p.dynamic_update_slice_p, p.select_n_p}

UNROLL = 4
FEW_POSITIONS = 100
"""Timed on two x86 cores: four examples a step take 0.78 to 0.87 of the time of one a step with 4 to 64 positions, and
no less time with 128. Eight are not better than four, and compile longer."""


def fits(tail: Tail, quantities: Sequence[Quantity]) -> bool:
    return bool(tail.equations) and all(known(eqn) in _KNOWN for eqn in tail.equations)


def run(
    tail: Tail, quantities: Sequence[Quantity], frontier: Frontier, chunk: int, rule: Rule = bind_wide
) -> list[Values]:
    values, _ = run_keeping(tail, quantities, frontier, chunk, rule)
    return values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outputs:
    """A tail's outputs for one example: gradients, which entries of them are left out, and what is kept."""

    gradients: list[Any]
    left_out: Any = False
    kept: Any = ()


def _only_gradients(outputs: list[Any]) -> Outputs:
    return Outputs(gradients=outputs)


def run_keeping(
    tail: Tail,
    quantities: Sequence[Quantity],
    frontier: Frontier,
    chunk: int,
    rule: Rule = bind_wide,
    split: Callable[[list[Any]], Outputs] = _only_gradients,
) -> tuple[list[Values], Any]:
    """As ``run``, and something that is kept of every example: ``split`` says what a tail's outputs are."""
    running = Running(quantities)

    def outputs_of(example: list[Any]) -> Outputs:
        return split(run_wide(tail, frontier.with_examples(example), rule))

    def step(state: tuple[Any, list[Values]], example: list[Any]) -> tuple[Any, Any]:
        n, totals = state
        outputs = outputs_of(example)
        pairs = zip(totals, outputs.gradients, strict=True)
        added = [running.add(total, g, n, outputs.left_out) for total, g in pairs]
        return (n + 1, [total for total, _ in added]), ([own for _, own in added], outputs.kept)

    examples = frontier.examples()
    shapes = jax.eval_shape(lambda example: outputs_of(example).gradients, [x[0] for x in examples])
    start = (jnp.ones((), jnp.float32), [running.start(s) for s in shapes])
    unroll = _unrolled(tail, min(chunk, frontier.B))
    (_, totals), (own, kept) = jax.lax.scan(step, start, examples, frontier.B, unroll=unroll)
    return [{**running.finish(total, frontier.B), **norms} for total, norms in zip(totals, own, strict=True)], kept


def _unrolled(tail: Tail, chunk: int) -> int:
    """How many examples a step of the loop takes; no more gradients are held than ``chunk``."""
    entries = max(1, sum(map(size, tail.outputs)))
    positions = tail_cost(tail).product_flops / (2 * entries)
    return min(UNROLL, chunk) if positions < FEW_POSITIONS else 1


def _cost(tail: Tail, quantities: Sequence[Quantity], B: int, chunk: int) -> Cost:
    tail_once = tail_cost(tail)
    tail_once = dataclasses.replace(tail_once, conv_flops=0.0, lone_conv_flops=tail_once.conv_flops)
    unrolled = _unrolled(tail, min(chunk, B))
    adding = accumulate_cost(tail, len(quantities), at_once=unrolled)
    one = tail_once + adding + Cost(bytes_moved=frontier_bytes(tail), steps=1 / unrolled)
    return one * B + Cost(bytes_held=unrolled * gradient_bytes(tail))


LOOP = Strategy(
    name="loop",
    why="one product an example, every statistic from it",
    fits=fits,
    run=run,
    cost=_cost,
    recomputes=True,
)
