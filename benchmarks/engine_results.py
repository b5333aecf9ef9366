"""What ``engine.py`` found: a row for each model, a cell in it for each method, ratios to ``grad``."""

import collections
import dataclasses
import math
from collections.abc import Sequence

from benchmarks.models import Model
from benchmarks.timing import Program, Timing
from pegprof.engine.plan import Plan
from pegprof.units import UNKNOWN

REFERENCE, OURS = "grad", "surgery"
NOISE = 1.10  # what two runs of the same program may differ by


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One method on one model. What was not measured says why."""

    program: Program | None = None
    timing: Timing | None = None
    reason: str = ""
    error: float | None = None  # of its statistics, relative to another method's


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One model: a cell for each method, and what surgery planned."""

    model: Model
    stats: tuple[str, ...]
    cells: dict[str, Cell]
    plan: Plan | None
    plan_s: float | None
    largest_parameter_bytes: int
    parameters: int

    def time_ratio(self, method: str) -> float | None:
        cell = self.cells.get(method)
        return cell.timing.ratio if cell and cell.timing else None

    def temp_ratio(self, method: str) -> float | None:
        temp, reference = self.temp_bytes(method), self.temp_bytes(REFERENCE)
        return None if temp is None or not reference else temp / reference

    def temp_bytes(self, method: str) -> int | None:
        cell = self.cells.get(method)
        return cell.program.temp_bytes if cell and cell.program else None

    @property
    def compile_ratio(self) -> float | None:
        ours, reference = (self.cells[m].program if m in self.cells else None for m in (OURS, REFERENCE))
        return ours.compile_s / reference.compile_s if ours and reference else None

    @property
    def best_other(self) -> str | None:
        others = {m: r for m in self.cells if m not in (REFERENCE, OURS) and (r := self.time_ratio(m)) is not None}
        return min(others, key=lambda m: others[m]) if others else None

    @property
    def time_against_others(self) -> float | None:
        """Surgery's time in units of the best other's; infinite where only the others could be timed."""
        if OURS not in self.cells or self.best_other is None:
            return None
        other = self.time_ratio(self.best_other)
        ours = self.time_ratio(OURS)
        return math.inf if ours is None or other is None else ours / other

    @property
    def allowed_temp_bytes(self) -> float | None:
        """1.1 times the gradient's temporaries, or these and one largest parameter."""
        reference = self.temp_bytes(REFERENCE)
        return None if reference is None else max(1.1 * reference, reference + self.largest_parameter_bytes)

    @property
    def temp_against_allowed(self) -> float | None:
        ours, allowed = self.temp_bytes(OURS), self.allowed_temp_bytes
        return None if ours is None or allowed is None else ours / allowed

    @property
    def strategies(self) -> str:
        """How often each strategy was planned, as in "loop 12, direct 5"."""
        if self.plan is None:
            return ""
        counts = collections.Counter(row.strategy for row in self.plan.rows)
        return ", ".join(f"{name} {count}" for name, count in counts.most_common())

    @property
    def examples_at_a_time(self) -> str:
        if self.plan is None:
            return UNKNOWN
        return "all" if self.plan.microbatch_size >= self.plan.batch else str(self.plan.microbatch_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extras:
    """What the bars need beside the rows."""

    deep_compile_ratio: float  # for 12 layers
    plan_s: float  # tracing and planning transformer-151m


@dataclasses.dataclass(frozen=True, kw_only=True)
class Results:
    rows: Sequence[Row]
    stats: tuple[str, ...]
    extras: Extras | None = None
