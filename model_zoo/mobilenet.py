"""MobileNet (Howard et al., 2017): 13 depthwise-separable convolutions, a 3×3 filter for each channel, then 1×1 ones.

Its BatchNorm, through which the examples of a batch would interact, is a GroupNorm of one group here. In flax NNX.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from model_zoo import DType, compute_dtype, mean_cross_entropy, random_images
from pegprof.models.problem import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The options of the family, and the axes that they are the lengths of."""

    image_size: int = 128  # H and W: the smallest of the four that the paper tries, for the sake of laptops
    channels: int = 3  # C
    width: int = 32  # channels of the first convolution: 32 times the paper's width multiplier
    layers: int = 5  # blocks in the middle, where the paper repeats one
    classes: int = 1000  # K
    dtype: DType = "float32"


CONFIGS = {"mobilenet": Config()}


class ConvNorm(nnx.Module):
    """A convolution, a norm over the whole example with a scale and a bias for each channel, and ReLU."""

    def __init__(
        self, config: Config, inputs: int, outputs: int, rngs: nnx.Rngs, *, size: int, stride: int = 1, groups: int = 1
    ) -> None:
        dtype = compute_dtype(config.dtype)
        self.conv = nnx.Conv(
            inputs, outputs, (size, size), stride, feature_group_count=groups, use_bias=False, dtype=dtype, rngs=rngs
        )
        self.norm = nnx.LayerNorm(outputs, reduction_axes=(-3, -2, -1), dtype=dtype, rngs=rngs)

    def __call__(self, x_BxHxWxC: jax.Array) -> jax.Array:
        return nnx.relu(self.norm(self.conv(x_BxHxWxC)))


class Separable(nnx.Module):
    """A 3×3 convolution of each channel alone, then a 1×1 convolution that mixes them."""

    def __init__(self, config: Config, inputs: int, outputs: int, rngs: nnx.Rngs, *, stride: int) -> None:
        self.depthwise = ConvNorm(config, inputs, inputs, rngs, size=3, stride=stride, groups=inputs)
        self.pointwise = ConvNorm(config, inputs, outputs, rngs, size=1)

    def __call__(self, x_BxHxWxC: jax.Array) -> jax.Array:
        return self.pointwise(self.depthwise(x_BxHxWxC))


class MobileNet(nnx.Module):
    """From images to the logits of their classes."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        # The output of each block, as a multiple of the first convolution's, and its stride: table 1 of the paper.
        table = [(2, 1), (4, 2), (4, 1), (8, 2), (8, 1), (16, 2), *[(16, 1)] * config.layers, (32, 2), (32, 1)]
        outputs = [config.width * multiple for multiple, _ in table]
        inputs = [config.width, *outputs[:-1]]
        self.stem = ConvNorm(config, config.channels, config.width, rngs, size=3, stride=2)
        self.blocks = nnx.List(
            Separable(config, i, o, rngs, stride=stride)
            for i, o, (_, stride) in zip(inputs, outputs, table, strict=True)
        )
        self.head = nnx.Linear(outputs[-1], config.classes, dtype=compute_dtype(config.dtype), rngs=rngs)

    def __call__(self, x_BxHxWxC: jax.Array) -> jax.Array:
        x = self.stem(x_BxHxWxC)
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(x, axis=(-3, -2)))


def make_problem(name: str, config: Config) -> Problem:
    """Classification of random images."""

    def init(key: jax.Array) -> Any:
        return nnx.to_pure_dict(nnx.state(MobileNet(config, nnx.Rngs(key)), nnx.Param))

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        model = nnx.eval_shape(lambda: MobileNet(config, nnx.Rngs(0)))  # the modules without values, then the values
        nnx.update(model, params)
        return mean_cross_entropy(model(batch["image"]), batch["label"])

    return Problem(
        name=name,
        init=init,
        loss=loss,
        batch=random_images(config),
        description=f"depthwise-separable convolutions on {config.image_size}×{config.image_size}",
        options=dataclasses.asdict(config),
        keep_batch_dim=False,
    )
