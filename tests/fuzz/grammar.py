"""Seed -> program: a random loss that is a chain of blocks, with its parameters and a batch.

A block is a function of (make, shape) that draws its options and parameters from ``make`` and returns what it does to
a hidden value, and the shape of the result. ``shape`` is that of one example's value. Where the loss sees a batch of
one (``make.lead`` is 1) the value itself has one axis more, in front, so blocks count axes from the end.
"""

import collections
import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Shape = tuple[int, ...]
Getter = Callable[["Context"], Any]

MOST_EXAMPLES = 7
MOST_ENTRIES = 100
"""How large one example's hidden value may become: a program has to compile in a fraction of a second."""


class Misfit(Exception):
    """A block cannot take this shape with the options that it drew; another block is tried."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """What a block computes from, beside the hidden value; it may add a penalty to the loss."""

    params: dict[str, Any]
    batch: dict[str, Any]
    penalties: list[Any]

    def with_params(self, params: dict[str, Any]) -> "Context":
        """The same with some parameters replaced, as in the body of a scan over layers."""
        return Context(params={**self.params, **params}, batch=self.batch, penalties=[])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """A block with its options drawn: ``apply(context, h)`` gives the next hidden value, of this shape."""

    text: str
    apply: Callable[[Context, Any], Any]
    shape: Shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """An entry of the table: the function, and the ranks of the values that it takes."""

    name: str
    draw: Callable[["Maker", Shape], tuple[Callable[[Context, Any], Any], Shape]]
    ranks: tuple[int, int]
    has_weights: bool
    holds_others: bool
    chance: float


BLOCKS: dict[str, Block] = {}


def block(
    *, ranks: tuple[int, int] = (1, 4), weights: bool = False, holds: bool = False, chance: float = 1.0
) -> Callable[[Any], Any]:
    """Registers a function as the block of its name.

    Args:
      ranks: the least and largest number of axes of an example that it takes.
      weights: whether it always has parameters.
      holds: whether it is made of other blocks.
      chance: how likely it is, relative to the others.
    """

    def register(draw: Any) -> Any:
        name = draw.__name__
        if name in BLOCKS:
            raise ValueError(f"two blocks are called {name}")
        BLOCKS[name] = Block(name=name, draw=draw, ranks=ranks, has_weights=weights, holds_others=holds, chance=chance)
        return draw

    return register


WEIGHTS: dict[str, Callable[["Maker", Shape, float], Getter]] = {}
"""Ways to make a weight of a shape from parameters: any block may get its weights by any of them."""


def weight(draw: Callable[["Maker", Shape, float], Getter]) -> Callable[["Maker", Shape, float], Getter]:
    """Registers a function of (make, shape, scale) as a way to make a weight."""
    WEIGHTS[draw.__name__] = draw
    return draw


class Scope:
    """The parameters and the batch that blocks have asked for. A scan over layers has a scope within the outer one."""

    def __init__(self, parent: "Scope | None" = None):
        self.parent = parent
        self.params: dict[str, np.ndarray] = {}
        self.inputs: dict[str, Any] = parent.inputs if parent else {}
        self.tags: set[str] = parent.tags if parent else set()
        self.used: collections.Counter[str] = parent.used if parent else collections.Counter()
        self._names: list[int] = parent._names if parent else [0]

    def name(self, stem: str) -> str:
        self._names[0] += 1
        return f"{stem}{self._names[0]}"

    def shareable(self) -> dict[str, np.ndarray]:
        """The parameters that one more weight may be made of."""
        return {**(self.parent.shareable() if self.parent else {}), **self.params}

    @contextlib.contextmanager
    def undone_on_misfit(self) -> Iterator[None]:
        """What a block asked for before it turned out not to fit is forgotten."""
        before = [dict(self.params), dict(self.inputs), set(self.tags), collections.Counter(self.used)]
        try:
            yield
        except Misfit:
            for now, then in zip((self.params, self.inputs, self.tags, self.used), before, strict=True):
                now.clear()
                now.update(then)
            raise


class Maker:
    """What a block draws from. The options that it draws are noted, for people."""

    def __init__(self, rng: np.random.Generator, lead: int, scope: Scope, depth: int = 0):
        self.rng, self.lead, self.scope, self.depth = rng, lead, scope, depth
        self.notes: list[str] = []

    # ---- options -------------------------------------------------------------------------------------------------

    def option(self, name: str, *choices: Any) -> Any:
        """One of some choices."""
        choice = choices[int(self.rng.integers(len(choices)))]
        self.notes.append(f"{name}={getattr(choice, '__name__', choice)}")
        return choice

    def flag(self, name: str, chance: float = 0.5) -> bool:
        chosen = bool(self.rng.uniform() < chance)
        if chosen:
            self.notes.append(name)
        return chosen

    def size(self, name: str, low: int, high: int) -> int:
        return int(self.option(name, *range(low, high + 1)))

    def order(self, name: str, n: int) -> tuple[int, ...]:
        """A permutation."""
        order = tuple(int(i) for i in self.rng.permutation(n))
        self.notes.append(f"{name}={order}")
        return order

    def axis(self, shape: Shape, name: str = "axis") -> int:
        """An axis of an example, counted from the end."""
        if not shape:
            raise Misfit
        return self.size(name, -len(shape), -1)

    def some(self, name: str, items: Sequence[Any], least: int = 0) -> list[Any]:
        """Some of the items, in order."""
        n = int(self.rng.integers(least, len(items) + 1))
        chosen = [items[i] for i in sorted(self.rng.permutation(len(items))[:n])]
        self.notes.append(f"{name}={tuple(chosen)}")
        return chosen

    # ---- arrays --------------------------------------------------------------------------------------------------

    def parameter(self, *shape: int, scale: float = 1.0, stem: str = "w") -> Getter:
        """A parameter of its own."""
        name = self.scope.name(stem)
        self.scope.params[name] = np.asarray(self.rng.normal(0.0, scale, shape))
        return lambda context: context.params[name]

    def weight(self, *shape: int, fan_in: int = 1) -> Getter:
        """A weight, mostly a parameter as it is; the products of ``fan_in`` terms stay of order one."""
        scale = 1 / math.sqrt(max(1, fan_in))
        if self.rng.uniform() < 0.75:
            return self.parameter(*shape, scale=scale)
        for name in self.rng.permutation(list(WEIGHTS)):
            try:
                with self.scope.undone_on_misfit():
                    found = WEIGHTS[name](self, shape, scale)
            except Misfit:
                continue
            self.scope.used[f"weight:{name}"] += 1
            self.notes.append(f"weight:{name}")
            return found
        return self.parameter(*shape, scale=scale)

    def constant(self, *shape: int, scale: float = 1.0) -> np.ndarray:
        return np.asarray(self.rng.normal(0.0, scale, shape))

    def _input(self, values: Any) -> Getter:
        name = self.scope.name("input")
        self.scope.inputs[name] = values
        return lambda context: context.batch[name]

    def input(self, *shape: int) -> Getter:
        """Numbers of the example's own; where the loss sees a batch of one, with that axis in front."""
        return self._input(self.rng.normal(size=(MOST_EXAMPLES, *shape)))

    def integers(self, *shape: int, below: int) -> Getter:
        return self._input(self.rng.integers(0, below, (MOST_EXAMPLES, *shape)).astype(np.int32))

    def booleans(self, *shape: int) -> Getter:
        return self._input(self.rng.uniform(size=(MOST_EXAMPLES, *shape)) < 0.6)

    def key(self) -> Getter:
        """A PRNG key of the example's own, without an axis."""
        get = self._input(jax.random.split(jax.random.key(int(self.rng.integers(2**31))), MOST_EXAMPLES))
        return lambda context: get(context)[0] if self.lead else get(context)

    def scalar(self, get: Getter) -> Getter:
        """An input without axes, also where the loss sees a batch of one."""
        return lambda context: get(context)[0] if self.lead else get(context)

    # ---- blocks within blocks ------------------------------------------------------------------------------------

    def inner(self, shape: Shape, to: Shape | None = None, *, most: int = 2, scope: Scope | None = None) -> Layer:
        """One or two blocks in a row; with ``to`` followed by a projection if they end in another shape."""
        make = Maker(self.rng, self.lead, scope or self.scope, self.depth + 1)
        layers = draw_chain(make, shape, 1 + int(most > 1 and self.rng.uniform() < 0.3))
        end = layers[-1].shape
        if to is not None and end != to:
            layers.append(project(make, end, to))
        chain = in_a_row(layers)
        self.notes.append(f"[{chain.text}]")
        return chain

    def stacked(self, shape: Shape, length: int) -> tuple[Layer, list[str]]:
        """As ``inner``, from a shape to itself, with ``length`` values of each parameter: their names."""
        within = Scope(self.scope)
        layer = self.inner(shape, to=shape, scope=within)
        for name, value in within.params.items():
            noise = 1 + 0.3 * self.rng.normal(size=(length, *value.shape))
            self.scope.params[name] = np.asarray(value * noise)
        return layer, list(within.params)

    def parameters_only(self, shape: Shape, to: Shape) -> tuple[Layer, list[str]]:
        """As ``inner``, of blocks that take nothing more of the example: the names of their own parameters."""
        within, inputs = Scope(self.scope), len(self.scope.inputs)
        layer = self.inner(shape, to=to, scope=within)
        if len(self.scope.inputs) > inputs:
            raise Misfit
        self.scope.params.update(within.params)
        return layer, list(within.params)


