"""Normalisation within an example, and weights that are normalised before they are used."""

import jax
import jax.numpy as jnp

from tests.programs.registry import program, score


def _standardise(x, axes):
    x = x - jnp.mean(x, axis=axes, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=axes, keepdims=True) + 1e-5)


@program()
def rms_norm(draw, B):
    def loss(p, x):
        h = x @ p["W"]
        return score(h * jax.lax.rsqrt(jnp.mean(jnp.square(h), axis=-1, keepdims=True) + 1e-6) * (1 + p["scale"]))

    return loss, {"W": draw(3, 4), "scale": draw(4)}, draw(B, 6, 3)


@program()
def layer_norm(draw, B):
    def loss(p, x):
        return score((_standardise(x @ p["W"], -1) * p["scale"] + p["shift"]) @ p["out"])

    return loss, {"W": draw(3, 4), "scale": draw(4), "shift": draw(4), "out": draw(4, 2)}, draw(B, 6, 3)


@program()
def layer_norm_over_all_but_the_batch(draw, B):
    def loss(p, x):
        return score(_standardise(jnp.tanh(x @ p["W"]), (1, 2)) * p["scale"] + p["shift"])

    return loss, {"W": draw(3, 4), "scale": draw(6, 4), "shift": draw(6, 4)}, draw(B, 6, 3)


@program()
def group_norm(draw, B):
    def loss(p, x):
        h = jax.lax.conv_general_dilated(x, p["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        grouped = h.reshape(*h.shape[:3], 2, 2)
        h = _standardise(grouped, (1, 2, 4)).reshape(h.shape)
        return score(h * p["scale"] + p["shift"])

    return loss, {"kernel": draw(3, 2, 3, 4), "scale": draw(4), "shift": draw(4)}, draw(B, 5, 6, 3)


@program()
def instance_norm(draw, B):
    def loss(p, x):
        return score(_standardise(jnp.tanh(x @ p["W"]), 1) * p["scale"] + p["shift"])

    return loss, {"W": draw(3, 4), "scale": draw(4), "shift": draw(4)}, draw(B, 6, 3)


@program()
def weight_normalisation(draw, B):
    def loss(p, x):
        W = p["g"] * p["v"] / jnp.linalg.norm(p["v"], axis=0)
        return score(jnp.tanh(x @ W + p["b"]))

    return loss, {"v": draw(3, 4), "g": draw.positive(4), "b": draw(4)}, draw(B, 6, 3)


@program()
def weight_standardised_convolution(draw, B):
    def loss(p, x):
        kernel = _standardise(p["kernel"], (0, 1, 2)) * p["gain"]
        h = jax.lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return score(jnp.tanh(h))

    return loss, {"kernel": draw(3, 2, 3, 4), "gain": draw.positive(4)}, draw(B, 5, 6, 3)


@program()
def spectral_normalisation(draw, B):
    def loss(p, x):
        v = p["u"]
        for _ in range(2):
            u = jax.lax.stop_gradient(p["W"] @ v)
            v = jax.lax.stop_gradient(p["W"].T @ (u / jnp.linalg.norm(u)))
            v = v / jnp.linalg.norm(v)
        return score(jnp.tanh(x @ (p["W"] / jnp.linalg.norm(p["W"] @ v))) * p["u"])

    return loss, {"W": draw(3, 4), "u": draw(4)}, draw(B, 3)


@program()
def query_key_norm(draw, B):
    def loss(p, x):
        q, k = (x @ p[name] for name in ("q", "k"))
        q, k = (h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6) * p["scale"] for h in (q, k))
        return score(jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k)) @ x)

    return loss, {"q": draw(3, 4), "k": draw(3, 4), "scale": draw.positive(4)}, draw(B, 5, 3)
