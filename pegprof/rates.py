"""How fast each backend is: what turns counted costs into seconds.

Such seconds are good for comparing strategies with each other and for nothing else.
"""

import dataclasses
from typing import TYPE_CHECKING

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

    def seconds(self, cost: "Cost") -> float:
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
