"""A small convolutional network for images: 3×3 convolutions, each halving the image, and a dense head."""

import dataclasses

import jax
from flax import linen as nn

from model_zoo import DType, classification_problem, compute_dtype
from pegprof.models.problem import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The options of the family, and the axes that they are the lengths of."""

    image_size: int = 32  # H and W
    channels: int = 3  # C
    width: int = 32  # channels after the first convolution, doubled by each further one
    layers: int = 3
    classes: int = 10  # K
    dtype: DType = "float32"


CONFIGS = {"cnn": Config()}


class CNN(nn.Module):
    """(3×3 convolution, ReLU, 2×2 average) × layers, then a dense head on what is left of the image."""

    config: Config

    @nn.compact
    def __call__(self, x_BxHxWxC: jax.Array) -> jax.Array:
        dtype = compute_dtype(self.config.dtype)
        x = x_BxHxWxC
        for layer in range(self.config.layers):
            x = nn.relu(nn.Conv(self.config.width * 2**layer, kernel_size=(3, 3), dtype=dtype)(x))
            x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x_BxF = x.reshape(*x.shape[:-3], -1)
        return nn.Dense(self.config.classes, dtype=dtype)(x_BxF)


def make_problem(name: str, config: Config) -> Problem:
    """Classification of random images."""
    description = f"{config.layers} 3×3 convolutions and a dense head on {config.image_size}×{config.image_size}"
    return classification_problem(name, config, CNN(config), description)
