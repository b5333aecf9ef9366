"""Environment: what two results must have in common to be compared."""

import dataclasses


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
