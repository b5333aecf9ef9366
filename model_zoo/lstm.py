"""A language model of LSTM layers: the medium one of Zaremba et al. (2014), which has two, without its dropout."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from model_zoo import DType, compute_dtype, next_token_problem
from pegprof.models.problem import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The options of the family, and the axes that they are the lengths of. G = 4 · D: the four gates."""

    seq_len: int = 35  # T
    layers: int = 2
    width: int = 650  # D
    vocab: int = 10000  # V
    dtype: DType = "float32"  # of the computation; parameters are float32


CONFIGS = {"lstm": Config()}


class LSTM(nn.Module):
    """One layer: every state h of a sequence, from a state of zeros."""

    config: Config

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        D, dtype = self.config.width, compute_dtype(self.config.dtype)
        # What the inputs give to the gates needs no state: one product for all positions.
        input_BxTxG = nn.Dense(4 * D, dtype=dtype, name="input")(x_BxTxD)
        recurrent_DxG = self.param("recurrent", nn.initializers.lecun_normal(), (D, 4 * D)).astype(dtype)

        def step(state: tuple[jax.Array, jax.Array], input_BxG: jax.Array) -> tuple[Any, jax.Array]:
            h_BxD, c_BxD = state
            i_BxD, f_BxD, g_BxD, o_BxD = jnp.split(input_BxG + h_BxD @ recurrent_DxG, 4, axis=-1)
            c_BxD = nn.sigmoid(f_BxD) * c_BxD + nn.sigmoid(i_BxD) * jnp.tanh(g_BxD)
            h_BxD = nn.sigmoid(o_BxD) * jnp.tanh(c_BxD)
            return (h_BxD, c_BxD), h_BxD

        zero_BxD = jnp.zeros_like(input_BxTxG[..., 0, :D])
        _, h_TxBxD = jax.lax.scan(step, (zero_BxD, zero_BxD), jnp.moveaxis(input_BxTxG, -2, 0))
        return jnp.moveaxis(h_TxBxD, 0, -2)


class LanguageModel(nn.Module):
    """From tokens to the logits of the token after each."""

    config: Config

    @nn.compact
    def __call__(self, token_BxT: jax.Array) -> jax.Array:
        config, dtype = self.config, compute_dtype(self.config.dtype)
        x_BxTxD = nn.Embed(config.vocab, config.width, dtype=dtype, name="embed")(token_BxT)
        for n in range(config.layers):
            x_BxTxD = LSTM(config, name=f"lstm_{n}")(x_BxTxD)
        return nn.Dense(config.vocab, dtype=dtype, name="head")(x_BxTxD)


def make_problem(name: str, config: Config) -> Problem:
    """Next-token prediction on random tokens."""
    description = f"LSTM language model, {config.layers} layers, D={config.width}, T={config.seq_len}"
    return next_token_problem(name, config, LanguageModel(config), description)
