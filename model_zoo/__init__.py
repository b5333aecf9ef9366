"""The model zoo: one file a family, and here the little that families share.

A file has a frozen ``Config`` whose fields are the model's options, ``CONFIGS``, a literal dict from names to configs,
and ``make_problem(name, config)``. Importing it registers nothing: a new file or a new entry is a new model.
Losses also take a bare example: the axis B of an array's name is then absent.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from pegprof.errors import PegprofError
from pegprof.models.problem import Problem

DType = Literal["float32", "bfloat16", "float16", "float64"]
Batch = Callable[[jax.Array, int], Any]


# Options.


def compute_dtype(name: DType) -> jnp.dtype:
    """The dtype that a model computes in; float64 is refused where JAX would quietly take float32."""
    if name == "float64" and not jax.config.read("jax_enable_x64"):
        raise PegprofError("dtype float64 needs JAX's 64-bit mode", hint="set JAX_ENABLE_X64=1")
    return jnp.dtype(name)


def check_divides(config: Any, whole: str, parts: str) -> None:
    """Refuses a config whose option ``parts``, a number of equal parts, does not divide its option ``whole``."""
    size, number = getattr(config, whole), getattr(config, parts)
    if number < 1 or size % number:
        hint = f"set {parts} to a divisor of {size}"
        raise PegprofError(f"{whole} {size} does not divide into {number} {parts}", hint=hint)


# Parts of models.


def run_blocks(block: Any, config: Any, x: Any) -> Any:
    """N blocks of a linen model one after the other, called from within it. ``x`` is what each takes and returns."""
    # Inside a scan nothing can be merged with the forward pass, so the barriers against that are not needed.
    block = nn.remat(block, prevent_cse=not config.scan_layers) if config.remat else block
    if not config.scan_layers:
        for n in range(config.layers):
            x = block(config, name=f"block_{n}")(x)
        return x
    scan = nn.scan(
        lambda layer, x: (layer(x), None),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=config.layers,
    )
    return scan(block(config, name="blocks"), x)[0]


def causal_softmax(score_BxHxTxT: jax.Array) -> jax.Array:
    """The weights of each position, the second axis from the end, over itself and its past; in float32 at least."""
    score_BxHxTxT = score_BxHxTxT.astype(jnp.promote_types(score_BxHxTxT.dtype, jnp.float32))
    past_BxHxTxT = jnp.broadcast_to(jnp.tri(score_BxHxTxT.shape[-1], dtype=bool), score_BxHxTxT.shape)
    return jax.nn.softmax(jnp.where(past_BxHxTxT, score_BxHxTxT, jnp.finfo(score_BxHxTxT.dtype).min))


def mean_cross_entropy(logits: Any, labels: jax.Array) -> jax.Array:
    """The mean over all labels, in float32 at least. The classes are the last axis of ``logits``."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


# Data.


def image_shape(config: Any) -> tuple[int, int, int]:
    """H×W×C of one image; images are square."""
    return (config.image_size, config.image_size, config.channels)


def random_images(config: Any) -> Batch:
    """Images of normal pixels, and labels."""

    def batch(key: jax.Array, B: int) -> dict[str, jax.Array]:
        image_key, label_key = jax.random.split(key)
        return {
            "image": jax.random.normal(image_key, (B, *image_shape(config))),
            "label": jax.random.randint(label_key, (B,), 0, config.classes),
        }

    return batch


def random_tokens(config: Any) -> Batch:
    """T + 1 tokens an example, so that T positions are processed: each predicts the token after it."""
    return lambda key, B: jax.random.randint(key, (B, config.seq_len + 1), 0, config.vocab)


# Problems.


def next_token_problem(name: str, config: Any, model: nn.Module, description: str) -> Problem:
    """Next-token prediction on random tokens, by a linen model from tokens to logits."""

    def init(key: jax.Array) -> Any:
        return model.lazy_init(key, jax.ShapeDtypeStruct((config.seq_len,), jnp.int32))["params"]

    def loss(params: Any, token_BxT1: jax.Array) -> jax.Array:
        logits_BxTxV = model.apply({"params": params}, token_BxT1[..., :-1])
        return mean_cross_entropy(logits_BxTxV, token_BxT1[..., 1:])

    return _problem(name, config, init, loss, random_tokens(config), description)


def classification_problem(name: str, config: Any, model: nn.Module, description: str) -> Problem:
    """Classification of random images, by a linen model from images to logits."""

    def init(key: jax.Array) -> Any:
        return model.lazy_init(key, jax.ShapeDtypeStruct(image_shape(config), jnp.float32))["params"]

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        return mean_cross_entropy(model.apply({"params": params}, batch["image"]), batch["label"])

    return _problem(name, config, init, loss, random_images(config), description)


def _problem(name: str, config: Any, init: Any, loss: Any, batch: Batch, description: str) -> Problem:
    options = dataclasses.asdict(config)
    return Problem(
        name=name, init=init, loss=loss, batch=batch, description=description, options=options, keep_batch_dim=False
    )
