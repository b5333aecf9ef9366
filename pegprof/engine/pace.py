"""What the body of a program takes when it runs some examples at a time.

All at once is what a plain gradient does. Fewer at a time need less memory, and on a CPU often less time as well: the
values of a few examples stay in the cache, where those of a batch go through memory again and again. Against that stand
smaller matrix products and, for each chunk, adding to every quantity of every parameter.
"""

import dataclasses
from collections.abc import Iterator

from pegprof.engine.costs import Cost, Rates
from pegprof.engine.flops import count_equation_flops
from pegprof.engine.jaxpr import JaxprEqn, dtype_of, shape_of
from pegprof.engine.jaxpr import primitives as p
from pegprof.engine.sites import Cut, EarlyPart, InnerLoop, Site
from pegprof.engine.squeeze import ELEMENTWISE
from pegprof.engine.tails import size, variables

# These two, and the rates of the cache, were set by hand until the planner's choices agreed with the paces timed on the
# models of benchmarks/models.py. How good they are on other models, or other CPUs, has not been measured.

_FULL_SPEED_ROWS = 32
"""A matrix product with this many rows runs at half of a large one's speed."""

_FULL_SPEED_IMAGES = 8
"""And so does a convolution of this many images."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Body:
    """What one example's forward and backward pass takes, outside the sites."""

    cost: Cost
    rows: float  # of its matrix products, on average over their operations: the positions of an example
    value_bytes: float  # the size of its values, on average over their bytes
    live_bytes: float  # at the most: all that is not elementwise, and so may have to be stored
    stacked_bytes: float  # of these, what loops put out for sites alone: the plain gradient adds up instead
    steps: float  # of the loops in it, however many examples go through them together


def body_of(cut: Cut) -> Body:
    """Count a cut program's body, for one example."""
    cost, rows, squares, live, steps = Cost(), 0.0, 0.0, 0.0, 0.0
    for eqn, times in _body_equations(cut):
        flops = count_equation_flops(eqn) * times
        sizes = [size(v) * dtype_of(v).itemsize for v in eqn.outvars if dtype_of(v) is not None]
        made = float(sum(sizes)) * times
        squares += sum(n * n for n in sizes) * times
        live += 0 if eqn.primitive in ELEMENTWISE else made
        steps += times * eqn.params["length"] if eqn.primitive is p.scan_p else 0
        moved = 3 * made  # two operands and a result
        if eqn.primitive is p.dot_general_p:
            cost += Cost(matmul_flops=flops, bytes_moved=moved)
            rows += flops * (shape_of(eqn.outvars[0]) or (1,))[0]
        elif eqn.primitive is p.conv_general_dilated_p and eqn.params["feature_group_count"] == 1:
            cost += Cost(conv_flops=flops, bytes_moved=moved)
        else:
            cost += Cost(other_flops=flops, bytes_moved=moved)
    return Body(
        cost=cost,
        rows=rows / cost.matmul_flops if cost.matmul_flops else 1.0,
        value_bytes=3 * squares / cost.bytes_moved if cost.bytes_moved else 0.0,
        live_bytes=live,
        stacked_bytes=_stacked_bytes(cut),
        steps=steps + sum(length for _, length in _inner_loops(cut)),
    )


def body_seconds(body: Body, examples: int, rates: Rates) -> float:
    """An estimate for some examples at once."""
    speed = examples * body.rows / (examples * body.rows + _FULL_SPEED_ROWS)
    conv_speed = examples / (examples + _FULL_SPEED_IMAGES)
    in_cache = min(1.0, rates.cache_bytes / max(1.0, 3 * examples * body.value_bytes))
    cost = dataclasses.replace(
        body.cost,
        matmul_flops=body.cost.matmul_flops / speed,
        conv_flops=body.cost.conv_flops / conv_speed,
        bytes_moved=body.cost.bytes_moved / (1 + (rates.cache_speedup - 1) * in_cache),
    )
    return rates.seconds(cost * examples + Cost(steps=body.steps))


def _stacked_bytes(cut: Cut) -> float:
    """What the scans of one example's program put out that nothing but tails takes in."""
    stacked = {
        v
        for eqn in cut.steps
        if isinstance(eqn, JaxprEqn) and eqn.primitive is p.scan_p
        for v in eqn.outvars[eqn.params["num_carry"] :]
    }
    in_tails = {id(eqn) for site in cut.sites() for eqn in site.tail.equations}
    used = {v for eqn in cut.closed.jaxpr.eqns if id(eqn) not in in_tails for v in variables(eqn.invars)}
    return float(sum(size(v) * dtype_of(v).itemsize for v in stacked - used))


def _inner_loops(cut: Cut, times: int = 1) -> Iterator[tuple[InnerLoop, int]]:
    """The loops that have sites of their own, and how many steps each takes in all."""
    for step in cut.steps:
        if isinstance(step, InnerLoop):
            steps = times * step.loop.eqn.params["length"]
            yield step, steps
            yield from _inner_loops(step.cut, steps)


def _body_equations(cut: Cut, times: int = 1) -> Iterator[tuple[JaxprEqn, int]]:
    """The equations outside sites, and how often each runs for an example."""
    for step in cut.steps:
        match step:
            case Site() | EarlyPart():
                continue
            case InnerLoop():
                yield from _body_equations(step.cut, times * step.loop.eqn.params["length"])
            case eqn:
                yield eqn, times
