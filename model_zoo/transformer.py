"""A decoder-only transformer after NanoDO: pre-LN, no biases, tied embedding, learned positions, GELU, causal.

GPT-2 is the same with biases. The sizes are NanoDO's default (19m), the paper's (151m) and a large one (1.2b), called
by their parameters outside embeddings and norms, 12·N·D².

Attention is the plain softmax of all T×T scores, without a fused kernel, so that what is measured is what is written.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from model_zoo import (
    DType,
    causal_softmax,
    check_divides,
    compute_dtype,
    next_token_problem,
    run_blocks,
)
from pegprof.models.problem import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The options of the family, and the axes that they are the lengths of. K = D / H is the width of a head."""

    seq_len: int  # T
    layers: int  # N
    width: int  # D
    heads: int  # H
    expansion: int = 4  # F = expansion · D
    vocab: int  # V
    bias: bool = False  # in dense layers and norms
    epsilon: float = 1e-6  # of the norms
    dtype: DType = "float32"  # of the computation; parameters are float32
    remat: bool = False  # keep only the input of each layer for the backward pass
    scan_layers: bool = False  # one layer's code, its parameters stacked along a leading axis N

    def __post_init__(self) -> None:
        check_divides(self, "width", "heads")


CONFIGS = {
    "transformer-tiny": Config(seq_len=128, layers=2, width=64, heads=4, vocab=256),
    "transformer-19m": Config(seq_len=512, layers=6, width=512, heads=8, vocab=32100),
    "transformer-151m": Config(seq_len=512, layers=12, width=1024, heads=16, vocab=32100),
    "transformer-1.2b": Config(seq_len=512, layers=24, width=2048, heads=32, vocab=32100),
    "gpt2-124m": Config(seq_len=1024, layers=12, width=768, heads=12, vocab=50257, bias=True, epsilon=1e-5),
}


class Attention(nn.Module):
    """Causal multi-head attention."""

    config: Config

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        H, K = self.config.heads, self.config.width // self.config.heads
        dense = dense_layer(self.config)
        q_BxTxHxK = dense(features=(H, K), name="query")(x_BxTxD) / K**0.5
        k_BxTxHxK = dense(features=(H, K), name="key")(x_BxTxD)
        v_BxTxHxK = dense(features=(H, K), name="value")(x_BxTxD)

        score_BxHxTxT = jnp.einsum("...qhk,...thk->...hqt", q_BxTxHxK, k_BxTxHxK)
        weight_BxHxTxT = causal_softmax(score_BxHxTxT).astype(v_BxTxHxK.dtype)
        out_BxTxHxK = jnp.einsum("...hqt,...thk->...qhk", weight_BxHxTxT, v_BxTxHxK)
        return dense(features=self.config.width, axis=(-2, -1), name="out")(out_BxTxHxK)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    config: Config

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        config, dense, norm = self.config, dense_layer(self.config), norm_layer(self.config)
        x_BxTxD += Attention(config, name="attention")(norm(name="attention_norm")(x_BxTxD))
        h_BxTxF = dense(features=config.expansion * config.width, name="up")(norm(name="mlp_norm")(x_BxTxD))
        return x_BxTxD + dense(features=config.width, name="down")(nn.gelu(h_BxTxF))


class Transformer(nn.Module):
    """From tokens to the logits of the token after each."""

    config: Config

    @nn.compact
    def __call__(self, token_BxT: jax.Array) -> jax.Array:
        config, dtype = self.config, compute_dtype(self.config.dtype)
        init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)
        embed = nn.Embed(config.vocab, config.width, embedding_init=init, dtype=dtype, name="embed")
        position_TxD = self.param("positions", init, (config.seq_len, config.width))

        x_BxTxD = embed(token_BxT)
        x_BxTxD += jnp.broadcast_to(position_TxD.astype(dtype), x_BxTxD.shape)
        x_BxTxD = run_blocks(Block, config, x_BxTxD)
        return embed.attend(norm_layer(config)(name="final_norm")(x_BxTxD))


def dense_layer(config: Config) -> Any:
    """``nn.DenseGeneral`` as this family has it."""
    init = nn.initializers.xavier_uniform()
    return partial(nn.DenseGeneral, use_bias=config.bias, kernel_init=init, dtype=compute_dtype(config.dtype))


def norm_layer(config: Config) -> Any:
    """``nn.LayerNorm`` as this family has it."""
    dtype = compute_dtype(config.dtype)
    return partial(nn.LayerNorm, use_bias=config.bias, epsilon=config.epsilon, dtype=dtype)


def make_problem(name: str, config: Config) -> Problem:
    """Next-token prediction on random tokens."""
    description = f"decoder-only transformer, {config.layers} layers, D={config.width}, T={config.seq_len}"
    return next_token_problem(name, config, Transformer(config), description)
