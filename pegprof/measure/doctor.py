"""The doctor: is everything here that a measurement needs, and what would more take?

``examine`` looks, ``diagnose`` judges what was seen, ``render`` says it. JAX's devices are found by a child: the parent
starts no backend.
"""

import dataclasses
import glob
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import Literal

from pegprof.errors import ExitCode, PegprofError
from pegprof.measure.process import ChildFailure
from pegprof.measure.progress import Talk
from pegprof.measure.protocol import ListDevices, run_child
from pegprof.targets import selection
from pegprof.targets.compilers import CUDA, TPU, has_wheels, install_line
from pegprof.targets.devices import DEVICES
from pegprof.units import format_bytes
from pegprof.versions import version_of

PACKAGES = ("jax", "jaxlib", "flax", "optax", "typer", "rich", "psutil", "pandas", "scipy", "platformdirs")
DEVICE_LIMIT_S = 120.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extra:
    """A set of optional packages of pyproject.toml: what it is for, and by what one knows that it is there."""

    purpose: str
    packages: tuple[str, ...]


EXTRAS: Mapping[str, Extra] = {
    TPU.extra: Extra(purpose="a TPU, here or only compiled for", packages=TPU.packages),
    CUDA.extra: Extra(purpose="an NVIDIA GPU that is only compiled for", packages=CUDA.packages),
    "cuda12": Extra(purpose="an NVIDIA GPU here, CUDA 12", packages=("jax-cuda12-plugin", "nvidia-cudnn-cu12")),
    "cuda13": Extra(purpose="an NVIDIA GPU here, CUDA 13", packages=("jax-cuda13-plugin",)),
    "bench": Extra(purpose="the figures of benchmarks/", packages=("matplotlib",)),
    "experiments": Extra(purpose="pegprof experiment", packages=("matplotlib", "scikit-learn")),
    "test": Extra(purpose="the tests", packages=("pytest", "pytest-xdist", "hypothesis")),
    "dev": Extra(purpose="development", packages=("ruff", "mypy", "pre-commit")),
}
COMPILERS = (TPU.extra, CUDA.extra)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes: of the machine, of its container, and what a run would have."""

    total: int
    available: int
    container: int | None  # what the tightest control group leaves
    for_a_run: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Symptoms:
    """What there is to see."""

    python: str
    versions: Mapping[str, str | None]  # None: not installed
    required: Mapping[str, str]  # the oldest version that will do, as far as it is known
    devices: tuple[str, ...]
    device_failure: str | None
    idle_accelerators: tuple[str, ...]  # in the machine, but of no use to JAX
    memory: Memory | None
    targets: tuple[str, ...] = ()  # that are not here, and can be compiled for
    has_wheels: bool = True  # whether the compilers for those can be installed on such a system


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the diagnosis. A ``problem`` stands in the way of measuring, a ``note`` does not."""

    status: Literal["ok", "note", "problem"]
    subject: str
    detail: str
    hint: str = ""


def examine(talk: Talk) -> Symptoms:
    """Looks at this machine and this environment."""
    talk.doing("asking JAX for its devices")
    devices, failure = _find_devices(talk)
    packages = (*PACKAGES, *(package for extra in EXTRAS.values() for package in extra.packages))
    return Symptoms(
        python=platform.python_version(),
        versions={package: version_of(package) for package in packages},
        required=_required_versions(),
        devices=devices,
        device_failure=failure,
        idle_accelerators=tuple(
            p.target for p in selection.ACCELERATORS if any(map(glob.glob, p.device_files)) and not p.is_present()
        ),
        memory=_find_memory(),
        targets=tuple(device.name for device in DEVICES.values() if device.compiler.is_installed),
        has_wheels=has_wheels(),
    )


def _find_devices(talk: Talk) -> tuple[tuple[str, ...], str | None]:
    """What a child sees, as a run's children would; or why it sees nothing."""
    try:
        environment = selection.host_target().environment
        answer = run_child(ListDevices(), environment=environment, limit_s=DEVICE_LIMIT_S, talk=talk)
    except ChildFailure as failure:
        return (), "; ".join(filter(None, [failure.reason, *failure.output.splitlines()[-1:]]))
    except PegprofError as error:
        return (), str(error)
    kinds = (selection.cpu_name(),) if answer.backend == "cpu" else answer.devices
    return tuple(f"{answer.backend}: {kind}" for kind in kinds), None


