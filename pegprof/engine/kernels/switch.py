"""Whether kernels may be used, and for which chip: ``pegprof.kernels(False)``, or ``PEGPROF_KERNELS=0``."""

import contextlib
import os
from collections.abc import Iterator

import jax

from pegprof.targets.chips import CHIPS, Chip, find_chip, name_of_kind

ENVIRONMENT_VARIABLE = "PEGPROF_KERNELS"

_enabled: bool | None = None  # None: what the environment says
_interpreted: Chip | None = None


class kernels:
    """Turn fused kernels on or off: for good, or in a ``with`` statement for what stands inside.

    They are on by default. They run on TPUs and NVIDIA GPUs only. ``PEGPROF_KERNELS=0`` turns them off too.

    Args:
      enabled: whether programs that are planned from now on may use kernels.

    >>> with kernels(False):
    ...     enabled()
    False
    """

    def __init__(self, enabled: bool):
        global _enabled
        self._before = _enabled
        _enabled = enabled

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        global _enabled
        _enabled = self._before


def enabled() -> bool:
    """Whether kernels may be used."""
    if _enabled is not None:
        return _enabled
    return os.environ.get(ENVIRONMENT_VARIABLE, "1").lower() not in ("0", "false", "off", "no")


@contextlib.contextmanager
def interpreted(name: str) -> Iterator[None]:
    """Whatever is planned inside takes the kernels of this chip, and runs them by Pallas's interpreter. For tests."""
    global _interpreted
    before, _interpreted = _interpreted, CHIPS[name]
    try:
        yield
    finally:
        _interpreted = before


def interprets() -> bool:
    return _interpreted is not None


def resolve_backend(asked: str | None) -> str:
    """What to plan for: what was asked for, or else the device that is here, by its name in the table of chips."""
    here = jax.default_backend()
    if asked is not None and asked != here:
        return asked
    return here if here == "cpu" else name_of_kind(jax.devices()[0].device_kind) or here


def is_present(chip: Chip) -> bool:
    """Whether programs for this kind of chip run here, so that its kernels can be tried."""
    return interprets() or jax.default_backend() == chip.backend


def chip_for(backend: str) -> Chip | None:
    """The chip whose kernels a plan for some backend may use; None if it may use none."""
    if not enabled():
        return None
    return _interpreted or find_chip(backend)