def project(make: Maker, shape: Shape, to: Shape) -> Layer:
    """A dense layer from any shape to any other."""
    w = make.parameter(math.prod(shape), math.prod(to), scale=1 / math.sqrt(max(1, math.prod(shape))))
    rank = len(shape)

    def apply(context: Context, h: Any) -> Any:
        lead = h.shape[: h.ndim - rank]
        return (h.reshape(*lead, -1) @ w(context)).reshape(*lead, *to)

    return Layer(text=f"project(to={to})", apply=apply, shape=to)


def in_a_row(layers: Sequence[Layer]) -> Layer:
    def apply(context: Context, h: Any) -> Any:
        for layer in layers:
            h = layer.apply(context, h)
        return h

    return Layer(text="; ".join(layer.text for layer in layers), apply=apply, shape=layers[-1].shape)


def draw_layer(make: Maker, shape: Shape, only: str | None = None, weights: bool = False) -> Layer:
    """A random block that fits a shape, or the one that is named."""
    fitting = [
        entry
        for entry in BLOCKS.values()
        if entry.ranks[0] <= len(shape) <= entry.ranks[1]
        and (only is None or entry.name == only)
        and (entry.has_weights or not weights)
        and not (entry.holds_others and make.depth >= 2)
    ]
    chances = make.rng.uniform(size=len(fitting)) ** (1 / np.array([entry.chance for entry in fitting] or [1.0]))
    for entry in [fitting[i] for i in np.argsort(-chances)]:  # without replacement, by their chances
        for _ in range(3):
            own = Maker(make.rng, make.lead, make.scope, make.depth)
            try:
                with make.scope.undone_on_misfit():
                    apply, after = entry.draw(own, shape)
                    if not (0 < math.prod(after) <= MOST_ENTRIES and 1 <= len(after) <= 4):
                        raise Misfit
            except Misfit:
                continue
            make.scope.used[entry.name] += 1
            return Layer(text=f"{entry.name}({', '.join(own.notes)})", apply=apply, shape=tuple(after))
    raise Misfit


