"""Inspection -> text for a person: the model's facts, a table of its sites, why each strategy was chosen."""

import dataclasses
from collections.abc import Iterator, Sequence

from pegprof.engine.plan import PlanRow
from pegprof.measure.inspection import Inspection
from pegprof.report.tables import WIDTH, Column, make_console, name_of, print_whole_table, print_words, text_of
from pegprof.result.layers import name_together
from pegprof.units import UNKNOWN, format_bytes, format_count


def render_inspection(inspection: Inspection, *, width: int = WIDTH, color: bool = False) -> str:
    """The facts of the model, a table of its sites, and why each strategy was chosen."""
    console = make_console(width, color)
    for line in _facts(inspection):
        print_words(console, line)
    console.print()
    where = f", for {inspection.target}" if inspection.target not in ("", inspection.plan.backend) else ""
    print_words(console, str(inspection.plan).partition("\n")[0] + where, style="bold")
    sites = find_alike(inspection.plan.rows)
    print_whole_table(console, _SITE_COLUMNS, sites)
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
