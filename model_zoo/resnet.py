"""ResNet-18 for 32×32 images: a 3×3 stem without pooling, then four stages, each at half the size of the one before.

GroupNorm stands where He et al. (2015) have BatchNorm, through which the examples of a batch would interact.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from model_zoo import (
    DType,
    check_divides,
    classification_problem,
    compute_dtype,
)
from pegprof.models.problem import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The options of the family, and the axes that they are the lengths of."""

    image_size: int = 32  # H and W
    channels: int = 3  # C
    width: int = 64  # channels of the first stage, doubled by each further one
    layers: int = 2  # blocks of a stage
    groups: int = 32  # of channels, as Wu and He (2018) have it
    classes: int = 10  # K
    dtype: DType = "float32"

    def __post_init__(self) -> None:
        check_divides(self, "width", "groups")


CONFIGS = {"resnet18-gn": Config()}


class Block(nn.Module):
    """relu(x + norm(conv(relu(norm(conv(x)))))); where the shape changes, x goes by a 1×1 convolution."""

    config: Config
    width: int
    stride: int

    @nn.compact
    def __call__(self, x_BxHxWxC: jax.Array) -> jax.Array:
        conv, norm = _conv(self.config), _norm(self.config)
        strides = (self.stride, self.stride)
        h = nn.relu(norm()(conv(self.width, (3, 3), strides)(x_BxHxWxC)))
        h = norm()(conv(self.width, (3, 3))(h))
        if x_BxHxWxC.shape != h.shape:
            x_BxHxWxC = norm(name="shortcut_norm")(conv(self.width, (1, 1), strides, name="shortcut")(x_BxHxWxC))
        return nn.relu(x_BxHxWxC + h)


class ResNet(nn.Module):
    """From images to the logits of their classes."""

    config: Config

    @nn.compact
    def __call__(self, x_BxHxWxC: jax.Array) -> jax.Array:
        config = self.config
        x = nn.relu(_norm(config)(name="stem_norm")(_conv(config)(config.width, (3, 3), name="stem")(x_BxHxWxC)))
        for stage in range(4):
            for n in range(config.layers):
                stride = 2 if stage > 0 and n == 0 else 1
                x = Block(config, config.width * 2**stage, stride, name=f"stage_{stage}_block_{n}")(x)
        x_BxD = jnp.mean(x, axis=(-3, -2))
        return nn.Dense(config.classes, dtype=compute_dtype(config.dtype), name="head")(x_BxD)


def _conv(config: Config) -> Any:
    return partial(nn.Conv, use_bias=False, dtype=compute_dtype(config.dtype))


def _norm(config: Config) -> Any:
    # By default flax takes the first axis for the batch, which a bare example does not have.
    return partial(nn.GroupNorm, config.groups, reduction_axes=(-3, -2, -1), dtype=compute_dtype(config.dtype))


def make_problem(name: str, config: Config) -> Problem:
    """Classification of random images."""
    size = f"{config.image_size}×{config.image_size}"
    description = f"ResNet with GroupNorm, 4 stages of {config.layers} blocks, on {size}"
    return classification_problem(name, config, ResNet(config), description)
