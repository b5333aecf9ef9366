"""Odd pytrees of parameters, odd leaves in the batch, and narrow dtypes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs.registry import program, score


class Layer(NamedTuple):
    """Parameters as a named tuple, some of them absent."""

    W: Any
    b: Any = None


@program("zero")
def odd_pytree(draw, B):
    params = {
        "layers": [Layer(draw(3, 4), draw(4)), Layer(draw(4, 2))],
        "nested": {"deep": ({"scale": draw()}, None, [])},
        "empty": draw(0),
        "tuple": (draw(2), (draw(1, 2),)),
    }

    def loss(p, x):
        h = jnp.tanh(x @ p["layers"][0].W + p["layers"][0].b) @ p["layers"][1].W
        return score(h * p["nested"]["deep"][0]["scale"] + p["tuple"][0] * p["tuple"][1][0] + jnp.sum(p["empty"]))

    return loss, params, draw(B, 3)


@program()
def a_bare_array_and_a_bare_batch(draw, B):
    return lambda p, x: jnp.mean(jnp.tanh(p[0] * x)), draw(1), draw(B)


@program()
def batch_with_none_and_unused_leaves(draw, B):
    def loss(p, batch):
        return score(batch[0]["x"] @ p)

    return loss, draw(3, 4), ({"x": draw(B, 3), "nothing": None}, [draw.integers(B, below=3)], draw(B, 2))


@program()
def batch_weights_that_may_be_zero(draw, B):
    def loss(p, batch):
        return jnp.mean(batch["weight"] * jnp.sum(jnp.square(jnp.tanh(batch["x"] @ p["W"]) - 0.2), axis=-1))

    return loss, {"W": draw(3, 4)}, {"x": draw(B, 3), "weight": draw.positive(B).at[0].set(0.0)}


@program()
def dropout_with_typed_keys_in_the_batch(draw, B):
    def one(p, example):
        kept = jax.random.bernoulli(example["key"], 0.7, (5, 4))
        return score(jnp.where(kept, jnp.tanh(example["x"] @ p["W"]), 0.0) @ p["V"])

    def loss(p, batch):
        return jnp.mean(jax.vmap(one, in_axes=(None, 0))(p, batch))

    return loss, {"W": draw(3, 4), "V": draw(4, 2)}, {"x": draw(B, 5, 3), "key": draw.keys(B)}


@program()
def noise_with_raw_keys_in_the_batch(draw, B):
    def one(p, example):
        noise = jax.random.normal(example["key"], (4,), p["W"].dtype)
        return score(jnp.tanh(example["x"] @ p["W"]) + noise * p["spread"])

    def loss(p, batch):
        return jnp.mean(jax.vmap(one, in_axes=(None, 0))(p, batch))

    return loss, {"W": draw(3, 4), "spread": draw(4)}, {"x": draw(B, 3), "key": jax.random.key_data(draw.keys(B))}


@program(keep_batch_dim=False)
def bare_dropout_with_a_key_of_its_own(draw, B):
    def loss(p, example):
        kept = jax.random.bernoulli(example["key"], 0.7, (4,))
        return score(jnp.where(kept, jnp.tanh(p["W"] @ example["x"]), 0.0) + p["b"])

    return loss, {"W": draw(4, 3), "b": draw(4)}, {"x": draw(B, 3), "key": draw.keys(B)}


@program()
def images_of_bytes(draw, B):
    def loss(p, x):
        return score(jnp.tanh((x.astype(p.dtype) / 128 - 1).reshape(x.shape[0], -1) @ p))

    return loss, draw(6, 4), draw.integers(B, 3, 2, below=256).astype(jnp.uint8)


@program("bf16")
def bfloat16_compute(draw, B):
    def loss(p, x):
        W, b, V = (p[name].astype(jnp.bfloat16) for name in ("W", "b", "V"))
        return score((jnp.tanh(x.astype(jnp.bfloat16) @ W + b) @ V).astype(jnp.float32))

    return loss, {"W": draw(3, 4), "b": draw(4), "V": draw(4, 2)}, draw(B, 6, 3)


@program("bf16")
def bfloat16_parameters(draw, B):
    params = {"table": draw(7, 3).astype(jnp.bfloat16), "W": draw(3, 4).astype(jnp.bfloat16)}

    def loss(p, tokens):
        return score(jnp.tanh(p["table"][tokens] @ p["W"]).astype(jnp.float32))

    return loss, params, draw.integers(B, 6, below=7)


@program("bf16")
def bfloat16_scanned_layers(draw, B):
    def loss(p, x):
        stack = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), p)
        layer = jax.checkpoint(lambda h, own: (jnp.tanh(h @ own["W"] + own["b"]), None))
        return score(lax.scan(layer, x.astype(jnp.bfloat16), stack)[0].astype(jnp.float32))

    return loss, {"W": draw(3, 4, 4, scale=0.5), "b": draw(3, 4)}, draw(B, 5, 4)


@program("bf16")
def bfloat16_convolution(draw, B):
    def loss(p, x):
        h = lax.conv_general_dilated(
            x.astype(jnp.bfloat16), p.astype(jnp.bfloat16), (1, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return score(jnp.tanh(h).astype(jnp.float32))

    return loss, draw(3, 2, 3, 4, scale=0.5), draw(B, 4, 5, 3)


@program("bf16")
def mixed_float16_and_float32(draw, B):
    def loss(p, x):
        h = jnp.tanh(x.astype(jnp.float16) @ p["W"].astype(jnp.float16)).astype(jnp.float32)
        return score(h @ p["V"].astype(jnp.float32))

    return loss, {"W": draw(3, 4), "V": draw(4, 2)}, draw(B, 5, 3)


@program("f32")
def parameters_of_two_dtypes(draw, B):
    params = {"W": draw(3, 4), "V": draw(4, 2).astype(jnp.float32)}
    return lambda p, x: score(jnp.tanh(x @ p["W"]) @ p["V"].astype(p["W"].dtype)), params, draw(B, 5, 3)
