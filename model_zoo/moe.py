"""The transformer of ``transformer.py`` with experts in place of its MLPs: each token goes to the best two of eight.

Tokens compete for the slots of an expert within their own example only, so that the examples of a batch leave each
other alone; and an expert fills its slots in the order of time, so that no token depends on a later one.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from model_zoo import compute_dtype, mean_cross_entropy, random_tokens, run_blocks, transformer
from pegprof.errors import PegprofError
from pegprof.models.problem import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(transformer.Config):
    """The options of the family, and the axes that they are the lengths of; F is the width of one expert's MLP."""

    experts: int = 8  # E
    chosen: int = 2  # M, the experts of a token
    capacity: float = 1.25  # C slots of an expert are this multiple of an even share of the choices
    balance: float = 0.01  # the weight of the loss that asks for an even share

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chosen > self.experts:
            raise PegprofError(f"a token cannot choose {self.chosen} of {self.experts} experts")


CONFIGS = {"moe-tiny": Config(seq_len=128, layers=2, width=64, heads=4, vocab=256)}


class Experts(nn.Module):
    """The experts' outputs, weighted, and how uneven their shares are: 1 is even, E is all tokens to one expert."""

    config: Config

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array) -> tuple[jax.Array, jax.Array]:
        config, dtype = self.config, compute_dtype(self.config.dtype)
        (T, D), E, F = x_BxTxD.shape[-2:], config.experts, config.expansion * config.width
        C = min(T, math.ceil(config.capacity * config.chosen * T / E))
        init = nn.initializers.xavier_uniform(batch_axis=(0,))
        up_ExDxF = self.param("up", init, (E, D, F)).astype(dtype)
        down_ExFxD = self.param("down", init, (E, F, D)).astype(dtype)

        # A choice between experts is a discontinuity: the scores that decide it are in float32 at least.
        router = nn.Dense(E, use_bias=False, dtype=jnp.promote_types(dtype, jnp.float32), name="router")
        score_BxTxE = router(x_BxTxD)
        best_BxTxM, expert_BxTxM = jax.lax.top_k(score_BxTxE, config.chosen)
        choice_BxTxMxE = jax.nn.one_hot(expert_BxTxM, E, dtype=score_BxTxE.dtype)
        weight_BxTxE = jnp.einsum("...tm,...tme->...te", jax.nn.softmax(best_BxTxM), choice_BxTxMxE)
        chosen_BxTxE = jnp.sum(choice_BxTxMxE, axis=-2)

        # The first slot is 0; a token that finds the slots of an expert taken, C or more, gets a row of zeros there.
        slot_BxTxE = (jnp.cumsum(chosen_BxTxE, axis=-2) - chosen_BxTxE).astype(jnp.int32)
        sent_BxTxExC = jax.nn.one_hot(slot_BxTxE, C, dtype=dtype) * chosen_BxTxE.astype(dtype)[..., None]
        x_BxExCxD = jnp.einsum("...tec,...td->...ecd", sent_BxTxExC, x_BxTxD)
        h_BxExCxF = nn.gelu(jnp.einsum("...ecd,edf->...ecf", x_BxExCxD, up_ExDxF))
        y_BxExCxD = jnp.einsum("...ecf,efd->...ecd", h_BxExCxF, down_ExFxD)
        y_BxTxD = jnp.einsum("...tec,...te,...ecd->...td", sent_BxTxExC, weight_BxTxE.astype(dtype), y_BxExCxD)

        # Fedus et al. (2021): the share of choices, which has no gradient, times the mean probability, which has.
        share_BxE = jnp.mean(chosen_BxTxE, axis=-2) / config.chosen
        probability_BxE = jnp.mean(jax.nn.softmax(score_BxTxE), axis=-2)
        return y_BxTxD, E * jnp.sum(share_BxE * probability_BxE, axis=-1)


class Block(nn.Module):
    """x + attention(norm(x)), then x + experts(norm(x)); the unevenness of the layers adds up beside x."""

    config: Config

    @nn.compact
    def __call__(self, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x_BxTxD, uneven_B = carry
        config, norm = self.config, transformer.norm_layer(self.config)
        x_BxTxD += transformer.Attention(config, name="attention")(norm(name="attention_norm")(x_BxTxD))
        y_BxTxD, more_B = Experts(config, name="experts")(norm(name="experts_norm")(x_BxTxD))
        return x_BxTxD + y_BxTxD, uneven_B + more_B


class MoE(nn.Module):
    """From tokens to the logits of the token after each, and the unevenness of all layers."""

    config: Config

    @nn.compact
    def __call__(self, token_BxT: jax.Array) -> tuple[jax.Array, jax.Array]:
        config, dtype = self.config, compute_dtype(self.config.dtype)
        init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)
        embed = nn.Embed(config.vocab, config.width, embedding_init=init, dtype=dtype, name="embed")
        position_TxD = self.param("positions", init, (config.seq_len, config.width))
        x_BxTxD = embed(token_BxT)
        x_BxTxD += jnp.broadcast_to(position_TxD.astype(dtype), x_BxTxD.shape)

        zero_B = jnp.zeros(token_BxT.shape[:-1], jnp.promote_types(dtype, jnp.float32))
        x_BxTxD, uneven_B = run_blocks(Block, config, (x_BxTxD, zero_B))
        return embed.attend(transformer.norm_layer(config)(name="final_norm")(x_BxTxD)), uneven_B


def make_problem(name: str, config: Config) -> Problem:
    """Next-token prediction on random tokens."""
    model = MoE(config)

    def init(key: jax.Array) -> Any:
        return model.lazy_init(key, jax.ShapeDtypeStruct((config.seq_len,), jnp.int32))["params"]

    def loss(params: Any, token_BxT1: jax.Array) -> jax.Array:
        output: Any = model.apply({"params": params}, token_BxT1[..., :-1])
        logits_BxTxV, uneven_B = output
        return mean_cross_entropy(logits_BxTxV, token_BxT1[..., 1:]) + config.balance * jnp.mean(uneven_B)

    sizes = f"{config.layers} layers, D={config.width}, T={config.seq_len}"
    return Problem(
        name=name,
        init=init,
        loss=loss,
        batch=random_tokens(config),
        description=f"transformer, {config.chosen} of {config.experts} experts a token, {sizes}",
        options=dataclasses.asdict(config),
        keep_batch_dim=False,
    )
