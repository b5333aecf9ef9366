"""The command line as a whole: its commands, and what becomes of errors."""

import sys
import traceback
from collections.abc import Callable
from typing import Annotated, NoReturn

import typer

import pegprof
from pegprof.cli import cache
from pegprof.cli.compare import compare
from pegprof.cli.defaults import CommandWithDefaults
from pegprof.cli.doctor import see_doctor
from pegprof.cli.experiment import experiment
from pegprof.cli.fit import fit
from pegprof.cli.gate import gate_baselines
from pegprof.cli.help import CONTEXT, Command, Group, as_pegprof_error
from pegprof.cli.inspect import inspect
from pegprof.cli.list_models import list_models
from pegprof.cli.new import new
from pegprof.cli.printing import say
from pegprof.cli.run import run
from pegprof.cli.streams import open_streams
from pegprof.cli.targets import show_targets
from pegprof.errors import ExitCode, PegprofError, first_line

# Typer's rich help would take a third of a second to load.
app = typer.Typer(
    name="pegprof",
    cls=Group,
    help="What do per-example gradient statistics cost, compared with the plain mini-batch gradient?",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=CONTEXT,
)


def main() -> NoReturn:
    """The entry point: whatever goes wrong becomes words and an exit code."""
    open_streams()
    try:
        try:
            code = app(prog_name="pegprof", standalone_mode=False)
        finally:
            sys.stdout.flush()  # here, where it can be said that something cannot be written
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    except Exception as error:
        sys.exit(_explain(error))
    sys.exit(code or ExitCode.OK)


def _explain(error: Exception) -> ExitCode:
    """Says what went wrong, and returns what to end with."""
    error = as_pegprof_error(error)
    if not isinstance(error, PegprofError):
        what = f"this is a bug in pegprof, or something is wrong with this machine: {first_line(error)}"
        error = PegprofError(what, hint="--debug shows the traceback", exit_code=ExitCode.UNMEASURED)
    if "--debug" in sys.argv:
        traceback.print_exc()
    else:
        say(f"error: {error}")
    return error.exit_code


def _print_version(asked: bool) -> None:
    if asked:
        print(f"pegprof {pegprof.__version__}")
        raise typer.Exit()


@app.callback()
def root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks; every command takes it too.")] = False,
) -> None:
    if debug:
        ctx.default_map = {name: {"debug": True} for name in COMMANDS}
        ctx.default_map["cache"] = {str(each.name): {"debug": True} for each in cache.app.registered_commands}


# In the order in which ``--help`` lists them, by section.
SECTIONS: dict[str, dict[str, Callable[..., None]]] = {
    "Measure": {"run": run, "fit": fit},
    "Look": {"list": list_models, "inspect": inspect, "targets": show_targets, "doctor": see_doctor},
    "Compare": {"compare": compare, "gate": gate_baselines},
    "More": {"new": new, "experiment": experiment},
}
COMMANDS = {name: command for commands in SECTIONS.values() for name, command in commands.items()}
for section, commands in SECTIONS.items():
    for name, command in commands.items():
        cls = CommandWithDefaults if command is run else Command
        app.command(name=name, cls=cls, rich_help_panel=section)(command)
app.add_typer(cache.app, rich_help_panel="More")
