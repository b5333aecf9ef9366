"""What a gate lets pass: from flags, and from ``[tool.pegprof.gate]`` in pyproject.toml, by model and method.

    [tool.pegprof.gate]
    max-bytes = "1%"
    max = { "surgery.time_ratio" = 1.2 }

    [tool.pegprof.gate.models.mlp]
    max-bytes = "2%"

    [tool.pegprof.gate.models.mlp.methods.vmap]
    max-bytes = "5%"

The more special goes before the more general, and a flag before the file.
"""

import dataclasses
import itertools
import math
import re
import tomllib
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pegprof.errors import PegprofError, nearest
from pegprof.result.result import Row
from pegprof.result.settings import METHODS

_SHARES = ("max-bytes", "max-time-ratio")
_PLACE = "[tool.pegprof.gate]"
_COMMAND_LINE = "the command line"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What one method of one model may do.

    Args:
      max_bytes: by which share a number that is the same in every run (bytes, flops) may grow.
      max_time_ratio: by which share its time beside grad's may grow.
      ceilings: the largest value that a column may have, whatever it was.
    """

    max_bytes: float = 0.01
    max_time_ratio: float = 0.10
    ceilings: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LimitTable:
    """Limits for every model and method. The layers are mappings like the file's, the most general first."""

    file: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    path: str = "pyproject.toml"  # of the file

    @property
    def time(self) -> bool:
        """Whether time is looked at, too."""
        return bool(self.flags.get("time", self.file.get("time", False)))

    def of(self, model: str, method: str) -> Limits:
        of_model = self.file.get("models", {}).get(model, {})
        layers = [self.file, of_model, of_model.get("methods", {}).get(method, {}), self.flags]
        shares = {
            name.replace("-", "_"): _parse_share(layer[name]) for layer in layers for name in _SHARES if name in layer
        }
        ceilings = {
            key.partition(".")[2]: value
            for layer in layers
            for key, value in layer.get("max", {}).items()
            if key.partition(".")[0] == method
        }
        return Limits(**shares, ceilings=ceilings)


def read_limits(
    folder: Path, *, max_bytes: str | None, max_time_ratio: str | None, ceilings: Iterable[str], time: bool | None
) -> LimitTable:
    """The limits in effect.

    Args:
      folder: the nearest pyproject.toml at or above it is read.
      max_bytes: what the flag says, like ``1%``; None if it is not given.
      max_time_ratio: the same.
      ceilings: like ``surgery.time_ratio=1.2``.
      time: whether time was asked for; None leaves that to the file.
    """
    flags: dict[str, Any] = {"max": dict(map(_parse_ceiling, ceilings))}
    flags |= {} if time is None else {"time": time}
    flags |= {name: text for name, text in zip(_SHARES, (max_bytes, max_time_ratio), strict=True) if text is not None}
    _check_layer(flags, where=_COMMAND_LINE, known=("time", "max", *_SHARES))
    path = next((p for f in (folder, *folder.parents) if (p := f / "pyproject.toml").is_file()), None)
    return LimitTable(file=_read_file(path), flags=flags, path=str(path)) if path else LimitTable(flags=flags)


def check_limits(table: LimitTable, methods_of: Mapping[str, Collection[str]], *, timed: bool) -> list[str]:
    """What of the file limits nothing, in words: a typo, or it is for another gate, since a project has one file.

    Args:
      methods_of: what there is to limit: the methods of each model.
      timed: whether there are times.

    Raises:
      PegprofError: a flag limits nothing.
    """
    methods = list(dict.fromkeys(itertools.chain.from_iterable(methods_of.values())))
    for error in _find_idle(table.flags, methods, timed, where=_COMMAND_LINE):
        raise error
    idle = list(_find_idle(table.file, methods, timed, where=table.path))
    for model, of_model in table.file.get("models", {}).items():
        where = f"{table.path}: models.{model}"
        if model not in methods_of:
            idle.append(PegprofError("no baseline is of this model", where=where, hint=nearest(model, methods_of)))
            continue
        for layer in (of_model, *of_model.get("methods", {}).values()):
            idle += _find_idle(layer, methods_of[model], timed, where=where)
    return [str(error) for error in idle]


