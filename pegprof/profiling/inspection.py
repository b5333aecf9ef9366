"""Inspection: a model and what surgery would do for it. Traced, never run; a child does that."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence

from pegprof.engine.plan import Plan, PlanRow
from pegprof.errors import ExitCode, PegprofError
from pegprof.profiling import records
from pegprof.profiling.asking import find_host
from pegprof.profiling.layers import name_together
from pegprof.profiling.meshes import check_batch
from pegprof.profiling.process import ChildFailure, run_child
from pegprof.profiling.progress import Talk
from pegprof.profiling.result import Settings
from pegprof.profiling.tables import WIDTH, Column, make_console, name_of, print_table, print_words, text_of
from pegprof.profiling.targets import Target, arrange, choose_target, cpu_target, free_host_bytes
from pegprof.profiling.units import UNKNOWN, format_bytes, format_count

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
    request = {
        **dataclasses.asdict(settings),
        "methods": ["surgery"],
        "batch": settings.batches[0],
        "backend": target.backend,
        "mesh": dict(target.mesh) or None,
        "capacity_bytes": min((limit for limit in limits if limit is not None), default=None),
    }
    talk.doing(f"tracing {settings.model}")
    where = cpu_target() if target.device else target
    try:
        answer = run_child("inspect", request, environment=where.environment, limit_s=LIMIT_S, talk=talk, debug=debug)
    except ChildFailure as failure:
        what = f"the model {settings.model} could not be traced: {failure.reason}"
        raise PegprofError(what, hint=failure.output[-2000:], exit_code=ExitCode.UNMEASURED) from failure
    inspection: Inspection = records.decode(Inspection, {**answer["inspection"], "target": target.name})
    return inspection


def _memory_of(target: Target) -> int | None:
    if target.device:
        return target.device.memory_bytes
    return free_host_bytes() if target.is_host else None


def render_inspection(inspection: Inspection, *, width: int = WIDTH, color: bool = False) -> str:
    """The facts of the model, a table of its sites, and why each strategy was chosen."""
    console = make_console(width, color)
    for line in _facts(inspection):
        print_words(console, line)
    console.print()
    where = f", for {inspection.target}" if inspection.target not in ("", inspection.plan.backend) else ""
    print_words(console, str(inspection.plan).partition("\n")[0] + where, style="bold")
    sites = find_alike(inspection.plan.rows)
    print_table(console, _SITE_COLUMNS, sites)
    for line in dict.fromkeys(f"{site.row.strategy}: {site.row.why}" for site in sites):
        print_words(console, line)
    for remark in inspection.plan.remarks:
        print_words(console, remark)
    return text_of(console)


def _facts(inspection: Inspection) -> Iterator[str]:
    count = f"{inspection.parameters:,} parameters ({format_bytes(inspection.parameter_bytes)})"
    yield f"{inspection.model}: {count}, {inspection.dtype}"
    if inspection.description:
        yield inspection.description
    if inspection.options:
        yield "options: " + " ".join(f"{key}={value}" for key, value in inspection.options.items())
    leaves = (f"{leaf.name} {leaf.dtype}{list(leaf.shape)}".strip() for leaf in inspection.example)
    way = "as a batch of one" if inspection.keep_batch_dim else "bare"
    yield f"an example: {', '.join(leaves)}; the loss takes it {way}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sites:
    """Parameters that get their statistics in the same way."""

    name: str
    count: int
    row: PlanRow

    @property
    def flops(self) -> float:
        return self.count * self.row.flops


def find_alike(rows: Sequence[PlanRow]) -> list[Sites]:
    """The rows of a plan, those that are alike together, in the order of the plan."""
    alike: dict[PlanRow, list[str]] = {}
    for row in rows:
        alike.setdefault(dataclasses.replace(row, parameter="", site="", candidates=()), []).append(row.parameter)
    return [
        Sites(name=name, count=count, row=row) for row, names in alike.items() for name, count in name_together(names)
    ]


def _uses(row: PlanRow) -> str:
    """The contractions that form a gradient, each on its own line."""
    return row.contraction.replace(" + ", "\n+ ") or UNKNOWN


_SITE_COLUMNS = (
    Column(header="parameters", cell=name_of, right=False),
    Column(header="shape", cell=lambda sites: "×".join(map(str, sites.row.shape)) or "scalar", right=False, keep=3),
    Column(header="contraction", cell=lambda sites: _uses(sites.row), right=False, keep=1),
    Column(header="T", cell=lambda sites: UNKNOWN if sites.row.rank is None else str(sites.row.rank)),
    Column(header="strategy", cell=lambda sites: sites.row.strategy, right=False),
    Column(header="flops", cell=lambda sites: format_count(sites.flops), keep=2),
    Column(header="moved", cell=lambda sites: format_bytes(int(sites.count * sites.row.bytes_moved)), keep=2),
    Column(header="bytes each", cell=lambda sites: format_bytes(sites.row.bytes), keep=0),
)
