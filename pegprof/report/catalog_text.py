"""Catalog -> text: what ``pegprof list`` shows, and its JSON."""

import dataclasses
import json

from pegprof.measure.catalog import OWN_PACKAGE, Catalog, Entry
from pegprof.report.tables import WIDTH, Column, make_console, natural_width, print_whole_table, text_of
from pegprof.units import UNKNOWN, format_count


def render_json(catalog: Catalog) -> str:
    return json.dumps([dataclasses.asdict(entry) for entry in catalog.entries], indent=2)


def render_terminal(catalog: Catalog, *, width: int = WIDTH, color: bool = False) -> str:
    """A table that fits the width, as long as that leaves room for the names."""
    console = make_console(max(width, natural_width(_NAME, catalog.entries)), color)
    print_whole_table(console, _COLUMNS, catalog.entries)
    return text_of(console)


def _describe(entry: Entry) -> str:
    return entry.description if entry.package == OWN_PACKAGE else f"{entry.description} ({entry.package})".lstrip()


_NAME = Column(header="model", cell=lambda entry: entry.name, right=False, whole=True)
_COLUMNS = (
    _NAME,
    Column(header="parameters", cell=lambda entry: format_count(entry.parameters), keep=5),
    Column(header="outside\nembeddings", cell=lambda entry: format_count(entry.parameters_outside_embeddings), keep=3),
    Column(header="batch", cell=lambda entry: str(entry.batch), keep=1),
    Column(header="seq_len", cell=lambda entry: UNKNOWN if entry.seq_len is None else str(entry.seq_len), keep=2),
    Column(
        header="dominant",
        cell=lambda entry: "activations" if entry.activations_dominate else "parameters",
        right=False,
        keep=4,
    ),
    Column(header="description", cell=_describe, right=False, keep=0, narrowest=20),
)
