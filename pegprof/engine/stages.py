"""``Stage``: a part of a site's work, run as soon as its inputs are known; ``Frontier``: those of all B examples."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pegprof.engine.accumulators import Accumulator, Summary
from pegprof.engine.dtypes import widen
from pegprof.engine.jaxpr import Atom, JaxprEqn, Rule, Var, bind, variables
from pegprof.engine.sites import Cut, InnerLoop, Site
from pegprof.engine.tails import Tail, is_number, makers

Accumulators = Sequence[Accumulator]
Summaries = list[list[Summary]]  # for each gradient, for each accumulator


@dataclasses.dataclass(frozen=True, kw_only=True)
class Frontier:
    """A tail's inputs for all B examples. Those that are not ``batched`` are the same for every example."""

    tail: Tail
    values: Sequence[Any]
    batched: Sequence[bool]
    B: int

    def examples(self) -> list[Any]:
        """The batched inputs."""
        return [x for x, b in zip(self.values, self.batched, strict=True) if b]

    def with_examples(self, examples: Sequence[Any]) -> list[Any]:
        """All inputs, with the batched ones replaced: by one example's, or by some examples'."""
        replaced = iter(examples)
        return [next(replaced) if b else x for x, b in zip(self.values, self.batched, strict=True)]

    def of_part(self, part: Tail) -> "Frontier":
        """What a part of the tail takes of this."""
        kept = [self.tail.inputs.index(v) for v in part.inputs]
        return Frontier(
            tail=part, values=[self.values[i] for i in kept], batched=[self.batched[i] for i in kept], B=self.B
        )

    def gradients_of(self, example: Sequence[Any], rule: Rule = bind) -> list[jax.Array]:
        """One example's gradients, in float32 or wider."""
        return [widen(g) for g in self.tail.run(*self.with_examples(example), rule=rule)]

    def map(self, fn: Callable[..., Any], examples: Sequence[Any] | None = None, n: int | None = None) -> Any:
        """``fn`` of every example's inputs, batched; of all examples, or of ``n`` given ones."""
        values = self.values if examples is None else self.with_examples(examples)
        axes = [0 if b else None for b in self.batched]
        return jax.vmap(fn, in_axes=axes, axis_size=self.B if n is None else n)(*values)

    def values_of(self, atoms: Sequence[Atom]) -> list[jax.Array]:
        """Some values of the tail for all examples, each with a leading axis of B."""
        part = self.tail.part_that_makes(atoms)
        return self.of_part(part).map(lambda *inputs: [jnp.asarray(x) for x in part.run(*inputs)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of a site. The summaries of the last are the site's."""

    site: Site
    tail: Tail  # the equations that it needs; their inputs are its inputs
    accumulators: Accumulators  # what its summaries belong to
    run: Callable[[Frontier, Summaries], Summaries]  # from all examples and the summaries of the stage before
    before: Accumulators = ()  # those of the stage before
    is_last: bool = True
    recomputes: bool = False  # whether what follows in the program waits for it, so that its frontier need not be held

    def run_one(self, before: Summaries, inputs: Sequence[Any]) -> Summaries:
        """The summaries of one example; a site's only stage is then the plain tail."""
        if self.is_last and not self.before:
            return [[a.of_one(widen(g)) for a in self.accumulators] for g in self.tail.run(*inputs)]
        values = [jnp.asarray(x)[None] for x in inputs]
        frontier = Frontier(tail=self.tail, values=values, batched=[True] * len(values), B=1)
        summaries = self.run(frontier, _map_own(lambda x: x[None], self.before, before))
        return _map_own(lambda x: x[0], self.accumulators, summaries)

    def per_example(self, summaries: Summaries) -> Any:
        """For each array of its summaries, whether it has a leading axis of examples."""
        none = jax.tree.map(lambda _: False, summaries)
        return _map_own(lambda _: True, self.accumulators, none)


def _map_own(fn: Callable[[Any], Any], accumulators: Accumulators, summaries: Summaries) -> Summaries:
    """Summaries with a function applied to those that are kept of each example alone."""
    pairs = [zip(accumulators, of_gradient, strict=True) for of_gradient in summaries]
    return [[jax.tree.map(fn, x) if a.per_example else x for a, x in of_gradient] for of_gradient in pairs]


def place(cut: Cut, stages: Iterable[Stage]) -> Iterator[JaxprEqn | InnerLoop | Stage]:
    """The body in order, with every stage right where the last of its inputs is known.

    The rows that a table is looked up at are known from the start, but as differentiated, their last step stands with
    the lookup's gradient, at the end. A stage that is not its site's last has such steps moved up to it.
    """
    made_by = makers(eqn for eqn in cut.body if isinstance(eqn, JaxprEqn))
    available: set[Atom] = {*cut.closed.jaxpr.invars, *cut.closed.jaxpr.constvars}
    waiting = list(stages)
    wanted = {v for stage in waiting for v in stage.tail.inputs}
    moved: set[int] = set()

    def place_ready() -> Iterator[JaxprEqn | Stage]:
        held: set[int] = set()  # sites with a stage that is not ready: those after it wait too
        for stage in list(waiting):
            missing = [v for v in stage.tail.inputs if v not in available]
            may_move = not missing or (not stage.is_last and not any(map(is_number, missing)))
            steps = _steps_to(missing, available, made_by) if may_move and id(stage.site) not in held else None
            if steps is None:
                held.add(id(stage.site))
                continue
            available.update(v for eqn in steps for v in eqn.outvars)
            moved.update(map(id, steps))
            waiting.remove(stage)
            yield from steps
            yield stage

    yield from place_ready()
    for step in cut.body:
        if id(step) not in moved:
            yield step
            made = step.loop.eqn.outvars if isinstance(step, InnerLoop) else step.outvars
            available.update(made)
            yield from () if wanted.isdisjoint(made) else place_ready()


def _steps_to(
    wanted: Iterable[Var], available: Collection[Atom], made_by: Mapping[Var, JaxprEqn]
) -> list[JaxprEqn] | None:
    """The equations that make some variables from those available, in order; None if there are none."""
    found: dict[int, JaxprEqn] = {}

    def visit(v: Var) -> bool:
        if v in available:
            return True
        eqn = made_by.get(v)
        if eqn is None or eqn.effects or not all(visit(u) for u in variables(eqn.invars)):
            return False
        found[id(eqn)] = eqn  # after all that it needs
        return True

    return list(found.values()) if all(visit(v) for v in wanted) else None
