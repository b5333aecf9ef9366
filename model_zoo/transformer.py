"""A decoder-only transformer after NanoDO: pre-LN, no biases, tied embedding, learned positions, GELU, causal.

Attention is the plain softmax of all T×T scores, without a fused kernel, so that what is measured is what is written.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from model_zoo import DType, compute_dtype, mean_cross_entropy
from pegprof.errors import PegprofError
from pegprof.problem import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The options of the family, and the axes that they are the lengths of. K = D / H is the width of a head."""

    seq_len: int  # T
    layers: int  # N
    width: int  # D
    heads: int  # H
    expansion: int = 4  # F = expansion · D
    vocab: int  # V
    dtype: DType = "float32"  # of the computation; parameters are float32
    remat: bool = False  # keep only the input of each layer for the backward pass
    scan_layers: bool = False  # one layer's code, its parameters stacked along a leading axis N

    def __post_init__(self) -> None:
        if self.width % self.heads:
            hint = f"set heads to a divisor of {self.width}"
            raise PegprofError(f"width {self.width} does not divide into {self.heads} heads", hint=hint)


CONFIGS = {
    "transformer-tiny": Config(seq_len=128, layers=2, width=64, heads=4, vocab=256),
    "transformer-151m": Config(seq_len=512, layers=12, width=1024, heads=16, vocab=32100),
}


class Attention(nn.Module):
    """Causal multi-head attention."""

    config: Config

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        H, K = self.config.heads, self.config.width // self.config.heads
        dense = _dense(self.config)
        q_BxTxHxK = dense(features=(H, K), name="query")(x_BxTxD) / K**0.5
        k_BxTxHxK = dense(features=(H, K), name="key")(x_BxTxD)
        v_BxTxHxK = dense(features=(H, K), name="value")(x_BxTxD)

        score_BxHxTxT = jnp.einsum("...qhk,...thk->...hqt", q_BxTxHxK, k_BxTxHxK)
        score_BxHxTxT = score_BxHxTxT.astype(jnp.promote_types(score_BxHxTxT.dtype, jnp.float32))
        T = x_BxTxD.shape[-2]
        past_BxHxTxT = jnp.broadcast_to(jnp.tri(T, dtype=bool), score_BxHxTxT.shape)
        score_BxHxTxT = jnp.where(past_BxHxTxT, score_BxHxTxT, jnp.finfo(score_BxHxTxT.dtype).min)
        weight_BxHxTxT = jax.nn.softmax(score_BxHxTxT).astype(v_BxTxHxK.dtype)

        out_BxTxHxK = jnp.einsum("...hqt,...thk->...qhk", weight_BxHxTxT, v_BxTxHxK)
        return dense(features=self.config.width, axis=(-2, -1), name="out")(out_BxTxHxK)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    config: Config

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        config, dense, norm = self.config, _dense(self.config), _norm(self.config)
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
        x_BxTxD = _blocks(config, x_BxTxD)
        return embed.attend(_norm(config)(name="final_norm")(x_BxTxD))


def _blocks(config: Config, x_BxTxD: jax.Array) -> jax.Array:
    """The N blocks, called from within ``Transformer``."""
    # Inside a scan nothing can be merged with the forward pass, so the barriers against that are not needed.
    block = nn.remat(Block, prevent_cse=not config.scan_layers) if config.remat else Block
    if not config.scan_layers:
        for n in range(config.layers):
            x_BxTxD = block(config, name=f"block_{n}")(x_BxTxD)
        return x_BxTxD
    scan = nn.scan(
        lambda layer, x_BxTxD: (layer(x_BxTxD), None),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=config.layers,
    )
    return scan(block(config, name="blocks"), x_BxTxD)[0]


def _dense(config: Config) -> Any:
    init = nn.initializers.xavier_uniform()
    return partial(nn.DenseGeneral, use_bias=False, kernel_init=init, dtype=compute_dtype(config.dtype))


def _norm(config: Config) -> Any:
    return partial(nn.LayerNorm, use_bias=False, dtype=compute_dtype(config.dtype))


def make_problem(name: str, config: Config) -> Problem:
    """Next-token prediction on random tokens: T + 1 tokens an example, so that T positions are processed."""
    model = Transformer(config)

    def init(key: jax.Array) -> Any:
        return model.lazy_init(key, jax.ShapeDtypeStruct((config.seq_len,), jnp.int32))["params"]

    def loss(params: Any, token_BxT1: jax.Array) -> jax.Array:
        logits_BxTxV = model.apply({"params": params}, token_BxT1[..., :-1])
        return mean_cross_entropy(logits_BxTxV, token_BxT1[..., 1:])

    def batch(key: jax.Array, B: int) -> jax.Array:
        return jax.random.randint(key, (B, config.seq_len + 1), 0, config.vocab)

    return Problem(
        name=name,
        init=init,
        loss=loss,
        batch=batch,
        description=f"decoder-only transformer, {config.layers} layers, D={config.width}, T={config.seq_len}",
        options=dataclasses.asdict(config),
        keep_batch_dim=False,
    )
