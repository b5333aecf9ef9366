"""Quantities of the gradients, computed from a stack, one gradient after the other, or merged from chunks of examples.

In: gradients, in whatever dtype. Out: ``{quantity name: array}``, in float32 at least.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pegprof.engine.jaxpr import zeros_like
from pegprof.engine.statistics import CENTRED, MEAN, Centred, Moment, Quantity, SquareNorm

Values = dict[str, Any]


def widen(g: Any) -> jax.Array:
    """The same values in float32 at least."""
    g = jnp.asarray(g)
    return g.astype(wide_dtype(g.dtype))


def wide_dtype(dtype: Any) -> Any:
    """The dtype itself if it is as wide as float32. By hand: numpy's promotion fails on float8."""
    is_wide = jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits >= 32
    return dtype if is_wide else jnp.dtype(jnp.float32)


def of_stack(quantities: Sequence[Quantity], g_Bx: Any) -> Values:
    """The quantities of B gradients that are all at hand."""
    g_Bx = widen(g_Bx)

    def of(quantity: Quantity) -> jax.Array:
        match quantity:
            case Moment():
                return jnp.mean(quantity.phi(g_Bx), axis=0)
            case Centred():
                return jnp.mean(jnp.square(g_Bx - jnp.mean(g_Bx, axis=0, keepdims=True)), axis=0)
            case SquareNorm():
                return jnp.sum(jnp.square(g_Bx), axis=tuple(range(1, g_Bx.ndim)))

    return {q.name: of(q) for q in quantities}


def of_same(quantities: Sequence[Quantity], g: Any, left_out: Any = False) -> Values:
    """The quantities where every example has the same gradient; for one example, its own.

    Entries that are ``left_out``, for another to add, count as nothing: for phi that is not the same as a zero.
    """
    g = widen(g)

    def of(quantity: Quantity) -> jax.Array:
        match quantity:
            case Moment():
                return _without(left_out, quantity.phi(g))
            case Centred():
                return jnp.zeros_like(g)
            case SquareNorm():
                return jnp.sum(_without(left_out, jnp.square(g)))

    return {q.name: of(q) for q in quantities}


def _without(left_out: Any, x: jax.Array) -> jax.Array:
    return x if left_out is False else jnp.where(left_out, 0, x)


def is_per_example(name: str) -> bool:
    return name == SquareNorm().name


class Running:
    """The quantities of gradients that come one after the other: ``start``, ``add`` each, ``finish``.

    Moments add up. The centred quantity follows Welford: with d = g - mean before, mean += d/n and
    m2 += d·(g - mean after), which never subtracts two large numbers.
    """

    def __init__(self, quantities: Sequence[Quantity]):
        self.centred = any(isinstance(q, Centred) for q in quantities)
        self.moments = [q for q in quantities if isinstance(q, Moment) and not (self.centred and q.name == MEAN.name)]
        self.norms = [q for q in quantities if isinstance(q, SquareNorm)]

    def start(self, g: jax.ShapeDtypeStruct) -> Values:
        zeros = zeros_like(g, wide_dtype(g.dtype))
        names = [q.name for q in self.moments] + ([MEAN.name, CENTRED.name] if self.centred else [])
        return dict.fromkeys(names, zeros)

    def add(self, total: Values, g: Any, n: Any, left_out: Any = False) -> tuple[Values, Values]:
        """The totals with the n-th gradient, and what is this example's alone; for ``left_out`` see ``of_same``."""
        g = widen(g)
        new = {name: total[name] + x for name, x in of_same(self.moments, g, left_out).items()}
        if self.centred:
            mean, before = total[MEAN.name], g - total[MEAN.name]
            new[MEAN.name] = _moved(mean, g, before / n)
            new[CENTRED.name] = total[CENTRED.name] + before * (g - new[MEAN.name])
        return new, of_same(self.norms, g, left_out)

    def finish(self, total: Values, B: int) -> Values:
        return {name: x if name == MEAN.name and self.centred else x / B for name, x in total.items()}


def merge(a: Values, n: Any, b: Values, m: Any) -> Values:
    """The quantities of n + m examples from those of n and of m; n may be 0.

    The centred one after Chan: the mean of both and (mean_a - mean_b)²·n·m/(n + m)².
    """

    def share(of: Any) -> jax.Array:
        return jnp.asarray(m / (n + m), of.dtype)

    merged = {name: _moved(x, b[name], (b[name] - x) * share(x)) for name, x in a.items()}
    if CENTRED.name in a:
        apart = a[MEAN.name] - b[MEAN.name]
        merged[CENTRED.name] += (apart * share(apart)) * (apart * (1 - share(apart)))  # a square alone may overflow
    return merged


def _moved(mean: jax.Array, new: Any, step: jax.Array) -> jax.Array:
    """A mean after a step towards something new, a part of their difference; an infinite mean stays what it is.

    Where both are equal the step is zero. To weigh the two would round, and give variance to what does not vary; but
    infinities have no difference.
    """
    return mean + jnp.where(jnp.isfinite(mean), step, new)


Chunk = Callable[[Any, int], tuple[list[Values], Any]]


def in_chunks(of_chunk: Chunk, examples: Any, B: int, size: int) -> tuple[list[Values], Any]:
    """Run a function chunk by chunk and merge; a last chunk may be smaller, so nothing is ever padded.

    Args:
      of_chunk: from some examples and their number to quantities, to be merged, and a tree of arrays with a leading
        axis of examples, to be joined.
      examples: a tree of arrays with a leading axis of B.
      B: how many examples there are.
      size: how many to take at a time.
    """
    if size >= B:
        return of_chunk(examples, B)
    whole, rest = divmod(B, size)
    cut = whole * size
    chunks = jax.tree.map(lambda x: x[:cut].reshape(whole, size, *x.shape[1:]), examples)
    shapes, _ = jax.eval_shape(lambda chunk: of_chunk(chunk, size), jax.tree.map(lambda x: x[:size], examples))
    totals = jax.tree.map(zeros_like, shapes)

    def step(state: tuple[Any, list[Values]], chunk: Any) -> tuple[Any, Any]:
        n, totals = state
        values, joined = of_chunk(chunk, size)
        return (n + size, [merge(a, n, b, size) for a, b in zip(totals, values, strict=True)]), joined

    (_, totals), joined = jax.lax.scan(step, (jnp.zeros((), jnp.result_type(float)), totals), chunks, whole)
    joined = jax.tree.map(lambda x: x.reshape(cut, *x.shape[2:]), joined)
    if rest:
        values, last = of_chunk(jax.tree.map(lambda x: x[cut:], examples), rest)
        totals = [merge(a, cut, b, rest) for a, b in zip(totals, values, strict=True)]
        joined = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), joined, last)
    return totals, joined
