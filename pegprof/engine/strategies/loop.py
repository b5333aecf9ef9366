"""loop: one example's gradient at a time, all quantities from the same product."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pegprof.engine.costs import Cost, accumulate_cost, frontier_bytes, gradient_bytes, tail_cost
from pegprof.engine.jaxpr import Rule
from pegprof.engine.jaxpr import primitives as p
from pegprof.engine.quantities import Running, Values
from pegprof.engine.statistics import Quantity
from pegprof.engine.strategies.base import Frontier, Strategy, bind_wide, run_wide
from pegprof.engine.tails import LINEAR, Tail

_KNOWN = LINEAR | {p.jit_p, p.scatter_add_p, p.dynamic_update_slice_p, p.select_n_p}


def fits(tail: Tail, quantities: Sequence[Quantity]) -> bool:
    return bool(tail.equations) and all(eqn.primitive in _KNOWN for eqn in tail.equations)


def run(
    tail: Tail, quantities: Sequence[Quantity], frontier: Frontier, chunk: int, rule: Rule = bind_wide
) -> list[Values]:
    running = Running(quantities)

    def gradients_of(example: list[Any]) -> list[Any]:
        return run_wide(tail, frontier.with_examples(example), rule)

    def step(state: tuple[Any, list[Values]], example: list[Any]) -> tuple[Any, Any]:
        n, totals = state
        added = [running.add(total, g, n) for total, g in zip(totals, gradients_of(example), strict=True)]
        return (n + 1, [total for total, _ in added]), [own for _, own in added]

    examples = frontier.examples()
    shapes = jax.eval_shape(gradients_of, [x[0] for x in examples])
    start = (jnp.ones((), jnp.float32), [running.start(s) for s in shapes])
    (_, totals), own = jax.lax.scan(step, start, examples)
    return [{**running.finish(total, frontier.B), **norms} for total, norms in zip(totals, own, strict=True)]


def _cost(tail: Tail, quantities: Sequence[Quantity], B: int, chunk: int) -> Cost:
    tail_once = tail_cost(tail)
    tail_once = dataclasses.replace(tail_once, conv_flops=0.0, lone_conv_flops=tail_once.conv_flops)
    one = tail_once + accumulate_cost(tail, len(quantities)) + Cost(bytes_moved=frontier_bytes(tail), steps=1)
    return one * B + Cost(bytes_held=gradient_bytes(tail))


LOOP = Strategy(
    name="loop",
    why="one product an example, every statistic from it",
    fits=fits,
    run=run,
    cost=_cost,
    recomputes=True,
)
