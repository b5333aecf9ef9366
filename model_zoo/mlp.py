"""A multi-layer perceptron for flat inputs: T = 1, so that its parameters outweigh its activations."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from model_zoo import DType, compute_dtype, mean_cross_entropy
from pegprof.models.problem import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The options of the family, and the axes that they are the lengths of."""

    inputs: int = 784  # I
    width: int = 1024  # D
    layers: int = 2  # hidden ones
    classes: int = 10  # C
    dtype: DType = "float32"


CONFIGS = {"mlp": Config()}


class MLP(nn.Module):
    """I → D → ... → D → C with biases and ReLU."""

    config: Config

    @nn.compact
    def __call__(self, x_BxI: jax.Array) -> jax.Array:
        dtype = compute_dtype(self.config.dtype)
        x = x_BxI
        for _ in range(self.config.layers):
            x = nn.relu(nn.Dense(self.config.width, dtype=dtype)(x))
        return nn.Dense(self.config.classes, dtype=dtype)(x)


def make_problem(name: str, config: Config) -> Problem:
    """Classification of random vectors."""
    model = MLP(config)

    def init(key: jax.Array) -> Any:
        return model.lazy_init(key, jax.ShapeDtypeStruct((config.inputs,), jnp.float32))["params"]

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        return mean_cross_entropy(model.apply({"params": params}, batch["x"]), batch["label"])

    def batch(key: jax.Array, B: int) -> dict[str, jax.Array]:
        x_key, label_key = jax.random.split(key)
        return {
            "x": jax.random.normal(x_key, (B, config.inputs)),
            "label": jax.random.randint(label_key, (B,), 0, config.classes),
        }

    sizes = [config.inputs, *[config.width] * config.layers, config.classes]
    return Problem(
        name=name,
        init=init,
        loss=loss,
        batch=batch,
        description="perceptron " + "-".join(map(str, sizes)),
        options=dataclasses.asdict(config),
        keep_batch_dim=False,
    )
