"""What the experiments train: small models on real data that needs no download.

``digits`` is a perceptron on the 8×8 digits that come with scikit-learn; ``bytes`` a small transformer on the source of
Python's own standard library, byte by byte; ``short-bytes`` the same on half as many at a time. A task gives batches of
what is trained on, and one batch that is not.
"""

import dataclasses
import functools
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pegprof.models.problem import load_problem

HELD_OUT = 0.1  # the share of the data that is not trained on
EVALUATED = 512  # examples of it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A model and its data. ``draw`` gives a batch: of the training data, or of what is held out."""

    name: str
    init: Callable[[jax.Array], Any]
    loss: Callable[[Any, Any], jax.Array]
    draw: Callable[[np.random.Generator, int, bool], Any]
    keep_batch_dim: bool

    def held_out(self) -> Any:
        """The same examples whenever it is asked."""
        return self.draw(np.random.default_rng(0), EVALUATED, True)


@functools.cache
def digits() -> Task:
    """64-64-10 with gelu, cross-entropy."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x_NxD, label_N = (data.data / 16).astype(np.float32), data.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(x_NxD))
    cut = round(len(order) * (1 - HELD_OUT))

    def init(key: jax.Array) -> Any:
        first, second = jax.random.split(key)
        return {
            "in": {"kernel": jax.random.normal(first, (64, 64)) / 8, "bias": jnp.zeros(64)},
            "out": {"kernel": jax.random.normal(second, (64, 10)) / 8, "bias": jnp.zeros(10)},
        }

    def loss(params: Any, batch: Any) -> jax.Array:
        h_BxF = jax.nn.gelu(batch["x"] @ params["in"]["kernel"] + params["in"]["bias"])
        logits_BxC = h_BxF @ params["out"]["kernel"] + params["out"]["bias"]
        return optax.softmax_cross_entropy_with_integer_labels(logits_BxC, batch["label"]).mean()

    def draw(rng: np.random.Generator, B: int, held_out: bool) -> Any:
        picked = rng.choice(order[cut:] if held_out else order[:cut], size=B)
        return {"x": jnp.asarray(x_NxD[picked]), "label": jnp.asarray(label_N[picked])}

    return Task(name="digits", init=init, loss=loss, draw=draw, keep_batch_dim=True)


@functools.cache
def library_bytes(T: int) -> Task:
    """The zoo's ``transformer-tiny`` on T bytes at a time of all files at the top of the standard library."""
    problem = load_problem("transformer-tiny", {"seq_len": T})
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(path.read_bytes() for path in files), np.uint8)
    cut = round(len(text) * (1 - HELD_OUT))

    def draw(rng: np.random.Generator, B: int, held_out: bool) -> Any:
        part = text[cut:] if held_out else text[:cut]
        starts = rng.integers(len(part) - T, size=(B, 1))
        return jnp.asarray(part[starts + np.arange(T + 1)].astype(np.int32))

    return Task(
        name=f"bytes-{T}", init=problem.init, loss=problem.loss, draw=draw, keep_batch_dim=problem.keep_batch_dim
    )


TASKS: Mapping[str, Callable[[], Task]] = {
    "digits": digits,
    "bytes": lambda: library_bytes(64),
    "short-bytes": lambda: library_bytes(32),
}