def _find_idle(
    layer: Mapping[str, Any], methods: Collection[str], timed: bool, *, where: str
) -> Iterator[PegprofError]:
    for key in layer.get("max", {}):
        method, _, column = key.partition(".")
        what = f"the limit of {key} limits nothing"
        if method not in methods:
            hint = f"there are {', '.join(methods)}"
            yield PegprofError(f"{what}: no baseline has the method {method}", where=where, hint=hint)
        elif is_of_time(column) and not timed:
            yield PegprofError(f"{what}: nothing is timed", where=where, hint="add --time")


def is_of_time(column: str) -> bool:
    """Whether a column is known only of what was timed because somebody asked for it."""
    return column.startswith("time_")


def _read_file(path: Path) -> dict[str, Any]:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        layer = data.get("tool", {}).get("pegprof", {}).get("gate", {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, AttributeError) as error:
        raise PegprofError(f"the limits cannot be read: {error}", where=str(path)) from error
    _check_layer(layer, where=str(path), known=("time", "max", "models", *_SHARES))
    for model, of_model in layer.get("models", {}).items():
        _check_layer(of_model, where=f"{path}: models.{model}", known=("max", "methods", *_SHARES))
        for method, of_method in of_model.get("methods", {}).items():
            _check_method(method, where=str(path))
            _check_layer(of_method, where=f"{path}: models.{model}.methods.{method}", known=("max", *_SHARES))
            for key in of_method.get("max", {}):
                if not key.startswith(f"{method}."):
                    raise PegprofError(f"{key} is not a column of {method}", where=str(path))
    return dict(layer)


def _check_layer(layer: Any, *, where: str, known: Iterable[str]) -> None:
    if not isinstance(layer, Mapping):
        raise PegprofError(f"{_PLACE} is not a table", where=where)
    for key in layer:
        if key not in known:
            raise PegprofError(f"{key!r} is not a limit", where=where, hint=nearest(key, known))
    for name in _SHARES:
        if name in layer:
            _parse_share(layer[name], where)
    if not isinstance(layer.get("time", False), bool):
        raise PegprofError(f"time is {layer['time']!r}", where=where, hint="write true or false")
    for name in ("max", "models", "methods"):
        if not isinstance(layer.get(name, {}), Mapping):
            raise PegprofError(f"{name} is not a table", where=where)
    for key, value in layer.get("max", {}).items():
        _check_ceiling(key, value, where)


def _check_ceiling(key: str, value: Any, where: str) -> None:
    method, _, column = key.partition(".")
    _check_method(method, where=where)
    known = [name for name, kind in typing.get_type_hints(Row).items() if kind in (int | None, float | None)]
    if column not in known:
        raise PegprofError(f"{column!r} is not a column of numbers", where=where, hint=nearest(column, known))
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PegprofError(f"the limit of {key} is {value!r}, not a number", where=where)
    if not 0 <= value < math.inf:
        raise PegprofError(f"the limit of {key} is {value}", where=where, hint="write a number of 0 or more")


def _check_method(method: str, *, where: str) -> None:
    if method not in METHODS:
        raise PegprofError(f"{method!r} is not a method", where=where, hint=nearest(method, METHODS))


def _parse_ceiling(text: str) -> tuple[str, float]:
    """
    >>> _parse_ceiling("surgery.time_ratio=1.2")
    ('surgery.time_ratio', 1.2)
    """
    key, _, value = text.partition("=")
    try:
        return key.strip(), float(value)
    except ValueError:
        hint = "write it like --max surgery.time_ratio=1.2"
        raise PegprofError(f"--max {text} has no number", hint=hint) from None


def _parse_share(text: Any, where: str = "") -> float:
    """
    >>> _parse_share("1%"), _parse_share("0.5 %")
    (0.01, 0.005)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip()) if isinstance(text, str) else None
    if not match:
        raise PegprofError(f"{text!r} is not a share", where=where, hint="write it like 1%")
    return float(match[1]) / 100
