"""How help is laid out: options in sections, one column of names, one of explanations.

Typer lays sections out with rich, which takes a third of a second to load. Here ``rich_help_panel`` is the section of
an option or command, and plain text is written.
"""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from pegprof.cli.printing import say
from pegprof.errors import ExitCode, PegprofError, nearest

WHAT = "What to measure"
COMPARING = "What to compare"
WHERE = "Where"
HOW_LONG = "How long"
OUTPUT = "Output"
GENERAL = "General options"

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
EVERYWHERE = ("quiet", "debug", "version", "install_completion", "show_completion", "help")
COLUMN = 31  # where explanations begin
RENAMED: Mapping[tuple[str, str], str] = {
    ("gate", "--junit"): "--export-junit FILE",
    ("inspect", "--json"): "--export-json FILE, with - for stdout",
    ("list", "--json"): "--export-json FILE, with - for stdout",
    ("compare", "--markdown"): "--export-markdown FILE, with - for stdout",
}
"""Options that had another name, by command."""

Row = tuple[str, str]


class Command(TyperCommand):
    """A command whose help has sections, and whose errors are pegprof's own."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_sections(formatter, options_by_section(self.get_params(ctx), ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", *(_name_of(param) for param in self.params if _is_argument(param))]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            raise as_pegprof_error(error, ctx) from error


class Group(TyperGroup):
    """Commands in sections. Without a command, it shows its help and ends with 2."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[Row]] = {}
        for name in self.list_commands(ctx):
            command = self.commands[name]
            section = getattr(command, "rich_help_panel", None) or "Commands"
            sections.setdefault(section, []).append((name, command.get_short_help_str(limit=200)))
        write_sections(formatter, sections, column=14)
        write_sections(formatter, options_by_section(self.get_params(ctx), ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", "COMMAND ..."]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            say(ctx.get_help())
            raise typer.Exit(ExitCode.USAGE)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            raise as_pegprof_error(error, ctx) from error

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands and not ctx.resilient_parsing:
            hint = f"{nearest(args[0], self.commands)} ({ctx.command_path} --help says what they do)"
            raise PegprofError(f"there is no command {args[0]!r}", hint=hint)
        return super().resolve_command(ctx, args)


def options_by_section(params: Iterable[Any], ctx: Any) -> dict[str, list[Row]]:
    """The arguments, then the options in the order in which they are declared, then those of every command."""
    sections: dict[str, list[Row]] = {"Arguments": []}
    general: list[Row] = []
    for param in params:
        if getattr(param, "hidden", False):
            continue
        if _is_argument(param):
            sections["Arguments"].append((_name_of(param), param.help or ""))
        elif param.name in EVERYWHERE:
            general.append(_describe(param, ctx))
        else:
            section = getattr(param, "rich_help_panel", None) or "Options"
            sections.setdefault(section, []).append(_describe(param, ctx))
    return {**sections, GENERAL: general}


def write_sections(formatter: Any, sections: Mapping[str, Sequence[Row]], *, column: int = COLUMN) -> None:
    """Each section that has rows, below its title."""
    for title, rows in sections.items():
        if rows:
            lines = (line for row in rows for line in _lay_out(*row, column=column, width=formatter.width))
            formatter.write(f"\n{title}:\n" + "".join(f"{line}\n" for line in lines))


def _lay_out(name: str, words: str, *, column: int, width: int) -> list[str]:
    """
    >>> _lay_out("--seed N", "Random seed for parameters and data.", column=12, width=40)
    ['  --seed N  Random seed for parameters', '            and data.']
    """
    start = f"  {name}".ljust(column - 1) + " "
    lines = textwrap.wrap(words, max(width - column, 20), break_on_hyphens=False) or [""]
    if len(start) > column:
        return [start.rstrip(), *(" " * column + line for line in lines)]
    return [(start + lines[0]).rstrip(), *(" " * column + line for line in lines[1:])]


def _describe(option: Any, ctx: Any) -> Row:
    """An option's names and what it takes; what it does, and its default."""
    names = ", ".join(sorted(option.opts, key=len))
    takes = "" if option.is_flag or option.count else f" {option.metavar or option.name.upper()}"
    default = option.show_default if isinstance(option.show_default, str) else option.get_default(ctx, call=False)
    known = option.show_default and default is not None and default is not False
    return names + takes, f"{option.help} [default: {default}]" if known else option.help or ""


def _is_argument(param: Any) -> bool:
    return bool(param.param_type_name == "argument")


def _name_of(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def as_pegprof_error(error: Exception, ctx: Any = None) -> Exception:
    """What the parser says about wrong usage, as pegprof says it; other errors as they are."""
    if not hasattr(error, "format_message"):
        return error
    ctx = ctx or error.ctx  # type: ignore[attr-defined]
    option = getattr(error, "option_name", None)
    if option is not None and hasattr(error, "possibilities"):
        known = [name for param in ctx.command.get_params(ctx) for name in (*param.opts, *param.secondary_opts)]
        return PegprofError(f"{ctx.command_path} has no option {option}", hint=_find_option(option, known, ctx))
    param, value_error = getattr(error, "param", None), getattr(error, "message", "")
    where = max(param.opts, key=len) if param is not None and value_error else ""
    message = (value_error if where else error.format_message()).rstrip(".")
    hint = f"{ctx.command_path} --help says what it takes"
    return PegprofError(f"{message[:1].lower()}{message[1:]}", where=where, hint=hint)


def _find_option(option: str, known: Sequence[str], ctx: Any) -> str:
    if new := RENAMED.get((ctx.info_name, option)):
        return f"it is now {new}"
    close = nearest(option, [name for name in known if name.startswith("--")])
    return close if close.startswith("did you mean") else f"{ctx.command_path} --help lists its options"
