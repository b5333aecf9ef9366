"""Reshapes that read their operand in another order than the default."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs.registry import program, score


@program()
def reshape_in_fortran_order(draw, B):
    def loss(p, x):
        h = jnp.tanh(x @ p["W"]).reshape(x.shape[0], -1)
        return score(h @ p["V"].reshape(12, 5, order="F"))

    return loss, {"W": draw(3, 4), "V": draw(5, 4, 3)}, draw(B, 3, 3)


@program(keep_batch_dim=False)
def bare_activations_reshaped_in_fortran_order(draw, B):
    def loss(p, x):
        h = jnp.tanh(x @ p["W"])
        return score(h.reshape(2, 10, order="F") @ p["V"]) + score(h.ravel(order="F") * p["scale"])

    return loss, {"W": draw(3, 4), "V": draw(10, 3), "scale": draw(20)}, draw(B, 5, 3)


@program()
def ravel_in_fortran_order(draw, B):
    def one(p, x):
        return score(x.ravel(order="F") @ p["W"] + p["table"].ravel(order="F") * jnp.mean(x))

    def loss(p, batch):
        return jnp.mean(jax.vmap(one, in_axes=(None, 0))(p, batch))

    return loss, {"W": draw(12, 10), "table": draw(5, 2)}, draw(B, 3, 4)


@program()
def reshape_by_lax_with_dimensions(draw, B):
    def loss(p, x):
        kernel = lax.reshape(p["V"], (12, 5), (1, 2, 0))
        h = lax.reshape(jnp.tanh(x @ p["W"]), (x.shape[0], 12), (0, 2, 1))
        return score(h @ kernel)

    return loss, {"W": draw(3, 4), "V": draw(5, 4, 3)}, draw(B, 3, 3)
