"""What strategies and the body cost: floating-point operations by kind, bytes moved, steps of loops, bytes held.

The rates of a backend (``pegprof/targets/rates.py``) turn a cost into seconds.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from pegprof.engine.accumulators import Accumulator
from pegprof.engine.facts import FACTS, UNKNOWN
from pegprof.engine.flops import count_equation_flops
from pegprof.engine.jaxpr import JaxprEqn, dtype_of, shape_of, size_of, variables
from pegprof.engine.jaxpr import primitives as p
from pegprof.engine.sites import Cut, InnerLoop, Site
from pegprof.engine.tails import Tail
from pegprof.targets.rates import Rates


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """What running something takes; costs add."""

    matmul_flops: float = 0.0  # in plain matrix products
    batched_flops: float = 0.0  # in products with a batch axis
    conv_flops: float = 0.0  # in convolutions as XLA writes them
    lone_conv_flops: float = 0.0  # in those that make the kernel's gradient of a single example
    shift_flops: float = 0.0  # in convolutions as products of shifted copies, entry by entry
    other_flops: float = 0.0  # in anything else that is elementwise
    bytes_moved: float = 0.0
    bytes_with_products: float = 0.0  # of these, what moves while products are computed
    cache_bytes: float = 0.0  # that programs of a kernel read through the cache that they share
    vector_flops: float = 0.0  # elementwise, in a kernel, while its products are computed
    steps: float = 0.0  # of loops
    bytes_held: float = 0.0  # at once, beside the frontier and the results

    def __add__(self, other: "Cost") -> "Cost":
        mine, its = dataclasses.asdict(self), dataclasses.asdict(other)
        return Cost(**{name: mine[name] + its[name] for name in mine})

    def __mul__(self, times: float) -> "Cost":
        scaled = {name: value * times for name, value in dataclasses.asdict(self).items()}
        return Cost(**{**scaled, "bytes_held": self.bytes_held})

    @property
    def product_flops(self) -> float:
        """Those of contractions, whichever way they are computed."""
        return self.matmul_flops + self.batched_flops + self.conv_flops + self.lone_conv_flops + self.shift_flops


def gradient_bytes(tail: Tail) -> int:
    """One example's gradients at a site, in float32 at least."""
    return sum(size_of(v) * max(4, dtype_of(v).itemsize) for v in tail.outputs)


def frontier_bytes(tail: Tail) -> int:
    """One example's own inputs of a tail."""
    depends = zip(tail.inputs, tail.depends, strict=True)
    return sum(size_of(v) * dtype_of(v).itemsize for v, own in depends if own)


def rebuilt_bytes(site: Site) -> int:
    """One example's operands that a site rebuilds from residuals."""
    rebuilt = set(site.tail.inputs).difference(site.recomputing.inputs)
    return sum(size_of(v) * dtype_of(v).itemsize for v in rebuilt)


def tail_cost(tail: Tail) -> Cost:
    """The floating-point operations of one example's tail, run as it stands."""
    cost = Cost()
    for eqn in tail.equations:
        # XLA writes the gradient of a kernel with groups as one without, and throws away what belongs to no group.
        groups = eqn.params.get("batch_group_count", 1)
        kind = FACTS.get(eqn.primitive, UNKNOWN).flop_kind
        cost += Cost(**{kind: float(count_equation_flops(eqn) * groups)})
    return cost


def arrays_of(accumulators: Sequence[Accumulator]) -> int:
    """How many arrays accumulators keep for each entry of a gradient."""
    return sum(1 + len(a.contains) for a in accumulators)


def accumulate_cost(tail: Tail, accumulators: Sequence[Accumulator], *, at_once: int = 1) -> Cost:
    """Adding one example's gradients to accumulators: each is read and written once for ``at_once`` examples."""
    entries, arrays = sum(map(size_of, tail.outputs)), arrays_of(accumulators)
    passes = 1 + 2 * arrays / at_once
    formed = gradient_bytes(tail)  # is written as it is formed
    return Cost(other_flops=2.0 * arrays * entries, bytes_moved=formed * passes, bytes_with_products=formed)


# ---- the body -------------------------------------------------------------------------------------------------------

# A plain gradient runs all at once. Fewer examples at a time need less memory, and on a CPU often less time as well:
# the values of a few examples stay in the cache, where those of a batch go through memory again and again. Against that
# stand smaller matrix products and, for each chunk, merging the summaries of every parameter.
#
# These two, and the rates of the cache, were set by hand until the planner's choices agreed with the times of the
# models in benchmarks/models.py. How good they are on other models, or other CPUs, has not been measured.

_HALF_SPEED_ROWS = 32  # a matrix product with this many rows runs at half of a large one's speed
_HALF_SPEED_IMAGES = 8  # a convolution of this many images runs at half of a large one's speed


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
        sizes = [size_of(v) * dtype_of(v).itemsize for v in eqn.outvars if dtype_of(v) is not None]
        made = float(sum(sizes)) * times
        squares += sum(n * n for n in sizes) * times
        live += 0 if FACTS.get(eqn.primitive, UNKNOWN).elementwise else made
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
    speed = examples * body.rows / (examples * body.rows + _HALF_SPEED_ROWS)
    conv_speed = examples / (examples + _HALF_SPEED_IMAGES)
    in_cache = min(1.0, rates.cache_bytes / max(1.0, 3 * examples * body.value_bytes))
    cost = dataclasses.replace(
        body.cost,
        matmul_flops=body.cost.matmul_flops / speed,
        conv_flops=body.cost.conv_flops / conv_speed,
        bytes_moved=body.cost.bytes_moved / (1 + (rates.cache_speedup - 1) * in_cache),
    )
    return rates.seconds(cost * examples + Cost(steps=body.steps))


def _stacked_bytes(cut: Cut) -> float:
    """What the scans of one example's program put out that only tails take in."""
    stacked = {
        v
        for eqn in cut.body
        if isinstance(eqn, JaxprEqn) and eqn.primitive is p.scan_p
        for v in eqn.outvars[eqn.params["num_carry"] :]
    }
    body = [step.loop.eqn if isinstance(step, InnerLoop) else step for step in cut.body]
    used = {v for eqn in body for v in variables(eqn.invars)}
    return float(sum(size_of(v) * dtype_of(v).itemsize for v in stacked - used))


def _inner_loops(cut: Cut, times: int = 1) -> Iterator[tuple[InnerLoop, int]]:
    """The loops that have sites of their own, and how many steps each takes in all."""
    for step in cut.body:
        if isinstance(step, InnerLoop):
            steps = times * step.loop.length
            yield step, steps
            yield from _inner_loops(step.cut, steps)


def _body_equations(cut: Cut, times: int = 1) -> Iterator[tuple[JaxprEqn, int]]:
    """The equations outside sites, and how often each runs for an example."""
    for step in cut.body:
        if isinstance(step, InnerLoop):
            yield from _body_equations(step.cut, times * step.loop.length)
        else:
            yield step, times
