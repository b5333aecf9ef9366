"""The table of models that the benchmarks run: small, one for each kind of gradient site, each a ``pegprof.Problem``.

The sizes let a run of one be milliseconds to a second on two cores. Losses also take a bare example: the axis B of an
array's name is then absent, and every axis is counted from the end.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from model_zoo import mean_cross_entropy
from pegprof.errors import PegprofError, nearest
from pegprof.models.problem import Problem, load_problem, zoo_names

IMAGE_SHAPE = (32, 32, 3)
CLASSES = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A problem and the batch that it is measured at. ``kinds`` is what the bars of ``engine.py`` go by."""

    name: str
    problem: Problem
    batch: int
    kinds: frozenset[str] = frozenset()


def find_models(names: str, *, batch: int | None = None) -> list[Model]:
    """The models that a comma-separated list names: of the table, else what ``load_problem`` knows."""
    models = [_find_model(name.strip()) for name in names.split(",")]
    return [dataclasses.replace(model, batch=batch) for model in models] if batch else models


def _find_model(name: str) -> Model:
    if name in MODELS:
        return MODELS[name]()
    if ":" not in name and name not in zoo_names():
        raise PegprofError(f"no model is called {name!r}", hint=nearest(name, [*MODELS, *zoo_names()]))
    return Model(name=name, problem=load_problem(name), batch=16)


class SeparableCNN(nn.Module):
    """A 3×3 convolution, then (3×3 depthwise, 1×1, ReLU, 2×2 average) × 3, then the mean over positions to a head."""

    width: int = 32

    @nn.compact
    def __call__(self, x_BxHxWxC: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(self.width, kernel_size=(3, 3))(x_BxHxWxC))
        for layer in range(3):
            x = nn.Conv(x.shape[-1], kernel_size=(3, 3), feature_group_count=x.shape[-1])(x)
            x = nn.relu(nn.Conv(self.width * 2 ** (layer + 1), kernel_size=(1, 1))(x))
            x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        return nn.Dense(CLASSES)(jnp.mean(x, axis=(-3, -2)))


class ResidualBlock(nn.Module):
    """x + conv(relu(norm(conv(relu(norm(x)))))), the way around by a 1×1 convolution where shapes differ."""

    width: int
    stride: int

    @nn.compact
    def __call__(self, x_BxHxWxC: jax.Array) -> jax.Array:
        strides = (self.stride, self.stride)
        h = nn.relu(_group_norm()(x_BxHxWxC))
        around = x_BxHxWxC
        if self.stride > 1 or x_BxHxWxC.shape[-1] != self.width:
            around = nn.Conv(self.width, kernel_size=(1, 1), strides=strides, use_bias=False)(h)
        h = nn.Conv(self.width, kernel_size=(3, 3), strides=strides, use_bias=False)(h)
        h = nn.Conv(self.width, kernel_size=(3, 3), use_bias=False)(nn.relu(_group_norm()(h)))
        return around + h


class ResNet(nn.Module):
    """Pre-activation residual network: three stages of two blocks, GroupNorm throughout."""

    width: int = 16

    @nn.compact
    def __call__(self, x_BxHxWxC: jax.Array) -> jax.Array:
        x = nn.Conv(self.width, kernel_size=(3, 3), use_bias=False)(x_BxHxWxC)
        for stage in range(3):
            for block in range(2):
                x = ResidualBlock(self.width * 2**stage, stride=2 if stage and not block else 1)(x)
        x = nn.relu(_group_norm()(x))
        return nn.Dense(CLASSES)(jnp.mean(x, axis=(-3, -2)))


def _group_norm() -> nn.GroupNorm:
    # By default flax takes the first axis for the batch, which a bare example does not have.
    return nn.GroupNorm(num_groups=8, reduction_axes=(-3, -2, -1))


class ViT(nn.Module):
    """Patches of 4×4, learned positions, pre-LN blocks with biases, the mean over positions to a head."""

    width: int = 128  # D
    layers: int = 4
    heads: int = 4
    patch: int = 4

    @nn.compact
    def __call__(self, x_BxHxWxC: jax.Array) -> jax.Array:
        size = (self.patch, self.patch)
        x = nn.Conv(self.width, kernel_size=size, strides=size, padding="VALID")(x_BxHxWxC)
        x_BxTxD = x.reshape(*x.shape[:-3], -1, self.width)
        x_BxTxD += self.param("positions", nn.initializers.normal(0.02), x_BxTxD.shape[-2:])
        for _ in range(self.layers):
            x_BxTxD += nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x_BxTxD))
            x_BxTxD += nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x_BxTxD))))
        return nn.Dense(CLASSES)(jnp.mean(nn.LayerNorm()(x_BxTxD), axis=-2))


