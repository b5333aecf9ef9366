"""The model zoo: one file a family, and here the little that families share.

A file has a frozen ``Config`` whose fields are the model's options, ``CONFIGS``, a literal dict from names to configs,
and ``make_problem(name, config)``. Importing it registers nothing: a new file or a new entry is a new model.
Losses also take a bare example: the axis B of an array's name is then absent.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from pegprof.errors import PegprofError

DType = Literal["float32", "bfloat16", "float16", "float64"]


def compute_dtype(name: DType) -> jnp.dtype:
    """The dtype that a model computes in; float64 is refused where JAX would quietly take float32."""
    if name == "float64" and not jax.config.read("jax_enable_x64"):
        raise PegprofError("dtype float64 needs JAX's 64-bit mode", hint="set JAX_ENABLE_X64=1")
    return jnp.dtype(name)


def mean_cross_entropy(logits: Any, labels: jax.Array) -> jax.Array:
    """The mean over all labels, in float32 at least. The classes are the last axis of ``logits``."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))
