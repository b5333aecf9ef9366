"""materialise: the gradients of a chunk of examples at a time. Fits every tail."""

from collections.abc import Sequence
from typing import Any

import jax

from pegprof.engine.costs import Cost, chunks, frontier_bytes, gradient_bytes, tail_cost
from pegprof.engine.quantities import Values, in_chunks, is_per_example, of_stack
from pegprof.engine.statistics import Quantity
from pegprof.engine.strategies.base import Frontier, Strategy, run_wide
from pegprof.engine.tails import Tail


def run(tail: Tail, quantities: Sequence[Quantity], frontier: Frontier, chunk: int) -> list[Values]:
    axes = [0 if b else None for b in frontier.batched]

    def of_chunk(examples: list[Any], n: int) -> tuple[list[Values], list[Values]]:
        values = frontier.with_examples(examples)
        gradients = jax.vmap(lambda *v: run_wide(tail, v), in_axes=axes, axis_size=n)(*values)
        found = [of_stack(quantities, g_Bx) for g_Bx in gradients]
        merged = [{name: x for name, x in values.items() if not is_per_example(name)} for values in found]
        joined = [{name: x for name, x in values.items() if is_per_example(name)} for values in found]
        return merged, joined

    merged, joined = in_chunks(of_chunk, frontier.examples(), frontier.B, chunk)
    return [{**a, **b} for a, b in zip(merged, joined, strict=True)]


def cost(tail: Tail, quantities: Sequence[Quantity], B: int, chunk: int) -> Cost:
    """A batched product writes all gradients of a chunk, and each quantity reads them."""
    one = tail_cost(tail)
    moved = frontier_bytes(tail) + gradient_bytes(tail) * (1 + len(quantities))
    batched = Cost(batched_flops=one.matmul_flops + one.conv_flops, other_flops=one.other_flops, bytes_moved=moved)
    return batched * B + Cost(steps=chunks(B, chunk), bytes_held=min(B, chunk) * gradient_bytes(tail))


MATERIALISE = Strategy(
    name="materialise",
    why="no other strategy fits",
    fits=lambda tail, quantities: True,
    run=run,
    cost=cost,
    recomputes=True,
)
