"""A Result as JSON: what goes in comes out, and what is not a result is said in words."""

import contextlib
import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegprof.errors import ExitCode, PegprofError
from pegprof.measure import doctor
from pegprof.report import doctor_text
from pegprof.report.terminal import render_preview, render_terminal
from pegprof.result.environment import Environment
from pegprof.result.layers import Layer
from pegprof.result.result import SCHEMA, Result, Row
from pegprof.result.samples import Sample, log_ratios, ratio_to_grad
from pegprof.result.settings import Settings
from pegprof.result.verdict import Verdict
from tests.result.results import PLAN, RESULT, make_samples

counts = st.integers(min_value=0, max_value=2**60)
maybe_count = st.none() | counts
numbers = st.floats(allow_nan=False)  # infinities too: that is what a disagreement with not-a-number is
words = st.text()
scalars = st.none() | st.booleans() | counts | numbers.filter(math.isfinite) | words
values = scalars | st.lists(scalars, max_size=2)

rows = st.builds(
    Row,
    model=words,
    batch=counts,
    stats=words,
    method=words,
    target=words,
    evidence=st.sampled_from(["measured", "compiled"]),
    status=st.sampled_from(["ok", "refused", "failed", "skipped"]),
    reason=words,
    time_s=st.none() | numbers,
    peak_bytes=maybe_count,
    activations_dominate=st.none() | st.booleans(),
    max_rel_error=st.none() | numbers,
    xla_flags=st.none() | words,
)
layers = st.builds(Layer, name=words, count=counts, shape=st.tuples(counts, counts), T=maybe_count, D=maybe_count)
verdicts = st.builds(
    Verdict,
    target=words,
    activation_bytes_per_example=maybe_count,
    parameter_bytes=counts,
    traced_bytes_per_example=maybe_count,
    layers=st.tuples() | st.tuples(layers),
)
settings = st.builds(
    Settings,
    model=words,
    options=st.dictionaries(words, values),
    batches=st.tuples(counts),
    methods=st.tuples(words),
    stats=st.tuples(words),
    runs=maybe_count,
    time_limit_s=numbers,
    memory_limit_bytes=maybe_count,
)
environments = st.builds(Environment, x64=st.booleans(), device_count=counts)
samples = st.builds(Sample, process=counts, round=counts, time_s=numbers)
results = st.builds(
    Result,
    settings=settings,
    rows=st.lists(rows, max_size=3, unique_by=lambda row: (row.batch, row.method, row.target)).map(tuple),
    verdict=st.none() | verdicts,
    samples=st.dictionaries(st.tuples(counts, words), st.tuples(samples, samples), max_size=3),
    plans=st.dictionaries(counts, st.just(PLAN), max_size=2),
    environment=st.none() | environments,
    options=st.dictionaries(words, scalars),
    complete=st.booleans(),
)


@given(results)
def test_a_result_reads_back_equal(result):
    text = result.to_json()
    assert Result.from_json(text) == result
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_not_a_number_survives():
    row = dataclasses.replace(RESULT.rows[0], max_rel_error=math.nan)
    back = Result.from_json(dataclasses.replace(RESULT, rows=(row,)).to_json())
    assert math.isnan(back.rows[0].max_rel_error)


def test_the_json_has_what_makes_results_comparable():
    data = json.loads(RESULT.to_json())
    assert data["schema"] == SCHEMA == 3
    assert data["environment"]["jax"] == "0.10.2"
    assert {"jaxlib", "device_kind", "xla_flags", "matmul_precision", "x64"} <= set(data["environment"])
    assert data["options"] == {"seq_len": 512, "layers": 12}
    assert data["settings"]["stats"] == ["mean", "second_moment"]
    assert data["samples"]["64"]["grad"][0] == {"process": 0, "round": 1, "time_s": 10.1}
    assert [sample["time_s"] for sample in data["samples"]["64"]["surgery"]] == [10.1, 10.1, 10.2]
    assert data["plans"]["64"]["rows"][0]["strategy"] == "loop"


def test_a_file_from_before_a_field_existed_is_read():
    data = json.loads(RESULT.to_json())
    for row in data["rows"]:
        del row["flops"]
    del data["complete"], data["plans"]
    back = Result.from_json(json.dumps(data))
    assert (back.rows[0].flops, back.complete, back.plans) == (None, True, {})


def schema_2(**times_s):
    """A file as it was before samples had processes and rounds."""
    data = json.loads(RESULT.to_json())
    del data["samples"], data["settings"]["processes"], data["settings"]["processes_within_s"]
    for row in data["rows"]:
        del row["processes"]
    return json.dumps({**data, "schema": 2, "samples_s": {"64": times_s}})


def test_times_of_an_older_file_are_rounds_of_one_process():
    back = Result.from_json(schema_2(grad=[10.1, 10.25], surgery=[10.1, 10.2]))
    at = [Sample(process=0, round=0, time_s=10.1), Sample(process=0, round=1, time_s=10.25)]
    assert back.samples[64, "grad"] == tuple(at)
    assert back.samples_s == {(64, "grad"): (10.1, 10.25), (64, "surgery"): (10.1, 10.2)}
    assert back.settings.processes == 1
    assert ratio_to_grad(back.samples[64, "surgery"], back.samples[64, "grad"]) < 1


