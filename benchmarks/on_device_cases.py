"""What ``on_device.py`` measures: sizes, cases of kernels, programs. Nothing here imports jax."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from pegprof.cli import arguments
from pegprof.errors import PegprofError
from pegprof.targets.chips import CHIPS

DTYPES = ("float32", "bfloat16")
PARTS = ("kernels", "programs")

PROGRAMS = {
    "grad": ("grad", False),
    "vmap": ("vmap", False),
    "surgery-without-kernels": ("surgery", False),
    "surgery": ("surgery", True),
}
"""The method of each program, and whether it may use kernels. Each is compared with the last before it that ran."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """One example's gradient is D×E, a sum over T positions."""

    T: int
    D: int
    E: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured if nothing else is asked for."""

    model: str
    batch: int
    shapes: tuple[Shape, ...]
    vocab: int


REAL = Sizes(  # the products of transformer-151m
    model="transformer-151m",
    batch=64,
    shapes=(Shape(T=512, D=1024, E=4096), Shape(T=512, D=4096, E=1024), Shape(T=512, D=1024, E=1024)),
    vocab=32100,
)
TINY = Sizes(model="transformer-tiny", batch=2, shapes=(Shape(T=128, D=32, E=48),), vocab=96)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A kernel, its shapes and its chip; ``rows`` takes T rows out of V × T for each example and has no D and E."""

    kernel: str
    B: int
    T: int
    D: int = 0
    E: int = 0
    V: int = 0
    dtype: str
    chip: str
    interpret: bool

    @property
    def shape(self) -> str:
        sizes = (self.B, self.V, self.T) if self.kernel == "rows" else (self.B, self.T, self.D, self.E)
        return "×".join(map(str, sizes))


def list_cases(
    chip: str, shapes: Sequence[Shape], *, batch: int, vocab: int, dtypes: Sequence[str], interpret: bool
) -> Iterator[Case]:
    """Every kernel at every shape and dtype; ``rows``, which TPUs have for float32, once."""
    common: dict[str, Any] = {"B": batch, "chip": chip, "interpret": interpret}
    for dtype in dtypes:
        for kernel in ("outer", "gram"):
            for shape in shapes:
                yield Case(kernel=kernel, dtype=dtype, **dataclasses.asdict(shape), **common)
        if CHIPS[chip].backend == "tpu" and dtype == "float32":
            yield Case(kernel="rows", T=shapes[0].T, V=vocab, dtype=dtype, **common)


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """
    >>> parse_shapes("512x1024x4096")
    (Shape(T=512, D=1024, E=4096),)
    """
    found = []
    for name in arguments.parse_names(text, "--shapes"):
        sizes = name.split("x")
        if len(sizes) != 3 or not all(n.isdecimal() and int(n) for n in sizes):
            hint = "write it like 512x1024x4096: positions, rows, columns"
            raise PegprofError(f"--shapes {name} is no shape", hint=hint)
        T, D, E = map(int, sizes)
        found.append(Shape(T=T, D=D, E=E))
    return tuple(found)
