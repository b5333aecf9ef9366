"""Grouped and depthwise convolutions above other layers, as in ResNeXt and MobileNet: gradients pass through them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from tests.programs.registry import program, score

NHWC = ("NHWC", "HWIO", "NHWC")
NCHW = ("NCHW", "OIHW", "NCHW")


def _conv(x, kernel, *, strides=(1, 1), padding="SAME", layout=NHWC, **options):
    return lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=layout, **options)


def _flax(module, draw, x):
    """A flax module's loss; its parameters have its shapes, drawn like all others."""
    shapes = jax.eval_shape(lambda key: module.init(key, x[:1]), jax.random.key(0))
    params = jax.tree.map(lambda leaf: draw(*leaf.shape, scale=0.5), shapes)
    return lambda p, x: score(module.apply(p, x)), params, x


def _group_norm(x, scale, shift, groups):
    """Statistics over the positions and the channels of a group."""
    split = x.reshape(*x.shape[:-1], groups, -1)
    mean = jnp.mean(split, axis=(1, 2, 4), keepdims=True)
    variance = jnp.mean(jnp.square(split - mean), axis=(1, 2, 4), keepdims=True)
    return ((split - mean) * lax.rsqrt(variance + 1e-5)).reshape(x.shape) * scale + shift


@program()
def grouped_convolution_above_another(draw, B):
    def loss(p, x):
        h = jax.nn.relu(_conv(x, p["first"]))
        return score(_conv(h, p["grouped"], feature_group_count=2))

    return loss, {"first": draw(3, 2, 3, 4), "grouped": draw(2, 3, 2, 6)}, draw(B, 5, 4, 3)


@program()
def grouped_convolution_of_flax_above_another(draw, B):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Conv(4, (3, 3))(x))
            return nn.Conv(8, (3, 2), feature_group_count=2)(x)

    return _flax(Net(), draw, draw(B, 5, 6, 3))


@program()
def grouped_convolutions_nchw_strided_and_dilated(draw, B):
    def loss(p, x):
        h = jnp.tanh(_conv(x, p["first"], layout=NCHW, padding=[(1, 0), (0, 1)]))
        h = jnp.tanh(
            _conv(h, p["strided"], layout=NCHW, strides=(2, 1), padding=[(1, 1), (0, 1)], feature_group_count=3)
        )
        return score(
            _conv(h, p["dilated"], layout=NCHW, padding=[(0, 1), (2, 1)], rhs_dilation=(1, 2), feature_group_count=3)
        )

    params = {"first": draw(6, 2, 3, 2), "strided": draw(9, 2, 3, 2), "dilated": draw(3, 3, 2, 3)}
    return loss, params, draw(B, 2, 5, 4)


@program()
def grouped_convolution_1d_above_another(draw, B):
    def loss(p, x):
        layout = ("NWC", "WIO", "NWC")
        h = jnp.tanh(_conv(x, p["first"], strides=(1,), layout=layout))
        return score(_conv(h, p["grouped"], strides=(2,), padding=[(2, 0)], layout=layout, feature_group_count=2))

    return loss, {"first": draw(2, 3, 4), "grouped": draw(3, 2, 6)}, draw(B, 7, 3)


@program()
def grouped_convolution_3d_above_another(draw, B):
    def loss(p, x):
        layout = ("NDHWC", "DHWIO", "NDHWC")
        h = jnp.tanh(_conv(x, p["first"], strides=(1, 1, 1), layout=layout))
        return score(_conv(h, p["grouped"], strides=(1, 2, 1), layout=layout, feature_group_count=2))

    return loss, {"first": draw(1, 2, 2, 3, 4), "grouped": draw(2, 1, 3, 2, 6)}, draw(B, 2, 4, 3, 3)


@program()
def depthwise_convolutions_with_a_multiplier_nchw(draw, B):
    def loss(p, x):
        h = jnp.tanh(_conv(x, p["first"], layout=NCHW, feature_group_count=3))
        return score(_conv(h, p["second"], layout=NCHW, strides=(2, 1), feature_group_count=6))

    return loss, {"first": draw(6, 1, 3, 2), "second": draw(12, 1, 2, 3)}, draw(B, 3, 5, 4)


@program()
def grouped_transposed_convolution(draw, B):
    def loss(p, x):  # a transposed convolution is one of the input spread out; lax.conv_transpose itself has no groups
        h = jnp.tanh(_conv(x, p["first"]))
        h = _conv(h, p["grouped"], padding=[(2, 1), (1, 1)], lhs_dilation=(2, 3), feature_group_count=2)
        return score(jnp.tanh(h) * p["scale"])

    return loss, {"first": draw(2, 3, 3, 4), "grouped": draw(3, 2, 2, 6), "scale": draw(6)}, draw(B, 3, 4, 3)


