"""Blocks that move, repeat, drop or add up entries."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.fuzz.grammar import Context, Maker, Misfit, Shape, block


def factorised(make: Maker, n: int, name: str = "to") -> Shape:
    """A random shape with as many entries, ones included."""
    sizes: list[int] = []
    while n > 1 and len(sizes) < 3:
        d = int(make.rng.choice([d for d in range(2, n + 1) if n % d == 0]))
        sizes.append(d)
        n //= d
    if n > 1 or not sizes:
        sizes.append(n)
    if make.rng.uniform() < 0.25 and len(sizes) < 4:
        sizes.insert(int(make.rng.integers(len(sizes) + 1)), 1)
    shape = tuple(sizes[i] for i in make.rng.permutation(len(sizes)))
    make.notes.append(f"{name}={shape}")
    return shape


@block(chance=1.5)
def reshape(make: Maker, shape: Shape) -> Any:
    """With the entries in rows or, order "F", in columns."""
    to = factorised(make, math.prod(shape))
    order = make.option("order", "C", "F")
    rank = len(shape)
    return (lambda _, h: h.reshape(*h.shape[: h.ndim - rank], *to, order=order)), to


@block(ranks=(1, 3), chance=1.5)
def reshape_of_permuted(make: Maker, shape: Shape) -> Any:
    """``lax.reshape`` with ``dimensions``; the batch axis may be among those that move."""
    to = factorised(make, math.prod(shape))
    if make.lead and make.flag("batch axis too"):
        order = make.order("dimensions", len(shape) + 1)
        return (lambda _, h: jax.lax.reshape(h, (h.shape[0], *to), order)), to
    order = tuple(make.lead + axis for axis in make.order("dimensions", len(shape)))
    lead = tuple(range(make.lead))
    return (lambda _, h: jax.lax.reshape(h, (*h.shape[: make.lead], *to), (*lead, *order))), to


@block()
def ravel(make: Maker, shape: Shape) -> Any:
    order = make.option("order", "C", "F")
    if not make.lead:
        return (lambda _, h: h.ravel(order=order)), (math.prod(shape),)
    if make.flag("with the batch axis"):
        return (lambda _, h: h.ravel(order=order)[None]), (math.prod(shape),)
    return (lambda _, h: jax.vmap(lambda x: x.ravel(order=order))(h)), (math.prod(shape),)


@block(ranks=(2, 4), chance=1.5)
def transpose(make: Maker, shape: Shape) -> Any:
    kind = make.option("kind", "transpose", "moveaxis", "swapaxes")
    if kind == "transpose":
        order = make.order("order", len(shape))
        axes = (*range(make.lead), *(make.lead + axis for axis in order))
        return (lambda _, h: jnp.transpose(h, axes)), tuple(shape[axis] for axis in order)
    a, b = make.axis(shape, "first"), make.axis(shape, "second")
    name = "moveaxis" if kind == "moveaxis" else "swapaxes"
    return (lambda _, h: getattr(jnp, name)(h, a, b)), getattr(np, name)(np.zeros(shape), a, b).shape


def _along(make: Maker, shape: Shape, fn: Any) -> Any:
    """A block that does something along the last axes, from what it does to one example."""
    after = jax.eval_shape(fn, jax.ShapeDtypeStruct(shape, jnp.float32)).shape
    return (lambda _, h: fn(h)), after


@block()
def flip_or_roll(make: Maker, shape: Shape) -> Any:
    axes = tuple(make.some("axes", range(-len(shape), 0), 1))
    if make.flag("flip"):
        return (lambda _, h: jnp.flip(h, axes)), shape
    shift = make.size("shift", -2, 3)
    return (lambda _, h: jnp.roll(h, shift, axes)), shape


@block()
def pad(make: Maker, shape: Shape) -> Any:
    """With zeros or another number, also by less than nothing, and between entries."""
    kind = make.option("kind", "lax", "edge", "reflect", "wrap", "weight")
    axis = make.axis(shape)
    low, high = make.size("low", 0, 2), make.size("high", 0, 1)
    rank = len(shape)
    if kind in ("edge", "reflect", "wrap"):
        if kind == "reflect" and max(low, high) >= shape[axis]:
            raise Misfit
        widths = [(low, high) if i == axis % rank else (0, 0) for i in range(rank)]
        fn = lambda h: jnp.pad(h, [(0, 0)] * (h.ndim - rank) + widths, mode=kind)
        return _along(make, shape, fn)
    low -= make.size("cropped", 0, 1)
    interior = make.size("interior", 0, 1)
    if shape[axis] + interior * (shape[axis] - 1) + low + high < 1:
        raise Misfit
    filler = make.weight() if kind == "weight" else lambda _: 0.0
    config = [(low, high, interior) if i == axis % rank else (0, 0, 0) for i in range(rank)]

    def apply(context: Context, h: Any) -> Any:
        return jax.lax.pad(h, jnp.asarray(filler(context), h.dtype), [(0, 0, 0)] * (h.ndim - rank) + config)

    after = [n + interior * (n - 1) + low + high if i == axis % rank else n for i, n in enumerate(shape)]
    return apply, tuple(after)


@block()
def concatenate(make: Maker, shape: Shape) -> Any:
    """With a function of itself, a parameter or more of the example."""
    axis = make.axis(shape)
    kind = make.option("with", "itself", "parameter", "input", "constant")
    fixed = make.constant(*shape)
    other = {
        "parameter": lambda: make.weight(*shape),
        "input": lambda: make.input(*shape),
        "constant": lambda: lambda _: fixed,
        "itself": lambda: None,
    }[kind]()
    first = make.flag("in front")

    def apply(context: Context, h: Any) -> Any:
        more = jnp.tanh(h) if other is None else jnp.broadcast_to(other(context), h.shape)
        return jnp.concatenate([more, h] if first else [h, more], axis=axis)

    return apply, tuple(2 * n if i == axis % len(shape) else n for i, n in enumerate(shape))


@block()
def split(make: Maker, shape: Shape) -> Any:
    """In two parts, of which one gates the other, or that change places."""
    axis = make.axis(shape)
    n = shape[axis]
    if n < 2:
        raise Misfit
    at = make.size("at", 1, n - 1)
    if n == 2 * at and make.flag("gated"):

        def gated(h: Any) -> Any:
            a, b = jnp.split(h, 2, axis=axis)
            return a * jax.nn.sigmoid(b)

        return _along(make, shape, gated)

    def swapped(h: Any) -> Any:
        a, b = jnp.split(h, [at], axis=axis)
        return jnp.concatenate([jnp.sin(b), a], axis=axis)

    return _along(make, shape, swapped)


@block()
def slices(make: Maker, shape: Shape) -> Any:
    """By slices with a step, by an index, or by an array of indices."""
    axis = make.axis(shape)
    n = shape[axis]
    kind = make.option("kind", "slice", "index", "array", "mask")
    if kind == "slice":
        first, step = make.size("first", 0, n - 1), make.option("step", 1, 2, -1)
        where: Any = slice(first, None, step)
    elif kind == "index":
        if len(shape) < 2:
            raise Misfit
        where = make.size("at", -n, n - 1)
    else:
        where = jnp.asarray(make.rng.integers(0, n, make.size("many", 1, 4)))
    rest = (slice(None),) * (-1 - axis)
    return _along(make, shape, lambda h: h[(..., where, *rest)])


@block(ranks=(1, 3))
def ones(make: Maker, shape: Shape) -> Any:
    """An axis of size one comes, or all of them go."""
    if make.flag("squeeze") and 1 in shape and any(n > 1 for n in shape):
        axes = tuple(i - len(shape) for i, n in enumerate(shape) if n == 1)
        return (lambda _, h: jnp.squeeze(h, axes)), tuple(n for n in shape if n != 1)
    axis = make.size("at", -len(shape) - 1, -1)
    return _along(make, shape, lambda h: jnp.expand_dims(h, axis))


@block()
def repeat(make: Maker, shape: Shape) -> Any:
    axis = make.axis(shape)
    kind = make.option("kind", "repeat", "tile", "broadcast", "uneven")
    if kind == "repeat":
        return _along(make, shape, lambda h: jnp.repeat(h, 2, axis=axis))
    if kind == "uneven":
        counts = make.rng.integers(0, 3, shape[axis])
        counts[0] = 1
        return _along(make, shape, lambda h: jnp.repeat(h, counts, axis=axis, total_repeat_length=int(counts.sum())))
    if kind == "tile":
        reps = tuple(2 if i == axis % len(shape) else 1 for i in range(len(shape)))
        return _along(make, shape, lambda h: jnp.tile(h, reps))
    scale = jnp.asarray(make.constant(2, *[1] * -axis))
    return _along(make, shape, lambda h: jnp.expand_dims(h, axis - 1) * scale)


@block()
def cumulative(make: Maker, shape: Shape) -> Any:
    axis = make.axis(shape)
    kind = make.option("kind", "cumsum", "reverse cumsum", "cumprod", "cumlogsumexp", "diff", "associative_scan")
    rank = len(shape)
    at = lambda h: h.ndim - rank + axis % rank
    if kind == "cumsum":
        return (lambda _, h: jnp.cumsum(h, axis=axis)), shape
    if kind == "reverse cumsum":
        return (lambda _, h: jax.lax.cumsum(h, axis=at(h), reverse=True)), shape
    if kind == "cumprod":
        return (lambda _, h: jnp.cumprod(1 + 0.3 * jnp.tanh(h), axis=axis)), shape
    if kind == "cumlogsumexp":
        return (lambda _, h: jax.lax.cumlogsumexp(h, axis=at(h))), shape
    if kind == "diff":
        return (lambda _, h: jnp.diff(h, axis=axis, prepend=0.5)), shape

    def combine(a: Any, b: Any) -> Any:
        return a[0] * b[0], b[0] * a[1] + b[1]

    return (lambda _, h: jax.lax.associative_scan(combine, (jax.nn.sigmoid(h), jnp.sin(h)), axis=at(h))[1]), shape


@block(ranks=(2, 4))
def reduce(make: Maker, shape: Shape) -> Any:
    """Sums, means, products and extremes over some axes."""
    axes = tuple(make.some("axes", range(-len(shape), 0), 1))
    keep = make.flag("keepdims")
    if len(axes) == len(shape) and not keep:
        raise Misfit
    offsets = jnp.asarray(make.constant(*shape))  # so that no two entries are equal
    fns = {
        "sum": lambda h: jnp.sum(h, axis=axes, keepdims=keep) / 2,
        "mean": lambda h: jnp.mean(h, axis=axes, keepdims=keep),
        "max": lambda h: jnp.max(h + offsets, axis=axes, keepdims=keep),
        "min": lambda h: jnp.min(h + offsets, axis=axes, keepdims=keep),
        "prod": lambda h: jnp.prod(1 + 0.3 * jnp.tanh(h), axis=axes, keepdims=keep),
        "var": lambda h: jnp.var(h + offsets, axis=axes, keepdims=keep),
        "logsumexp": lambda h: jax.nn.logsumexp(h, axis=axes, keepdims=keep),
    }
    return _along(make, shape, fns[make.option("by", *fns)])


@block(ranks=(2, 4))
def triangle(make: Maker, shape: Shape) -> Any:
    kind = make.option("kind", "tril", "triu", "diagonal", "rot90", "outer")
    if kind == "tril":
        return (lambda _, h: jnp.tril(h) + 0.1 * h), shape
    if kind == "triu":
        return (lambda _, h: jnp.triu(h, 1) + 0.1 * h), shape
    if kind == "diagonal":
        return _along(make, shape, lambda h: jnp.diagonal(h, axis1=-2, axis2=-1))
    if kind == "rot90":
        turns = make.size("turns", 1, 3)
        return _along(make, shape, lambda h: jnp.rot90(h, turns, axes=(-2, -1)))
    return _along(make, shape, lambda h: h[..., :, None] * jnp.cos(h[..., None, :]))
