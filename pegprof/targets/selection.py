"""Targets: what a program is compiled for. The host, which is the device of this machine, can also run it.

The parent process never starts a JAX backend, so the device is found by its files and its plug-in, and JAX_PLATFORMS
is explicit in every child: a TPU library that is installed but has no TPU would look for one and warn.
"""

import dataclasses
import glob
import importlib.util
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pegprof.errors import PegprofError, nearest
from pegprof.targets import meshes
from pegprof.targets.chips import name_of_kind
from pegprof.targets.devices import DEVICES, Device, find_device, require_compiler
from pegprof.units import format_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Platform:
    """A kind of device that may be in this machine, and how to tell without starting it."""

    target: str  # JAX's name for it
    jax_platforms: str
    device_files: tuple[str, ...]
    plugins: tuple[str, ...]

    def is_present(self) -> bool:
        has_device = any(glob.glob(pattern) for pattern in self.device_files)
        return has_device and any(importlib.util.find_spec(plugin) for plugin in self.plugins)


CPU = Platform(target="cpu", jax_platforms="cpu", device_files=(), plugins=())
ACCELERATORS = (
    Platform(
        target="tpu",
        jax_platforms="tpu,cpu",
        device_files=("/dev/accel*", "/dev/vfio/[0-9]*"),
        plugins=("libtpu",),
    ),
    Platform(
        target="gpu",
        jax_platforms="cuda,cpu",
        device_files=("/dev/nvidia[0-9]*",),
        plugins=("jax_cuda12_plugin", "jax_cuda13_plugin"),
    ),
)