def test_times_of_an_older_file_that_are_not_as_many_are_of_no_common_round():
    back = Result.from_json(schema_2(grad=[1.0, 1.0, 1.0], surgery=[2.0, 2.0]))
    assert log_ratios(back.samples[64, "surgery"], back.samples[64, "grad"]) == {}
    assert ratio_to_grad(back.samples[64, "surgery"], back.samples[64, "grad"]) == 2.0  # of the medians


def test_a_ratio_is_of_the_rounds_that_both_have_whatever_drifts():
    grad = make_samples((1.0, 2.0, 4.0), (1.0, 1.0, 1.0))
    method = make_samples((1.5, 3.0, 6.0), (1.5, 1.5))
    assert ratio_to_grad(method, grad) == pytest.approx(1.5)
    assert {process: len(ratios) for process, ratios in log_ratios(method, grad).items()} == {0: 3, 1: 2}


def test_one_round_that_was_disturbed_does_not_move_the_centre_of_its_process():
    grad, method = make_samples((1.0,) * 5), make_samples((2.0, 2.0, 90.0, 2.0, 2.0))
    assert ratio_to_grad(method, grad) == pytest.approx(2.0)


def changed(**changes):
    return json.dumps({**json.loads(RESULT.to_json()), **changes})


def changed_row(**changes):
    data = json.loads(RESULT.to_json())
    data["rows"][2] |= changes
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a result of pegprof: Expecting value"),
        (RESULT.to_json()[:-500], "not a result of pegprof"),
        ("[1, 2]", "it has no schema"),
        ("{}", "it has no schema"),
        ("[" * 100_000, "not a result of pegprof"),
        (changed(schema="1"), "it has no schema"),
        (changed(schema=SCHEMA + 1), "the result has schema 4, and this version of pegprof reads 2 and 3"),
        ('{"schema": 2}', "settings is missing"),
        ('{"schema": 1}', "the result has schema 1, and this version of pegprof reads 2 and 3"),
        (changed(rows=3), "rows is not an array"),
        (changed(rows=[3]), r"rows\[0\] is not an object"),
        (
            changed(rows=json.loads(RESULT.to_json())["rows"][:1] * 2),
            "two rows are of the same batch, method and target",
        ),
        (changed(colour="red"), "colour is not known to this version"),
        (changed(samples={"many": {}}), "samples has the key 'many', which is not a number"),
        (changed(samples={"64": {"grad": [0.5]}}), r"samples.64.grad\[0\] is not an object"),
        (changed(samples_s={}), "samples_s is not known to this version"),
        (schema_2(grad=["soon"]), r"samples_s.64.grad\[0\] is 'soon', not of type float"),
        (changed(complete=1), "complete is '1', not of type bool"),
        (changed_row(peak_bytes="much"), r"rows\[2\].peak_bytes is 'much', not of type int"),
        (changed_row(peak_bytes=1.5), r"rows\[2\].peak_bytes is '1.5', not of type int"),
        (changed_row(batch=True), r"rows\[2\].batch is 'True', not of type int"),
        (changed_row(status="splendid"), r"rows\[2\].status is 'splendid', not one of ok, refused, failed, skipped"),
    ],
    ids=range(22),
)
def test_what_is_not_a_result_is_said_in_words(text, words):
    with pytest.raises(PegprofError, match=words) as caught:
        Result.from_json(text)
    assert caught.value.hint
    assert caught.value.exit_code == ExitCode.USAGE


@given(st.binary(max_size=40).map(lambda noise: noise.decode("latin-1")), st.integers(0, 3000))
def test_noise_in_the_text_is_never_a_traceback(noise, where):
    text = RESULT.to_json()
    with contextlib.suppress(PegprofError):
        Result.from_json(text[:where] + noise + text[where:])


# In a notebook.


@pytest.fixture
def notebook(monkeypatch):
    """A process that rich takes for one of Jupyter's; what it would put into a cell beside the text is listed."""
    shown = []
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setattr("builtins.get_ipython", lambda: shell, raising=False)
    monkeypatch.setattr("rich.jupyter.display", lambda *args: shown.append(args))
    return shown


def test_a_result_is_the_same_text_in_a_notebook(request):
    plain = [str(RESULT), render_terminal(RESULT, color=True), render_preview(RESULT)]
    shown = request.getfixturevalue("notebook")
    assert [str(RESULT), render_terminal(RESULT, color=True), render_preview(RESULT)] == plain
    assert "transformer-151m" in plain[0]
    assert shown == []


def test_what_the_doctor_and_the_lists_say_is_text_in_a_notebook_too(notebook):
    assert "jax" in doctor_text.render([doctor.Finding(status="ok", subject="jax", detail="0.10.2")])
    assert notebook == []


def test_printing_a_result_is_one_output(notebook, capsys):
    print(RESULT)  # noqa: T201
    assert capsys.readouterr().out == f"{RESULT}\n"
    assert notebook == []


def test_a_notebook_shows_a_result_as_its_text():
    row = dataclasses.replace(RESULT.rows[0], model="a<b>&c")
    shown = dataclasses.replace(RESULT, rows=(row,))._repr_html_()
    assert shown.startswith('<pre style="white-space: pre">a&lt;b&gt;&amp;c: ')
    assert shown.endswith("</pre>")
    assert "\x1b" not in shown
