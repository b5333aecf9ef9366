"""direct: the body has formed the gradients, and they are no larger than what they were made from."""

from collections.abc import Sequence

from pegprof.engine.costs import Cost, gradient_bytes
from pegprof.engine.quantities import Values, of_stack
from pegprof.engine.statistics import Quantity
from pegprof.engine.strategies.base import Frontier, Strategy
from pegprof.engine.tails import Tail


def _run(tail: Tail, quantities: Sequence[Quantity], frontier: Frontier, chunk: int) -> list[Values]:
    return [of_stack(quantities, g_Bx) for g_Bx in frontier.values]


def _cost(tail: Tail, quantities: Sequence[Quantity], B: int, chunk: int) -> Cost:
    held = B * gradient_bytes(tail)
    return Cost(bytes_moved=held, bytes_held=held)


DIRECT = Strategy(
    name="direct",
    why="the gradient is no larger than what it is made from",
    fits=lambda tail, quantities: not tail.equations and not tail.grows,
    run=_run,
    cost=_cost,
)
