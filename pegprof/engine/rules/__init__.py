"""The table of rules: faster ways for one structure and some accumulators than forming each gradient.

The default is the fold over the examples (``folds.py``), which fits every site and every accumulator: one example at a
time, a chunk, or all at once. A rule is a speed-up, never a condition for an answer: with ``RULES`` emptied, every
value stays right. Of what fits, the planner takes the cheapest on the backend at hand.
"""

from pegprof.engine.rules.base import Rule, Strategy
from pegprof.engine.rules.conv import DEPTHWISE, PATCHES
from pegprof.engine.rules.folds import BATCHED, DIRECT, LOOP
from pegprof.engine.rules.fused import FUSED, FUSED_GRAM
from pegprof.engine.rules.fused_rows import FUSED_ROWS
from pegprof.engine.rules.fused_tied import FUSED_TIED
from pegprof.engine.rules.outer import BATCHED_GRAM, FACTORED, GRAM
from pegprof.engine.rules.rows import SEGMENT
from pegprof.engine.rules.sums import STAGED, TIED

__all__ = ["RULES", "SCHEDULES", "Rule", "Strategy", "find_strategy", "strategies"]

SCHEDULES: dict[str, Strategy] = {s.name: s for s in (DIRECT, LOOP, BATCHED)}
"""Schedules of the default fold: all at once, one example at a time, a chunk at a time."""

_XLA = (FACTORED, PATCHES, DEPTHWISE, SEGMENT, TIED, STAGED, GRAM, BATCHED_GRAM)
_KERNELS = (FUSED, FUSED_GRAM, FUSED_ROWS, FUSED_TIED)
RULES: dict[str, Rule] = {rule.name: rule for rule in (*_XLA, *_KERNELS)}
"""By name. To add a rule, add it here, or from outside: ``RULES[rule.name] = rule``."""


def strategies() -> dict[str, Strategy]:
    """Everything that a plan may name."""
    return {**SCHEDULES, **RULES}


def find_strategy(name: str) -> Strategy:
    return strategies()[name]