def _find_memory() -> Memory | None:
    try:
        import psutil
    except ImportError:
        return None
    machine = psutil.virtual_memory()
    container = min(selection.free_container_bytes(), default=machine.total)
    return Memory(
        total=machine.total,
        available=machine.available,
        container=container if container < machine.total else None,  # "no limit" is a very large number
        for_a_run=selection.free_host_bytes(),
    )


def _required_versions() -> dict[str, str]:
    """The lower bounds of pegprof's own requirements; none where it runs without being installed."""
    try:
        requirements = metadata.requires("pegprof") or []
    except metadata.PackageNotFoundError:
        return {}
    bounds = (re.match(r"([\w.-]+)\s*>=\s*([\d.]+)\s*$", requirement) for requirement in requirements)
    return {bound[1]: bound[2] for bound in bounds if bound}


def diagnose(symptoms: Symptoms) -> list[Finding]:
    """What that means, the problems with their remedies."""
    return [
        Finding(status="ok", subject="python", detail=symptoms.python),
        *(_judge_package(package, symptoms) for package in PACKAGES),
        *_judge_devices(symptoms),
        _judge_memory(symptoms.memory),
        _judge_targets(symptoms.targets),
        *(_judge_extra(name, extra, symptoms) for name, extra in EXTRAS.items()),
    ]


def exit_code(findings: Sequence[Finding]) -> ExitCode:
    return ExitCode.UNMEASURED if any(finding.status == "problem" for finding in findings) else ExitCode.OK


def _judge_package(package: str, symptoms: Symptoms) -> Finding:
    version, required = symptoms.versions[package], symptoms.required.get(package)
    remedy = f"pip install -U '{package}>={required}'" if required else f"pip install {package}"
    if version is None:
        return Finding(status="problem", subject=package, detail="is not installed", hint=remedy)
    if required and _as_numbers(version) < _as_numbers(required):
        return Finding(status="problem", subject=package, detail=f"{version} is older than {required}", hint=remedy)
    return Finding(status="ok", subject=package, detail=version)


def _as_numbers(version: str) -> tuple[int, ...]:
    """
    >>> _as_numbers("0.10.2") > _as_numbers("0.9"), _as_numbers("1.0rc1")
    (True, (1, 0))
    """
    numbers = [re.match(r"\d+", part) for part in version.split(".")]
    return tuple(int(number[0]) for number in numbers if number)


def _judge_devices(symptoms: Symptoms) -> Iterator[Finding]:
    if symptoms.device_failure:
        hint = "JAX_PLATFORMS=cpu pegprof run ... measures on the CPU alone"
        yield Finding(status="problem", subject="device", detail=symptoms.device_failure, hint=hint)
    for device in symptoms.devices:
        yield Finding(status="ok", subject="device", detail=device)
    for target in symptoms.idle_accelerators:
        detail = f"there is a {target.upper()} here, but JAX has no plug-in for it"
        extra = "cuda12" if target == "gpu" else target
        yield Finding(status="note", subject="device", detail=detail, hint=install_line(extra))


def _judge_memory(memory: Memory | None) -> Finding:
    if memory is None:
        return Finding(status="note", subject="memory", detail="unknown without psutil")
    detail = f"{format_bytes(memory.available)} of {format_bytes(memory.total)} available"
    if memory.container is not None:
        detail += f", the container leaves {format_bytes(memory.container)}"
    return Finding(status="ok", subject="memory", detail=f"{detail}; a run may take {format_bytes(memory.for_a_run)}")


def _judge_targets(names: Sequence[str]) -> Finding:
    if not names:
        return Finding(status="note", subject="targets", detail="no compiler for a device that is not here")
    return Finding(status="ok", subject="targets", detail=f"compilers for {', '.join(names)}")


def _judge_extra(name: str, extra: Extra, symptoms: Symptoms) -> Finding:
    missing = [package for package in extra.packages if symptoms.versions[package] is None]
    subject = f"extra {name}"
    if not missing:
        return Finding(status="ok", subject=subject, detail=f"installed, for {extra.purpose}")
    if name in COMPILERS and not symptoms.has_wheels:
        return Finding(status="note", subject=subject, detail=f"no wheels for this system, for {extra.purpose}")
    return Finding(
        status="note", subject=subject, detail=f"not installed, for {extra.purpose}", hint=install_line(name)
    )
