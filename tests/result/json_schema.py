"""The JSON Schema of results and of logs, from their types. ``python -m tests.result.json_schema`` writes it anew.

It is published with the package, as ``pegprof/result/schema.json``: ``$defs/Result`` is a file of ``--export-json``,
``$defs/Event`` is a line of ``--log``.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

import pegprof.result
from pegprof.result import log
from pegprof.result.result import SCHEMA, Result
from pegprof.result.samples import Sample

PATH = Path(pegprof.result.__file__).with_name("schema.json")
REF = "#/$defs/{name}"
NUMBER = {"anyOf": [{"type": "number"}, {"enum": ["inf", "-inf", "nan"]}]}  # JSON has no number that is not finite


def make_schema() -> dict[str, Any]:
    kinds = [_as_written(Result, schema=Literal[SCHEMA], samples=Mapping[str, Mapping[str, tuple[Sample, ...]]])]
    kinds += [_as_written(kind, event=Literal[name], at_s=float) for name, kind in log.KINDS.items()]
    _, defs = msgspec.json.schema_components(kinds, ref_template=REF, schema_hook=_anything)
    defs["Event"] = {"oneOf": [{"$ref": REF.format(name=name)} for name in log.KINDS]}
    for each in defs.values():
        if each.get("type") == "object":
            each["additionalProperties"] = False
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "pegprof: results and logs",
        "$defs": {name: _as_json(defs[name]) for name in sorted(defs)},
    }


def _anything(kind: type) -> dict[str, Any]:
    """An option of a model is whatever JSON made of it."""
    assert kind is object, kind
    return {"description": "anything"}


def _as_written(kind: type, **more: Any) -> type:
    """A record with what stands in its JSON beside, or in place of, its own fields."""
    own = [(f.name, f.type, f) for f in dataclasses.fields(kind) if f.name not in more]
    return dataclasses.make_dataclass(kind.__name__, [*more.items(), *own], kw_only=True)


def _as_json(schema: Any) -> Any:
    """As ``records.encode`` writes it: any number may be infinite. Docstrings and defaults are for Python."""
    if isinstance(schema, list):
        return [_as_json(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") == "number":
        return NUMBER
    return {
        key: {name: _as_json(each) for name, each in value.items()} if key == "properties" else _as_json(value)
        for key, value in schema.items()
        if key not in ("description", "default")
    }


def main() -> None:
    PATH.write_text(json.dumps(make_schema(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
