"""How fast each backend is: what turns counted costs into seconds.

Such seconds are good for comparing strategies with each other and for nothing else.
"""

import dataclasses
from typing import TYPE_CHECKING

from pegprof.targets.chips import CHIPS, Chip, find_chip

if TYPE_CHECKING:
    from pegprof.engine.costs import Cost


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
    cache_bandwidth: float | None = None  # of the cache that the programs of a kernel share, if they do
    overlaps: bool = False  # whether memory and vector units work while products are computed

    def seconds(self, cost: "Cost") -> float:
        """An estimate, for comparisons. Costs add up; of what overlaps, the longest counts."""
        products = (
            cost.matmul_flops / self.matmul
            + cost.batched_flops / self.batched
            + cost.conv_flops / self.conv
            + cost.lone_conv_flops / self.lone_conv
        )
        others = (cost.shift_flops + cost.other_flops) / self.other + cost.steps / self.steps
        if not self.overlaps:
            return products + others + cost.bytes_moved / self.bandwidth
        with_products = (
            products,
            cost.vector_flops / self.other,
            cost.bytes_with_products / self.bandwidth,
            cost.cache_bytes / self.cache_bandwidth if self.cache_bandwidth else 0.0,
        )
        return max(with_products) + others + (cost.bytes_moved - cost.bytes_with_products) / self.bandwidth


# cpu: near what benchmarks/rates.py measures on two x86 cores, where two runs gave 7e10 and 1e11 for matmul, 2.6e9 for
# lone_conv, 11 and 12 for cache_speedup. Chosen, not measured: cache_bytes; cache_speedup, lower than measured; and
# batched, six times lower than the large products that rates.py times, since at a gradient's sizes they are far slower.
CPU = Rates(
    matmul=1e11,
    batched=1.5e10,
    conv=2.9e10,
    lone_conv=4e9,
    other=6.7e9,
    bandwidth=1.5e10,
    steps=5e5,
    cache_bytes=8 * 2**20,
    cache_speedup=8,
)


EFFICIENCY = 0.65
"""The share of a chip's peak that products reach, by XLA's own cost models: 0.60 on an H100, 0.71 on a TPU v5p (the
plain gradient of transformer-151m in reports/accelerators.csv)."""


def rates_of(backend: str) -> Rates:
    """The rates of a backend, by its name in jax or that of a device; one that is not known is taken for a GPU."""
    if backend == "cpu":
        return CPU
    return _rates_of_chip(find_chip(backend) or CHIPS["h100"])


def _rates_of_chip(chip: Chip) -> Rates:
    """By the makers' figures. The speeds of convolutions and of loops are guesses: nothing was ever run there."""
    return Rates(
        matmul=EFFICIENCY * chip.float32_flops,
        batched=EFFICIENCY * chip.float32_flops,
        conv=EFFICIENCY * chip.float32_flops / 2,
        lone_conv=EFFICIENCY * chip.float32_flops / 2,
        other=chip.vector_flops,
        bandwidth=chip.bandwidth,
        steps=2e5 if chip.backend == "gpu" else 1e6,
        cache_bytes=chip.cache_bytes or chip.on_chip_bytes,
        cache_speedup=2,
        cache_bandwidth=chip.cache_bandwidth,
        overlaps=True,
    )
