"""``Plan``: which strategy each site gets, what that costs, and why.

A plan is data, keyed by site: it prints as a table with a row for each parameter, and ``grad_stats(..., plan=...)``
follows it.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from pegprof.engine.plan_table import plan_table
from pegprof.errors import PegprofError

CONSTANT = "constant"
SCHEMA = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A strategy that was considered for a site: what it takes for one chunk of the batch, and in what time."""

    strategy: str
    seconds: float  # an estimate, good for comparing candidates
    flops: float
    bytes_moved: float
    bytes_held: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """A number of examples at a time, and estimates: the time for the whole batch, and the bytes live at once."""

    microbatch_size: int
    seconds: float
    bytes: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRow:
    """How one parameter gets its statistics. Parameters of one site have rows that agree in strategy and chunk."""

    parameter: str
    shape: tuple[int, ...]
    strategy: str  # a rule, a schedule of the default fold, or "constant" where no example has a part in the gradient
    site: str = ""  # the key of its site; "" where there is none
    structure: str = ""  # of one example's gradient: outer, conv, rows, sum or dense
    contraction: str = ""
    rank: int | None = None  # bounds the rank of one example's gradient: T, the positions of an example
    chunk: int = 1  # how many gradients are held at once, where the strategy holds some
    flops: float = 0.0  # of the whole batch, at this site
    bytes_moved: float = 0.0  # to and from main memory, likewise, by estimate
    bytes: int = 0  # held at this site beside its frontier and the results
    why: str = ""
    source: str = ""  # the user's line, where the gradients are materialised
    kernel: bool = False  # whether the strategy is a fused kernel
    materialised: bool = False  # whether an operation that no rule understands forms the gradients in full
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
    schedules: tuple[Schedule, ...] = ()  # what was compared, where the planner chose
    rates: Mapping[str, float] = dataclasses.field(default_factory=dict)  # what turned costs into seconds
    remarks: tuple[str, ...] = ()  # what a reader should know, such as why kernels are not used
    devices: int = 1  # that have such a batch each, of one that is sharded

    @property
    def materialised(self) -> tuple[str, ...]:
        """The parameters whose gradients an operation forms in full that no rule understands."""
        return tuple(row.parameter for row in self.rows if row.materialised)

    @property
    def sites(self) -> tuple[str, ...]:
        """The keys of the sites."""
        return tuple(dict.fromkeys(row.site for row in self.rows if row.site))

    @property
    def kernel_sites(self) -> tuple[str, ...]:
        """Those at which a fused kernel runs."""
        return tuple(dict.fromkeys(row.site for row in self.rows if row.kernel))

    def at(self, site: str) -> PlanRow:
        """What the plan says of a site; see ``Site.key``."""
        return self._find(site, (row for row in self.rows if row.site == site))

    def row(self, parameter: str) -> PlanRow:
        """What the plan says of a parameter."""
        return self._find(parameter, (row for row in self.rows if row.parameter == parameter))

    def _find(self, name: str, rows: Iterator[PlanRow]) -> PlanRow:
        for row in rows:
            return row
        hint = "it was made for another loss or other parameters: make it again with make_plan"
        raise PegprofError(f"the plan has no parameter {name}", where=name, hint=hint)

    def __str__(self) -> str:
        return plan_table(self)

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
            return _from(cls, {**data, "rows": tuple(rows), "schedules": _all(Schedule, data["schedules"])})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PegprofError(f"this is not a plan: {error}", hint="make it with make_plan(...).to_json()") from error


def _from(cls: Any, data: Mapping[str, Any]) -> Any:
    """A record from what JSON made of it: lists are tuples again."""
    return cls(**{name: tuple(x) if isinstance(x, list) else x for name, x in data.items()})


def _all(cls: Any, data: list[Mapping[str, Any]]) -> tuple[Any, ...]:
    return tuple(_from(cls, each) for each in data)
