"""A vision transformer: patches of the image are its tokens, and a learned token in front of them gives the class."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn

from model_zoo import (
    DType,
    check_divides,
    classification_problem,
    compute_dtype,
    run_blocks,
)
from pegprof.models.problem import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The options of the family, and the axes that they are the lengths of. T = 1 + the number of patches."""

    image_size: int = 224  # H and W
    channels: int = 3  # C
    patch: int = 16  # height and width of a patch
    layers: int = 12  # N
    width: int = 384  # D
    heads: int = 6
    expansion: int = 4  # F = expansion · D
    classes: int = 1000  # K
    dtype: DType = "float32"  # of the computation; parameters are float32
    remat: bool = False  # keep only the input of each layer for the backward pass
    scan_layers: bool = False  # one layer's code, its parameters stacked along a leading axis N

    def __post_init__(self) -> None:
        check_divides(self, "width", "heads")


CONFIGS = {"vit-s16": Config()}


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    config: Config

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        config, dtype = self.config, compute_dtype(self.config.dtype)
        attention = nn.MultiHeadDotProductAttention(
            config.heads, dtype=dtype, force_fp32_for_softmax=dtype.itemsize < 4, name="attention"
        )
        x_BxTxD += attention(nn.LayerNorm(dtype=dtype, name="attention_norm")(x_BxTxD))
        y_BxTxD = nn.LayerNorm(dtype=dtype, name="mlp_norm")(x_BxTxD)
        h_BxTxF = nn.gelu(nn.Dense(config.expansion * config.width, dtype=dtype, name="up")(y_BxTxD))
        return x_BxTxD + nn.Dense(config.width, dtype=dtype, name="down")(h_BxTxF)


class ViT(nn.Module):
    """From images to the logits of their classes."""

    config: Config

    @nn.compact
    def __call__(self, x_BxHxWxC: jax.Array) -> jax.Array:
        config, dtype = self.config, compute_dtype(self.config.dtype)
        size = (config.patch, config.patch)
        patch = nn.Conv(config.width, kernel_size=size, strides=size, padding="VALID", dtype=dtype, name="patch")
        x = patch(x_BxHxWxC)
        *lead, _, _, D = x.shape
        class_1xD = self.param("class", nn.initializers.zeros, (1, D)).astype(dtype)
        class_Bx1xD = jnp.broadcast_to(class_1xD, (*lead, 1, D))
        x_BxTxD = jnp.concatenate([class_Bx1xD, x.reshape(*lead, -1, D)], axis=-2)
        position_TxD = self.param("positions", nn.initializers.normal(0.02), x_BxTxD.shape[-2:])
        x_BxTxD += jnp.broadcast_to(position_TxD.astype(dtype), x_BxTxD.shape)

        x_BxTxD = run_blocks(Block, config, x_BxTxD)
        x_BxD = nn.LayerNorm(dtype=dtype, name="final_norm")(x_BxTxD[..., 0, :])
        return nn.Dense(config.classes, dtype=dtype, name="head")(x_BxD)


def make_problem(name: str, config: Config) -> Problem:
    """Classification of random images."""
    patches = f"{config.patch}×{config.patch} patches of {config.image_size}×{config.image_size}"
    description = f"vision transformer, {config.layers} layers, D={config.width}, {patches}"
    return classification_problem(name, config, ViT(config), description)
