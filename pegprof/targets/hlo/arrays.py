"""The shape of an array as HLO writes it, ``bf16[64,512]{1,0:T(8,128)(2,1)S(1)}``: what it holds, where it lies.

A TPU stores arrays in tiles, so the bytes are those of whole tiles. ``S(n)`` is a memory space: none is main memory,
1 is VMEM, others hold scalars and flags.
"""

import dataclasses
import functools
import math
import re

BITS = {
    "pred": 8, "token": 0, "opaque": 0,
    "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64,
    "u64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Array:
    """One array: ``dtype`` as HLO spells it, ``order`` its axes from the innermost out, ``tile`` along the last."""

    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...] = ()
    tile: tuple[int, ...] = ()
    space: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bits(self) -> int:
        """Of an entry. Small floating-point formats have it in their name, f8e4m3fn."""
        return BITS.get(self.dtype) or int(re.sub(r"^[a-z]+(\d+).*", r"\1", self.dtype) or 0) if self.dtype else 0

    @functools.cached_property
    def bytes(self) -> int:
        """In whole tiles.

        >>> parse_arrays("f32[64,513]{1,0:T(8,128)}")[0].bytes == 64 * 640 * 4
        True
        """
        physical = [self.shape[axis] for axis in reversed(self.order)] if self.order else list(self.shape)
        physical = [1] * (len(self.tile) - len(physical)) + physical
        for back, length in enumerate(reversed(self.tile), 1):
            physical[-back] = -(-physical[-back] // length) * length
        return math.prod(physical) * self.bits // 8

    @property
    def main_bytes(self) -> int:
        """What of it lies in main memory: all or nothing."""
        return 0 if self.space else self.bytes

    def __str__(self) -> str:
        """Without its layout, as HLO writes it."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_TILE = re.compile(r"T\(([\d,]+)\)")
_SPACE = re.compile(r"S\((\d+)\)")


@functools.lru_cache(maxsize=2**16)
def parse_arrays(text: str) -> tuple[Array, ...]:
    """All arrays of a type, those of a tuple in order.

    >>> [str(array) for array in parse_arrays("(s32[]{:T(128)}, /*index=1*/f32[4,2]{0,1})")]
    ['s32[]', 'f32[4,2]']
    """
    return tuple(_parse_array(*found.groups()) for found in _ARRAY.finditer(text))


def _parse_array(dtype: str, shape: str, layout: str | None) -> Array:
    order, _, rest = (layout or "").partition(":")
    tile, space = _TILE.search(rest), _SPACE.search(rest)
    return Array(
        dtype=dtype,
        shape=tuple(int(n.lstrip("<=")) for n in shape.split(",") if n),
        order=tuple(int(n) for n in order.split(",") if n),
        tile=tuple(int(n) for n in tile[1].split(",")) if tile else (),
        space=int(space[1]) if space else 0,
    )
