"""Jaxpr -> sites: the program cut in two, with each parameter's gradient formed at one site.

In: a flat program whose tails stand where sites can be (``passes/loops.py``). Out: a ``Cut``: the body's equations in
order, the sites, and the loops that have sites of their own.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from pegprof.engine.facts import known, permutes
from pegprof.engine.jaxpr import Atom, ClosedJaxpr, JaxprEqn, Literal, Var, primitives, variables
from pegprof.engine.passes.recompute import Ancestry, with_prelude
from pegprof.engine.passes.widen import widen
from pegprof.engine.structures import Structure, match, unknown_equation
from pegprof.engine.tails import Loop, Permuted, Tail, example_dependent, find_permuted, find_tails, grows, makers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """Where gradients are formed. With no equations in its tail, the body has formed them already."""

    tail: Tail
    recomputing: Tail  # the same tail, with operands rebuilt from residuals that are stored anyway
    structures: tuple[Structure, ...]  # for each gradient of the tail
    outputs: tuple[Var, ...]  # the variables of the program that these gradients are
    parameters: tuple[tuple[str, ...], ...]  # for each gradient, the parameters that it belongs to
    formed_by: JaxprEqn | None  # the equation that forms the first gradient, for people
    repeats: int = 1  # how often an example passes here: the length of the loops around it

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for names in self.parameters for name in names)

    @property
    def key(self) -> str:
        """What plans call the site. Every parameter belongs to one site, so its parameters tell it from all others."""
        return " + ".join(self.names)

    @property
    def unknown(self) -> JaxprEqn | None:
        """An equation that forms full gradients and that no rule can look into."""
        return self.formed_by if self.tail.grows else unknown_equation(self.tail)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InnerLoop:
    """A scan whose stacked outputs at ``cut.gradients`` are gradients, formed inside it."""

    loop: Loop
    cut: "Cut"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """A program with its sites.

    ``gradients`` maps the position of each output that is a gradient to its origin: a variable that a site or an inner
    loop forms, with the steps that still permute its entries; or None where no example has a part in it.
    """

    closed: ClosedJaxpr
    body: tuple["JaxprEqn | InnerLoop", ...]
    own_sites: tuple[Site, ...]  # without those of inner loops
    gradients: Mapping[int, Permuted | None]
    names: Mapping[int, str]

    def sites(self) -> Iterator[Site]:
        yield from self.own_sites
        for step in self.body:
            if isinstance(step, InnerLoop):
                yield from step.cut.sites()

    def constants(self) -> Iterator[str]:
        """The parameters whose gradient no example has a part in."""
        yield from (self.names[i] for i, origin in self.gradients.items() if origin is None)
        for step in self.body:
            if isinstance(step, InnerLoop):
                yield from step.cut.constants()


def cut_program(
    closed: ClosedJaxpr,
    names: Mapping[int, str],
    depends: Sequence[bool],
    *,
    inside_loops: bool = True,
    repeats: int = 1,
) -> Cut:
    """Cut a flat program whose outputs at the positions ``names`` are the gradients of these parameters.

    ``inside_loops``: whether a site may stand inside a loop, where it sees the slices of a stacked gradient.
    """
    jaxpr = closed.jaxpr
    dependent = example_dependent(jaxpr, depends)
    scans = [eqn for eqn in jaxpr.eqns if known(eqn) is primitives.scan_p]
    loops = {v: eqn for eqn in scans for v in eqn.outvars[eqn.params["num_carry"] :]}
    in_loops = {m.output: m for m in find_permuted(jaxpr, names) if m.source in loops} if inside_loops else {}

    origins: dict[int, Permuted | None] = {}
    for i in names:
        out = jaxpr.outvars[i]
        constant = isinstance(out, Literal) or out not in dependent
        origins[i] = None if constant else in_loops.get(i, Permuted(output=i, source=out, steps=()))
    formed = dict.fromkeys(origin.source for i, origin in origins.items() if origin and i not in in_loops)
    made_by = makers(jaxpr.eqns)
    ancestry = Ancestry.of(jaxpr)

    def site(tail: Tail) -> Site:
        wide = widen(tail)
        return Site(
            tail=wide,
            recomputing=with_prelude(wide, ancestry) if tail.equations else wide,
            structures=match(wide),
            outputs=tuple(variables(tail.outputs)),
            parameters=tuple(
                tuple(names[i] for i, origin in origins.items() if origin and origin.source is v) for v in tail.outputs
            ),
            formed_by=tail.starts[0] if tail.starts else _last_real_step(tail.outputs[0], made_by),
            repeats=repeats,
        )

    tails = find_tails(jaxpr, [i for i in origins if i not in in_loops and origins[i]], depends)
    by_tail = {v for tail in tails for v in tail.outputs}
    tails += [_no_tail(v, made_by.get(v), dependent) for v in formed if v not in by_tail]
    inner = _inner_loops(loops, in_loops, names, dependent, repeats)
    gone = {id(eqn) for moved in in_loops.values() for eqn in moved.steps}
    gone |= {id(eqn) for tail in tails for eqn in tail.equations}
    return Cut(
        closed=closed,
        body=tuple(inner.get(id(eqn), eqn) for eqn in jaxpr.eqns if id(eqn) not in gone),
        own_sites=tuple(site(tail) for tail in tails),
        gradients=origins,
        names=dict(names),
    )


def _last_real_step(v: Atom, made_by: Mapping[Var, JaxprEqn]) -> JaxprEqn | None:
    """The equation that makes a value, but for permutations of its entries."""
    eqn = made_by.get(v) if isinstance(v, Var) else None
    while eqn is not None and permutes(eqn) and isinstance(eqn.invars[0], Var) and eqn.invars[0] in made_by:
        eqn = made_by[eqn.invars[0]]
    return eqn


def _no_tail(v: Var, made_by: JaxprEqn | None, dependent: set[Var]) -> Tail:
    larger = made_by is not None and grows(made_by, dependent, [v])
    return Tail(equations=(), starts=(), inputs=(v,), outputs=(v,), depends=(True,), grows=larger)


def _inner_loops(
    loops: Mapping[Var, JaxprEqn],
    in_loops: Mapping[int, Permuted],
    names: Mapping[int, str],
    dependent: set[Var],
    repeats: int,
) -> dict[int, InnerLoop]:
    inner = {}
    for eqn in {id(loops[m.source]): loops[m.source] for m in in_loops.values()}.values():
        loop = Loop.of(eqn, dependent)
        inner_names = {eqn.outvars.index(m.source): names[i] for i, m in in_loops.items() if loops[m.source] is eqn}
        cut = cut_program(loop.body, inner_names, loop.depends, repeats=repeats * loop.length)
        inner[id(eqn)] = InnerLoop(loop=loop, cut=cut)
    return inner
