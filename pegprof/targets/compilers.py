"""What compiles for accelerators that are not here: XLA's own compilers, from wheels. Nothing here imports jax."""

import dataclasses
import importlib.metadata
import importlib.util
import json
import platform
import sys
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pegprof.versions import version_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wheels:
    """A set of wheels that suffices to compile.

    Args:
      modules: without which it does not work.
      packages: whose versions its answers depend on.
      without_module: those of the packages that no module tells of, and without which it does not work either.
    """

    modules: tuple[str, ...]
    packages: tuple[str, ...]
    without_module: tuple[str, ...] = ()

    @property
    def are_installed(self) -> bool:
        return all(map(_can_import, self.modules)) and all(map(version_of, self.without_module))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SecondTry:
    """What to leave out where a compiler fails at a program, and what a reader must know of it then."""

    options: Mapping[str, Any]  # of XLA
    note: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiler:
    """What compiles for devices of one kind.

    Args:
      backend: JAX's name for the kind, by which the planner knows it.
      platform: as ``jax.experimental.topologies`` spells it.
      extra: of pyproject.toml, that installs it.
      wheels: the sets of wheels of which any will do; the first is what the extra installs.
      environment: of a process that compiles.
      second_try: for programs that it fails at.
    """

    backend: str
    platform: str
    extra: str
    wheels: tuple[Wheels, ...]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    second_try: SecondTry | None = None

    @property
    def is_installed(self) -> bool:
        return any(wheels.are_installed for wheels in self.wheels)

    @property
    def packages(self) -> tuple[str, ...]:
        """What the extra installs."""
        return self.wheels[0].packages

    @property
    def description(self) -> str:
        """The packages with their versions, those that are installed."""
        return ", ".join(f"{package} {version}" for package, version in self.versions().items() if version)

    def versions(self) -> dict[str, str | None]:
        """Of all that is installed and could be what compiles: JAX decides which of several sets does."""
        installed = [wheels for wheels in self.wheels if wheels.are_installed] or self.wheels[:1]
        return {package: version_of(package) for wheels in installed for package in wheels.packages}


TPU = Compiler(
    backend="tpu",
    platform="tpu",
    extra="tpu",
    wheels=(Wheels(modules=("libtpu",), packages=("libtpu",)),),
    environment={
        "TPU_SKIP_MDS_QUERY": "1",  # else it asks the network for a machine that has a TPU
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else the second of two compiles at once ends at the lock of the first
        "TPU_LOG_DIR": "disabled",  # else a folder in /tmp, which is another user's on a shared machine
    },
)
CUDA = Compiler(
    backend="gpu",
    platform="cuda",
    extra="gpu",
    wheels=(
        Wheels(
            modules=("jax_plugins.xla_cuda12", "jax_cuda12_plugin", "nvidia.cuda_nvcc"),
            packages=("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12"),
        ),
        Wheels(  # of jax[cuda13]
            modules=("jax_plugins.xla_cuda13", "jax_cuda13_plugin", "nvidia.cu13"),
            packages=("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc"),
            without_module=("nvidia-cuda-nvcc",),  # nvidia.cu13 is the folder of all of NVIDIA's wheels
        ),
    ),
    # Seen with 0.10.2: "Couldn't find output tile sizes" for the 197 positions of a ViT. There is no GPU to try kernels
    # on, by which XLA chooses them elsewhere.
    second_try=SecondTry(
        options={"xla_gpu_enable_triton_gemm": False},
        note="matrix products by cuBLAS, since the compiler fails at Triton's",
    ),
)


def why_not(compiler: Compiler) -> str | None:
    """What keeps a compiler from being used on this machine, with what to do about it; None if nothing does."""
    if compiler.is_installed:
        return None
    if not has_wheels():
        return f"its wheels are for Linux on x86-64 only, not for {platform.system()} on {platform.machine()}"
    return install_line(compiler.extra)


def has_wheels() -> bool:
    """Whether the extras ``tpu`` and ``gpu`` have anything to install here: as their markers in pyproject.toml."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


def install_line(extra: str) -> str:
    """What installs an extra, in the way that pegprof itself was installed: from a clone, from a URL, or by name."""
    origin = _origin()
    url, requirement = str(origin.get("url", "")), f"pegprof[{extra}]"
    if origin.get("dir_info", {}).get("editable"):
        clone = Path(urllib.parse.unquote(urllib.parse.urlsplit(url).path))
        return f"pip install -e '{'.' if clone == Path.cwd() else clone}[{extra}]'"
    if vcs := origin.get("vcs_info", {}).get("vcs"):
        return f"pip install '{requirement} @ {vcs}+{url}'"
    return f"pip install '{requirement}'"


def _origin() -> dict[str, Any]:
    """Where pip took pegprof from: its direct_url.json, which what comes from an index does not have."""
    try:
        text = importlib.metadata.distribution("pegprof").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return {}
    origin: dict[str, Any] = json.loads(text) if text else {}
    return origin


def _can_import(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even its package is there
        return False