def draw_chain(make: Maker, shape: Shape, n: int) -> list[Layer]:
    layers: list[Layer] = []
    for _ in range(n):
        layers.append(draw_layer(make, shape))
        shape = layers[-1].shape
    return layers


# ---- whole programs ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A loss whose examples do not interact, its parameters, and a batch of seven examples.

    ``form`` says how the loss takes an example: ``bare``, as a ``batch`` of one, or as a batch that it maps over by
    itself (``vmap``). ``positions`` are those of its blocks among the blocks that were drawn.
    """

    seed: int
    form: str
    texts: tuple[str, ...]
    positions: tuple[int, ...]
    loss: Callable[[Any, Any], Any]
    params: dict[str, Any]
    batch: dict[str, Any]
    tags: frozenset[str]
    used: dict[str, int]

    @property
    def keep_batch_dim(self) -> bool:
        return self.form != "bare"

    def __str__(self) -> str:
        shapes = {name: tuple(value.shape) for name, value in self.params.items()}
        lines = [f"loss of an example as {self.form}", *(f"  {text}" for text in self.texts), f"  params {shapes}"]
        return "\n".join(lines)


FORMS = ("bare", "batch", "vmap")


def draw_program(seed: int, *, keep: Sequence[int] | None = None, only: str | None = None) -> Program:
    """The program of a seed.

    Args:
      seed: all that is random comes from it.
      keep: which of its blocks to keep; None keeps all. The other blocks are drawn anew where shapes have changed.
      only: a block that is to be the second one, for tests of that block.
    """
    rng = np.random.default_rng([seed, 0])
    form = FORMS[int(rng.choice(3, p=[0.4, 0.45, 0.15]))]
    count = int(rng.choice([2, 3, 4], p=[0.3, 0.5, 0.2]))
    lead = int(form == "batch")
    scope = Scope()
    start = _draw_start(Maker(rng, lead, scope))
    layers, shape, positions = [start], start.shape, []
    for i in range(count):
        if keep is not None and i not in keep:
            continue
        make = Maker(np.random.default_rng([seed, 1 + i]), lead, scope)
        named = only if i == 1 else None
        layers.append(draw_layer(make, shape, only=named, weights=i in (0, count - 1) and named is None))
        positions.append(i)
        shape = layers[-1].shape
    head = _draw_head(Maker(np.random.default_rng([seed, 1 + count]), lead, scope), shape)
    layers.append(head)
    chain = in_a_row(layers)

    def of_one(params: Any, example: Any) -> Any:
        """The mean over the entries of what may be a batch."""
        context = Context(params=params, batch=example, penalties=[])
        return jnp.mean(chain.apply(context, None)) + sum(context.penalties)

    def mapped(params: Any, batch: Any) -> Any:
        return jnp.mean(jax.vmap(of_one, in_axes=(None, 0))(params, batch))

    return Program(
        seed=seed,
        form=form,
        texts=tuple(layer.text for layer in layers),
        positions=tuple(positions),
        loss=mapped if form == "vmap" else of_one,
        params=dict(scope.params),
        batch=dict(scope.inputs),
        tags=frozenset(scope.tags),
        used=dict(scope.used),
    )


def _draw_start(make: Maker) -> Layer:
    """The first hidden value: numbers of the example, or rows of a table that it looks up."""
    rank = int(make.rng.choice([1, 2, 3, 4], p=[0.2, 0.35, 0.35, 0.1]))
    sizes = [1, 2, 3, 4, 5] if rank <= 3 else [1, 2, 3]
    shape = tuple(
        int(n) for n in make.rng.choice(sizes, size=rank, p=None if rank > 3 else [0.12, 0.22, 0.22, 0.22, 0.22])
    )
    if make.rng.uniform() < 0.8:
        x = make.input(*shape)
        return Layer(text=f"x {shape}", apply=lambda context, _: x(context), shape=shape)
    rows = int(make.rng.integers(1, 6))
    ids = make.integers(*shape[:-1], below=rows)
    table = make.weight(rows, shape[-1])
    text = f"table{(rows, shape[-1])}[tokens {shape[:-1]}]"
    return Layer(text=text, apply=lambda context, _: table(context)[ids(context)], shape=shape)


def _draw_head(make: Maker, shape: Shape) -> Layer:
    """What is averaged: something of every entry with no symmetry, or a cross entropy along the last axis."""
    if make.rng.uniform() < 0.8 or shape[-1] < 2:
        shift = make.constant(*shape, scale=0.5)
        return Layer(text="score", apply=lambda _, h: jnp.sin(h) + 0.5 * jnp.square(h - shift), shape=shape)
    labels = make.integers(*shape[:-1], below=shape[-1])

    def cross_entropy(context: Context, h: Any) -> Any:
        logs = jax.nn.log_softmax(h, axis=-1)
        return -jnp.take_along_axis(logs, labels(context)[..., None], axis=-1)

    return Layer(text="cross_entropy", apply=cross_entropy, shape=shape)
