"""The table of devices that a program can be compiled for while they are not here.

XLA's own compilers run on a machine without any accelerator, and give the real buffer assignment. A new device is one
entry of ``DEVICES``. Nothing here imports jax.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from pegprof.errors import ExitCode, PegprofError, nearest
from pegprof.targets.compilers import CUDA, TPU, Compiler, why_not

GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One entry of the table.

    Args:
      name: what ``--target`` takes.
      title: what people call it.
      compiler: what compiles for it.
      memory_bytes: what programs can have of it.
      topology: the arguments of ``jax.experimental.topologies.get_topology_desc``.
      environment: of a process that compiles for it.
      count: how many of them there are; more than one are a slice.
    """

    name: str
    title: str
    compiler: Compiler
    memory_bytes: int
    topology: Mapping[str, Any]
    environment: Mapping[str, str]
    count: int = 1

    @property
    def kind(self) -> str:
        """The name of one of them."""
        return self.name.partition(":")[0]

    @property
    def per_host(self) -> int:
        """How many of a slice are in one host or node, where links are fastest. Of TPUs, the smallest whole host.

        >>> find_device("tpu-v5e:4x4").per_host, find_device("h100:4x8").per_host
        (4, 8)
        """
        if self.compiler is TPU:
            whole = str(DEVICES[self.kind].topology["topology_name"]).partition(":")[2]
            return math.prod(int(n) for n in whole.split("x"))
        return int(str(self.topology["topology"]).rpartition("x")[2])


def _tpu(name: str, title: str, *, usable_gib: float, topology: str, accelerator: str, **more: Any) -> Device:
    """The smallest whole host of such chips, of which a program takes one.

    ``usable_gib`` is what XLA says is available when it refuses a program that needs more: the published size without
    what the system keeps.
    """
    return Device(
        name=name,
        title=title,
        compiler=TPU,
        memory_bytes=int(usable_gib * GIB),
        topology={"topology_name": topology, **more},
        environment={**TPU.environment, "TPU_ACCELERATOR_TYPE": accelerator},
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """What XLA wants to know of a GPU: the figures that CUDA reports of it, in XLA's words.

    For A100, H100, H200 and B200 they are those that XLA's own repository publishes, in
    xla/backends/gpu/target_config/specs; for T4 and L4 those of NVIDIA's data sheets and CUDA's tables by compute
    capability. ``device_memory_size`` is all of it: what a driver and a context take is not known here.
    """

    capability: tuple[int, int]
    accelerated: bool = False  # code for this very generation, sm_90a for sm_90
    core_count: int
    fpus_per_core: int
    threads_per_core_limit: int = 2048
    clock_rate_ghz: float
    memory_bandwidth: int  # bytes a second
    device_memory_size: int
    l2_cache_size: int
    shared_memory_per_core: int
    shared_memory_per_block_optin: int

    def to_text_proto(self, title: str) -> str:
        """A ``stream_executor.GpuTargetConfigProto``."""
        figures = dataclasses.asdict(self)
        (major, minor), accelerated = figures.pop("capability"), figures.pop("accelerated")
        figures |= _COMMON_TO_GPUS
        feature = "feature_extension: ACCELERATED_FEATURES" if accelerated else ""
        return (
            f"gpu_device_info {{ {' '.join(f'{field}: {value}' for field, value in figures.items())} "
            f"cuda_compute_capability {{ major: {major} minor: {minor} {feature} }} }} "
            f'platform_name: "CUDA" device_description_str: "{title}" '
            "dnn_version_info { major: 9 minor: 10 patch: 0 } runtime_version { major: 12 minor: 9 patch: 0 }"
        )


_COMMON_TO_GPUS = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 48 * 2**10,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 2**16 - 1,
    "block_dim_limit_z": 2**16 - 1,
    "registers_per_core_limit": 2**16,
    "registers_per_block_limit": 2**16,
}


def _gpu(name: str, title: str, *, gpu: Gpu) -> Device:
    return Device(
        name=name,
        title=title,
        compiler=CUDA,
        memory_bytes=gpu.device_memory_size,
        topology={"topology_name": name, "target_config": gpu.to_text_proto(title), "topology": "1x1x1"},
        environment=CUDA.environment,
    )


_A100 = Gpu(
    capability=(8, 0),
    core_count=108,
    fpus_per_core=64,
    clock_rate_ghz=1.41,
    memory_bandwidth=1_555_200_000_000,
    device_memory_size=42_331_013_120,
    l2_cache_size=40 * 2**20,
    shared_memory_per_core=164 * 2**10,
    shared_memory_per_block_optin=163 * 2**10,
)
_H100 = Gpu(
    capability=(9, 0),
    accelerated=True,
    core_count=132,
    fpus_per_core=128,
    clock_rate_ghz=1.98,
    memory_bandwidth=3_352_320_000_000,
    device_memory_size=84_942_979_072,
    l2_cache_size=50 * 2**20,
    shared_memory_per_core=228 * 2**10,
    shared_memory_per_block_optin=227 * 2**10,
)
_H200 = dataclasses.replace(_H100, memory_bandwidth=4_800_000_000_000, device_memory_size=151_397_597_184)
_B200 = dataclasses.replace(
    _H100,
    capability=(10, 0),
    core_count=148,
    clock_rate_ghz=1.965,
    memory_bandwidth=7_672_320_000_000,
    device_memory_size=191_514_411_008,
    l2_cache_size=132_644_864,
)
_T4 = Gpu(
    capability=(7, 5),
    core_count=40,
    fpus_per_core=64,
    threads_per_core_limit=1024,
    clock_rate_ghz=1.59,
    memory_bandwidth=320_000_000_000,
    device_memory_size=15_843_721_216,
    l2_cache_size=4 * 2**20,
    shared_memory_per_core=64 * 2**10,
    shared_memory_per_block_optin=64 * 2**10,
)
_L4 = Gpu(
    capability=(8, 9),
    core_count=58,
    fpus_per_core=128,
    threads_per_core_limit=1536,
    clock_rate_ghz=2.04,
    memory_bandwidth=300_000_000_000,
    device_memory_size=22 * GIB,  # of 24 GB, whose error correction takes its part
    l2_cache_size=48 * 2**20,
    shared_memory_per_core=100 * 2**10,
    shared_memory_per_block_optin=99 * 2**10,
)

DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _tpu(
            "tpu-v4",
            "TPU v4",
            usable_gib=30.75,
            topology="v4:2x2x1",
            accelerator="v4-8",
            chip_config_name="megacore",  # both cores of a chip as one, as JAX has them where they are present
        ),
        _tpu(
            "tpu-v5e",
            "TPU v5e",
            usable_gib=15.75,
            topology="v5e:2x2",
            accelerator="v5litepod-4",
        ),
        _tpu(
            "tpu-v5p",
            "TPU v5p",
            usable_gib=95.74,
            topology="v5p:2x2x1",
            accelerator="v5p-8",
        ),
        _tpu(
            "tpu-v6e",
            "TPU v6e",
            usable_gib=31.25,
            topology="v6e:2x2",
            accelerator="v6e-4",
        ),
        _tpu(
            "tpu-7x",
            "TPU 7x, half a chip",  # JAX has its two halves as two devices, each with half the memory
            usable_gib=94.75,
            topology="tpu7x:2x2x1",
            accelerator="tpu7x-8",
        ),
        _gpu("t4", "NVIDIA T4", gpu=_T4),
        _gpu("l4", "NVIDIA L4", gpu=_L4),
        _gpu("a100", "NVIDIA A100 40 GB", gpu=_A100),
        _gpu(
            "a100-80",
            "NVIDIA A100 80 GB",
            gpu=dataclasses.replace(_A100, memory_bandwidth=2_039_040_000_000, device_memory_size=85_100_068_864),
        ),
        _gpu("h100", "NVIDIA H100 80 GB", gpu=_H100),
        _gpu("h200", "NVIDIA H200", gpu=_H200),
        _gpu("b200", "NVIDIA B200", gpu=_B200),
    )
}


def one_of(name: str | None) -> str | None:
    """The name of one device of a slice.

    >>> one_of("tpu-v5e:4x4")
    'tpu-v5e'
    """
    return name and name.partition(":")[0]


def find_device(name: str) -> Device:
    """A device of the table, or a slice of them: ``tpu-v5p:4x4x4`` chips, ``h100:8`` in a node, ``h100:4x8`` in four.

    Raises:
      PegprofError: there is no such device, or it does not come in such slices.

    >>> find_device("tpu-v5e:4x4").count
    16
    """
    kind, _, shape = name.partition(":")
    if kind not in DEVICES:
        raise PegprofError(f"unknown target {name!r}", hint=nearest(kind, DEVICES))
    device = DEVICES[kind]
    return _slice_of(device, shape) if shape else device


def _slice_of(device: Device, shape: str) -> Device:
    sizes = [int(n) if n.isdecimal() else 0 for n in shape.split("x")]
    whole = str(device.topology["topology_name" if device.compiler is TPU else "topology"]).rpartition(":")[2]
    least = [int(n) for n in whole.split("x")]
    lengths = (len(least),) if device.compiler is TPU else (1, 2)
    if len(sizes) not in lengths or 0 in sizes:
        example = "x".join(str(2 * n) for n in least) if device.compiler is TPU else "8, or 4x8 for four nodes of eight"
        raise PegprofError(f"{device.kind}:{shape} is not a slice", hint=f"write {device.kind}:{example}")
    if device.compiler is TPU:
        if any(n % m for n, m in zip(sizes, least, strict=True)):
            what = f"{device.kind}:{shape} is not a whole number of hosts, which have {whole} chips each"
            raise PegprofError(what, hint=f"each side must be a multiple: {device.kind}:{whole} is the smallest")
        prefix = str(device.topology["topology_name"]).partition(":")[0]
        topology = {**device.topology, "topology_name": f"{prefix}:{shape}"}
    else:
        nodes, each = (1, *sizes)[-2:]
        topology = {**device.topology, "topology": f"1x{nodes}x{each}"}
    count = math.prod(sizes)
    return dataclasses.replace(
        device, name=f"{device.kind}:{shape}", title=f"{count} × {device.title}", topology=topology, count=count
    )


def require_compiler(device: Device) -> None:
    """Raises in words if the device's compiler is missing."""
    if remedy := why_not(device.compiler):
        what = f"the compiler for {device.name} is not installed"
        raise PegprofError(what, hint=remedy, exit_code=ExitCode.UNMEASURED)
