"""Quantised products: rounding with straight-through gradients, integers inside, narrow floats."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs.registry import program, score


def _round(x):
    """Rounds; the gradient passes straight through."""
    return x + lax.stop_gradient(jnp.round(x) - x)


@program()
def fake_quantised_weights_and_activations(draw, B):
    def quantise(x, scale):  # LSQ: the step is a parameter, its gradient through the rounding too
        return _round(jnp.clip(x / scale, -7, 7)) * scale

    def loss(p, x):
        h = jnp.tanh(quantise(x, p["steps"][0]) @ quantise(p["W"], p["channels"]))
        return score(quantise(h, p["steps"][1]) @ quantise(p["V"], p["steps"][2]))

    params = {"W": draw(3, 4), "V": draw(4, 2), "channels": 0.2 * draw.positive(4), "steps": 0.2 * draw.positive(3)}
    return loss, params, draw(B, 5, 3)


@jax.custom_vjp
def _int8_dot(x, W):
    """x @ W in eight bits: a scale for each row of x and each column of W."""

    def to_int8(a, axis):
        scale = jnp.max(jnp.abs(a), axis=axis, keepdims=True) / 127
        return jnp.round(a / scale).astype(jnp.int8), scale

    (x8, x_scale), (W8, W_scale) = to_int8(x, -1), to_int8(W, 0)
    contract = (((x.ndim - 1,), (0,)), ((), ()))
    return lax.dot_general(x8, W8, contract, preferred_element_type=jnp.int32) * x_scale * W_scale


_int8_dot.defvjp(
    lambda x, W: (_int8_dot(x, W), (x, W)),
    lambda residuals, g: (g @ residuals[1].T, jnp.einsum("...i,...o->io", residuals[0], g)),
)


@program()
def int8_products_with_a_float_backward_pass(draw, B):
    def loss(p, x):
        h = jnp.tanh(_int8_dot(x, p["W"]) + p["b"])
        return score(_int8_dot(h, p["V"]) * p["scale"])

    return loss, {"W": draw(3, 4), "b": draw(4), "V": draw(4, 2), "scale": draw.positive(2)}, draw(B, 5, 3)


@program()
def int8_products_in_scanned_layers(draw, B):
    def loss(p, x):
        return score(lax.scan(lambda h, own: (jnp.tanh(_int8_dot(h, own["W"]) * own["scale"]), None), x, p)[0])

    return loss, {"W": draw(3, 4, 4, scale=0.7), "scale": draw.positive(3, 4)}, draw(B, 4)


@program()
def frozen_int8_weights_with_adapters(draw, B):
    W8 = draw.integers(3, 4, below=255).astype(jnp.int8)

    def loss(p, x):  # QLoRA: the weights are integers in the closure; scales and a low-rank term are learnt
        frozen = W8.astype(x.dtype) * p["scale"] / 127
        return score(jnp.tanh(x @ frozen + (x @ p["down"]) @ p["up"]))

    return loss, {"scale": draw.positive(4), "down": draw(3, 2), "up": draw(2, 4)}, draw(B, 5, 3)


@program()
def weights_looked_up_in_a_codebook(draw, B):
    codes = draw.integers(3, 4, below=5)

    def loss(p, x):  # weight clustering: every entry of the matrix is one of five numbers
        return score(jnp.tanh(x @ p["codebook"][codes] + p["b"]))

    return loss, {"codebook": draw(5), "b": draw(4)}, draw(B, 5, 3)


@program()
def vector_quantised_activations(draw, B):
    def loss(p, x):  # VQ-VAE: the nearest code, straight through, with its two penalties
        h = x @ p["encode"]
        distances = jnp.sum(jnp.square(h[..., None, :] - p["codes"]), axis=-1)
        code = p["codes"][jnp.argmin(distances, axis=-1)]
        passed = h + lax.stop_gradient(code - h)
        commitment = jnp.mean(jnp.square(h - lax.stop_gradient(code)))
        return score(passed @ p["decode"]) + jnp.mean(jnp.square(code - lax.stop_gradient(h))) + 0.25 * commitment

    return loss, {"encode": draw(3, 2), "codes": draw(4, 2), "decode": draw(2, 5)}, draw(B, 6, 3)


@program()
def binarised_weights(draw, B):
    def loss(p, x):  # XNOR-Net: signs, with the mean magnitude of each column
        signs = jnp.sign(p["W"]) * jnp.mean(jnp.abs(p["W"]), axis=0)
        clipped = jnp.clip(p["W"], -1, 1)
        return score(jnp.tanh(x @ (clipped + lax.stop_gradient(signs - clipped))) @ p["V"])

    return loss, {"W": draw(3, 4, scale=0.7), "V": draw(4, 2)}, draw(B, 5, 3)


def _through(x, there):
    """x as it is after a stay in the dtype ``there``; the gradient passes straight through."""
    return x + lax.stop_gradient(x.astype(there).astype(x.dtype) - x)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _rounding_gradients(x, there):
    """x itself; its cotangent stays in the dtype ``there`` for a moment."""
    return x


_rounding_gradients.defvjp(lambda x, there: (x, None), lambda there, _, g: (g.astype(there).astype(g.dtype),))


@program(keep_batch_dim=False)
def bare_eight_bit_floats_both_ways(draw, B):
    def dense(x, W):  # as flax's Fp8Ops: e4m3 forward, e5m2 for the cotangents of outputs
        y = _through(x, jnp.float8_e4m3fn) @ _through(W, jnp.float8_e4m3fn)
        return _rounding_gradients(y, jnp.float8_e5m2)

    def loss(p, x):
        return score(dense(jnp.tanh(dense(x, p["W"]) + p["b"]), p["V"]))

    return loss, {"W": draw(3, 4), "b": draw(4), "V": draw(4, 2)}, draw(B, 5, 3)


@program(keep_batch_dim=False)
def bare_weight_gradients_rounded_to_eight_bits(draw, B):
    def loss(p, x):  # what is rounded is the gradient of the example: a sum over its positions
        W, V = (_rounding_gradients(p[name], jnp.float8_e4m3fn) for name in ("W", "V"))
        return score(jnp.tanh(x @ W) @ V)

    return loss, {"W": draw(3, 4), "V": draw(4, 2)}, draw(B, 5, 3)


@program(keep_batch_dim=False)
def bare_weights_of_reduced_precision(draw, B):
    def loss(p, x):  # the derivative of reduce_precision reduces the precision of the gradient too
        W, V = (lax.reduce_precision(p[name], exponent_bits=5, mantissa_bits=6) for name in ("W", "V"))
        return score(jnp.tanh(x @ W) @ V)

    return loss, {"W": draw(3, 4), "V": draw(4, 2)}, draw(B, 5, 3)


@program("bf16")
def bfloat16_products_with_float32_sums(draw, B):
    def loss(p, x):
        def dense(x, W):
            operands = x.astype(jnp.bfloat16), W.astype(jnp.bfloat16)
            return lax.dot_general(*operands, (((x.ndim - 1,), (0,)), ((), ())), preferred_element_type=jnp.float32)

        return score(dense(jnp.tanh(dense(x, p["W"]) + p["b"]), p["V"]))

    shapes = {"W": (3, 4), "b": (4,), "V": (4, 2)}
    return loss, {k: draw(*shape).astype(jnp.float32) for k, shape in shapes.items()}, draw(B, 5, 3).astype(jnp.float32)


@program()
def quantised_convolution(draw, B):
    def loss(p, x):
        kernel = _round(jnp.clip(p["kernel"] / p["scale"], -7, 7)) * p["scale"]
        h = lax.conv_general_dilated(x, kernel, (1, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return score(jnp.tanh(h))

    return loss, {"kernel": draw(3, 2, 3, 4), "scale": 0.2 * draw.positive(4)}, draw(B, 4, 5, 3)
