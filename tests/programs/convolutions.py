"""Convolutions of every layout, and pooling."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs.registry import program, score

NHWC = ("NHWC", "HWIO", "NHWC")


def _conv(x, kernel, *, strides=(1, 1), padding="VALID", layout=NHWC, **options):
    return lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=layout, **options)


def _one_layer(draw, kernel, x, **options):
    """A convolution and a bias; the bias is along the last axis of the output, or the second for NC layouts."""
    conv = partial(_conv, **options)
    channels = conv(x, kernel).shape[-1]
    return lambda p, x: score(jnp.tanh(conv(x, p["kernel"]) + p["b"])), {"kernel": kernel, "b": draw(channels)}, x


@program()
def convolution_1d(draw, B):
    return _one_layer(draw, draw(3, 2, 4), draw(B, 7, 2), strides=(1,), layout=("NWC", "WIO", "NWC"))


@program()
def convolution_1d_causal_and_dilated(draw, B):
    return _one_layer(
        draw,
        draw(3, 2, 4),
        draw(B, 7, 2),
        strides=(1,),
        padding=[(4, 0)],
        rhs_dilation=(2,),
        layout=("NWC", "WIO", "NWC"),
    )


@program()
def convolution_2d(draw, B):
    return _one_layer(draw, draw(3, 2, 3, 4), draw(B, 6, 5, 3))


@program()
def convolution_2d_strided_same(draw, B):
    return _one_layer(draw, draw(3, 2, 3, 4), draw(B, 6, 7, 3), strides=(2, 3), padding="SAME")


@program()
def convolution_2d_padded_unevenly(draw, B):
    return _one_layer(draw, draw(3, 2, 3, 4), draw(B, 5, 4, 3), strides=(2, 1), padding=[(0, 2), (3, 1)])


@program()
def convolution_2d_cropped_by_negative_padding(draw, B):
    return _one_layer(draw, draw(3, 2, 3, 4), draw(B, 7, 6, 3), padding=[(-1, 0), (2, -2)])


@program()
def convolution_2d_dilated_kernel(draw, B):
    return _one_layer(draw, draw(3, 2, 3, 4), draw(B, 7, 6, 3), rhs_dilation=(2, 3))


@program()
def convolution_2d_dilated_input(draw, B):
    return _one_layer(draw, draw(3, 2, 3, 4), draw(B, 4, 3, 3), padding=[(1, 1), (2, 0)], lhs_dilation=(2, 3))


@program()
def convolution_2d_dilated_both_ways_and_strided(draw, B):
    return _one_layer(
        draw,
        draw(3, 2, 3, 4),
        draw(B, 4, 3, 3),
        strides=(2, 1),
        padding=[(2, 3), (1, 1)],
        lhs_dilation=(2, 2),
        rhs_dilation=(1, 2),
    )


@program()
def convolution_2d_nchw(draw, B):
    def loss(p, x):
        h = _conv(x, p["kernel"], strides=(1, 2), padding="SAME", layout=("NCHW", "OIHW", "NCHW"))
        return score(jnp.tanh(h + p["b"][:, None, None]))

    return loss, {"kernel": draw(4, 3, 3, 2), "b": draw(4)}, draw(B, 3, 5, 6)


@program()
def convolution_2d_in_an_odd_layout(draw, B):
    return _one_layer(draw, draw(2, 4, 3, 3), draw(B, 5, 3, 6), layout=("NHCW", "WOHI", "NHWC"))


@program()
def convolution_3d(draw, B):
    kernel, x = draw(2, 3, 2, 2, 3), draw(B, 3, 5, 4, 2)
    return _one_layer(draw, kernel, x, strides=(1, 2, 1), padding="SAME", layout=("NDHWC", "DHWIO", "NDHWC"))


@program()
def convolution_2d_pointwise(draw, B):
    return _one_layer(draw, draw(1, 1, 3, 4), draw(B, 5, 6, 3))


@program()
def convolution_2d_kernel_as_large_as_the_input(draw, B):
    return _one_layer(draw, draw(5, 6, 3, 4, scale=0.1), draw(B, 5, 6, 3))


@program()
def convolution_2d_grouped(draw, B):
    return _one_layer(draw, draw(3, 2, 3, 4), draw(B, 5, 4, 6), padding="SAME", feature_group_count=2)


@program()
def convolution_2d_grouped_nchw_strided(draw, B):
    def loss(p, x):
        h = _conv(
            x, p, strides=(2, 1), padding=[(1, 0), (0, 1)], layout=("NCHW", "OIHW", "NCHW"), feature_group_count=3
        )
        return score(jnp.tanh(h))

    return loss, draw(6, 2, 3, 2), draw(B, 6, 5, 4)


@program()
def convolution_2d_depthwise(draw, B):
    return _one_layer(draw, draw(3, 2, 1, 4), draw(B, 5, 6, 4), padding="SAME", feature_group_count=4)


@program()
def convolution_2d_depthwise_with_a_multiplier(draw, B):
    return _one_layer(draw, draw(3, 2, 1, 6), draw(B, 5, 4, 3), strides=(2, 1), padding="SAME", feature_group_count=3)


@program()
def convolution_1d_depthwise_causal(draw, B):
    return _one_layer(
        draw,
        draw(4, 1, 3),
        draw(B, 6, 3),
        strides=(1,),
        padding=[(3, 0)],
        feature_group_count=3,
        layout=("NWC", "WIO", "NWC"),
    )


@program()
def convolution_with_a_batch_group_count(draw, B):
    def loss(p, x):  # two groups of images an example, put on the batch axis of the convolution, groups first
        merged = jnp.moveaxis(x, 1, 0).reshape(-1, *x.shape[2:])
        h = _conv(merged, p, padding="SAME", batch_group_count=2)
        return score(jnp.tanh(h))

    return loss, draw(3, 2, 3, 4), draw(B, 2, 5, 6, 3)


@program()
def separable_convolution(draw, B):
    def loss(p, x):
        h = _conv(x, p["depthwise"], padding="SAME", feature_group_count=3)
        return score(jnp.tanh(_conv(jax.nn.silu(h), p["pointwise"]) + p["b"]))

    return loss, {"depthwise": draw(3, 2, 1, 3), "pointwise": draw(1, 1, 3, 4), "b": draw(4)}, draw(B, 5, 6, 3)


@program()
def transposed_convolution(draw, B):
    def loss(p, x):
        return score(jnp.tanh(lax.conv_transpose(x, p["kernel"], (2, 3), "SAME") + p["b"]))

    return loss, {"kernel": draw(3, 2, 3, 4), "b": draw(4)}, draw(B, 3, 4, 3)


@program()
def transposed_convolution_tied_to_its_convolution(draw, B):
    def loss(p, x):
        h = jnp.tanh(_conv(x, p, strides=(2, 1)))
        return score(lax.conv_transpose(h, p, (2, 1), "VALID", transpose_kernel=True))

    return loss, draw(3, 2, 3, 4, scale=0.5), draw(B, 5, 4, 3)


@program()
def kernel_shared_by_two_layers(draw, B):
    def loss(p, x):
        h = jnp.tanh(_conv(x, p["kernel"], padding="SAME") + p["b"])
        return score(_conv(h, p["kernel"], strides=(2, 1)) + p["b"])

    return loss, {"kernel": draw(3, 2, 3, 3, scale=0.5), "b": draw(3)}, draw(B, 5, 6, 3)


@program()
def kernel_shared_across_scales(draw, B):
    def loss(p, x):
        half = lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return score(_conv(x, p)) + score(_conv(half, p))

    return loss, draw(3, 2, 3, 4, scale=0.5), draw(B, 6, 8, 3)


@program()
def max_pooling(draw, B):
    def loss(p, x):
        h = lax.reduce_window(_conv(x, p), -jnp.inf, lax.max, (1, 2, 3, 1), (1, 2, 1, 1), "VALID")
        return score(h)

    return loss, draw(3, 2, 3, 4), draw(B, 6, 7, 3)


@program()
def average_pooling_to_a_classifier(draw, B):
    def loss(p, batch):
        h = jax.nn.relu(_conv(batch["image"], p["kernel"], padding="SAME") + p["b"])
        h = lax.reduce_window(h, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "SAME") / 4
        logits = jnp.mean(h, axis=(1, 2)) @ p["out"]
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), batch["label"][:, None], axis=1))

    params = {"kernel": draw(3, 2, 3, 4), "b": draw(4), "out": draw(4, 5)}
    return loss, params, {"image": draw(B, 5, 6, 3), "label": draw.integers(B, below=5)}


@program()
def strided_patch_embedding(draw, B):
    def loss(p, x):
        h = _conv(x, p["kernel"], strides=(2, 3)).reshape(x.shape[0], -1, 4) + p["positions"]
        return score(jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", h, h)) @ h)

    return loss, {"kernel": draw(2, 3, 3, 4, scale=0.5), "positions": draw(6, 4)}, draw(B, 4, 9, 3)


@program()
def patches_by_reshape(draw, B):
    def loss(p, x):
        patches = x.reshape(-1, 2, 2, 3, 3, 2).transpose(0, 1, 3, 2, 4, 5).reshape(-1, 6, 12)
        return score(jnp.tanh(patches @ p["W"] + p["b"]))

    return loss, {"W": draw(12, 5), "b": draw(5)}, draw(B, 4, 9, 2)


@program()
def convolution_with_circular_padding(draw, B):
    def loss(p, x):
        return score(jnp.tanh(_conv(jnp.pad(x, ((0, 0), (1, 1), (0, 2), (0, 0)), mode="wrap"), p)))

    return loss, draw(3, 2, 3, 4), draw(B, 5, 6, 3)


@program()
def residual_block(draw, B):
    def loss(p, x):
        h = jax.nn.relu(_conv(x, p["first"], padding="SAME"))
        h = _conv(h, p["second"], padding="SAME") * p["scale"] + x
        return score(jnp.mean(h, axis=(1, 2)) @ p["out"])

    params = {"first": draw(3, 3, 3, 4), "second": draw(3, 3, 4, 3), "scale": draw(3), "out": draw(3, 2)}
    return loss, params, draw(B, 4, 5, 3)


@program()
def kernel_made_by_the_example(draw, B):
    def one(p, x):
        kernel = jnp.einsum("c,chwio->hwio", jnp.tanh(jnp.mean(x, axis=(0, 1)) @ p["mix"]), p["kernels"])
        return score(_conv(x[None], kernel))

    def loss(p, batch):
        return jnp.mean(jax.vmap(one, in_axes=(None, 0))(p, batch))

    return loss, {"mix": draw(3, 2), "kernels": draw(2, 3, 2, 3, 4)}, draw(B, 5, 6, 3)
