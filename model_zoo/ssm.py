"""A language model of selective state-space layers after Mamba (Gu and Dao, 2023), without its short convolution.

A layer keeps, for each of E channels, S numbers that decay at rates of their own. How much of the input is written to
them, and how long it stays, depends on the input. The recurrence is linear, so an associative scan runs it in parallel.

In plain JAX: parameters are a dict, and the model is written for one example; ``jnp.vectorize`` adds the batch.
"""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from model_zoo import DType, compute_dtype, mean_cross_entropy, random_tokens
from pegprof.models.problem import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The options of the family, and the axes that they are the lengths of."""

    seq_len: int  # T
    layers: int  # N
    width: int  # D
    expansion: int = 2  # E = expansion · D
    state: int = 16  # S
    vocab: int  # V
    dtype: DType = "float32"  # of the computation; parameters are float32
    remat: bool = False  # keep only the input of each layer for the backward pass


CONFIGS = {"ssm-tiny": Config(seq_len=128, layers=2, width=64, vocab=256)}


def init_layer(config: Config, key: jax.Array) -> dict[str, jax.Array]:
    """Steps of 0.001 to 0.1 and decays of 1 to S a unit of step, as Mamba has them: memories of 1 to 1000 positions."""
    D, E, S = config.width, config.expansion * config.width, config.state
    keys = iter(jax.random.split(key, 7))
    step_E = jnp.exp(jax.random.uniform(next(keys), (E,), jnp.float32, math.log(0.001), math.log(0.1)))
    return {
        "norm": jnp.ones(D, jnp.float32),
        "input": _dense(next(keys), D, E),
        "gate": _dense(next(keys), D, E),
        "step": _dense(next(keys), E, E),
        "step_bias": jnp.log(jnp.expm1(step_E)),  # so that softplus gives the step
        "write": _dense(next(keys), E, S),
        "read": _dense(next(keys), E, S),
        "log_decay": jnp.log(jnp.broadcast_to(jnp.arange(1, S + 1, dtype=jnp.float32), (E, S))),
        "skip": jnp.ones(E, jnp.float32),
        "output": _dense(next(keys), E, D),
    }


def init_params(config: Config, key: jax.Array) -> dict[str, Any]:
    """The parameters of the whole model."""
    embed_key, layers_key = jax.random.split(key)
    layer_keys = jax.random.split(layers_key, config.layers)
    return {
        # Transposed: the rows of the embedding are also the columns of the logits.
        "embed": _dense(embed_key, config.width, config.vocab).T,
        "layers": [init_layer(config, layer_keys[n]) for n in range(config.layers)],
        "final_norm": jnp.ones(config.width, jnp.float32),
    }


def selective_scan(params: dict[str, jax.Array], u_TxE: jax.Array) -> jax.Array:
    """h_t = exp(-step_t · decay) · h_{t-1} + step_t · u_t · write_t, and of that y_t = h_t · read_t + skip · u_t."""
    step_TxE = jax.nn.softplus(u_TxE @ params["step"] + params["step_bias"][None])
    write_TxS, read_TxS = u_TxE @ params["write"], u_TxE @ params["read"]
    kept_TxExS = jnp.exp(-step_TxE[..., None] * jnp.exp(params["log_decay"])[None])
    added_TxExS = (step_TxE * u_TxE)[..., None] * write_TxS[:, None]

    def combine(left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return left[0] * right[0], left[1] * right[0] + right[1]

    _, h_TxExS = jax.lax.associative_scan(combine, (kept_TxExS, added_TxExS))
    return jnp.einsum("tes,ts->te", h_TxExS, read_TxS) + params["skip"][None] * u_TxE


def run_layer(params: dict[str, jax.Array], x_TxD: jax.Array) -> jax.Array:
    """x + a gated state-space layer of norm(x)."""
    y_TxD = rms_norm(params["norm"], x_TxD)
    y_TxE = selective_scan(params, jax.nn.silu(y_TxD @ params["input"]))
    return x_TxD + (y_TxE * jax.nn.silu(y_TxD @ params["gate"])) @ params["output"]


def rms_norm(scale_D: jax.Array, x_TxD: jax.Array) -> jax.Array:
    """x / rms(x), scaled."""
    return x_TxD * jax.lax.rsqrt(jnp.mean(jnp.square(x_TxD), axis=-1, keepdims=True) + 1e-6) * scale_D[None]


def next_token_logits(config: Config, params: dict[str, Any], token_T: jax.Array) -> jax.Array:
    """From the tokens of one example to the logits of the token after each."""
    dtype = compute_dtype(config.dtype)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    layer = jax.checkpoint(run_layer) if config.remat else run_layer
    x_TxD = params["embed"][token_T]
    for layer_params in params["layers"]:
        x_TxD = layer(layer_params, x_TxD)
    return rms_norm(params["final_norm"], x_TxD) @ params["embed"].T


def _dense(key: jax.Array, inputs: int, outputs: int) -> jax.Array:
    return jax.random.normal(key, (inputs, outputs), jnp.float32) / inputs**0.5


def make_problem(name: str, config: Config) -> Problem:
    """Next-token prediction on random tokens."""

    def loss(params: Any, token_BxT1: jax.Array) -> jax.Array:
        logits = jnp.vectorize(partial(next_token_logits, config, params), signature="(t)->(t,v)")
        return mean_cross_entropy(logits(token_BxT1[..., :-1]), token_BxT1[..., 1:])

    return Problem(
        name=name,
        init=partial(init_params, config),
        loss=loss,
        batch=random_tokens(config),
        description=f"selective state-space model, {config.layers} layers, D={config.width}, T={config.seq_len}",
        options=dataclasses.asdict(config),
        keep_batch_dim=False,
    )
