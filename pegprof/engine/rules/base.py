"""What a strategy is: a schedule of the default fold, or a rule that does better for one structure."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from pegprof.engine.accumulators import Accumulator
from pegprof.engine.costs import Cost
from pegprof.engine.sites import Site
from pegprof.engine.stages import Accumulators, Frontier, Stage, Summaries
from pegprof.engine.structures import Structure
from pegprof.targets.chips import Chip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strategy:
    """One way to get summaries at a site. ``chunk`` is how many gradients may be held at once."""

    name: str  # as the plan shows it
    why: str  # what makes it the right one, for people
    fits: Callable[[Site, Accumulators], bool]
    cost: Callable[[Site, Accumulators, int, int], Cost]  # for B examples, with ``chunk``
    run: Callable[[Site, Accumulators, Frontier, int], Summaries] | None = None  # with ``chunk``
    recomputes: bool = False  # whether it rebuilds operands for each example, rather than have them stored for all
    loops: bool = False  # whether it runs a loop over the examples, however many gradients may be held at once
    frees_memory: bool = False  # whether it lets go of large operands early; preferred where memory is what runs out
    stages: Callable[[Site, Accumulators, int], Sequence[Stage]] | None = None  # in place of ``run``, if several

    @property
    def is_kernel(self) -> bool:
        """Whether it runs a fused kernel."""
        return False

    def covers(self, site: Site, accumulators: Accumulators, chip: Chip | None = None) -> bool:
        """Whether it can serve these accumulators at a site; ``chip`` is the one whose kernels may be used."""
        return self.fits(site, accumulators)

    def cost_at(self, site: Site, accumulators: Accumulators, B: int, chunk: int, chip: Chip | None = None) -> Cost:
        """What it takes for B examples."""
        return self.cost(site, accumulators, B, chunk)

    def stages_at(
        self, site: Site, accumulators: Accumulators, chunk: int, chip: Chip | None = None
    ) -> Sequence[Stage]:
        """Its stages at a site; most strategies have one."""
        if self.stages:
            return self.stages(site, accumulators, chunk)

        def run(frontier: Frontier, _: Any) -> Summaries:
            assert self.run is not None
            return self.run(site, accumulators, frontier, chunk)

        tail = site.recomputing if self.recomputes else site.tail
        return [Stage(site=site, tail=tail, accumulators=accumulators, run=run, recomputes=self.recomputes)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule(Strategy):
    """A faster way for one kind of structure and some kinds of accumulators. It never changes a value."""

    structure: type[Structure]
    accumulators: tuple[type[Accumulator], ...]

    def covers(self, site: Site, accumulators: Accumulators, chip: Chip | None = None) -> bool:
        parts = [part for structure in site.structures for part in (structure, *structure.parts)]
        return (
            any(isinstance(part, self.structure) for part in parts)
            and all(isinstance(a, self.accumulators) for a in accumulators)
            and self.fits(site, accumulators)
        )
