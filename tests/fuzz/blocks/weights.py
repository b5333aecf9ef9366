"""Ways to make a weight of a shape from parameters: shared, normalised, merged, cut out, put together."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.fuzz.grammar import Getter, Maker, Misfit, Shape, weight


@weight
def shared(make: Maker, shape: Shape, scale: float) -> Getter:
    """A parameter that another weight has already, its axes permuted or its entries reshaped."""
    known = make.scope.shareable()
    turned = [name for name, value in known.items() if sorted(value.shape) == sorted(shape)]
    reshaped = [name for name, value in known.items() if value.size == math.prod(shape)]
    if turned and make.rng.uniform() < 0.7:
        name = str(make.rng.choice(turned))
        orders = [o for o in _permutations(len(shape)) if tuple(known[name].shape[i] for i in o) == tuple(shape)]
        order = orders[int(make.rng.integers(len(orders)))]
        make.notes.append(f"{name} as {order}")
        return lambda context: jnp.transpose(context.params[name], order)
    if not reshaped:
        raise Misfit
    name, entries = str(make.rng.choice(reshaped)), make.option("order", "C", "F")
    make.notes.append(name)
    return lambda context: context.params[name].reshape(shape, order=entries)


def _permutations(n: int) -> list[tuple[int, ...]]:
    if n == 0:
        return [()]
    return [(*rest[:i], n - 1, *rest[i:]) for rest in _permutations(n - 1) for i in range(n)]


@weight
def normalised(make: Maker, shape: Shape, scale: float) -> Getter:
    """Weight norm: a direction and its length."""
    if not shape:
        raise Misfit
    v, g = make.parameter(*shape), make.parameter(shape[-1], scale=0.3)
    axes = tuple(range(len(shape) - 1))

    def get(context: Any) -> Any:
        direction = v(context) / jnp.sqrt(0.1 + jnp.sum(jnp.square(v(context)), axis=axes, keepdims=True))
        return direction * (1 + g(context))

    return get


@weight
def low_rank(make: Maker, shape: Shape, scale: float) -> Getter:
    """A matrix with a low-rank change merged into it."""
    if len(shape) < 2:
        raise Misfit
    rank, rows = int(make.rng.integers(1, 3)), math.prod(shape[:-1])
    w, a, b = make.parameter(*shape, scale=scale), make.parameter(rows, rank), make.parameter(rank, shape[-1])
    return lambda context: w(context) + scale * 0.5 * (a(context) @ b(context)).reshape(shape)


@weight
def sliced(make: Maker, shape: Shape, scale: float) -> Getter:
    """A part of a larger parameter; two parts of it, added."""
    if not shape:
        raise Misfit
    axis, extra = int(make.rng.integers(len(shape))), int(make.rng.integers(0, 3))
    n = shape[axis]
    p = make.parameter(*(n + extra if i == axis else size for i, size in enumerate(shape)), scale=scale)
    twice = make.flag("twice")

    def get(context: Any) -> Any:
        first = jax.lax.slice_in_dim(p(context), 0, n, axis=axis)
        return first + 0.5 * jnp.sin(jax.lax.slice_in_dim(p(context), extra, n + extra, axis=axis)) if twice else first

    return get


@weight
def joined(make: Maker, shape: Shape, scale: float) -> Getter:
    """Two parameters end to end."""
    axes = [i for i, n in enumerate(shape) if n > 1]
    if not axes:
        raise Misfit
    axis = int(make.rng.choice(axes))
    at = int(make.rng.integers(1, shape[axis]))
    sizes = [[k if i == axis else n for i, n in enumerate(shape)] for k in (at, shape[axis] - at)]
    parts = [make.parameter(*size, scale=scale) for size in sizes]
    return lambda context: jnp.concatenate([part(context) for part in parts], axis=axis)


@weight
def stored_otherwise(make: Maker, shape: Shape, scale: float) -> Getter:
    """A parameter in another order of axes, flat, flipped, or in columns first."""
    kind = make.option("stored", "permuted", "flat", "columns", "flipped", "with ones")
    if kind == "flat":
        p = make.parameter(math.prod(shape), scale=scale)
        return lambda context: p(context).reshape(shape)
    if kind == "columns":
        p = make.parameter(*shape[::-1], scale=scale)
        return lambda context: p(context).ravel(order="F").reshape(shape)
    if kind == "flipped":
        p = make.parameter(*shape, scale=scale)
        return lambda context: jnp.flip(p(context))
    if kind == "with ones":
        p = make.parameter(1, *shape, 1, scale=scale)
        return lambda context: p(context)[0, ..., 0]
    order = tuple(int(i) for i in make.rng.permutation(len(shape)))
    p = make.parameter(*(shape[order.index(i)] for i in range(len(shape))), scale=scale)
    return lambda context: jnp.transpose(p(context), order)


@weight
def function_of(make: Maker, shape: Shape, scale: float) -> Getter:
    """An elementwise function of a parameter: masked, squashed, scaled by one number, cumulated."""
    p = make.parameter(*shape, scale=scale)
    kind = make.option("function", "masked", "tanh", "scaled", "stopped in part", "cumsum", "softmax", "cast")
    if kind == "masked":
        mask = make.rng.uniform(size=shape) < 0.7
        return lambda context: jnp.where(mask, p(context), 0.1)
    if kind == "tanh":
        return lambda context: jnp.tanh(p(context))
    if kind == "scaled":
        s = make.parameter()
        return lambda context: (1 + 0.3 * s(context)) * p(context)
    if kind == "stopped in part":
        return lambda context: p(context) * jax.lax.stop_gradient(1 + 0.1 * p(context))
    if kind == "cumsum" and shape:
        return lambda context: jnp.cumsum(p(context), axis=0) / shape[0]
    if kind == "softmax" and shape:
        return lambda context: jax.nn.softmax(p(context), axis=-1) - 0.3
    return lambda context: p(context) + 0.0


@weight
def rows_of(make: Maker, shape: Shape, scale: float) -> Getter:
    """Rows of a parameter by fixed indices, some of them more than once."""
    if not shape:
        raise Misfit
    rows = int(make.rng.integers(1, shape[0] + 2))
    ids = make.rng.integers(0, rows, shape[0])
    p = make.parameter(rows, *shape[1:], scale=scale)
    return lambda context: p(context)[np.asarray(ids)]


@weight
def broadcast(make: Maker, shape: Shape, scale: float) -> Getter:
    """One value for several entries."""
    kept = make.rng.uniform(size=len(shape)) < 0.5
    p = make.parameter(*(n if keep else 1 for n, keep in zip(shape, kept, strict=True)), scale=scale)
    fixed = make.constant(*shape, scale=0.5)
    return lambda context: p(context) * (1 + fixed)


@weight
def product(make: Maker, shape: Shape, scale: float) -> Getter:
    """Two parameters multiplied, or added."""
    p, q = make.parameter(*shape, scale=scale), make.parameter(*shape)
    if make.flag("sum"):
        return lambda context: p(context) + 0.3 * q(context)
    return lambda context: p(context) * (1 + 0.5 * q(context))


@weight
def symmetric(make: Maker, shape: Shape, scale: float) -> Getter:
    """A matrix plus its transpose, or a triangle of one."""
    if len(shape) != 2 or shape[0] != shape[1]:
        raise Misfit
    p = make.parameter(*shape, scale=scale)
    if make.flag("triangle"):
        return lambda context: jnp.tril(p(context)) + 0.1
    return lambda context: (p(context) + p(context).T) / 2


@weight
def computed(make: Maker, shape: Shape, scale: float) -> Getter:
    """A weight that a loop, a branch, remat, a product or a convolution makes of parameters alone."""
    kind = make.option("computed by", "scan", "cond", "remat", "einsum", "convolution", "vmap", "custom_vjp")
    if kind in ("convolution", "vmap") and not shape:
        raise Misfit
    p = make.parameter(*shape, scale=scale)
    if kind == "scan":
        steps = make.parameter(3, *shape, scale=0.5)
        step = lambda w, u: (jnp.tanh(w + 0.3 * u), None)
        return lambda context: jax.lax.scan(step, p(context), steps(context))[0]
    if kind == "cond":
        return lambda context: jax.lax.cond(jnp.sum(p(context)) > 0.01, jnp.sin, lambda w: 0.8 * w, p(context))
    if kind == "remat":
        return lambda context: jax.checkpoint(lambda w: jnp.tanh(jnp.sin(w)))(p(context))
    if kind == "einsum":
        n = math.prod(shape)
        mix = make.parameter(n, n, scale=1 / max(1, n))
        return lambda context: p(context) + (mix(context) @ p(context).reshape(-1)).reshape(shape)
    if kind == "convolution":
        taps = make.parameter(3, scale=0.5)
        smooth = lambda row, k: jnp.convolve(row, k, mode="same") if row.size >= 3 else row * k[0]
        return lambda context: jax.vmap(smooth, (0, None))(p(context).reshape(-1, shape[-1]), taps(context)).reshape(
            shape
        )
    if kind == "vmap":
        return lambda context: jax.vmap(lambda row: row / jnp.sqrt(0.3 + jnp.sum(jnp.square(row))))(p(context))
    clipped = jax.custom_vjp(lambda w: jnp.round(3 * w) / 3)
    clipped.defvjp(lambda w: (jnp.round(3 * w) / 3, jnp.cos(w)), lambda kept, g: (kept * g,))
    return lambda context: clipped(p(context))
