"""What workers are asked, and what they answer: typed records, one pair for each job.

A request goes over the socket as JSON, under the name of its class; a field that its type does not have is refused, on
either side. An answer may come in parts: its fields have defaults where a worker that dies may leave them out.
"""

import contextlib
import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from pegprof.engine.plan import Plan
from pegprof.measure.process import Child, Watch, Worker
from pegprof.measure.progress import Talk
from pegprof.result import records
from pegprof.result.environment import Environment
from pegprof.result.findings import Compiled, Facts
from pegprof.result.settings import Settings
from pegprof.targets.selection import Target

A = TypeVar("A")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """What a worker works on: the settings, and where.

    Args:
      settings: what is measured.
      device: one that is not here, by name; None is the one that JAX has.
      backend: what surgery plans for; None is the one that JAX has.
      mesh: the sizes of the axes of several devices, by name.
    """

    settings: Settings
    device: str | None = None
    backend: str | None = None
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def at(cls, settings: Settings, target: Target) -> "Subject":
        device = target.device.name if target.device else None
        return cls(settings=settings, device=device, backend=target.backend, mesh=dict(target.mesh))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slot:
    """Where in the file an array is. ``key_impl`` is the kind of random keys that it holds, if it does."""

    offset: int
    shape: tuple[int, ...]
    dtype: str
    key_impl: str | None = None


# Answers that are no record of a Result.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Done:
    """There is nothing to say."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Devices:
    """What JAX sees: kinds of devices."""

    backend: str
    devices: tuple[str, ...]
    environment: Environment


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planned:
    """What surgery does."""

    plan: Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """The temporaries of the plain gradient at two batch sizes, and what the backward pass keeps by the trace."""

    temp_bytes: Mapping[int, int]
    traced_bytes_per_example: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Where in the file the parameters and the batch are."""

    params: tuple[Slot, ...]
    batch: tuple[Slot, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
    """What came of runs.

    Args:
      times_s: of each run that counts.
      host_bytes: the peak of the process's memory above what it had before.
      device_peak_bytes: the device's own.
      kept: where in the file the statistics are.
      not_kept: why they are not there.
      max_rel_error: by which they differ from others; None if there was no finite number.
      nonfinite: which of them are no finite numbers, in words.
    """

    times_s: tuple[float, ...]
    host_bytes: int | None = None
    device_peak_bytes: int | None = None
    kept: Mapping[str, tuple[Slot, ...]] | None = None
    not_kept: str = ""
    max_rel_error: float | None = None
    nonfinite: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExamplesChecked:
    """Whether examples leave each other alone, and whether the engine is right; ``text`` is for people.

    ``loss`` says that it is no finite number, if so.
    """

    ok: bool
    text: str = ""
    cause: str = ""
    engine_fault: str = ""
    loss: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Surveyed:
    """Facts of models by name, why others have none, and the model that was looked at last."""

    facts: Mapping[str, object] = dataclasses.field(default_factory=dict)
    failures: Mapping[str, str] = dataclasses.field(default_factory=dict)
    running: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspected:
    """The facts of a model as ``Inspection`` has them."""

    inspection: Mapping[str, object]


# Requests.


class Request(Generic[A]):
    """Something to do, with an answer of type A."""

    @classmethod
    def answer(cls) -> type[A]:
        (base,) = cls.__orig_bases__  # type: ignore[attr-defined]
        made: type[A] = typing.get_args(base)[0]
        return made


@dataclasses.dataclass(frozen=True, kw_only=True)
class GetReady(Request[Done]):
    """Import all that the other jobs need."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListDevices(Request[Devices]):
    """Say what JAX sees."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Survey(Request[Surveyed]):
    """Facts of models, of those that no other worker has claimed by a file in the folder ``claims``."""

    models: tuple[str, ...]
    claims: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Describe(Request[Facts]):
    """Check all of the settings, and describe the model; ``measure_rate`` is how fast the device multiplies."""

    subject: Subject
    measure_rate: bool = False
    meshes: tuple[Mapping[str, int], ...] = ()  # that it must be possible to shard the model over


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspect(Request[Inspected]):
    """Describe the model and what surgery does for it."""

    subject: Subject
    batch: int
    capacity_bytes: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MakePlan(Request[Planned]):
    """Say what surgery does at a batch."""

    subject: Subject
    batch: int
    capacity_bytes: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weigh(Request[Weights]):
    """Compare activations and parameters."""

    subject: Subject


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compile(Request[Compiled]):
    """Compile one method at one batch; what can be run is kept.

    Args:
      capacity_bytes: what surgery's planner may use.
      surgery_size: how many examples surgery takes at a time, where that is not the planner's choice.
    """

    subject: Subject
    method: str
    batch: int
    capacity_bytes: int | None = None
    surgery_size: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MakeArguments(Request[Arguments]):
    """Make the parameters and a batch, once for all methods, into a file that is open by that descriptor."""

    subject: Subject
    batch: int
    seed: int
    file: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load(Request[Done]):
    """Get the arguments of a method's program from the file."""

    subject: Subject
    method: str
    batch: int
    arguments: Arguments
    file: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unload(Request[Done]):
    """Give the arguments up, and their memory back, until they are loaded again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(Request[Times]):
    """Run a method with the arguments that are loaded.

    Args:
      times: how often.
      rewarm: whether there is one more run before, which does not count.
      measure_peak: whether to measure the memory that it takes; of a second run if the first is a short one.
      keep: whether to put the statistics into the file.
      compare_with: what another method kept.
      find_nonfinite: whether to look for statistics that are no finite numbers.
    """

    method: str
    file: int
    times: int = 1
    rewarm: bool = False
    measure_peak: bool = False
    keep: bool = False
    compare_with: Mapping[str, tuple[Slot, ...]] | None = None
    find_nonfinite: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckExamples(Request[ExamplesChecked]):
    """``pegprof.check_examples`` on the first examples of the batch."""

    subject: Subject
    arguments: Arguments
    examples: int
    file: int


def send(worker: Worker, request: Request[Any]) -> None:
    """Hands a request over; it is begun when those before it are done."""
    worker.send(type(request).__name__, records.encode(request))


def receive(worker: Worker, answer: type[A], *, limit_s: float, watch: Watch | None = None) -> A:
    """The answer to the oldest request that has none yet, of the type that this has; else as ``Child.receive``."""
    return read(answer, worker.receive(limit_s=limit_s, watch=watch))


def run_child(
    request: Request[A],
    *,
    environment: Mapping[str, str],
    limit_s: float,
    talk: Talk,
    debug: bool = False,
) -> A:
    """Does one job in a fresh process."""
    with contextlib.closing(Child(environment, talk=talk, debug=debug)) as child:
        send(child, request)
        return receive(child, request.answer(), limit_s=limit_s)


def read(answer: type[A], fields: Mapping[str, Any]) -> A:
    """An answer, or what there is of it."""
    made: A = records.decode(answer, dict(fields))
    return made
