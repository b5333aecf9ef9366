"""A decoder-only transformer after Llama 3.2: RMSNorm, rotary positions, grouped queries, SwiGLU, tied embedding.

Attention is the plain softmax of all T×T scores, as in ``transformer.py``.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
    """The options of the family, and the axes that they are the lengths of.

    K = D / H is the width of a head. The queries of R = H / G heads share the keys and values of one.
    """

    seq_len: int  # T
    layers: int  # N
    width: int  # D
    heads: int  # H
    kv_heads: int  # G
    mlp_width: int  # F
    vocab: int  # V
    dtype: DType = "float32"  # of the computation; parameters are float32
    remat: bool = False  # keep only the input of each layer for the backward pass
    scan_layers: bool = False  # one layer's code, its parameters stacked along a leading axis N

    def __post_init__(self) -> None:
        check_divides(self, "width", "heads")
        check_divides(self, "heads", "kv_heads")


CONFIGS = {
    # Llama 3.2 takes up to 131072 positions; 1024 are as many as GPT-2 takes.
    "llama-1b": Config(seq_len=1024, layers=16, width=2048, heads=32, kv_heads=8, mlp_width=8192, vocab=128256),
}


def rotary_frequencies(K: int) -> np.ndarray:
    """Radians a position for each pair of a head's K entries: 500000^(-2i/K), the slow ones slowed further.

    Llama 3.1 stretched a context of 8192: a pair that makes less than one turn in it turns 32 times slower, one that
    makes more than four stays, and between the two it is a mixture.
    """
    frequency = 500000.0 ** -(np.arange(0, K, 2) / K)
    turns = frequency * 8192 / (2 * np.pi)
    kept = np.clip((turns - 1) / (4 - 1), 0, 1)
    return frequency * (kept + (1 - kept) / 32)


def rotate(x_BxTxHxK: jax.Array) -> jax.Array:
    """Turns entries i and i + K/2 of each head, as a pair, by an angle that grows with the position."""
    *_, T, _, K = x_BxTxHxK.shape
    angle_Tx1xI = np.arange(T)[:, None, None] * rotary_frequencies(K)
    left, right = jnp.split(x_BxTxHxK, 2, axis=-1)
    cos, sin = (jnp.broadcast_to(f(angle_Tx1xI).astype(left.dtype), left.shape) for f in (np.cos, np.sin))
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


class Attention(nn.Module):
    """Causal attention in which groups of heads share their keys and values."""

    config: Config

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        config, dense = self.config, _dense(self.config)
        H, G, K = config.heads, config.kv_heads, config.width // config.heads
        q_BxTxHxK = rotate(dense(features=(H, K), name="query")(x_BxTxD)) / K**0.5
        k_BxTxGxK = rotate(dense(features=(G, K), name="key")(x_BxTxD))
        v_BxTxGxK = dense(features=(G, K), name="value")(x_BxTxD)

        q_BxTxGxRxK = q_BxTxHxK.reshape(*x_BxTxD.shape[:-1], G, H // G, K)
        score_BxGxRxTxT = jnp.einsum("...qgrk,...tgk->...grqt", q_BxTxGxRxK, k_BxTxGxK)
        weight_BxGxRxTxT = causal_softmax(score_BxGxRxTxT).astype(v_BxTxGxK.dtype)
        out_BxTxGxRxK = jnp.einsum("...grqt,...tgk->...qgrk", weight_BxGxRxTxT, v_BxTxGxK)
        return dense(features=config.width, axis=(-2, -1), name="out")(out_BxTxGxRxK.reshape(q_BxTxHxK.shape))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    config: Config

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        config, dense, norm = self.config, _dense(self.config), _norm(self.config)
        x_BxTxD += Attention(config, name="attention")(norm(name="attention_norm")(x_BxTxD))
        y_BxTxD = norm(name="mlp_norm")(x_BxTxD)
        gate_BxTxF = nn.silu(dense(features=config.mlp_width, name="gate")(y_BxTxD))
        h_BxTxF = gate_BxTxF * dense(features=config.mlp_width, name="up")(y_BxTxD)
        return x_BxTxD + dense(features=config.width, name="down")(h_BxTxF)


class Llama(nn.Module):
    """From tokens to the logits of the token after each."""

    config: Config

    @nn.compact
    def __call__(self, token_BxT: jax.Array) -> jax.Array:
        config = self.config
        init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)
        dtype = compute_dtype(config.dtype)
        embed = nn.Embed(config.vocab, config.width, embedding_init=init, dtype=dtype, name="embed")
        x_BxTxD = run_blocks(Block, config, embed(token_BxT))
        return embed.attend(_norm(config)(name="final_norm")(x_BxTxD))


def _dense(config: Config) -> Any:
    init = nn.initializers.xavier_uniform()
    return partial(nn.DenseGeneral, use_bias=False, kernel_init=init, dtype=compute_dtype(config.dtype))


def _norm(config: Config) -> Any:
    return partial(nn.RMSNorm, epsilon=1e-5, dtype=compute_dtype(config.dtype))


def make_problem(name: str, config: Config) -> Problem:
    """Next-token prediction on random tokens."""
    description = f"Llama, {config.layers} layers, D={config.width}, T={config.seq_len}"
    return next_token_problem(name, config, Llama(config), description)
