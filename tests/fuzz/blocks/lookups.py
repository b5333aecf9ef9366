"""Tables that are looked up, indices that the example decides, sorting."""

from typing import Any

import jax
import jax.numpy as jnp

from tests.fuzz.grammar import Context, Maker, Misfit, Shape, block


@block(weights=True, chance=2.0)
def embedding(make: Maker, shape: Shape) -> Any:
    """Rows of a table added or multiplied to the value; an index may lie outside the table."""
    rows = make.option("rows", 1, 3, 6, 12)
    mode = make.option("mode", None, "clip", "fill", "wrap")
    ids = make.integers(*shape[:-1], below=rows + (2 if mode in ("clip", "wrap") and make.flag("outside") else 0))
    table = make.weight(rows, shape[-1])
    product = make.flag("product")
    options = {} if mode is None else {"mode": mode}

    def apply(context: Context, h: Any) -> Any:
        found = jnp.take(table(context), ids(context), axis=0, **options)
        return h * found if product else h + found

    return apply, shape


@block(weights=True, chance=3.0)
def tied_embedding(make: Maker, shape: Shape) -> Any:
    """A table that is looked up, and used again as the last product."""
    rows = make.option("rows", 1, 3, 6, 9, 12)
    ids, table = make.integers(*shape[:-1], below=rows), make.weight(rows, shape[-1])
    again = make.integers(*shape[:-1], below=rows) if make.flag("two lookups", 0.3) else None
    between = make.weight(shape[-1], shape[-1], fan_in=shape[-1]) if make.flag("a layer between") else None

    def apply(context: Context, h: Any) -> Any:
        h = h + table(context)[ids(context)]
        if again is not None:
            h = h * table(context)[again(context)]
        if between is not None:
            h = jnp.tanh(h @ between(context))
        return h @ table(context).T

    return apply, (*shape[:-1], rows)


@block(weights=True)
def positions(make: Maker, shape: Shape) -> Any:
    """A table by position: a slice of it, or rows by an arange, or from a place that the example decides."""
    axis = make.axis(shape)
    n = shape[axis]
    extra = make.size("extra rows", 0, 2)
    table = make.weight(n + extra, *[1] * (-1 - axis))
    kind = make.option("kind", "slice", "arange", "dynamic")
    start = make.scalar(make.integers(below=extra + 2))

    def apply(context: Context, h: Any) -> Any:
        w = table(context)
        if kind == "slice":
            return h + w[extra:]
        if kind == "arange":
            return h + w[jnp.arange(n)[::-1]]
        return h + jax.lax.dynamic_slice_in_dim(w, start(context), n, axis=0)

    return apply, shape


@block(weights=True, chance=1.5)
def weights_by_example(make: Maker, shape: Shape) -> Any:
    """A matrix chosen by the example: by an index, or as a window that starts where the example says."""
    count, width = make.size("count", 1, 3), make.size("width", 1, 3)
    which = make.scalar(make.integers(below=count))
    if make.flag("window"):
        w = make.weight(shape[-1] + count - 1, width, fan_in=shape[-1])
        apply = lambda context, h: h @ jax.lax.dynamic_slice_in_dim(w(context), which(context), shape[-1])
        return apply, (*shape[:-1], width)
    w = make.weight(count, shape[-1], width, fan_in=shape[-1])
    return (lambda context, h: h @ w(context)[which(context)]), (*shape[:-1], width)


@block()
def take_along_axis(make: Maker, shape: Shape) -> Any:
    axis = make.axis(shape)
    many = make.size("many", 1, 3)
    where = tuple(many if i == axis % len(shape) else n for i, n in enumerate(shape))
    ids = make.integers(*where, below=shape[axis])
    return (lambda context, h: jnp.take_along_axis(h, ids(context), axis=axis)), where


