"""Defaults of ``pegprof run`` from the nearest pyproject.toml: its options by name, a flag before the file.

[tool.pegprof.run]
batch = [16, 64]
time-limit = "5m"
time = false               # or no-time = true
set = { width = 256 }
"""

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pegprof.cli.help import Command
from pegprof.cli.printing import say
from pegprof.errors import PegprofError, nearest

TABLE = "[tool.pegprof.run]"


class CommandWithDefaults(Command):
    """A command whose options take their defaults from the file."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        # Help and completion shall work where the file is wrong.
        lenient = extra.get("resilient_parsing") or {"-h", "--help"} & set(args)
        found = None if lenient else read_defaults(Path.cwd(), self)
        given = ((parent.default_map if parent else None) or {}).get(info_name, {})
        extra["default_map"] = {**(found.values if found else {}), **given}
        if found and not (found.values.get("quiet") or {"-q", "--quiet"} & set(args)):
            say(f"defaults from {found.path}: {found.words}")
        return super().make_context(info_name, args, parent, **extra)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Defaults:
    """What the file says: values by parameter, and the same in words."""

    path: Path
    values: Mapping[str, Any]
    words: str


def read_defaults(folder: Path, command: Command) -> Defaults | None:
    """The defaults of the nearest pyproject.toml at or above a folder; None if it has none.

    Raises:
      PegprofError: the file cannot be read, or an entry is no option or of the wrong kind.
    """
    path = next((p for f in (folder, *folder.parents) if (p := f / "pyproject.toml").is_file()), None)
    table = _read_table(path) if path else {}
    if not (path and table):
        return None
    shown = path.relative_to(folder) if path.is_relative_to(folder) else path
    options = {name: option for option in command.params for name in _names_of(option)}
    values = {}
    for name, value in table.items():
        where = f"{shown}: {TABLE}"
        if name not in options:
            raise PegprofError(f"{name!r} is not an option of run", where=where, hint=nearest(name, options))
        values[options[name].name] = _convert(name, value, options[name], where=where)
    words = ", ".join(f"{name} = {_spell(value)}" for name, value in table.items())
    return Defaults(path=shown, values=values, words=words)


def _read_table(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("pegprof", {}).get("run", {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, AttributeError) as error:
        raise PegprofError(f"{TABLE} cannot be read: {error}", where=str(path)) from error
    if not isinstance(table, dict):
        raise PegprofError(f"{TABLE} is not a table", where=str(path), hint=f"write {TABLE} on a line of its own")
    return table


def _names_of(option: Any) -> list[str]:
    """As they are in the file: the long names, without dashes before them."""
    if option.param_type_name == "argument" or option.name in ("help", "debug"):
        return []
    return [name.removeprefix("--") for name in (*option.opts, *option.secondary_opts) if name.startswith("--")]


def _convert(name: str, value: Any, option: Any, *, where: str) -> Any:
    """A value of the file as the command line would give it."""
    if option.is_flag:
        if not isinstance(value, bool):
            raise PegprofError(f"{name} is {_spell(value)}", where=where, hint="write true or false")
        return value if f"--{name}" in option.opts else not value
    if isinstance(value, dict):
        if not option.multiple:
            raise PegprofError(f"{name} is a table", where=where, hint=f"write {name} = ...")
        return [f"{key}={_plain(each)}" for key, each in value.items()]
    if isinstance(value, list) and option.multiple:
        return [_plain(each) for each in value]
    if option.multiple:
        raise PegprofError(f"{name} is {_spell(value)}", where=where, hint=f"write {name} = {{ width = 64 }}")
    return ",".join(map(_plain, value)) if isinstance(value, list) else _plain(value)


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _spell(value: Any) -> str:
    """
    >>> _spell({"width": 64}), _spell([8, 16]), _spell(True)
    ('width=64', '8,16', 'true')
    """
    if isinstance(value, dict):
        return " ".join(f"{key}={_plain(each)}" for key, each in value.items())
    return ",".join(map(_plain, value)) if isinstance(value, list) else _plain(value)
