"""``pegprof cache``: what compilers answered before, and how to forget it."""

import typer

from pegprof.cli.help import CONTEXT, Command, Group
from pegprof.cli.options import Quiet, Tracebacks
from pegprof.cli.printing import say

app = typer.Typer(
    name="cache",
    cls=Group,
    help="Show or clear the cache of compiled programs' sizes.",
    rich_markup_mode=None,
    context_settings=CONTEXT,
)


@app.command(name="info", cls=Command)
def show_cache(debug: Tracebacks = False) -> None:
    """Show where the cache is and how large.

    It keeps what XLA's compilers answered for devices that are not here. An answer is used again only for the same
    program, device, versions and flags.
    """
    from pegprof.targets import cache
    from pegprof.units import format_bytes

    contents = cache.survey()
    print(f"folder   {contents.folder}\nanswers  {contents.answers}\nsize     {format_bytes(contents.total_bytes)}")


@app.command(name="clear", cls=Command)
def clear_cache(quiet: Quiet = False, debug: Tracebacks = False) -> None:
    """Remove every answer from the cache."""
    from pegprof.targets import cache
    from pegprof.units import format_bytes

    before = cache.clear()
    if not quiet:
        answers = "1 answer" if before.answers == 1 else f"{before.answers} answers"
        say(f"removed {answers}, {format_bytes(before.total_bytes)}, from {before.folder}")
