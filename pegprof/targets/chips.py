"""The figures of each accelerator that decide what a program costs there. Nothing here imports jax.

Peaks are the makers' and are for dense matrices. A TPU multiplies float32 in one pass of bfloat16 by default, in three
at ``Precision.HIGH`` and in six at ``HIGHEST``; a GPU takes TF32 by default and its plain cores at ``HIGHEST``.
"""

import dataclasses
from typing import Literal

GIGA, TERA, KIB, MIB = 1e9, 1e12, 2**10, 2**20

ProductClass = Literal["bfloat16", "float32", "high", "highest"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One device as JAX has it.

    Args:
      name: as ``--target`` takes it.
      backend: JAX's name for the kind, ``tpu`` or ``gpu``.
      kinds: what JAX calls the device where it is present.
      cores: of a TPU, that work as one device; multiprocessors of a GPU.
      bfloat16_flops: of matrix products, a second.
      float32_flops: the same of float32 operands, as the backend multiplies them by default.
      highest_flops: the same at ``Precision.HIGHEST``.
      vector_flops: elementwise operations a second.
      bandwidth: of main memory, bytes a second.
      on_chip_bytes: what a kernel can hold: VMEM of a TPU's core, shared memory of a GPU's block.
      matrix_width: of a TPU's matrix unit.
      clock_hz: with which a TPU's ``estimated_cycles`` are seconds; None on a GPU, whose compiler says seconds.
      cache_bytes: of a GPU's L2.
      link_bandwidth: what it sends to others of a slice or a node, bytes a second; None if it has no such links.
      cache_bandwidth: from there, bytes a second; None where there is no such cache.
    """

    name: str
    backend: Literal["tpu", "gpu"]
    kinds: tuple[str, ...]
    cores: int
    bfloat16_flops: float
    float32_flops: float
    highest_flops: float
    vector_flops: float
    bandwidth: float
    on_chip_bytes: int
    matrix_width: int = 128
    clock_hz: float | None = None
    cache_bytes: int = 0
    cache_bandwidth: float | None = None
    link_bandwidth: float | None = None

    def product_flops(self, product_class: str) -> float:
        """The peak of matrix products of one class of precision.

        >>> CHIPS["tpu-v5p"].product_flops("float32") == CHIPS["tpu-v5p"].product_flops("bfloat16")
        True
        """
        match product_class:
            case "bfloat16":
                return self.bfloat16_flops
            case "highest":
                return self.highest_flops
            case "high" if self.backend == "tpu":
                return self.bfloat16_flops / 3
        return self.float32_flops


def _tpu(
    name: str,
    *kinds: str,
    teraflops: float,
    bandwidth: float,
    vmem_mib: int,
    clock_ghz: float,
    links: float,
    cores: int = 1,
    matrix_width: int = 128,
) -> Chip:
    """Teraflops, bandwidth and links, half of what goes both ways: Google's documentation of each version.

    VMEM of a core: jax's ``tpu_info.py``. The clock is inferred: with it the chip's matrix units, 128×128 before v6e
    and 256×256 from then on, make the published peak. Elementwise: 8×128 lanes of 4 units in each core, as "How to
    Scale Your Model" has it for v5p; inferred for the others.
    """
    return Chip(
        name=name,
        backend="tpu",
        kinds=kinds,
        cores=cores,
        bfloat16_flops=teraflops * TERA,
        float32_flops=teraflops * TERA,
        highest_flops=teraflops * TERA / 6,
        vector_flops=cores * 8 * 128 * 4 * clock_ghz * GIGA,
        bandwidth=bandwidth,
        on_chip_bytes=vmem_mib * MIB,
        matrix_width=matrix_width,
        clock_hz=clock_ghz * GIGA,
        link_bandwidth=links,
    )


def _gpu(
    name: str,
    *kinds: str,
    cores: int,
    bfloat16: float,
    tf32: float,
    float32: float,
    bandwidth: float,
    shared_kib: int,
    cache_bytes: int,
    cache_bandwidth: float,
    links: float | None = None,
) -> Chip:
    """Teraflops and NVLink, half of what goes both ways: NVIDIA's data sheets, without sparsity.

    Bandwidth, shared memory of a block and the size of L2: as in ``pegprof/targets/devices.py``, from what XLA
    publishes of these devices.
    """
    return Chip(
        name=name,
        backend="gpu",
        kinds=kinds,
        cores=cores,
        bfloat16_flops=bfloat16 * TERA,
        float32_flops=tf32 * TERA,
        highest_flops=float32 * TERA,
        vector_flops=float32 * TERA,
        bandwidth=bandwidth,
        on_chip_bytes=shared_kib * KIB,
        cache_bytes=cache_bytes,
        cache_bandwidth=cache_bandwidth,
        link_bandwidth=links,
    )


# What L2 gives is less than its ports can: A100 is published at 5120 bytes a cycle, 7.2 TB/s, and measured at 4.8 on
# NVIDIA's forum; 5.5 for H100 is "How to Scale Your Model"'s, T4 measured by Jia et al., arXiv 1903.07486. L4 and B200
# are guesses.
_A100_CACHE, _H100_CACHE = 4.8e12, 5.5e12

CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        _tpu("tpu-v4", "TPU v4", teraflops=275, bandwidth=1.228e12, vmem_mib=16, clock_ghz=1.05, links=3e11, cores=2),
        _tpu(
            "tpu-v5e", "TPU v5 lite", "TPU v5e", teraflops=197, bandwidth=8.19e11, vmem_mib=128, clock_ghz=1.5,
            links=2e11,
        ),
        _tpu(
            "tpu-v5p", "TPU v5", "TPU v5p", teraflops=459, bandwidth=2.765e12, vmem_mib=64, clock_ghz=1.75,
            links=6e11, cores=2,
        ),
        _tpu(
            "tpu-v6e", "TPU v6 lite", "TPU v6e", teraflops=918, bandwidth=1.638e12, vmem_mib=128, clock_ghz=1.75,
            links=4e11, matrix_width=256,
        ),
        # Half a chip, which is a device to JAX: half of the published figures.
        _tpu(
            "tpu-7x", "TPU7x", teraflops=2307 / 2, bandwidth=7.38e12 / 2, vmem_mib=64, clock_ghz=2.2,
            links=3e11, matrix_width=256,
        ),
        _gpu(  # Turing has neither bfloat16 nor TF32
            "t4", "Tesla T4", "NVIDIA T4", cores=40, bfloat16=8.1, tf32=8.1, float32=8.1, bandwidth=3.2e11,
            shared_kib=64, cache_bytes=4 * MIB, cache_bandwidth=1.27e12,
        ),
        _gpu(
            "l4", "NVIDIA L4", cores=58, bfloat16=121, tf32=60, float32=30.3, bandwidth=3e11, shared_kib=99,
            cache_bytes=48 * MIB, cache_bandwidth=1.8e12,
        ),
        _gpu(
            "a100", "NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB", cores=108, bfloat16=312, tf32=156,
            float32=19.5, bandwidth=1.5552e12, shared_kib=163, cache_bytes=40 * MIB,
            cache_bandwidth=_A100_CACHE, links=3e11,
        ),
        _gpu(
            "a100-80", "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe", cores=108, bfloat16=312, tf32=156,
            float32=19.5, bandwidth=2.03904e12, shared_kib=163, cache_bytes=40 * MIB,
            cache_bandwidth=_A100_CACHE, links=3e11,
        ),
        _gpu(
            "h100", "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", cores=132, bfloat16=989.4, tf32=494.7,
            float32=66.9, bandwidth=3.35232e12, shared_kib=227, cache_bytes=50 * MIB,
            cache_bandwidth=_H100_CACHE, links=4.5e11,
        ),
        _gpu(
            "h200", "NVIDIA H200", cores=132, bfloat16=989.4, tf32=494.7, float32=66.9, bandwidth=4.8e12,
            shared_kib=227, cache_bytes=50 * MIB, cache_bandwidth=_H100_CACHE, links=4.5e11,
        ),
        _gpu(
            "b200", "NVIDIA B200", cores=148, bfloat16=2250, tf32=1125, float32=74.4, bandwidth=7.67232e12,
            shared_kib=227, cache_bytes=132_644_864, cache_bandwidth=1.0e13, links=9e11,
        ),
    )
}  # fmt: skip

DEFAULT_OF = {"tpu": "tpu-v5p", "gpu": "h100", "cuda": "h100", "rocm": "h100"}
"""What a backend is planned for where nobody says which device it is."""


def name_of_kind(kind: str) -> str | None:
    """The name in the table of a device that is here, by what JAX calls it; None if it is not there.

    >>> name_of_kind("TPU v5 lite"), name_of_kind("abacus")
    ('tpu-v5e', None)
    """
    return next((chip.name for chip in CHIPS.values() if kind in chip.kinds), None)


def find_chip(backend: str) -> Chip | None:
    """The chip that a backend means, by the name of a device or by JAX's name for the kind; None for a CPU.

    >>> find_chip("tpu-v5e").name, find_chip("gpu").name, find_chip("cpu")
    ('tpu-v5e', 'h100', None)
    """
    return CHIPS.get(DEFAULT_OF.get(backend, backend))
