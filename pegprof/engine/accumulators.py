"""Accumulators: what is kept of the per-example gradients g_1..g_B of one parameter, without keeping B gradients.

    init ──> add(g_1) ──> add(g_2) ──> ... ──> finish ──> summary          merge(summary, summary) ──> summary

A *state* lives inside one loop over the examples. A *summary* is what the loop leaves behind. Summaries merge, so that
microbatches, steps, devices and hosts are all the same thing. To keep something new, subclass ``Accumulator`` or
``PerExample``: it works for every gradient at once, by a loop over the examples. Rules (``rules/``) make it faster.

Accumulators are keyed by the object itself. Two that are equal are one; a name means nothing.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from pegprof.engine.dtypes import wide_dtype
from pegprof.engine.jaxpr import vary, varying_axes, zeros_like

State = Any
Summary = Any
Elementwise = Callable[[Any], Any]


class Accumulator:
    """What is kept of gradients over a set of examples. Gradients come in float32 or wider."""

    # Whether every array of a summary is shaped like the gradient, and each entry depends on that entry alone.
    entrywise: ClassVar[bool] = False
    # Whether a summary has a leading axis of examples.
    per_example: ClassVar[bool] = False
    # Whether ``merge`` takes zeros, with n = 0, for the summary of no examples. If not, the engine sees to it.
    merges_from_zeros: ClassVar[bool] = False
    # Accumulators whose summaries can be read from this one's, so that they need not be kept beside it.
    contains: ClassVar[Mapping["Accumulator", Callable[[Summary], Summary]]] = {}

    @property
    def takes_parts(self) -> bool:
        """Whether the parts of a gradient may be taken one by one, and its entries in any order."""
        return self.entrywise

    def init(self, g: Any) -> State:
        """The state before the first gradient, which will have this shape and dtype."""
        raise NotImplementedError

    def add(self, state: State, g: jax.Array, n: Any) -> State:
        """The state after one more gradient, the n-th."""
        raise NotImplementedError

    def finish(self, state: State, n: Any) -> Summary:
        """The summary of n gradients."""
        return state

    def merge(self, a: Summary, n: Any, b: Summary, m: Any) -> Summary:
        """The summary of n + m examples from those of n and of m; see ``merges_from_zeros`` for n = 0."""
        raise NotImplementedError

    def merge_across(self, a: Summary, n: Any, axes: Sequence[str]) -> Summary:
        """The summary of all devices along some axes of a mesh, each of which has that of n examples."""
        for axis in axes:
            devices = jax.lax.axis_size(axis)
            pairs = devices & (devices - 1) == 0
            a = (self._merge_pairs if pairs else self._merge_gathered)(a, n, axis, devices)
            n = n * devices
        return a

    def merge_scattered(self, a: Summary, n: Any, axes: Sequence[str], dimension: int) -> Summary:
        """As ``merge_across``, for an entrywise summary of which a device keeps its own slice along a dimension.

        Every device sends to each other its slice, and merges those that it receives.
        """
        devices = math.prod(jax.lax.axis_size(axis) for axis in axes)

        def exchange(x: jax.Array) -> jax.Array:
            sliced = x.reshape(*x.shape[:dimension], devices, -1, *x.shape[dimension + 1 :])
            return jax.lax.all_to_all(jnp.moveaxis(sliced, dimension, 0), tuple(axes), 0, 0)

        return self._merge_stacked(jax.tree.map(exchange, a), n, devices)

    def _merge_pairs(self, a: Summary, n: Any, axis: str, devices: int) -> Summary:
        """Pairs of devices merge, then pairs of pairs: log₂ of their number times what ``a`` takes is sent.

        All devices must get the same bits, so of each pair the same one comes first.
        """
        for distance in (1 << k for k in range(devices.bit_length() - 1)):
            pairs = [(i, i ^ distance) for i in range(devices)]
            b = jax.lax.ppermute(a, axis, pairs)
            comes_first = jax.lax.axis_index(axis) & distance == 0
            first = jax.tree.map(functools.partial(jnp.where, comes_first), a, b)
            second = jax.tree.map(functools.partial(jnp.where, comes_first), b, a)
            a = self.merge(first, n * distance, second, n * distance)
        return a

    def _merge_gathered(self, a: Summary, n: Any, axis: str, devices: int) -> Summary:
        """Along an axis whose size is no power of two: every device gathers all summaries."""
        return self._merge_stacked(jax.lax.all_gather(a, axis), n, devices)

    def _merge_stacked(self, stacked: Summary, n: Any, devices: int) -> Summary:
        """The summary of all devices from a stack of theirs, each of n examples."""
        first, *others = (jax.tree.map(operator.itemgetter(i), stacked) for i in range(devices))
        for i, other in enumerate(others, 1):
            first = self.merge(first, i * n, other, n)
        return first

    def of_one(self, g: jax.Array) -> Summary:
        """The summary of one gradient."""
        return self.finish(self.add(self.init(g), g, 1), 1)

    def of_stack(self, g_Bx: jax.Array) -> Summary:
        """The summary of B gradients that are all at hand."""
        ((summary,),) = fold([self], lambda g: [g], g_Bx, len(g_Bx))
        return summary

    def of_equal(self, g: jax.Array, B: int) -> Summary:
        """The summary of B examples that all have the same gradient."""
        return self.of_stack(jnp.broadcast_to(g[None], (B, *g.shape)))


class PerExample(Accumulator):
    """Something kept of each example alone: ``of_one`` says what. Summaries have a leading axis of examples."""

    per_example = True
    additive: ClassVar[bool] = False  # whether it is the sum over the gradient's entries of a function of each

    @property
    def takes_parts(self) -> bool:
        return self.additive

    def of_stack(self, g_Bx: jax.Array) -> Summary:
        return jax.vmap(self.of_one)(g_Bx)

    def of_equal(self, g: jax.Array, B: int) -> Summary:
        return self.of_one(g)  # the same for every example

    def merge(self, a: Summary, n: Any, b: Summary, m: Any) -> Summary:
        return jax.tree.map(lambda x, y: jnp.concatenate([x, y]), a, b)

    def merge_across(self, a: Summary, n: Any, axes: Sequence[str]) -> Summary:
        return a  # every device keeps that of its own examples


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moment(Accumulator):
    """The mean over the examples of ``phi(g)``, entry by entry.

    ``factor`` is set where phi(x·y) = factor(x)·factor(y): then the mean of phi over rank-one gradients is one
    contraction of transformed factors.
    """

    name: str
    phi: Elementwise
    factor: Elementwise | None = None

    entrywise = merges_from_zeros = True

    def init(self, g: Any) -> jax.Array:
        return zeros_like(g, wide_dtype(g.dtype))

    def add(self, state: jax.Array, g: jax.Array, n: Any) -> jax.Array:
        return state + self.phi(g)

    def finish(self, state: jax.Array, n: Any) -> jax.Array:
        return state / n

    def merge(self, a: jax.Array, n: Any, b: jax.Array, m: Any) -> jax.Array:
        return _move_mean(a, b, (b - a) * _share(n, m, a))

    def merge_across(self, a: jax.Array, n: Any, axes: Sequence[str]) -> jax.Array:
        return jax.lax.pmean(a, tuple(axes))

    def merge_scattered(self, a: jax.Array, n: Any, axes: Sequence[str], dimension: int) -> jax.Array:
        devices = math.prod(jax.lax.axis_size(axis) for axis in axes)
        return jax.lax.psum_scatter(a, tuple(axes), scatter_dimension=dimension, tiled=True) / devices

    def of_one(self, g: jax.Array) -> jax.Array:
        return self.phi(g)

    def of_stack(self, g_Bx: jax.Array) -> jax.Array:
        return jnp.mean(self.phi(g_Bx), axis=0)

    def of_equal(self, g: jax.Array, B: int) -> jax.Array:
        return self.phi(g)


def _sign(g: Any) -> jax.Array:
    """The sign as a choice, since Pallas lowers ``jnp.sign`` only where there is a TPU; zeros and NaN stay."""
    one, minus_one = (jnp.full((), value, g.dtype) for value in (1, -1))  # Triton does not negate a constant
    return jnp.where(g > 0, one, jnp.where(g < 0, minus_one, g))


MEAN = Moment(name="mean", phi=lambda g: g, factor=lambda x: x)
SQUARE = Moment(name="square", phi=jnp.square, factor=jnp.square)
SIGN = Moment(name="sign", phi=_sign, factor=_sign)
ABS = Moment(name="abs", phi=jnp.abs, factor=jnp.abs)


class Spread(NamedTuple):
    """The mean of some gradients, and the mean of their squared distances from it."""

    mean: jax.Array
    square: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Centred(Accumulator):
    """The mean over the examples of (g - mean)², which never subtracts two large numbers.

    One gradient after the other, by Welford: with d = g - mean before, mean += d/n and square += d·(g - mean after).
    """

    entrywise = merges_from_zeros = True
    contains = {MEAN: lambda spread: spread.mean}  # noqa: RUF012 - nobody changes it

    def init(self, g: Any) -> Spread:
        zeros = zeros_like(g, wide_dtype(g.dtype))
        return Spread(zeros, zeros)

    def add(self, state: Spread, g: jax.Array, n: Any) -> Spread:
        before = g - state.mean
        mean = _move_mean(state.mean, g, before / n)
        return Spread(mean, state.square + before * (g - mean))

    def finish(self, state: Spread, n: Any) -> Spread:
        return Spread(state.mean, state.square / n)

    def merge(self, a: Spread, n: Any, b: Spread, m: Any) -> Spread:
        """By Chan: the mean of both squares and (mean_a - mean_b)²·n·m/(n + m)²."""
        share = _share(n, m, a.mean)
        apart = a.mean - b.mean
        square = _move_mean(a.square, b.square, (b.square - a.square) * share)
        return Spread(
            _move_mean(a.mean, b.mean, (b.mean - a.mean) * share),
            square + (apart * share) * (apart * (1 - share)),  # a square alone may overflow
        )

    def merge_across(self, a: Spread, n: Any, axes: Sequence[str]) -> Spread:
        """The means first: then the mean of the squares around it, which subtracts no two large numbers."""
        mean = jax.lax.pmean(a.mean, tuple(axes))
        return Spread(mean, jax.lax.pmean(a.square + jnp.square(a.mean - mean), tuple(axes)))

    def of_one(self, g: jax.Array) -> Spread:
        return Spread(g, jnp.zeros_like(g))

    def of_stack(self, g_Bx: jax.Array) -> Spread:
        mean = jnp.mean(g_Bx, axis=0)
        return Spread(mean, jnp.mean(jnp.square(g_Bx - jnp.expand_dims(mean, 0)), axis=0))

    def of_equal(self, g: jax.Array, B: int) -> Spread:
        return self.of_one(g)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SquareNorm(PerExample):
    """The sum of g² over one parameter, one number for each example."""

    additive = True

    def of_one(self, g: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(g))

    def of_stack(self, g_Bx: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(g_Bx), axis=tuple(range(1, g_Bx.ndim)))


CENTRED = Centred()
SQUARE_NORM = SquareNorm()


def _share(n: Any, m: Any, like: jax.Array) -> jax.Array:
    return jnp.asarray(m / (n + m), like.dtype)


def _move_mean(mean: jax.Array, new: Any, step: jax.Array) -> jax.Array:
    """mean + step, with step = w·(new - mean): exact where both are equal.

    inf - inf is NaN, so an infinite mean absorbs ``new`` instead.
    """
    return mean + jnp.where(jnp.isfinite(mean), step, new)


def fold(
    accumulators: Sequence[Accumulator],
    gradients_of: Callable[[Any], list[Any]],
    examples: Any,
    B: int,
    *,
    unroll: int = 1,
) -> list[list[Summary]]:
    """The summaries of each gradient, one example at a time: ``gradients_of`` makes them from one of ``examples``."""
    running = [a for a in accumulators if not a.per_example]
    alone = [a for a in accumulators if a.per_example]

    def step(carry: Any, example: Any) -> Any:
        n, states = carry
        gradients = gradients_of(example)
        states = [
            [a.add(s, g, n) for a, s in zip(running, of_g, strict=True)]
            for of_g, g in zip(states, gradients, strict=True)
        ]
        return (n + 1, states), [[a.of_one(g) for a in alone] for g in gradients]

    shapes = jax.eval_shape(gradients_of, jax.tree.map(lambda x: x[0], examples))
    axes = frozenset[str]().union(*map(varying_axes, jax.tree.leaves(shapes)))  # a user's ``init`` need not know these
    states = jax.tree.map(lambda x: vary(jnp.asarray(x), axes), [[a.init(g) for a in running] for g in shapes])
    start = (jnp.ones((), jnp.float32), states)
    (_, states), kept = jax.lax.scan(step, start, examples, B, unroll=unroll)

    def summaries(of_g: list[Any], own: list[Any]) -> list[Summary]:
        finished, each = iter(a.finish(s, B) for a, s in zip(running, of_g, strict=True)), iter(own)
        return [next(each if a.per_example else finished) for a in accumulators]

    return [summaries(of_g, own) for of_g, own in zip(states, kept, strict=True)]


Chunk = Callable[[Any, int], list[Summary]]


def in_chunks(of_chunk: Chunk, kinds: Sequence[Accumulator], examples: Any, B: int, size: int) -> list[Summary]:
    """The summaries of B examples, ``size`` at a time. A last chunk may be smaller, so nothing is ever padded.

    ``of_chunk`` gives the summaries of some examples; ``kinds`` are the accumulators that they belong to.
    """
    if size >= B:
        return of_chunk(examples, B)
    whole, rest = divmod(B, size)
    cut = whole * size
    chunks = jax.tree.map(lambda x: x[:cut].reshape(whole, size, *x.shape[1:]), examples)
    merging = [kind for kind in kinds if not kind.per_example]

    def split(summaries: Sequence[Summary]) -> tuple[list[Summary], list[Summary]]:
        """Those that merge, and those that are put end to end."""
        pairs = list(zip(kinds, summaries, strict=True))
        return [s for kind, s in pairs if not kind.per_example], [s for kind, s in pairs if kind.per_example]

    def merge(totals: list[Summary], n: Any, summaries: list[Summary], m: int) -> list[Summary]:
        def of_kind(kind: Accumulator, a: Summary, b: Summary) -> Summary:
            merged = kind.merge(a, n, b, m)
            if not kind.merges_from_zeros:
                merged = jax.tree.map(lambda x, y: jnp.where(n == 0, y, x), merged, b)
            return jax.tree.map(lambda x, old: x.astype(old.dtype), merged, a)  # counts may be of a wider dtype

        return [of_kind(kind, a, b) for kind, a, b in zip(merging, totals, summaries, strict=True)]

    def step(carry: tuple[Any, list[Summary]], chunk: Any) -> tuple[Any, Any]:
        n, totals = carry
        summaries, own = split(of_chunk(chunk, size))
        return (n + size, merge(totals, n, summaries, size)), own

    shapes, _ = split(jax.eval_shape(lambda chunk: of_chunk(chunk, size), jax.tree.map(lambda x: x[:size], examples)))
    start = (jnp.zeros((), jnp.result_type(float)), jax.tree.map(zeros_like, shapes))
    (_, totals), own = jax.lax.scan(step, start, chunks, whole)
    own = jax.tree.map(lambda x: x.reshape(cut, *x.shape[2:]), own)
    if rest:
        summaries, last = split(of_chunk(jax.tree.map(lambda x: x[cut:], examples), rest))
        totals = merge(totals, cut, summaries, rest)
        own = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), own, last)
    merged, joined = iter(totals), iter(own)
    return [next(joined if kind.per_example else merged) for kind in kinds]