# The user's compilation cache would make compile_s a matter of luck; preallocation would hide what a GPU has free.
ENVIRONMENT = {"JAX_ENABLE_COMPILATION_CACHE": "false", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def sharing(folder: str) -> dict[str, str]:
    """The environment of processes that find there what one of them has compiled."""
    return {
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": folder,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """Where programs are compiled for and, if it is the device that is here, run.

    Args:
      name: what ``--target`` takes.
      backend: what the planner plans for: JAX's name for the kind of device, or a device of the table.
      environment: of every child.
      runs: whether programs are run on it: the host alone.
      device: what is not here, and only compiled for.
      mesh: the sizes of the axes that several devices are arranged in, by name; empty for one device.
    """

    name: str
    backend: str
    environment: Mapping[str, str]
    runs: bool = False
    device: Device | None = None
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def is_host(self) -> bool:
        """Whether programs take the memory of this machine, and any number of processes can have their part of it."""
        return is_host(self.name)

    @property
    def has_one_owner(self) -> bool:
        """Whether it is an accelerator that is here: one process at a time can have it."""
        return self.device is None and not self.is_host

    @property
    def count(self) -> int:
        """Of its devices."""
        if self.device:
            return self.device.count
        return int(self.name.partition(":")[2] or 1) if self.is_host else 1

    @property
    def per_host(self) -> int:
        """How many of its devices are in one host."""
        return self.device.per_host if self.device else self.count


def is_host(name: str) -> bool:
    """Whether a target of that name is the processor of this machine, as one device or as several.

    >>> is_host("cpu"), is_host("cpu:8"), is_host("h100:8")
    (True, True, False)
    """
    return name.partition(":")[0] == CPU.target


def host_target() -> Target:
    """The device of this machine: what JAX_PLATFORMS says, else an accelerator that is present, else the CPU."""
    asked = os.environ.get("JAX_PLATFORMS")
    if asked:
        chosen = next(
            (p for p in (CPU, *ACCELERATORS) if asked.split(",")[0] in (p.target, *p.jax_platforms.split(","))), None
        )
        if chosen is None:
            hint = "set it to cpu, cuda or tpu, or unset it"
            raise PegprofError(f"JAX_PLATFORMS is {asked!r}, which pegprof does not know", hint=hint)
    else:
        chosen = next((p for p in ACCELERATORS if p.is_present()), CPU)
    environment = {**ENVIRONMENT, "JAX_PLATFORMS": asked or chosen.jax_platforms}
    return Target(name=chosen.target, backend=chosen.target, environment=environment, runs=True)


def cpu_target() -> Target:
    """The processor of this machine, whatever else it has: for what needs no particular device."""
    return Target(name=CPU.target, backend=CPU.target, environment={**ENVIRONMENT, "JAX_PLATFORMS": "cpu"})


def absent_target(device: Device) -> Target:
    """A device that is only compiled for. Its children run nothing, and see no accelerator that is here."""
    environment = {**ENVIRONMENT, **device.environment, "JAX_PLATFORMS": "cpu"}
    return Target(name=device.name, backend=device.kind, environment=environment, device=device)


def virtual_target(name: str) -> Target:
    """``cpu:8``: the processor as eight devices, on which programs are run."""
    count = name.partition(":")[2]
    if not count.isdecimal() or int(count) < 1:
        raise PegprofError(f"{name} is not a number of devices", hint="write it like cpu:8")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}".strip()
    return dataclasses.replace(
        cpu_target(), name=name, runs=True, environment={**cpu_target().environment, "XLA_FLAGS": flags}
    )


def find_host(ask_kind: Callable[[Target], str | None]) -> Target:
    """The host by the name that the table of devices has for it.

    Args:
      ask_kind: what JAX calls an accelerator that is here: only a child may ask it.
    """
    host = host_target()
    if host.name == CPU.target:
        return host
    kind = ask_kind(host)
    if kind == CPU.target:  # JAX passes over a GPU that JAX_PLATFORMS lists and the machine does not have
        return dataclasses.replace(host, name=CPU.target, backend=CPU.target)
    return dataclasses.replace(host, name=(kind and name_of_kind(kind)) or host.name)


def choose_targets(names: Sequence[str], host: Target) -> tuple[Target, ...]:
    """What ``--target`` names, the host where it names nothing.

    Raises:
      PegprofError: a name is unknown, or the compiler for it is not installed.
    """
    chosen = tuple(choose_target(name, host) for name in names) or (host,)
    for target in chosen:
        if target.device:
            require_compiler(target.device)
    return chosen


def choose_target(name: str, host: Target) -> Target:
    """The target of that name, whether it can be compiled for or only planned for."""
    if name in (host.name, host.backend):
        return host
    if name == CPU.target:
        return cpu_target()
    if name.startswith(f"{CPU.target}:"):
        return virtual_target(name)
    if name.partition(":")[0] not in DEVICES:
        raise PegprofError(f"unknown target {name!r}", hint=nearest(name, (CPU.target, *DEVICES)))
    return absent_target(find_device(name))


def arrange(target: Target, mesh: Mapping[str, int]) -> Target:
    """A target with its devices in a mesh: along ``data``, if no other is asked for.

    Raises:
      PegprofError: the mesh has not as many devices.
    """
    if target.count == 1 and not mesh:
        return target
    if target.count == 1:
        what = f"--mesh {meshes.describe(mesh)} needs several devices, and {target.name} is one"
        raise PegprofError(what, hint="name a slice, such as --target tpu-v5p:4x4x4, h100:8 or cpu:8")
    chosen = mesh or {"data": target.count}
    meshes.check_mesh(chosen, target.count)
    return dataclasses.replace(target, mesh=chosen)


def cpu_name() -> str:
    """The processor as a person knows it, with the number of cores that this process may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} core{'s' if cores != 1 else ''}"


PROCESS_BYTES = 2**29
"""What a process with JAX takes before it runs anything, the compiling included: 0.3 to 0.4 GiB have been seen."""

SPARED = 0.05
"""The share of what is available that is left to others: they may want more at any time."""


LEAST_LEFT_BYTES = 2**29
"""Below this a child is stopped. It can take as much again until we look the next time."""


def free_host_bytes() -> int:
    """The memory that a program may take in a process yet to be started."""
    return max(0, spendable_host_bytes() - PROCESS_BYTES)


def spendable_host_bytes() -> int:
    """The memory that the processes which are there may take on top of what they have."""
    return int(available_host_bytes() * (1 - SPARED))


def available_host_bytes() -> int:
    """What the machine and the containers around this process leave, without swapping."""
    import psutil

    return max(0, min([psutil.virtual_memory().available, *free_container_bytes()]))


def short_of_memory() -> str | None:
    """Why a child must be stopped, if it must: before the machine swaps, or kills somebody else."""
    import psutil

    left = available_host_bytes()
    if left >= min(LEAST_LEFT_BYTES, psutil.virtual_memory().total // 32):
        return None
    return f"stopped: only {format_bytes(left)} of memory were left on this machine"


def free_container_bytes(root: Path = Path("/")) -> list[int]:
    """What each control group around this process has left, inner groups first; empty where nothing is limited."""
    return [free for group in _memory_groups(root) if (free := _free_in_group(group)) is not None]


def _memory_groups(root: Path) -> list[Path]:
    """The folders of the control groups that count this process's memory: version 2, then version 1."""
    groups = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
        else:
            continue
        group = mount / path.lstrip("/")
        groups += [folder for folder in (group, *group.parents) if folder == mount or mount in folder.parents]
    return groups


# Limit, usage, and what of the usage is cache. Above memory.high a group is not killed, but held up.
_LIMIT_USAGE_CACHE = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.high", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def _free_in_group(group: Path) -> int | None:
    free = []
    for limit_file, usage_file, cache in _LIMIT_USAGE_CACHE:
        try:
            limit = (group / limit_file).read_text().strip()
            usage = int((group / usage_file).read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if limit != "max":
            # Cached files count as used, yet the kernel drops them before it kills anybody.
            free.append(int(limit) - usage + int(stat.get(cache, 0)))
    return min(free, default=None)
