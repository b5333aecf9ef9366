"""A model for pegprof: a small classifier of random vectors, until you make it yours.

pegprof run my_model.py:model --batch 32
pegprof run my_model.py:model --batch 32 --set width=512
"""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import pegprof


def model(inputs: int = 64, width: int = 256, classes: int = 10):
    """What stands behind the colon on the command line. Its arguments are the options that --set knows."""

    # The parameters: a pytree of floating-point arrays. Everything random comes from the key, and from nowhere else.
    def init(key):
        hidden_key, output_key = jax.random.split(key)
        return {
            "hidden": jax.random.normal(hidden_key, (inputs, width)) / inputs**0.5,
            "output": jax.random.normal(output_key, (width, classes)) / width**0.5,
        }

    # The loss that you train with: one number, the mean over the examples of a batch of any size.
    def loss(params, batch):
        hidden = jax.nn.relu(batch["x"] @ params["hidden"])
        logits = hidden @ params["output"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    # The data: every array has one row for each of the B examples. Random numbers will do.
    def batch(key, B):
        x_key, label_key = jax.random.split(key)
        return {
            "x": jax.random.normal(x_key, (B, inputs)),
            "label": jax.random.randint(label_key, (B,), 0, classes),
        }

    return pegprof.Problem(name="my_model", init=init, loss=loss, batch=batch, description="two dense layers")


def flax_model(width: int = 256):
    """The same for a Flax module: its loss, and one example in whose image batches are drawn. It runs as well."""

    def loss(model, batch):
        return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["label"]).mean()

    # The largest label is 9. For tokens, write numpy.full(length, vocabulary - 1). For nnx there is from_nnx.
    module = nn.Sequential([nn.Dense(width), nn.relu, nn.Dense(10)])
    return pegprof.from_flax(module, loss, example={"x": jnp.zeros(64), "label": 9})
