"""A model of one's own, for ``pegprof run examples/my_model.py:linear --batch 32 --set width=128``."""

import jax
import jax.numpy as jnp

import pegprof


def linear(width: int = 64) -> pegprof.Problem:
    """Least squares. The keyword arguments are the options that ``--set`` knows."""
    return pegprof.Problem(
        name="linear",
        init=lambda key: jax.random.normal(key, (width, 1)),
        loss=lambda w, batch: jnp.mean((batch["x"] @ w - batch["y"]) ** 2),
        batch=lambda key, B: {"x": jax.random.normal(key, (B, width)), "y": jnp.ones((B, 1))},
    )
