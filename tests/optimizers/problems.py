"""What the optimizers are tried on: a small regression, and stand-ins for statistics."""

import jax
import jax.numpy as jnp
import numpy as np

from pegprof import optimizers
from pegprof.engine.statistics import STATISTICS

NAMES = list(optimizers.OPTIMIZERS)
RATE = 0.05


def loss(params, batch):
    h_BxH = jnp.tanh(batch["x"] @ params["in"]["W"] + params["in"]["b"])
    return jnp.mean(jnp.sum((h_BxH @ params["out"] - batch["y"]) ** 2, axis=-1))


def make_params(dtype=None):
    rng = np.random.default_rng(0)
    params = {"in": {"W": rng.normal(size=(3, 5)), "b": rng.normal(size=5)}, "out": rng.normal(size=(5, 2))}
    return jax.tree.map(lambda p: jnp.asarray(p, dtype), params)


def make_batch(seed, B=6):
    rng = np.random.default_rng(seed)
    return {"x": jnp.asarray(rng.normal(size=(B, 3))), "y": jnp.asarray(rng.normal(size=(B, 2)))}


def make_stats(params, seed=0, B=4):
    """Every statistic of random gradients, as ``grad_stats`` returns them: in float32 at least."""
    rng = np.random.default_rng(seed)
    g = jax.tree.map(lambda p: rng.normal(size=(B, *p.shape)), params)

    def wide(p):
        return jnp.promote_types(p.dtype, jnp.float32)

    return {
        name: jax.tree.map(lambda p, g, stat=stat: jnp.asarray(stat.oracle(g), wide(p)), params, g)
        for name, stat in STATISTICS.items()
        if stat.scope == "entry"
    }


def assert_trees_close(actual, expected, rtol=1e-6, atol=0.0):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=rtol, atol=atol)
