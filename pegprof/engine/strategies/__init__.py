"""The table of strategies: ways to get the quantities of a site without keeping B gradients.

``materialise`` fits every tail, so a strategy is a speed-up, never a condition for an answer: deleting all others
changes no result. Of those that fit, the planner takes the cheapest on the backend at hand.
"""

from pegprof.engine.strategies.base import Frontier, Strategy
from pegprof.engine.strategies.batched import BATCHED
from pegprof.engine.strategies.depthwise import DEPTHWISE
from pegprof.engine.strategies.direct import DIRECT
from pegprof.engine.strategies.factored import FACTORED
from pegprof.engine.strategies.gram import BATCHED_GRAM, GRAM
from pegprof.engine.strategies.late import LATE
from pegprof.engine.strategies.loop import LOOP
from pegprof.engine.strategies.materialise import MATERIALISE
from pegprof.engine.strategies.patches import PATCHES
from pegprof.engine.strategies.segment import SEGMENT
from pegprof.engine.strategies.tied import TIED

__all__ = ["STRATEGIES", "Frontier", "Strategy"]

STRATEGIES: dict[str, Strategy] = {
    s.name: s
    for s in (
        *(DIRECT, FACTORED, LOOP, PATCHES, DEPTHWISE, SEGMENT, TIED, LATE),
        *(GRAM, BATCHED_GRAM, BATCHED, MATERIALISE),
    )
}
