"""What a strategy costs at a site, and how fast each backend is at what.

A cost counts: floating-point operations by kind, bytes moved, steps of loops, bytes held. A backend's rates turn it
into seconds, which are good for comparing strategies with each other and for nothing else.
"""

import dataclasses
import math

from pegprof.engine.flops import count_equation_flops
from pegprof.engine.jaxpr import dtype_of
from pegprof.engine.jaxpr import primitives as p
from pegprof.engine.tails import Tail, size


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """How fast a backend is: operations, or bytes, or steps, each a second."""

    matmul: float
    batched: float
    conv: float
    lone_conv: float
    other: float
    bandwidth: float
    steps: float
    cache_bytes: float  # what the values of a step must fit into to stay near
    cache_speedup: float  # how much faster bytes move there

    def seconds(self, cost: Cost) -> float:
        """An estimate, for comparisons: what is done one after the other adds up."""
        return (
            cost.matmul_flops / self.matmul
            + cost.batched_flops / self.batched
            + cost.conv_flops / self.conv
            + cost.lone_conv_flops / self.lone_conv
            + (cost.shift_flops + cost.other_flops) / self.other
            + cost.bytes_moved / self.bandwidth
            + cost.steps / self.steps
        )


# cpu: near what benchmarks/rates.py measures on two x86 cores, where two runs gave 7e10 and 1e11 for matmul, 2.6e9 for
# lone_conv, 11 and 12 for cache_speedup. Chosen, not measured: cache_bytes; cache_speedup, lower than measured; and
# batched, six times lower than the large products that rates.py times, since at a gradient's sizes they are far slower.
# gpu and tpu: the makers' flop/s and bandwidth for an H100 SXM (TF32, dense) and a TPU v5p (bf16, at half rate for
# float32 by passes); lone_conv, other, steps and the caches are guesses. None of it was ever run on such a device.
RATES: dict[str, Rates] = {
    "cpu": Rates(
        matmul=1e11,
        batched=1.5e10,
        conv=2.9e10,
        lone_conv=4e9,
        other=6.7e9,
        bandwidth=1.5e10,
        steps=5e5,
        cache_bytes=8 * 2**20,
        cache_speedup=8,
    ),
    "gpu": Rates(
        matmul=4.9e14,
        batched=4.9e14,
        conv=2.5e14,
        lone_conv=2.5e14,
        other=6.7e13,
        bandwidth=3.35e12,
        steps=2e5,
        cache_bytes=50 * 2**20,
        cache_speedup=2,
    ),
    "tpu": Rates(
        matmul=2.3e14,
        batched=2.3e14,
        conv=2.3e14,
        lone_conv=2.3e14,
        other=4e12,
        bandwidth=2.77e12,
        steps=1e6,
        cache_bytes=128 * 2**20,
        cache_speedup=2,
    ),
}


def rates_of(backend: str) -> Rates:
    """The rates of a backend by its name in jax; one that is not known is taken for a GPU."""
    return RATES.get({"cuda": "gpu", "rocm": "gpu"}.get(backend, backend), RATES["gpu"])


def gradient_bytes(tail: Tail) -> int:
    """One example's gradients at a site, in float32 at least."""
    return sum(size(v) * max(4, dtype_of(v).itemsize) for v in tail.outputs)


def frontier_bytes(tail: Tail) -> int:
    """One example's own inputs of a tail."""
    depends = zip(tail.inputs, tail.depends, strict=True)
    return sum(size(v) * dtype_of(v).itemsize for v, own in depends if own)


def tail_cost(tail: Tail) -> Cost:
    """The floating-point operations of one example's tail, run as it stands."""
    flops = dict.fromkeys(("matmul_flops", "conv_flops", "other_flops"), 0.0)
    kinds = {p.dot_general_p: "matmul_flops", p.jit_p: "matmul_flops", p.conv_general_dilated_p: "conv_flops"}
    for eqn in tail.equations:
        # XLA writes the gradient of a kernel with groups as one without, and throws away what belongs to no group.
        groups = eqn.params["batch_group_count"] if eqn.primitive is p.conv_general_dilated_p else 1
        flops[kinds.get(eqn.primitive, "other_flops")] += count_equation_flops(eqn) * groups
    return Cost(**flops)


def accumulate_cost(tail: Tail, quantities: int, *, at_once: int = 1) -> Cost:
    """Adding one example's gradients to running quantities: each is read and written, for some examples at once."""
    entries = sum(map(size, tail.outputs))
    passes = 1 + 2 * quantities / at_once
    return Cost(other_flops=2.0 * quantities * entries, bytes_moved=gradient_bytes(tail) * passes)


def chunks(B: int, chunk: int) -> int:
    return math.ceil(B / max(1, chunk))
