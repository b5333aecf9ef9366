"""Events: what happens in a measurement, one after the other. A log of them is all that a Result is made from.

``history.py`` folds them; ``log.py`` writes them down and reads them back.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from pegprof.result.findings import Compiled, Facts, Peak
from pegprof.result.remarks import Remark
from pegprof.result.settings import Settings
from pegprof.result.verdict import Verdict

Outcome = Literal["failed", "refused", "skipped"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """What a row says of its target.

    Args:
      name: what ``--target`` takes.
      runs: whether methods are run on it.
      device: its name; None if only a worker can tell.
      kind: of the devices of a slice, whose links are known.
      compiler: what compiles for a device that is not here.
      second_try: what to say where that had to do without something.
      mesh: the sizes of the axes of several devices, by name.
      devices: how many there are.
    """

    name: str
    runs: bool = False
    device: str | None = None
    kind: str | None = None
    compiler: str | None = None
    second_try: str = ""
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)
    devices: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Begun:
    """A measurement, and what it is of."""

    settings: Settings
    places: tuple[Place, ...]
    timestamp: str
    pegprof: str
    xla_flags: str | None
    in_process: bool = False  # a model that no other process could import


@dataclasses.dataclass(frozen=True, kw_only=True)
class Described:
    """The model was loaded."""

    facts: Facts
    capacity_bytes: Mapping[str, int | None]  # by target


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodCompiled:
    """A method was compiled, or could not be."""

    batch: int
    method: str
    target: str
    compiled: Compiled


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weighed:
    """The activations of one example were compared with the parameters on a target."""

    verdict: Verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchChosen:
    """All methods are run at ``time_batch``. What was measured before at another one does not count."""

    batch: int
    time_batch: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstRun:
    """A method ran for the first time at a batch."""

    batch: int
    method: str
    time_batch: int
    time_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ran:
    """A method ran in a round of a process: the median of its runs there."""

    batch: int
    method: str
    process: int
    round: int
    time_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeakMeasured:
    """The memory of a run was measured."""

    batch: int
    method: str
    peak: Peak


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared:
    """A method's statistics were compared with another's; None where there was no finite number to compare."""

    batch: int
    method: str
    max_rel_error: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remarked:
    """There is something to say of a method's row."""

    batch: int
    method: str
    remark: Remark


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
    """A method crashed or is wrong, does not fit, or there was no time for it."""

    batch: int
    method: str
    status: Outcome
    words: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cleared:
    """What was held against a method is taken back: another one was wrong."""

    batch: int
    method: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessesPlanned:
    """So many processes there is time for."""

    processes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchTimed:
    """The rounds of a batch are over."""

    batch: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished:
    """Nothing is left to measure."""


Event = (
    Begun
    | Described
    | MethodCompiled
    | Weighed
    | BatchChosen
    | FirstRun
    | Ran
    | PeakMeasured
    | Compared
    | Remarked
    | Ended
    | Cleared
    | ProcessesPlanned
    | BatchTimed
    | Finished
)