def _image_problem(name: str, module: nn.Module) -> Problem:
    """Classification of random images."""

    def batch(key: jax.Array, B: int) -> dict[str, jax.Array]:
        image_key, label_key = jax.random.split(key)
        return {
            "image": jax.random.normal(image_key, (B, *IMAGE_SHAPE)),
            "label": jax.random.randint(label_key, (B,), 0, CLASSES),
        }

    return Problem(
        name=name,
        init=lambda key: module.lazy_init(key, jax.ShapeDtypeStruct(IMAGE_SHAPE, jnp.float32))["params"],
        loss=lambda params, batch: mean_cross_entropy(module.apply({"params": params}, batch["image"]), batch["label"]),
        batch=batch,
        keep_batch_dim=False,
    )


def _lstm_problem(name: str, *, seq_len: int = 64, inputs: int = 128, width: int = 256) -> Problem:
    """An LSTM with one kernel for all gates, a scan over time, and a head on every state; plain JAX."""

    def init(key: jax.Array) -> dict[str, jax.Array]:
        kernel_key, head_key = jax.random.split(key)
        fan_in = inputs + width
        return {
            "kernel": jax.random.normal(kernel_key, (fan_in, 4 * width)) / fan_in**0.5,
            "bias": jnp.zeros(4 * width),
            "head": jax.random.normal(head_key, (width, CLASSES)) / width**0.5,
        }

    def loss(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
        x_BxTxI = batch["x"]

        def step(state: tuple[jax.Array, jax.Array], x_BxI: jax.Array) -> tuple[Any, jax.Array]:
            h, c = state
            gates = jnp.concatenate([x_BxI, h], axis=-1) @ params["kernel"] + params["bias"]
            i, f, g, o = jnp.split(gates, 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros((*x_BxTxI.shape[:-2], width))
        _, h_TxBxD = jax.lax.scan(step, (zeros, zeros), jnp.moveaxis(x_BxTxI, -2, 0))
        return mean_cross_entropy(jnp.moveaxis(h_TxBxD, 0, -2) @ params["head"], batch["label"])

    def batch(key: jax.Array, B: int) -> dict[str, jax.Array]:
        x_key, label_key = jax.random.split(key)
        return {
            "x": jax.random.normal(x_key, (B, seq_len, inputs)),
            "label": jax.random.randint(label_key, (B, seq_len), 0, CLASSES),
        }

    return Problem(name=name, init=init, loss=loss, batch=batch, keep_batch_dim=False)


def _zoo(name: str, zoo_name: str, *, batch: int, kinds: str = "", **options: Any) -> Callable[[], Model]:
    """An entry that is a model of the zoo with options."""

    def make() -> Model:
        problem = dataclasses.replace(load_problem(zoo_name, options), name=name)
        return Model(name=name, problem=problem, batch=batch, kinds=frozenset(kinds.split()))

    return make


def _own(name: str, make_problem: Callable[[str], Problem], *, batch: int, kinds: str = "") -> Callable[[], Model]:
    return lambda: Model(name=name, problem=make_problem(name), batch=batch, kinds=frozenset(kinds.split()))


def transformer(name: str, *, batch: int, kinds: str = "", **options: Any) -> Callable[[], Model]:
    """An entry that is the zoo's transformer: 4 layers, D=256, a vocabulary of 256, unless told otherwise."""
    sizes = {"layers": 4, "width": 256, "heads": 4, "vocab": 256} | options
    return _zoo(name, "transformer-tiny", batch=batch, kinds=f"transformer {kinds}", **sizes)


MODELS: dict[str, Callable[[], Model]] = {
    "dense": _zoo("dense", "mlp", batch=256, kinds="dense"),
    "cnn": _zoo("cnn", "cnn", batch=64, kinds="convolution"),
    "depthwise": _own("depthwise", lambda name: _image_problem(name, SeparableCNN()), batch=64, kinds="convolution"),
    "long": transformer("long", batch=16, kinds="T≥D", seq_len=256),
    "short": transformer("short", batch=64, seq_len=32),
    "vocabulary": transformer("vocabulary", batch=16, seq_len=64, layers=2, width=128, vocab=16000),
    "scanned": transformer("scanned", batch=16, kinds="scanned", seq_len=128, scan_layers=True, remat=True),
    "lstm": _own("lstm", _lstm_problem, batch=32, kinds="recurrent"),
    "vit": _own("vit", lambda name: _image_problem(name, ViT()), batch=32),
    "resnet": _own("resnet", lambda name: _image_problem(name, ResNet()), batch=32),
}
