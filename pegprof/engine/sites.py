"""Jaxpr -> sites: the program cut in two, with each parameter's gradient formed at one site.

In: a flat, hoisted Jaxpr. Out: a ``Cut``: the body's equations in order, with sites among them, each right where the
last of its inputs is known, and with loops that have sites of their own.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from pegprof.engine.facts import known
from pegprof.engine.jaxpr import Atom, ClosedJaxpr, JaxprEqn, Literal, Var, primitives
from pegprof.engine.recompute import Ancestry, with_prelude
from pegprof.engine.tails import (
    Loop,
    Moved,
    Tail,
    example_dependent,
    find_tails,
    moved_from,
    only_moves_entries,
    size,
    variables,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """Where gradients are formed. With no equations, the body has formed them already.

    ``parameters`` names, for each output of the tail, the parameters that it is the gradient of.
    """

    tail: Tail
    lean_tail: Tail  # the same, its operands recomputed from what is kept anyway
    parameters: tuple[tuple[str, ...], ...]
    made_by: JaxprEqn | None  # the equation that forms the first gradient, for people
    repeats: int = 1  # how often an example passes here: the length of the loops around it

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for names in self.parameters for name in names)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyPart:
    """Where a part of a later site's inputs is known, which a strategy may reduce there: ``inputs`` are all of it."""

    site: Site
    inputs: tuple[Var, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class InnerLoop:
    """A scan whose stacked outputs at ``cut.gradients`` are gradients, formed inside it."""

    loop: Loop
    cut: "Cut"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """A program with its sites.

    ``gradients`` maps the position of each output that is a gradient to where its quantities come from: a variable that
    a site or an inner loop forms, with the steps that still move its entries, or None where no example has a part.
    """

    closed: ClosedJaxpr
    steps: tuple["JaxprEqn | Site | EarlyPart | InnerLoop", ...]
    gradients: Mapping[int, Moved | None]
    names: Mapping[int, str]

    def sites(self) -> Iterator[Site]:
        for step in self.steps:
            if isinstance(step, Site):
                yield step
            elif isinstance(step, InnerLoop):
                yield from step.cut.sites()

    def constants(self) -> Iterator[str]:
        """The parameters whose gradient no example has a part in."""
        yield from (self.names[i] for i, origin in self.gradients.items() if origin is None)
        for step in self.steps:
            if isinstance(step, InnerLoop):
                yield from step.cut.constants()


def cut_program(closed: ClosedJaxpr, names: Mapping[int, str], depends: Sequence[bool], repeats: int = 1) -> Cut:
    """Cut a flat, hoisted program whose outputs at the positions ``names`` are the gradients of these parameters."""
    jaxpr = closed.jaxpr
    dependent = example_dependent(jaxpr, depends)
    loops = {v: eqn for eqn in jaxpr.eqns if known(eqn) is primitives.scan_p for v in _stacked(eqn)}
    in_loops = {m.output: m for m in moved_from(jaxpr, names) if m.source in loops}

    origins: dict[int, Moved | None] = {}
    for i in names:
        out = jaxpr.outvars[i]
        constant = isinstance(out, Literal) or out not in dependent
        origins[i] = None if constant else in_loops.get(i, Moved(output=i, source=out, chain=()))
    formed = dict.fromkeys(origin.source for i, origin in origins.items() if origin and i not in in_loops)
    made_by = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    ancestry = Ancestry.of(jaxpr)

    def site(tail: Tail) -> Site:
        parameters = tuple(
            tuple(names[i] for i, origin in origins.items() if origin and origin.source is v) for v in tail.outputs
        )
        first = tail.starts[0] if tail.starts else _last_real_step(tail.outputs[0], made_by)
        lean = with_prelude(tail, ancestry) if tail.equations else tail
        return Site(tail=tail, lean_tail=lean, parameters=parameters, made_by=first, repeats=repeats)

    tails = find_tails(jaxpr, [i for i in origins if i not in in_loops and origins[i]], depends)
    by_tail = {v for tail in tails for v in tail.outputs}
    tails += [_no_tail(v, made_by.get(v), dependent) for v in formed if v not in by_tail]
    inner = _inner_loops(loops, in_loops, names, dependent, repeats)
    moving = {id(eqn) for moved in in_loops.values() for eqn in moved.chain}
    body = [inner.get(id(eqn), eqn) for eqn in jaxpr.eqns if id(eqn) not in moving]
    return Cut(
        closed=closed,
        steps=_place(body, [site(tail) for tail in tails], [*jaxpr.invars, *jaxpr.constvars]),
        gradients=origins,
        names=dict(names),
    )


def _stacked(eqn: JaxprEqn) -> list[Var]:
    return eqn.outvars[eqn.params["num_carry"] :]


def _last_real_step(v: Var, made_by: Mapping[Var, JaxprEqn]) -> JaxprEqn | None:
    """The equation that makes a value, but for the order of its entries."""
    eqn = made_by.get(v)
    while eqn is not None and only_moves_entries(eqn) and isinstance(eqn.invars[0], Var) and eqn.invars[0] in made_by:
        eqn = made_by[eqn.invars[0]]
    return eqn


def _no_tail(v: Var, made_by: JaxprEqn | None, dependent: set[Var]) -> Tail:
    larger = False
    if made_by is not None and made_by.primitive is not primitives.broadcast_in_dim_p:  # which XLA never stores
        larger = size(v) > sum(size(u) for u in set(variables(made_by.invars)) & dependent)
    return Tail(equations=(), starts=(), inputs=(v,), outputs=(v,), depends=(True,), grows=larger)


def _inner_loops(
    loops: Mapping[Var, JaxprEqn],
    in_loops: Mapping[int, Moved],
    names: Mapping[int, str],
    dependent: set[Var],
    repeats: int,
) -> dict[int, InnerLoop]:
    inner = {}
    for eqn in {id(loops[m.source]): loops[m.source] for m in in_loops.values()}.values():
        loop = Loop.of(eqn, dependent)
        inner_names = {eqn.outvars.index(m.source): names[i] for i, m in in_loops.items() if loops[m.source] is eqn}
        cut = cut_program(loop.body, inner_names, loop.depends, repeats * eqn.params["length"])
        inner[id(eqn)] = InnerLoop(loop=loop, cut=cut)
    return inner


def _place(
    body: Sequence[JaxprEqn | InnerLoop], sites: Sequence[Site], given: Sequence[Atom]
) -> tuple[JaxprEqn | Site | InnerLoop, ...]:
    """The body without the equations of tails, each site where the last of its inputs is known."""
    in_tails = {id(eqn) for site in sites for eqn in site.tail.equations}
    known: set[Atom] = set(given)
    waiting = list(sites)
    steps: list[JaxprEqn | Site | InnerLoop] = []

    def place_ready() -> None:
        nonlocal waiting
        ready = [site for site in waiting if all(v in known for v in site.tail.inputs)]
        waiting = [site for site in waiting if site not in ready]
        steps.extend(ready)

    place_ready()
    for step in body:
        if id(step) in in_tails:
            continue
        steps.append(step)
        known.update(step.loop.eqn.outvars if isinstance(step, InnerLoop) else step.outvars)
        place_ready()
    return tuple(steps)
