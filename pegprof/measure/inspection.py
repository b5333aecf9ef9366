"""Inspection: a model and what surgery would do for it. Traced, never run; a child does that."""

import dataclasses
import json
from collections.abc import Mapping, Sequence

from pegprof.engine.plan import Plan
from pegprof.errors import ExitCode, PegprofError
from pegprof.measure import protocol
from pegprof.measure.process import ChildFailure
from pegprof.measure.progress import Talk
from pegprof.measure.workers import find_host
from pegprof.result import records
from pegprof.result.settings import Settings
from pegprof.targets.meshes import check_batch
from pegprof.targets.selection import Target, arrange, choose_target, cpu_target, free_host_bytes

SCHEMA = 2
LIMIT_S = 600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    """One array of an example."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspection:
    """The fields are those of the child's answer."""

    model: str
    description: str
    options: Mapping[str, object]
    parameters: int
    parameter_bytes: int
    dtype: str
    keep_batch_dim: bool
    example: tuple[Leaf, ...]
    plan: Plan
    target: str = ""

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, **records.encode(self)}, indent=1, ensure_ascii=False)


def to_json(inspections: Sequence[Inspection]) -> str:
    """One object, or an array of several."""
    texts = [inspection.to_json() for inspection in inspections]
    return texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"


def inspect_model(settings: Settings, *, talk: Talk, debug: bool = False) -> list[Inspection]:
    """What surgery would do at the first batch size of the settings, with the memory that a run would have.

    There is one for each target. For one that is not here nothing has to be installed: a plan needs its kind and its
    memory alone.
    """
    host = find_host(talk)
    named = [choose_target(name, host) for name in settings.targets] or [host]
    targets = [arrange(target, settings.mesh) for target in named]
    for target in targets:
        check_batch(target.mesh, settings.batches[0])
    return [_inspect_for(target, settings, talk=talk, debug=debug) for target in targets]


def _inspect_for(target: Target, settings: Settings, *, talk: Talk, debug: bool) -> Inspection:
    limits = [settings.memory_limit_bytes, _memory_of(target)]
    asked = dataclasses.replace(settings, methods=("surgery",))
    request = protocol.Inspect(
        subject=protocol.Subject(settings=asked, backend=target.backend, mesh=dict(target.mesh)),
        batch=settings.batches[0],
        capacity_bytes=min((limit for limit in limits if limit is not None), default=None),
    )
    talk.doing(f"tracing {settings.model}")
    where = cpu_target() if target.device else target
    try:
        answer = protocol.run_child(request, environment=where.environment, limit_s=LIMIT_S, talk=talk, debug=debug)
    except ChildFailure as failure:
        what = f"the model {settings.model} could not be traced: {failure.reason}"
        raise PegprofError(what, hint=failure.output[-2000:], exit_code=ExitCode.UNMEASURED) from failure
    inspection: Inspection = records.decode(Inspection, {**answer.inspection, "target": target.name})
    return inspection


def _memory_of(target: Target) -> int | None:
    if target.device:
        return target.device.memory_bytes
    return free_host_bytes() if target.is_host else None
