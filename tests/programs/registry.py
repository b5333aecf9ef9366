"""A program is a small loss with its parameters and a batch, made on demand; a decorated function is one program."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Loss = Callable[[Any, Any], Any]


class Draw:
    """Random arrays in the default float dtype; NumPy draws them, since JAX would compile each shape anew.

    >>> Draw(jax.random.key(0))(2, 3).shape
    (2, 3)
    """

    def __init__(self, key: jax.Array):
        self._rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))

    def __call__(self, *shape: int, scale: float = 1.0) -> jax.Array:
        """Normal entries; ``scale`` is their standard deviation."""
        return jnp.asarray(self._rng.normal(0.0, scale, shape), jnp.result_type(float))

    def positive(self, *shape: int) -> jax.Array:
        """Entries between 0.5 and 1.5."""
        return jnp.asarray(self._rng.uniform(0.5, 1.5, shape), jnp.result_type(float))

    def integers(self, *shape: int, below: int) -> jax.Array:
        """Tokens, labels, indices."""
        return jnp.asarray(self._rng.integers(0, below, shape), jnp.int32)

    def booleans(self, *shape: int) -> jax.Array:
        """A mask, true a little more often than not."""
        return jnp.asarray(self._rng.uniform(size=shape) < 0.6)

    def keys(self, B: int) -> jax.Array:
        """One typed PRNG key for each example."""
        return jax.random.split(jax.random.key(int(self._rng.integers(2**31))), B)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A loss whose examples do not interact, so that the mean of the per-example gradients is the gradient.

    ``make(key, B)`` gives (loss, params, batch); the parameters depend on the key alone. With ``keep_batch_dim=False``
    the loss takes one bare example. Tags: ``bf16``, ``f32`` (computes in that dtype even when float64 is on), ``zero``
    (some parameter has no gradient, on purpose), ``no_vmap`` (JAX cannot batch it).
    """

    name: str
    make: Callable[[jax.Array, int], tuple[Loss, Any, Any]]
    keep_batch_dim: bool = True
    tags: frozenset[str] = frozenset()


PROGRAMS: dict[str, Program] = {}


def program(*tags: str, keep_batch_dim: bool = True) -> Callable[[Callable[[Draw, int], Any]], Any]:
    """Registers a function of (draw, B) that returns (loss, params, batch) as the program of its name."""

    def register(build: Callable[[Draw, int], Any]) -> Callable[[Draw, int], Any]:
        name = build.__name__
        if name in PROGRAMS:
            raise ValueError(f"two programs are called {name}")

        def make(key: jax.Array, B: int) -> tuple[Loss, Any, Any]:
            return build(Draw(key), B)

        PROGRAMS[name] = Program(name=name, make=make, keep_batch_dim=keep_batch_dim, tags=frozenset(tags))
        return build

    return register


def score(y: jax.Array) -> jax.Array:
    """A loss of any outputs: the mean over all entries of something with no symmetry to make gradients vanish."""
    return jnp.mean(jnp.sin(y) + 0.5 * jnp.square(y))
