"""The table of strategies: ways to get the quantities of a site without keeping B gradients.

``materialise`` fits every tail, so a strategy is a speed-up, never a condition for an answer: deleting all others
changes no result. The planner takes the first that fits.
"""

from pegprof.engine.strategies.base import Frontier, Strategy
from pegprof.engine.strategies.direct import DIRECT
from pegprof.engine.strategies.factored import FACTORED
from pegprof.engine.strategies.loop import LOOP
from pegprof.engine.strategies.materialise import MATERIALISE

__all__ = ["STRATEGIES", "Frontier", "Strategy"]

STRATEGIES: dict[str, Strategy] = {s.name: s for s in (DIRECT, FACTORED, LOOP, MATERIALISE)}
