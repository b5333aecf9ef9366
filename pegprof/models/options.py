"""A model's options: what ``--set`` gives as text becomes what a signature declares."""

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

from pegprof.errors import PegprofError, nearest


def options_of(fn: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function, or of a class, by name."""
    try:
        return inspect.signature(fn, eval_str=True).parameters
    except Exception:  # an annotation that is text, as under ``from __future__ import annotations``, may name anything
        return inspect.signature(fn).parameters


def convert_options(given: Mapping[str, Any], known: Mapping[str, inspect.Parameter], *, where: str) -> dict[str, Any]:
    """The given options, each as the type of its default."""
    unknown = [key for key in given if key not in known]
    if unknown:
        hint = nearest(unknown[0], known) if known else "it takes none"
        raise PegprofError(f"unknown option {unknown[0]!r}", where=where, hint=hint)
    return {key: _convert(value, known[key], where=where) for key, value in given.items()}


def _convert(value: Any, option: inspect.Parameter, *, where: str) -> Any:
    # The default says the type; where it is None or missing, the annotation does, as in ``width: int | None = None``.
    types = (type(option.default), option.annotation, *typing.get_args(option.annotation))
    kind = next((kind for kind in types if isinstance(kind, type) and kind in _PARSERS), None)
    if kind is None:
        return value
    try:
        converted = _PARSERS[kind](str(value))
    except (ValueError, KeyError) as error:
        like = "" if option.default in (option.empty, None) else f"like {option.default!r}"
        hint = "true or false" if kind is bool else like
        what = f"option {option.name}={value} is not of type {kind.__name__}"
        raise PegprofError(what, where=where, hint=hint) from error
    choices = typing.get_args(option.annotation) if typing.get_origin(option.annotation) is typing.Literal else ()
    if choices and converted not in choices:
        raise PegprofError(f"option {option.name} cannot be {value!r}", where=where, hint=nearest(str(value), choices))
    return converted


def _parse_bool(text: str) -> bool:
    return {"true": True, "1": True, "false": False, "0": False}[text.lower()]


_PARSERS: dict[type, Callable[[str], Any]] = {bool: _parse_bool, int: int, float: float, str: str}


def is_required(option: inspect.Parameter) -> bool:
    named = option.kind in (option.POSITIONAL_OR_KEYWORD, option.KEYWORD_ONLY)
    return named and option.default is option.empty
