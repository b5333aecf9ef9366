"""Records to JSON and back. What goes in comes out equal; what does not fit the types of the record is said in words.

JSON has neither tuples nor numbers that are not finite: a tuple is an array, an infinity the string "inf". Keys are
strings: an integer key is written as one. The types of a dataclass's fields say how to read all of that again.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any


class Unreadable(Exception):
    """Data that does not fit the record: where in it, and what is wrong."""

    def __init__(self, where: str, what: str):
        super().__init__(f"{where.removeprefix('.') or 'the data'} {what}")


def encode(value: Any) -> Any:
    """
    >>> encode({"a": (1, float("inf")), 2: None})
    {'a': [1, 'inf'], '2': None}
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def decode(kind: Any, data: Any, where: str = "") -> Any:
    """A value of that type, from what JSON made of it. A field that is missing takes its default.

    Raises:
      Unreadable: something is missing, unknown or of another type.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _decode_record(kind, data, where)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(arguments, data, where)
    if origin is typing.Literal:
        _require(data in arguments, where, f"is {data!r}, not one of {', '.join(map(str, arguments))}")
        return data
    if origin is tuple:
        _require(isinstance(data, list), where, "is not an array")
        return tuple(decode(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if origin is Mapping:
        return _decode_mapping(arguments[0], arguments[1], data, where)
    return _decode_scalar(kind, data, where)


def _decode_record(kind: Any, data: Any, where: str) -> Any:
    _require(isinstance(data, dict), where, "is not an object")
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name in data:
        _require(name in fields, f"{where}.{name}", "is not known to this version of pegprof")
    for name, field in fields.items():
        optional = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        _require(name in data or optional, f"{where}.{name}", "is missing")
    return kind(**{name: decode(hints[name], item, f"{where}.{name}") for name, item in data.items()})


def _decode_union(kinds: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None and type(None) in kinds:
        return None
    (kind,) = (kind for kind in kinds if kind is not type(None))  # unions here are of something and None
    return decode(kind, data, where)


def _decode_mapping(key_kind: Any, kind: Any, data: Any, where: str) -> dict[Any, Any]:
    _require(isinstance(data, dict), where, "is not an object")
    items = {}
    for key, item in data.items():
        _require(key_kind is not int or key.isdecimal(), where, f"has the key {key!r}, which is not a number")
        items[key_kind(key)] = decode(kind, item, f"{where}.{key}")
    return items


def _decode_scalar(kind: Any, data: Any, where: str) -> Any:
    if kind is float and data in ("inf", "-inf", "nan"):
        return float(data)
    is_number = isinstance(data, int | float) and not isinstance(data, bool)
    fits = {
        float: is_number,
        int: isinstance(data, int) and is_number,
        object: True,  # whatever JSON made of it
    }.get(kind, isinstance(data, kind))
    _require(fits, where, f"is {str(data)[:40]!r}, not of type {kind.__name__}")
    return float(data) if kind is float else data


def _require(condition: bool, where: str, what: str) -> None:
    if not condition:
        raise Unreadable(where, what)
