"""``pegprof compare``: results side by side."""

from pathlib import Path
from typing import Annotated

import typer

from pegprof.cli.options import Quiet, Tracebacks, export
from pegprof.cli.printing import show_text
from pegprof.errors import PegprofError


def compare(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE FILE...", help="Results of run --export-json; the first is the reference."),
    ],
    export_markdown: Annotated[str | None, export("the comparison as Markdown")] = None,
    quiet: Quiet = False,
    debug: Tracebacks = False,
) -> None:
    """Show two or more results side by side.

    Two results share a row for each method. With more, each has a row of its own, with its change from the first.
    """
    from pegprof.compare import gate
    from pegprof.report import output, side_by_side

    if len(files) < 2:
        raise PegprofError("compare takes two files or more", hint=f"pegprof compare {files[0]} OTHER.json")
    exports = output.choose_exports({"markdown": export_markdown})
    exports.check_apart_from(files)
    exports.check_writable()
    named = side_by_side.name_results(files, [gate.read_result(file) for file in files])
    show_text(
        lambda **shape: side_by_side.render_terminal(named, **shape),
        exports,
        {"markdown": lambda: side_by_side.render_markdown(named)},
        quiet=quiet,
        widest=160,
    )
