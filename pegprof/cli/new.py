"""``pegprof new``: a starting file for a model of one's own."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from pegprof.cli.options import Tracebacks
from pegprof.cli.printing import say


def new(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write, like my_model.py.")],
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    debug: Tracebacks = False,
) -> None:
    """Write a commented model file to start from; it runs as it is."""
    from pegprof.models.starting_file import FUNCTION, write_starting_file

    write_starting_file(file, force=force)
    say(f"wrote {file}\nnext: pegprof run {shlex.quote(f'{file}:{FUNCTION}')} --batch 32")
