"""Sites × statistics -> Plan: which strategy each parameter gets, what that costs, and why.

A plan is data: it prints as a table, and ``grad_stats(..., plan=...)`` follows it.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from pegprof.errors import PegprofError

MATERIALISE = "materialise"
SCHEMA = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A strategy that was thought of for a parameter, what it takes for one chunk of the batch, and in what time."""

    strategy: str
    seconds: float  # an estimate, good for comparing candidates
    flops: float
    bytes_moved: float
    bytes_held: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pace:
    """A number of examples at a time, what the whole batch then takes by estimate, and what is live at once."""

    microbatch_size: int
    seconds: float
    bytes: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRow:
    """How one parameter gets its statistics."""

    parameter: str
    shape: tuple[int, ...]
    strategy: str  # of the table, or "constant" where no example has a part in the gradient
    contraction: str = ""
    rank: int | None = None  # bounds the rank of one example's gradient: T, the positions of an example
    chunk: int = 1  # how many gradients are held at once, where the strategy holds some
    flops: float = 0.0  # of the whole batch, at this site
    bytes: int = 0  # held at this site beside its frontier and the results
    why: str = ""
    source: str = ""  # the user's line, where the gradients are materialised
    candidates: tuple[Candidate, ...] = ()  # what was compared, cheapest first


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What ``grad_stats`` does for a loss, a batch size and some statistics.

    ``str(plan)`` is a table with one row for each parameter.
    """

    rows: tuple[PlanRow, ...]
    stats: tuple[str, ...]
    batch: int
    microbatch_size: int  # B: all at once
    backend: str
    one_at_a_time: str = ""  # why the program cannot be batched, if it cannot
    paces: tuple[Pace, ...] = ()  # what was compared, where the planner chose
    rates: Mapping[str, float] = dataclasses.field(default_factory=dict)  # what turned costs into seconds

    @property
    def materialised(self) -> tuple[str, ...]:
        """The parameters whose gradients are materialised, for want of a strategy."""
        return tuple(row.parameter for row in self.rows if row.strategy == MATERIALISE)

    def row(self, parameter: str) -> PlanRow:
        for row in self.rows:
            if row.parameter == parameter:
                return row
        raise PegprofError(
            f"the plan has no parameter {parameter}",
            where=parameter,
            hint="it was made for another loss or other parameters: make it again with make_plan",
        )

    def __str__(self) -> str:
        head = f"plan for {', '.join(self.stats)} of {self.batch} examples on {self.backend}, {self._pace()}"
        columns = ("parameter", "shape", "contraction", "T", "strategy", "flops", "bytes", "why")
        cells = [
            (
                row.parameter,
                "×".join(map(str, row.shape)) or "scalar",
                row.contraction or "–",
                "–" if row.rank is None else str(row.rank),
                row.strategy,
                _short(row.flops),
                _short_bytes(row.bytes),
                row.why,
            )
            for row in self.rows
        ]
        widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
        right = {"T", "flops", "bytes"}
        lines = [
            "  ".join(
                cell.rjust(width) if name in right else cell.ljust(width)
                for name, cell, width in zip(columns, line, widths, strict=True)
            ).rstrip()
            for line in (columns, *cells)
        ]
        return "\n".join([head, *lines])

    def to_json(self) -> str:
        """The plan as text, every number that it was made with included; ``from_json`` reads it back."""
        return json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """A plan that ``to_json`` wrote."""
        try:
            data = json.loads(text)
            if data.pop("schema") != SCHEMA:
                raise PegprofError("the plan was written by another version of pegprof", hint="make it again")
            rows = [_from(PlanRow, {**row, "candidates": _all(Candidate, row["candidates"])}) for row in data["rows"]]
            return _from(cls, {**data, "rows": tuple(rows), "paces": _all(Pace, data["paces"])})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PegprofError(f"this is not a plan: {error}", hint="make it with make_plan(...).to_json()") from error

    def _pace(self) -> str:
        if self.one_at_a_time:
            return f"one at a time: {self.one_at_a_time}"
        return "all at once" if self.microbatch_size >= self.batch else f"{self.microbatch_size} at a time"


def _from(cls: Any, data: Mapping[str, Any]) -> Any:
    """A record from what JSON made of it: lists are tuples again."""
    return cls(**{name: tuple(x) if isinstance(x, list) else x for name, x in data.items()})


def _all(cls: Any, data: list[Mapping[str, Any]]) -> tuple[Any, ...]:
    return tuple(_from(cls, each) for each in data)


def _short(number: float) -> str:
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.1f} {unit}"
    return f"{number:.0f}"


def _short_bytes(number: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= scale:
            return f"{number / scale:.1f} {unit}"
    return f"{number} B"
