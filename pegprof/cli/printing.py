"""Printing: data on stdout, talk on stderr. Only this package prints."""

import os
import sys
from collections.abc import Callable, Mapping
from typing import IO, TYPE_CHECKING, Any

from pegprof.result.result import Result

if TYPE_CHECKING:
    from pegprof.report.output import Exports


def say(text: str) -> None:
    """Talk."""
    print(text, file=sys.stderr, flush=True)


def show(result: Result, render: Callable[..., str], exports: "Exports", *, quiet: bool) -> None:
    """The table of a result on stdout; its files are written by then. As ``show_text`` otherwise."""
    from pegprof.report.formats import FORMATS

    _show(render, exports.stdout and FORMATS[exports.stdout](result), quiet=quiet)


def show_text(
    render: Callable[..., str],
    exports: "Exports",
    formats: Mapping[str, Callable[[], str]],
    *,
    quiet: bool,
    widest: int = 100,
) -> None:
    """Writes the files, and shows the text on stdout, or the export that goes there; the text is then on stderr."""
    from pegprof.report import output

    _show(render, exports.stdout and formats[exports.stdout](), quiet=quiet, widest=widest)
    for name, path in exports.files.items():
        output.write(path, formats[name](), name)
        if not quiet:
            say(f"wrote {path}")


def _show(render: Callable[..., str], exported: str | None, *, quiet: bool, widest: int = 100) -> None:
    text_file = sys.stdout if exported is None else sys.stderr
    if exported is None or not quiet:
        print(render(**shape_of(text_file, widest=widest)), file=text_file, flush=True)
    if exported is not None:
        print(exported, end="", flush=True)


def shape_of(file: IO[str], *, widest: int = 100) -> dict[str, Any]:
    """How text should look in a stream: as wide as its terminal, up to a point, and in colour if that wants it.

    What is no terminal is as wide as COLUMNS says.
    """
    from rich.console import Console

    from pegprof.report.tables import WIDTH

    console = Console(file=file)
    width = min(console.width, widest) if file.isatty() else _columns() or WIDTH
    return {"width": width, "color": console.is_terminal and not console.no_color}


def _columns() -> int | None:
    text = os.environ.get("COLUMNS", "")
    return int(text) if text.isdecimal() and int(text) > 0 else None
