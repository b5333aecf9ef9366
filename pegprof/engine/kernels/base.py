"""What every kernel has in common: what it costs, and how a compiled program tells.

XLA's cost models say nothing of a kernel. So a kernel counts its own operations and traffic, from its block shapes, and
leaves them on the operation as attributes of the HLO. ``pegprof/targets/hlo/estimate.py`` reads them there.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata

from pegprof.engine.accumulators import Accumulator
from pegprof.engine.dtypes import wide_dtype
from pegprof.engine.jaxpr import vary, varying_axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelCost:
    """What a kernel takes.

    Args:
      flops: of its products.
      vector_flops: of what it does to the entries of each tile.
      bytes: that move to and from main memory.
      cache_bytes: that programs of a GPU load through its L2 cache; 0 on a TPU, whose kernels load blocks.
      held_bytes: on chip, by one program.
    """

    flops: int
    vector_flops: int
    bytes: int
    cache_bytes: int = 0
    held_bytes: int = 0


@contextlib.contextmanager
def priced(name: str, cost: KernelCost) -> Iterator[None]:
    """Marks the kernels that are called inside with their name and cost, for whoever reads the compiled program."""
    figures = {f"pegprof_{field}": str(int(value)) for field, value in dataclasses.asdict(cost).items()}
    with set_xla_metadata(pegprof_kernel=name, **figures):
        yield


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operand:
    """One operand of a product, for all examples: arrays, and what a kernel makes of their blocks.

    Args:
      arrays: each [B, G, X, T, D], or [B, G, X, D, T]; any axis may have size one where the operand's has not.
      evaluate: the operand's entries from blocks of the arrays; None if it is the one array itself. It also gets a
        function that returns the numbers of the positions, or with ``free=True`` of the free entries.
      shape: of the operand.
      dtype: of the operand.
      minor: whether D is last.
      steps: how many elementwise operations ``evaluate`` takes.
      whole: for each array, whether every block has all of its last two axes.
      written: whether it is stored for the kernel alone.
    """

    arrays: tuple[Any, ...]
    evaluate: Callable[[Sequence[Any], Callable[..., Any]], Any] | None = None
    shape: tuple[int, ...]
    dtype: Any
    minor: bool
    steps: int = 0
    whole: tuple[bool, ...] = ()
    written: bool = False

    @classmethod
    def stored(cls, x: Any, *, minor: bool, written: bool = False) -> "Operand":
        """An operand that is an array."""
        return cls(arrays=(x,), shape=x.shape, dtype=x.dtype, minor=minor, whole=(False,), written=written)

    @classmethod
    def of_ids(cls, ids_BxT: jax.Array, V: int, dtype: Any) -> "Operand":
        """For each example ones where a position has the number of a row, else zeros, [V, T], made on chip."""
        B, T = ids_BxT.shape
        return cls(
            arrays=(ids_BxT[:, None, None, None, :],),
            evaluate=lambda blocks, index: jnp.where(index(free=True) == blocks[0], 1.0, 0.0),
            shape=(B, 1, 1, V, T),
            dtype=dtype,
            minor=False,
            steps=2,
            whole=(False,),
        )

    @property
    def T(self) -> int:
        return self.shape[3 if self.minor else 4]

    @property
    def D(self) -> int:
        return self.shape[4 if self.minor else 3]

    def block_of(self, array: int, T: int, D: int) -> tuple[int, int]:
        """The last two axes of a block of an array, for a tile of the operand."""
        shape = self.arrays[array].shape[3:]
        if self.whole[array]:
            return shape
        tile = (T, D) if self.minor else (D, T)
        return min(tile[0], shape[0]), min(tile[1], shape[1])

    def read_bytes(self, times: int) -> int:
        """What is read where every array is read so many times."""
        return times * sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in self.arrays)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
    """A product of two operands: g_b = Σ_t s_tᵀ r_t, for each group and each pair of outer axes."""

    s: Operand
    r: Operand

    @property
    def B(self) -> int:
        return self.s.shape[0]

    @property
    def G(self) -> int:
        return self.s.shape[1]

    @property
    def X(self) -> int:
        return self.s.shape[2]

    @property
    def Y(self) -> int:
        return self.r.shape[2]

    @property
    def T(self) -> int:
        return self.s.T

    @property
    def D(self) -> int:
        return self.s.D

    @property
    def E(self) -> int:
        return self.r.D

    @property
    def dtype(self) -> Any:
        """Of the operands as they are multiplied."""
        return self.s.dtype

    @property
    def wide(self) -> Any:
        """The dtype that products and states have."""
        return wide_dtype(self.dtype)

    @property
    def entries(self) -> int:
        """Of one example's gradient."""
        return self.G * self.X * self.Y * self.D * self.E

    def count(self, D: int, E: int) -> int:
        """How many tiles of D×E there are."""
        return self.G * self.X * self.Y * math.ceil(self.D / D) * math.ceil(self.E / E)


def states_of(accumulators: Sequence[Accumulator]) -> int:
    """How many arrays, each as large as the gradient, entrywise accumulators keep."""
    one = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    running = [a for a in accumulators if not a.per_example]
    return len(jax.tree.leaves(jax.eval_shape(lambda: [a.init(one) for a in running])))


def one_precision(precision: Any, dtype: Any) -> Any:
    """One precision for both operands: the higher of two. Products of bfloat16 are exact in any."""
    given = precision if isinstance(precision, tuple) else (precision,)
    high = any(x in (jax.lax.Precision.HIGH, jax.lax.Precision.HIGHEST) for x in given)
    return jax.lax.Precision.HIGHEST if high and jnp.dtype(dtype) != jnp.bfloat16 else None


def same_axes(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Arrays that all differ along the same axes of a ``shard_map``, by their types: those of any of them."""
    axes = frozenset[str]().union(*map(varying_axes, arrays))
    return [vary(x, axes) for x in arrays]
