"""What the compiler's own cost model says that an operation takes, in seconds.

A TPU's compiler writes ``estimated_cycles``, which the chip's clock makes seconds. A GPU's compiler writes
``reification_cost``, several models by name, if it is told to: ``GPU_OPTIONS``. Of those ``sol`` is plausible, with two
holes. It has no figure for fusions that Triton runs and that are not products, where ``indexing-cost-model`` has one.
Its table of products has bfloat16 and float32 alone: others, as bfloat16 with a float32 result or one that is
converted to it at once, it prices 80 times too dear, which is no price.
"""

import re

from pegprof.targets.chips import Chip
from pegprof.targets.hlo.flops import product_dtypes
from pegprof.targets.hlo.module import Computation, Module, Operation

GPU_OPTIONS = {"xla_gpu_collect_cost_model_stats": True}
"""For ``lowered.compile``: without it a GPU's compiler writes no prices."""

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_MODEL = re.compile(r'"exec_time_us":([\d.eE+-]+)[^{}]*"name":"([^"]*)"')
_NO_FIGURE_US = 0.02  # ``sol`` says 0.01 where it knows nothing
_IN_THE_TABLE = {("bf16", "bf16", "bf16"), ("f32", "f32", "f32")}  # of both operands and the result


def compiler_price(module: Module, computation: Computation, operation: Operation, chip: Chip) -> float | None:
    """Seconds; None if the compiler has no price for it."""
    config = operation.backend_config
    if found := _CYCLES.search(config):
        return int(found[1]) / chip.clock_hz if chip.clock_hz else None
    if "reification_cost" not in config or product_dtypes(module, computation, operation) - _IN_THE_TABLE:
        return None
    models = {name: float(us) for us, name in _MODEL.findall(config)}
    price_us = models.get("sol")
    if '"kind":"__triton"' in config and (price_us is None or price_us < _NO_FIGURE_US):
        price_us = models.get("indexing-cost-model")
    return None if price_us is None else price_us * 1e-6
