"""Environment: what two results must have in common to be compared. Found by a child, since it starts a JAX backend."""

import dataclasses
import os
import platform
from importlib import metadata

import pegprof


@dataclasses.dataclass(frozen=True, kw_only=True)
class Environment:
    """The versions, the device and the settings of JAX that a program was compiled and run with."""

    pegprof: str
    python: str
    system: str
    jax: str
    jaxlib: str
    flax: str | None
    optax: str | None
    backend: str
    device_kind: str
    device_count: int
    xla_flags: str | None
    libtpu_init_args: str | None
    matmul_precision: str | None
    x64: bool


def find_environment() -> Environment:
    """That of this process. Starts its JAX backend."""
    import jax
    import jaxlib

    return Environment(
        pegprof=pegprof.__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        jax=jax.__version__,
        jaxlib=jaxlib.version.__version__,
        flax=version_of("flax"),
        optax=version_of("optax"),
        backend=jax.default_backend(),
        device_kind=jax.devices()[0].device_kind,
        device_count=jax.device_count(),
        xla_flags=os.environ.get("XLA_FLAGS") or None,
        libtpu_init_args=os.environ.get("LIBTPU_INIT_ARGS") or None,
        matmul_precision=jax.config.jax_default_matmul_precision,  # type: ignore[attr-defined]
        x64=jax.config.jax_enable_x64,  # type: ignore[attr-defined]
    )


def version_of(distribution: str) -> str | None:
    """
    >>> version_of("no-such-package") is None
    True
    """
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
