"""Kernels of ours in a compiled program: what they say of themselves.

A compiler has no price for a custom call, so a kernel carries its own figures, for one call, as attributes that
``jax.experimental.xla_metadata.set_xla_metadata`` sets around its ``pallas_call``. All are integers, as text:

    pegprof_kernel        its name
    pegprof_flops         of its matrix products
    pegprof_bytes         to and from main memory, by its block specs
    pegprof_vector_flops  elementwise operations on tiles
    pegprof_cache_bytes   what its blocks read through a GPU's L2 cache
    pegprof_precision     "highest" or "high", where its products are not at the default precision
"""

import dataclasses
import re

from pegprof.targets.hlo.flops import product_class
from pegprof.targets.hlo.module import Computation, Module, Operation

TARGETS = re.compile(r"tpu_custom_call|__gpu\$xla\.gpu\.triton|triton_kernel_call|mosaic_gpu.*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """What one call does. Figures that it does not say are None."""

    name: str
    product_class: str
    flops: int | None = None
    bytes: int | None = None
    vector_flops: int = 0
    cache_bytes: int = 0


def find_kernel(module: Module, computation: Computation, operation: Operation) -> Kernel | None:
    """The kernel that an operation calls, alone or in a fusion with slices and updates around it."""
    if operation.opcode == "custom-call" and TARGETS.fullmatch(operation.custom_call_target):
        return _read(computation, operation)
    if operation.opcode in ("fusion", "call", "async-start"):
        for name in operation.called:
            inner = module.computations[name]
            for each in inner.operations:
                if each.opcode in ("custom-call", "fusion") and (found := find_kernel(module, inner, each)):
                    return found
    return None


def _read(computation: Computation, call: Operation) -> Kernel:
    said = call.frontend_attributes

    def figure(name: str) -> int | None:
        text = said.get(f"pegprof_{name}", "")
        return int(text) if text.isdigit() else None

    flops, moved = figure("flops"), figure("bytes")
    if flops is None and moved is None:  # somebody else's: what its author told the compiler, if anything
        found = re.search(r'"cost_estimate":\s*\{([^}]*)\}', call.backend_config)
        told = dict(re.findall(r'"(\w+)":\s*"?(\d+)', found[1])) if found else {}
        flops = int(told["flops"]) if "flops" in told else None
        moved = int(told["bytes_accessed"]) if "bytes_accessed" in told else None
    default = "bfloat16" if _is_narrow(computation, call) else product_class(computation, call)
    return Kernel(
        name=said.get("pegprof_kernel", ""),
        product_class=said.get("pegprof_precision") or default,
        flops=flops,
        bytes=moved,
        vector_flops=figure("vector_flops") or 0,
        cache_bytes=figure("cache_bytes") or 0,
    )


def _is_narrow(computation: Computation, call: Operation) -> bool:
    """Whether its products take bf16 operands: its first two arrays of numbers do."""
    dtypes = [x.results[0].dtype for x in computation.operands(call) if x.results and "f" in x.results[0].dtype]
    return bool(dtypes) and all(dtype in ("bf16", "f16") for dtype in dtypes[:2])