def _resnext_block(p, x, strides=(1, 1)):
    h = jax.nn.relu(_group_norm(_conv(x, p["reduce"]), *p["norm"], groups=2))
    h = jax.nn.relu(_conv(h, p["grouped"], strides=strides, feature_group_count=2))
    h = _conv(h, p["expand"])
    return jax.nn.relu(h + (_conv(x, p["shortcut"], strides=strides) if "shortcut" in p else x))


def _resnext_params(draw, wide_in, wide_out):
    params = {
        "reduce": draw(1, 1, wide_in, 4, scale=0.7),
        "norm": (draw.positive(4), draw(4)),
        "grouped": draw(3, 3, 2, 4, scale=0.5),
        "expand": draw(1, 1, 4, wide_out),
    }
    return params if wide_in == wide_out else params | {"shortcut": draw(1, 1, wide_in, wide_out)}


@program()
def resnext_blocks(draw, B):
    def loss(p, x):
        h = _resnext_block(p["first"], x)
        return score(jnp.mean(_resnext_block(p["second"], h), axis=(1, 2)) @ p["out"])

    params = {"first": _resnext_params(draw, 3, 3), "second": _resnext_params(draw, 3, 3), "out": draw(3, 2)}
    return loss, params, draw(B, 4, 5, 3)


@program()
def resnext_strided_block(draw, B):
    def loss(p, x):
        h = _resnext_block(p["first"], x, strides=(2, 2))
        return score(jnp.mean(_resnext_block(p["second"], h), axis=(1, 2)))

    return loss, {"first": _resnext_params(draw, 3, 5), "second": _resnext_params(draw, 5, 5)}, draw(B, 6, 5, 3)


@program()
def mobilenet_with_a_multiplier(draw, B):
    def block(p, h, strides):
        h = jnp.minimum(jax.nn.relu(_conv(h, p["expand"])), 6.0)
        h = jnp.tanh(_conv(h, p["depthwise"], strides=strides, feature_group_count=h.shape[-1]) + p["b"])
        return _conv(h, p["project"])

    def loss(p, x):
        return score(block(p["second"], x + block(p["first"], x, (1, 1)), (2, 1)))

    def params(wide_out):
        return {
            "expand": draw(1, 1, 3, 4),
            "depthwise": draw(3, 2, 1, 8, scale=0.5),
            "b": draw(8),
            "project": draw(1, 1, 8, wide_out, scale=0.5),
        }

    return loss, {"first": params(3), "second": params(2)}, draw(B, 5, 4, 3)


@program()
def mobilenet_with_a_multiplier_nchw(draw, B):
    def block(p, h, strides):
        h = jax.nn.relu(_conv(h, p["expand"], layout=NCHW))
        h = _conv(h, p["depthwise"], strides=strides, layout=NCHW, feature_group_count=h.shape[1])
        return _conv(jnp.tanh(h + p["b"][:, None, None]), p["project"], layout=NCHW)

    def loss(p, x):
        return score(block(p["second"], x + block(p["first"], x, (1, 1)), (2, 1)))

    def params(wide_out):
        return {
            "expand": draw(4, 3, 1, 1),
            "depthwise": draw(8, 1, 3, 2, scale=0.5),
            "b": draw(8),
            "project": draw(wide_out, 8, 1, 1, scale=0.5),
        }

    return loss, {"first": params(3), "second": params(2)}, draw(B, 3, 5, 4)


@program()
def mobilenet_with_a_multiplier_of_flax(draw, B):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Conv(6, (3, 2), feature_group_count=3)(x)
            x = nn.Conv(4, (1, 1), use_bias=False)(nn.GroupNorm(num_groups=2)(nn.silu(x)))
            x = nn.silu(nn.Conv(8, (2, 3), strides=(1, 2), feature_group_count=4)(x))
            return nn.Dense(2)(jnp.mean(x, axis=(1, 2)))

    return _flax(Net(), draw, draw(B, 4, 5, 3))


@program()
def scanned_depthwise_convolutions(draw, B):
    def loss(p, x):  # ConvNeXt: depthwise, then a mixing of channels, layer after layer
        def layer(h, own):
            mixed = _conv(h, own["depthwise"], feature_group_count=3)
            return h + jnp.tanh(jax.nn.gelu(mixed @ own["up"]) @ own["down"]), None

        return score(lax.scan(layer, x, p)[0])

    return loss, {"depthwise": draw(2, 3, 2, 1, 3), "up": draw(2, 3, 4), "down": draw(2, 4, 3)}, draw(B, 4, 5, 3)
