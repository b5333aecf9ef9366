"""Kernels by Pallas, interpreted, under rules for derivatives; and callbacks to the host."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from tests.programs.registry import program, score


def _matmul_kernel(x_ref, y_ref, out_ref):
    out_ref[...] = x_ref[...] @ y_ref[...]


def _matmul(x, y):
    """x @ y by one kernel, a row of the grid for each row of x."""
    (m, k), n = x.shape, y.shape[1]
    return pl.pallas_call(
        _matmul_kernel,
        grid=(m,),
        in_specs=[pl.BlockSpec((1, k), lambda i: (i, 0)), pl.BlockSpec((k, n), lambda i: (0, 0))],
        out_specs=pl.BlockSpec((1, n), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        interpret=True,
    )(x, y)


def _gelu_kernel(x_ref, W_ref, b_ref, out_ref):
    out_ref[...] = jax.nn.gelu(x_ref[...] @ W_ref[...] + b_ref[...])


def _plain_dense_gelu(x, W, b):
    return jax.nn.gelu(x @ W + b)


@jax.custom_vjp
def _dense_gelu(x, W, b):
    """gelu(x @ W + b), fused."""
    shape = jax.ShapeDtypeStruct((x.shape[0], W.shape[1]), x.dtype)
    return pl.pallas_call(_gelu_kernel, out_shape=shape, interpret=True)(x, W, b)


_dense_gelu.defvjp(
    lambda x, W, b: (_dense_gelu(x, W, b), (x, W, b)),
    lambda residuals, g: jax.vjp(_plain_dense_gelu, *residuals)[1](g),
)


@program()
def pallas_kernels_with_a_plain_backward_pass(draw, B):
    def loss(p, x):
        h = _dense_gelu(x, p["W"], p["b"])
        return score(_dense_gelu(h, p["V"], p["c"]))

    return loss, {"W": draw(3, 4), "b": draw(4), "V": draw(4, 2), "c": draw(2)}, draw(B, 3)


@jax.custom_vjp
def _dense(x, W):
    """x @ W, all three products by Pallas."""
    return _matmul(x, W)


_dense.defvjp(
    lambda x, W: (_matmul(x, W), (x, W)),
    lambda residuals, g: (_matmul(g, residuals[1].T), _matmul(residuals[0].T, g)),
)


@program()
def pallas_kernels_both_ways(draw, B):
    def one(p, x):
        return score(_dense(jnp.tanh(_dense(x @ p["in"], p["W"]) + p["b"]), p["V"]))

    def loss(p, x):
        return jnp.mean(jax.vmap(one, in_axes=(None, 0))(p, x))

    return loss, {"in": draw(6, 3), "W": draw(3, 4), "b": draw(4), "V": draw(4, 2)}, draw(B, 5, 6)


@program()
def pallas_kernel_with_a_cotangent_that_nothing_needs(draw, B):
    def loss(p, x):  # x is data: the kernel for its cotangent is traced, and its result used by nothing
        return score(jnp.tanh(_dense(x.reshape(-1, 3), p["W"]) + p["b"]))

    return loss, {"W": draw(3, 4), "b": draw(4)}, draw(B, 5, 3)


@program()
def pallas_kernels_in_scanned_layers(draw, B):
    def loss(p, x):
        return score(lax.scan(lambda h, W: (jnp.tanh(_dense(h, W)), None), x, p)[0])

    return loss, draw(3, 4, 4, scale=0.7), draw(B, 4)


@program()
def pallas_kernel_that_adds_up_in_place(draw, B):
    def kernel(x_ref, W_ref, out_ref):  # a grid over the contracted axis, as kernels on a TPU have it
        @pl.when(pl.program_id(0) == 0)
        def _():
            out_ref[...] = jnp.zeros_like(out_ref)

        out_ref[...] += x_ref[...] @ W_ref[...]

    def product(x, W):
        (m, k), n = x.shape, W.shape[1]
        return pl.pallas_call(
            kernel,
            grid=(k // 2,),
            in_specs=[pl.BlockSpec((m, 2), lambda j: (0, j)), pl.BlockSpec((2, n), lambda j: (j, 0))],
            out_specs=pl.BlockSpec((m, n), lambda j: (0, 0)),
            out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
            interpret=True,
        )(x, W)

    @jax.custom_vjp
    def dense(x, W):
        return product(x, W)

    dense.defvjp(lambda x, W: (product(x, W), (x, W)), lambda r, g: (g @ r[1].T, r[0].T @ g))
    return lambda p, x: score(jnp.sin(dense(x, p["W"])) * p["scale"]), {"W": draw(6, 4), "scale": draw(4)}, draw(B, 6)


def _host(function, x):
    """A function of NumPy on the host, in float32 at least; it says nothing of how to batch it."""

    def call(x):
        return function(np.asarray(x, np.promote_types(x.dtype, np.float32))).astype(x.dtype)

    return jax.pure_callback(call, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@jax.custom_vjp
def _host_sine(x):
    return _host(np.sin, x)


_host_sine.defvjp(lambda x: (_host(np.sin, x), x), lambda x, g: (g * _host(np.cos, x),))


@program("no_vmap", "bf16")
def callback_with_bfloat16_gradients(draw, B):
    def loss(p, x):
        h = _host_sine(x @ p["W"] + p["b"])
        return score((h @ p["V"]).astype(jnp.float32))

    params = {"W": draw(3, 4), "b": draw(4), "V": draw(4, 2)}
    return loss, *jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (params, draw(B, 5, 3)))


@program("no_vmap")
def callback_in_scanned_layers_with_a_penalty(draw, B):
    def loss(p, x):
        def layer(carry, W):
            h, penalty = carry
            return (_host_sine(h @ W), penalty + jnp.sum(jnp.square(W))), None

        (h, penalty), _ = lax.scan(layer, (x, 0.0), p)
        return score(h) + 0.1 * penalty

    return loss, draw(3, 4, 4, scale=0.7), draw(B, 4)


@program()
def callback_batched_by_a_loop(draw, B):
    def host(function, x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda x: function(np.asarray(x)), shape, x, vmap_method="sequential")

    @jax.custom_vjp
    def sine(x):
        return host(np.sin, x)

    sine.defvjp(lambda x: (host(np.sin, x), x), lambda x, g: (g * host(np.cos, x),))
    return lambda p, x: score(sine(x @ p["W"]) @ p["V"]), {"W": draw(3, 4), "V": draw(4, 2)}, draw(B, 3)
