"""Front -> text for a person: a table of meshes by method, with those marked that are worth a choice."""

from pegprof.measure.fit import Fit
from pegprof.measure.front import Front, Point
from pegprof.report.fit_text import describe_edge, render_fit
from pegprof.report.tables import WIDTH, Column, make_console, print_table, print_words, text_of
from pegprof.report.terminal import headline
from pegprof.units import UNKNOWN, format_bytes

MARK = "*"
MEANING = f"{MARK} no other mesh needs less memory without moving more, or moves less without needing more"


def render(found: Fit | Front, *, width: int = WIDTH, color: bool = False) -> str:
    """What was found of one mesh, or of all."""
    if isinstance(found, Front):
        return render_front(found, width=width, color=color)
    return render_fit(found, width=width, color=color)


def render_front(front: Front, *, width: int = WIDTH, color: bool = False) -> str:
    """The table, what the mark means, and what is missing."""
    console = make_console(width, color)
    rows = front.result.rows
    if not rows:
        return ""
    first = rows[0]
    print_words(console, headline(first, with_batch=False), style="bold")
    available = f"{format_bytes(first.capacity_bytes)} available each"
    print_words(console, f"{first.target}: {first.device}, {available}; figures of one device at batch {front.batch}")
    points = front.points
    columns = [column for column in _COLUMNS if any(column.cell(point) for point in points)]
    print_table(console, columns, points)
    print_words(console, MEANING)
    for point in points:
        if point.answer and point.answer.failure:
            print_words(console, f"{point.method}, mesh {point.mesh}: {point.answer.failure}")
        elif point.row and point.row.status == "failed":
            print_words(console, f"{point.method}, mesh {point.mesh}: {point.row.reason}")
    for mesh, why in front.refused.items():
        print_words(console, f"mesh {mesh}: {why}")
    if front.untried:
        print_words(console, f"the time limit came before these meshes: {' '.join(front.untried)}")
    return text_of(console)


def _status(point: Point) -> str:
    status = point.row.status if point.row else ""
    return {"ok": "yes", "refused": "no"}.get(status, UNKNOWN)


_STYLES = {"yes": "green", "no": "yellow", UNKNOWN: "red"}
_COLUMNS = (
    Column(header="method", cell=lambda point: point.method, right=False),
    Column(header="--mesh", cell=lambda point: point.mesh, right=False, whole=True),
    Column(
        header="largest batch",
        cell=lambda point: describe_edge(point.answer, point.most) if point.answer else "",
        right=False,
    ),
    Column(header="fits", cell=_status, right=False, style=lambda point: _STYLES[_status(point)], keep=0),
    Column(header="needs", cell=lambda point: format_bytes(point.row.peak_bytes if point.row else None)),
    Column(header="moves", cell=lambda point: format_bytes(point.row.collective_bytes if point.row else None)),
    Column(header="front", cell=lambda point: MARK if point.is_on_front else "", right=False),
)
