"""The default fold over the examples, by three schedules. One of them fits every site, whatever is accumulated.

- direct: the body has formed the gradients of all examples, which are reduced at once.
- loop: one example's gradient at a time, everything accumulated from it. Where the product is of few positions, adding
  the gradient to what is accumulated takes as long as forming it. The loop is then unrolled, so that the gradients of a
  few examples are added in one pass.
- batched: the gradients of a chunk of examples at a time, by products with a batch axis. Right for accelerators, slow
  on a CPU.
"""

import dataclasses
import functools
import math
from typing import Any

from pegprof.engine.accumulators import fold, in_chunks
from pegprof.engine.costs import Cost, accumulate_cost, arrays_of, frontier_bytes, gradient_bytes, tail_cost
from pegprof.engine.dtypes import widen
from pegprof.engine.jaxpr import Rule, bind, size_of
from pegprof.engine.rules.base import Strategy
from pegprof.engine.sites import Site
from pegprof.engine.stages import Accumulators, Frontier, Summaries
from pegprof.engine.tails import Tail

UNROLL = 4
FEW_POSITIONS = 100
"""Timed on two x86 cores: four examples a step take 0.78 to 0.87 of the time of one a step with 4 to 64 positions, and
no less time with 128. Eight are not better than four, and compile longer."""


def _run_direct(site: Site, accumulators: Accumulators, frontier: Frontier, chunk: int) -> Summaries:
    return [[a.of_stack(widen(g_Bx)) for a in accumulators] for g_Bx in frontier.values_of(site.tail.outputs)]


def _cost_direct(site: Site, accumulators: Accumulators, B: int, chunk: int) -> Cost:
    held = B * gradient_bytes(site.tail)
    return Cost(bytes_moved=held, bytes_held=held)


DIRECT = Strategy(
    name="direct",
    why="the gradient is no larger than what it is made from",
    fits=lambda site, accumulators: not site.tail.equations,
    run=_run_direct,
    cost=_cost_direct,
)


def run_loop(accumulators: Accumulators, frontier: Frontier, chunk: int, rule: Rule = bind) -> Summaries:
    """One example at a time; the tail's equations are applied by ``rule``."""
    gradients_of = functools.partial(frontier.gradients_of, rule=rule)
    unroll = unrolled(frontier.tail, min(chunk, frontier.B))
    return fold(accumulators, gradients_of, frontier.examples(), frontier.B, unroll=unroll)


def unrolled(tail: Tail, chunk: int) -> int:
    """How many examples a step of the loop takes; no more gradients are held than ``chunk``."""
    entries = max(1, sum(map(size_of, tail.outputs)))
    positions = tail_cost(tail).product_flops / (2 * entries)
    return min(UNROLL, chunk) if positions < FEW_POSITIONS else 1


def loop_cost(tail: Tail, accumulators: Accumulators, B: int, chunk: int) -> Cost:
    tail_once = tail_cost(tail)
    tail_once = dataclasses.replace(tail_once, conv_flops=0.0, lone_conv_flops=tail_once.conv_flops)
    examples = unrolled(tail, min(chunk, B))
    adding = accumulate_cost(tail, accumulators, at_once=examples)
    taken = frontier_bytes(tail)
    one = tail_once + adding + Cost(bytes_moved=taken, bytes_with_products=taken, steps=1 / examples)
    return one * B + Cost(bytes_held=examples * gradient_bytes(tail))


LOOP = Strategy(
    name="loop",
    loops=True,
    why="one product an example, every statistic from it",
    fits=lambda site, accumulators: bool(site.tail.equations),
    run=lambda site, accumulators, frontier, chunk: run_loop(accumulators, frontier, chunk),
    cost=lambda site, accumulators, B, chunk: loop_cost(site.tail, accumulators, B, chunk),
    recomputes=True,
)


def _run_batched(site: Site, accumulators: Accumulators, frontier: Frontier, chunk: int) -> Summaries:
    outputs = len(frontier.tail.outputs)

    def of_chunk(examples: list[Any], n: int) -> list[Any]:
        gradients = frontier.map(lambda *values: [widen(g) for g in frontier.tail.run(*values)], examples, n)
        return [a.of_stack(g_nx) for g_nx in gradients for a in accumulators]

    flat = in_chunks(of_chunk, list(accumulators) * outputs, frontier.examples(), frontier.B, chunk)
    count = len(accumulators)
    return [flat[i * count : (i + 1) * count] for i in range(outputs)]


def _cost_batched(site: Site, accumulators: Accumulators, B: int, chunk: int) -> Cost:
    """A batched product writes all gradients of a chunk, and each accumulator reads them."""
    tail = site.tail
    one = tail_cost(tail)
    formed = frontier_bytes(tail) + gradient_bytes(tail)
    batched = Cost(
        batched_flops=one.matmul_flops + one.conv_flops,
        other_flops=one.other_flops,
        bytes_moved=formed + gradient_bytes(tail) * arrays_of(accumulators),
        bytes_with_products=formed,
    )
    return batched * B + Cost(steps=math.ceil(B / chunk), bytes_held=min(B, chunk) * gradient_bytes(tail))


BATCHED = Strategy(
    name="batched",
    why="products of a chunk of examples at once",
    fits=lambda site, accumulators: bool(site.tail.equations),
    run=_run_batched,
    cost=_cost_batched,
    recomputes=True,
)
