"""What the command lines of all benchmarks share: streams, CSV, errors in words."""

import csv
import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console

from pegprof.errors import ExitCode, PegprofError


def run_command(command: Callable[..., None]) -> NoReturn:
    """Run a benchmark's command line: an error that a user can act on becomes words and an exit code."""
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
    app.command()(command)
    try:
        app()
    except PegprofError as error:
        say(f"error: {error}")
        sys.exit(error.exit_code)
    sys.exit(ExitCode.OK)


def write_csv(rows: Sequence[dict[str, Any]], path: str) -> None:
    """``-`` is stdout."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(column for row in rows for column in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    if path == "-":
        print(text.getvalue(), end="")
    else:
        Path(path).write_text(text.getvalue(), encoding="utf-8")


def say(text: str) -> None:
    """Talk goes to stderr."""
    print(text, file=sys.stderr, flush=True)


def make_console(*, to_stderr: bool = False) -> Console:
    """A terminal's own width; in a file, wide enough for the tables."""
    stream = sys.stderr if to_stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else 180)
