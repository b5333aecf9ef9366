"""The Environment of this process: what two results must have in common to be compared."""

import os
import platform

import jax
import jaxlib

import pegprof
from pegprof.result.environment import Environment
from pegprof.versions import version_of


def find_environment() -> Environment:
    """That of this process. Starts its JAX backend."""
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