@block()
def dynamic_slice(make: Maker, shape: Shape) -> Any:
    """A window of the value at a place that the example decides, cut out or written over.

    What is written is not made of the value, and a window lies within it: XLA's compiler for CPUs is wrong for some of
    the others (openxla/xla 49176 and 49121). ``positions`` has windows of a weight that start too late.
    """
    axis = make.axis(shape)
    size = make.size("size", 1, shape[axis])
    start = make.scalar(make.integers(below=shape[axis] - size + 1))
    at = make.lead + axis % len(shape)
    after = tuple(size if i == axis % len(shape) else n for i, n in enumerate(shape))
    if make.flag("update"):
        w, x = make.weight(*after), make.input(*after)

        def update(context: Context, h: Any) -> Any:
            return jax.lax.dynamic_update_slice_in_dim(h, w(context) * x(context), start(context), axis=at)

        return update, shape
    return (lambda context, h: jax.lax.dynamic_slice_in_dim(h, start(context), size, axis=at)), after


@block(weights=True)
def indexed_update(make: Maker, shape: Shape) -> Any:
    """``.at[...]`` of the value or of a weight: adding, setting, multiplying, at places of the example or fixed."""
    many = make.size("many", 1, 3)
    by = make.option("by", "add", "set", "multiply", "max")
    own = make.flag("places of the example")
    n = shape[-1]
    fixed = jnp.asarray(make.rng.permutation(n)[:many].astype("int32"))
    many = len(fixed)
    ids = make.scalar(make.integers(many, below=n)) if own else (lambda _: fixed)
    updates = make.weight(*shape[:-1], many)
    to_weight = make.flag("of a weight", 0.3)
    base = make.weight(*shape) if to_weight else None
    if own and by in ("set", "multiply", "max"):
        ids = (lambda context, get=ids: get(context)[:1]) if many > 1 else ids  # two at one place are in no order
        updates = lambda context, get=updates: get(context)[..., :1]

    def apply(context: Context, h: Any) -> Any:
        target = h if base is None else jnp.broadcast_to(base(context), h.shape)
        # jax differentiates a product only where it is told that no place comes twice
        options = {"unique_indices": True} if by == "multiply" else {}
        new = getattr(target.at[..., ids(context)], by)(updates(context) + 0.1, **options)
        return new if base is None else h * new

    return apply, shape


@block()
def ordered(make: Maker, shape: Shape) -> Any:
    """Sorted, the largest few, or permuted by another's order."""
    kind = make.option("kind", "sort", "top_k", "argsort", "argmax", "median")
    n = shape[-1]
    offsets = jnp.asarray(make.constant(*shape))
    if kind == "sort":
        return (lambda _, h: jnp.sort(h + offsets, axis=-1)), shape
    if kind == "top_k":
        k = make.size("k", 1, n)
        return (lambda _, h: jax.lax.top_k(h + offsets, k)[0]), (*shape[:-1], k)
    if kind == "argsort":
        return (lambda _, h: jnp.take_along_axis(h, jnp.argsort(jnp.sin(h + offsets)), axis=-1)), shape
    if kind == "argmax":
        return (lambda _, h: h * (1 + jax.nn.one_hot(jnp.argmax(h + offsets, axis=-1), n))), shape
    if n < 2:
        raise Misfit
    return (lambda _, h: h - jnp.median(h + offsets, axis=-1, keepdims=True)), shape


@block(ranks=(2, 3))
def segments(make: Maker, shape: Shape) -> Any:
    """Rows added up by a segment that the example gives each."""
    many = make.size("segments", 1, 3)
    rows = shape[0]
    ids = make.integers(rows, below=many)

    def of_one(h: Any, ids: Any) -> Any:
        return jax.ops.segment_sum(h, ids, num_segments=many)

    def apply(context: Context, h: Any) -> Any:
        fn = jax.vmap(of_one) if make.lead else of_one
        return fn(h, ids(context))

    return apply, (many, *shape[1:])
