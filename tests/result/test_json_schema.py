"""The published schema is that of the types, and what is written obeys it."""

import json

import jsonschema
import pytest

from pegprof.result import log
from tests.result import json_schema
from tests.result.results import RESULT
from tests.result.test_log import EVENTS


def check(data, name):
    schema = json.loads(json_schema.PATH.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator({**schema, "$ref": f"#/$defs/{name}"}).validate(data)


def test_the_published_schema_is_that_of_the_types():
    written = json.loads(json_schema.PATH.read_text(encoding="utf-8"))
    assert written == json_schema.make_schema(), "python -m tests.result.json_schema writes it anew"


def test_a_result_obeys_the_schema():
    check(json.loads(RESULT.to_json()), "Result")


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_a_line_of_a_log_obeys_the_schema(event):
    check(json.loads(log._line(event, 1.5)), "Event")


@pytest.mark.parametrize("change", [{"colour": "red"}, {"rows": 3}, {"schema": 1}])
def test_what_is_no_result_does_not(change):
    with pytest.raises(jsonschema.ValidationError):
        check({**json.loads(RESULT.to_json()), **change}, "Result")
