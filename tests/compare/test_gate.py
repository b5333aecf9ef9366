"""The gate: a real regression is named, an unchanged program passes, and a baseline that says nothing never does."""

import dataclasses
import json
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import pytest

import pegprof
from pegprof.compare.comparison import compare_results
from pegprof.compare.gate import (
    Effort,
    Gate,
    Refusal,
    command_of,
    exit_code,
    pass_against,
    pass_gate,
    pass_gates,
    read_baseline,
    settings_of,
)
from pegprof.compare.limits import Limits, LimitTable
from pegprof.engine.rules import RULES
from pegprof.errors import ExitCode, PegprofError
from pegprof.report import ci, gate_report
from pegprof.report.output import Exports
from tests.compare.baselines import BASELINE, MATERIALISING, UNTIMED, changes, slower, with_surgery
from tests.result.results import GRAD, make_samples

# Baselines.


def write(path, result=BASELINE):
    path.write_text(result if isinstance(result, str) else result.to_json())
    return path


def gate(path, after=BASELINE, *, time=False):
    limits = LimitTable(flags={"time": time})
    return pass_gate(read_baseline(path, time=time), limits=limits, measure=lambda settings, check, enough: after)


def test_an_unchanged_program_passes(tmp_path):
    found = gate(write(tmp_path / "b.json"))
    assert (found.failures, found.unresolved, found.improvements) == ([], [], [])


def test_what_is_measured_again_is_what_the_baseline_holds_in_as_much_memory(tmp_path):
    asked = []
    pass_gate(
        read_baseline(write(tmp_path / "b.json"), time=False),
        limits=LimitTable(),
        measure=lambda settings, check, enough: asked.append(settings) or BASELINE,
    )
    assert asked == [dataclasses.replace(BASELINE.settings, time=False, planned_bytes=20 * 2**30)]
    timed = settings_of(BASELINE, time=True)
    assert (timed.time, timed.processes, timed.processes_within_s, timed.time_limit_s) == (True, 16, 110.0, 585.0)


def test_what_a_gate_may_spend_on_times_can_be_said():
    given = settings_of(BASELINE, time=True, effort=Effort(runs=7, processes=12, time_limit_s=300.0))
    assert (given.runs, given.processes, given.processes_within_s, given.time_limit_s) == (7, 12, None, 300.0)
    assert settings_of(UNTIMED, time=True, effort=Effort(processes=12)).processes == 1


def test_whoever_measures_is_told_after_each_process_whether_that_is_enough(tmp_path):
    told = []

    def measure(settings, check, enough):
        for processes in range(1, settings.processes + 1):
            so_far = dataclasses.replace(slower(1.5, processes=processes), settings=settings)
            told.append(enough(so_far, 64))
            if told[-1]:
                return so_far
        raise AssertionError("never enough")

    read = read_baseline(write(tmp_path / "b.json"), time=True)
    found = pass_gate(read, limits=LimitTable(flags={"time": True}), measure=measure)
    assert told == [False, False, True]
    assert [change.metric for change in found.failures] == ["time_ratio"]


def test_times_of_an_older_file_whose_rounds_are_not_known_are_refused_by_name(tmp_path):
    data = json.loads(BASELINE.to_json())
    del data["samples"]
    data |= {"schema": 2, "samples_s": {"64": {"grad": [1.0] * 5, "surgery": [1.2] * 4}}}
    path = write(tmp_path / "b.json", json.dumps(data))
    assert gate(path).failures == []
    with pytest.raises(PegprofError, match="which times of surgery and grad are of the same round") as caught:
        gate(path, time=True)
    assert "--processes 8" in caught.value.hint


# Against another revision.


def against(before, after, *, revision="main (1234567)", time=True):
    def measure(settings, check, enough):
        check(before, after)
        return before, after

    settings = BASELINE.settings
    return pass_against(settings, revision=revision, limits=LimitTable(flags={"time": time}), measure=measure)


def test_two_revisions_are_compared_as_with_a_baseline():
    found = against(BASELINE, slower(1.5, peak_bytes=26 * 2**30))
    assert [change.metric for change in found.failures] == ["peak_bytes", "time_ratio"]
    assert gate_report.summary(found).startswith("transformer-151m against main (1234567): 2 failed")
    assert against(BASELINE, BASELINE).failures == []
    better = gate_report.render_gates([against(BASELINE, slower(0.5))])
    assert "1 better" in better
    assert "baseline" not in better


def test_two_revisions_with_other_options_are_not_comparable():
    with pytest.raises(PegprofError, match=r"main .* is not comparable: option layers was 12, is 13") as caught:
        against(BASELINE, dataclasses.replace(BASELINE, options={"seq_len": 512, "layers": 13}))
    assert caught.value.exit_code == ExitCode.INCOMPARABLE


def test_a_method_that_failed_in_the_other_revision_is_nothing_to_compare_with():
    with pytest.raises(PegprofError, match="surgery at batch 64 failed in main") as caught:
        against(with_surgery(status="failed", reason="it is broken"), BASELINE)
    assert caught.value.exit_code == ExitCode.UNMEASURED


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("empty", ""),
        ("truncated", BASELINE.to_json()[:900]),
        ("another object", "{}"),
        ("a list", "[]"),
        ("an older schema", BASELINE.to_json().replace('"schema": 3', '"schema": 1')),
        ("a newer schema", BASELINE.to_json().replace('"schema": 3', '"schema": 99')),
        ("no rows", dataclasses.replace(BASELINE, rows=()).to_json()),
        ("rows of others", dataclasses.replace(BASELINE, rows=(GRAD,)).to_json()),
        ("a run that was stopped", dataclasses.replace(BASELINE, complete=False).to_json()),
        ("a failed row", with_surgery(status="failed").to_json()),
        ("no bytes", with_surgery(peak_bytes=None).to_json()),
        ("negative bytes", with_surgery(temp_bytes=-1).to_json()),
        ("nothing to compare it by", dataclasses.replace(BASELINE, environment=None).to_json()),
        ("times below nothing", with_surgery(times={(64, "surgery"): make_samples((-1.0, 2.0))}).to_json()),
    ],
    ids=lambda value: value if " " in value[:20] and len(value) < 40 else "",
)
def test_a_file_that_is_no_baseline_is_refused_with_its_name(tmp_path, name, text):
    path = write(tmp_path / "b.json", text)
    with pytest.raises(PegprofError) as caught:
        gate(path)
    assert caught.value.exit_code in (ExitCode.USAGE, ExitCode.INCOMPARABLE), name
    assert caught.value.where == str(path)


def test_a_baseline_without_times_cannot_gate_times(tmp_path):
    path = write(tmp_path / "b.json", UNTIMED)
    with pytest.raises(PegprofError, match="it has no times") as caught:
        gate(path, time=True)
    hint = (
        f"make a new one: pegprof run transformer-151m --batch 64 --methods grad,surgery --processes 8 "
        f"--no-csv --export-json {path}"
    )
    assert caught.value.hint == hint


def test_a_file_that_is_not_there_is_said(tmp_path):
    with pytest.raises(PegprofError, match="No such file"):
        gate(tmp_path / "b.json")


def test_other_versions_are_listed_with_the_command_for_a_new_baseline(tmp_path):
    path = write(tmp_path / "b.json")
    newer = dataclasses.replace(
        BASELINE,
        environment=dataclasses.replace(BASELINE.environment, jax="0.11.0", x64=True),
        options={"seq_len": 512, "layers": 13},
    )
    with pytest.raises(PegprofError) as caught:
        gate(path, newer)
    assert caught.value.exit_code == ExitCode.INCOMPARABLE
    assert caught.value.what == (
        "the baseline is not comparable: jax was 0.10.2, is 0.11.0; x64 was False, is True; option layers was 12, is 13"
    )
    assert caught.value.hint == f"make a new one: {command_of(BASELINE.settings, export_json=path)}"


def test_what_is_made_with_other_versions_is_not_even_measured(tmp_path):
    def measure(settings, check, enough):
        check(dataclasses.replace(BASELINE, environment=dataclasses.replace(BASELINE.environment, jaxlib="0.11.0")))
        raise AssertionError("measured all the same")

    path = write(tmp_path / "b.json")
    gates, (refusal,) = pass_gates([path], limits=LimitTable(), measure=measure)
    assert (gates, refusal.error.exit_code) == ([], ExitCode.INCOMPARABLE)
    assert refusal.words == "the baseline is not comparable: jaxlib was 0.10.2, is 0.11.0"


def test_a_baseline_of_another_step_or_of_none_is_not_comparable(tmp_path):
    settings = dataclasses.replace(BASELINE.settings, step="micro_adam")
    path = write(tmp_path / "b.json", dataclasses.replace(BASELINE, settings=settings))
    with pytest.raises(PegprofError, match="step was micro_adam, is not set") as caught:
        gate(path)
    assert caught.value.exit_code == ExitCode.INCOMPARABLE
    assert "pegprof run transformer-151m --batch 64 --methods grad,surgery --step micro_adam" in caught.value.hint


def test_a_baseline_that_cannot_be_compared_does_not_hide_the_others(tmp_path):
    good, bad = write(tmp_path / "good.json"), write(tmp_path / "bad.json", "")
    gates, refusals = pass_gates([bad, good], limits=LimitTable(), measure=lambda settings, check, enough: BASELINE)
    assert [found.baseline for found in gates] == [str(good)]
    assert [refusal.baseline for refusal in refusals] == [str(bad)]


def test_a_model_that_cannot_be_measured_refuses_its_baseline_and_says_where(tmp_path):
    def measure(settings, check, enough):
        raise PegprofError("no such name", where="net.py:3", exit_code=ExitCode.UNMEASURED)

    path = write(tmp_path / "b.json")
    _, (refusal,) = pass_gates([path], limits=LimitTable(), measure=measure)
    assert (refusal.baseline, refusal.words) == (str(path), "net.py:3: no such name")


@pytest.mark.parametrize(
    ("codes", "worst"),
    [
        ([], ExitCode.OK),
        ([ExitCode.INCOMPARABLE], ExitCode.INCOMPARABLE),
        ([ExitCode.INCOMPARABLE, ExitCode.UNMEASURED], ExitCode.UNMEASURED),
        ([ExitCode.INCOMPARABLE, ExitCode.TIME_LIMIT], ExitCode.TIME_LIMIT),
        ([ExitCode.UNMEASURED, ExitCode.USAGE, ExitCode.INCOMPARABLE], ExitCode.USAGE),
    ],
)
def test_the_worst_of_several_baselines_decides_the_exit_code_whatever_their_order(codes, worst):
    errors = [PegprofError("no", exit_code=code) for code in codes]
    assert exit_code([], errors) == exit_code([], errors[::-1]) == worst


def test_a_regression_decides_the_exit_code_unless_it_may_not(failed_gate):
    errors = [PegprofError("no", exit_code=ExitCode.INCOMPARABLE)]
    assert exit_code([failed_gate], errors) == ExitCode.NO
    assert exit_code([failed_gate], errors, no_fail=True) == ExitCode.INCOMPARABLE


# Limits that limit nothing.


def measure_never(settings, check, enough):
    raise AssertionError("this is to be refused before anything is measured")


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("surgery.time_ratio", "the limit of surgery.time_ratio limits nothing: nothing is timed\nhint: add --time"),
        ("vmap.peak_ratio", "no baseline has the method vmap\nhint: there are grad, surgery"),
    ],
)
def test_a_limit_of_the_command_line_that_limits_nothing_is_refused_before_anything_is_measured(tmp_path, key, words):
    limits = LimitTable(flags={"max": {key: 1.0}})
    with pytest.raises(PegprofError, match=words) as caught:
        pass_gates([write(tmp_path / "b.json")], limits=limits, measure=measure_never)
    assert caught.value.exit_code == ExitCode.USAGE


def test_a_ceiling_on_times_holds_for_a_result_that_has_them_even_if_they_are_not_compared(tmp_path):
    limits, path = LimitTable(flags={"max": {"surgery.time_ratio": 0.5}}), write(tmp_path / "b.json")
    (found,), _ = pass_gates([path], limits=limits, measure=measure_never, result=path)
    assert [change.metric for change in found.failures] == ["max time_ratio"]
    with pytest.raises(PegprofError, match="nothing is timed"):
        pass_gates([path], limits=limits, measure=measure_never, result=write(tmp_path / "untimed.json", UNTIMED))


def test_what_of_the_file_limits_nothing_is_a_warning_since_other_gates_may_need_it(tmp_path):
    file = {
        "max": {"surgery.time_ratio": 1.2, "surgery.peak_ratio": 1.2},
        "models": {
            "transformer-151n": {},
            "transformer-151m": {"methods": {"vmap": {"max": {"vmap.peak_ratio": 9.0}}}},
        },
    }
    warnings = []
    pass_gates(
        [write(tmp_path / "b.json")],
        limits=LimitTable(file=file),
        measure=lambda settings, check, enough: BASELINE,
        warn=warnings.append,
    )
    of_time, of_no_model, of_no_method = warnings
    assert of_time.startswith("pyproject.toml: the limit of surgery.time_ratio limits nothing: nothing is timed")
    assert of_no_model == (
        "pyproject.toml: models.transformer-151n: no baseline is of this model\nhint: did you mean 'transformer-151m'?"
    )
    assert of_no_method.startswith("pyproject.toml: models.transformer-151m: the limit of vmap.peak_ratio limits")


# A real regression.


def net(key):
    keys = jax.random.split(key)
    return {"hidden": jax.random.normal(keys[0], (16, 16)), "out": jax.random.normal(keys[1], (16, 4))}


def loss(params, x):
    return jnp.mean(jnp.sum((jnp.tanh(x @ params["hidden"]) @ params["out"]) ** 2, -1))


def profile():
    problem = pegprof.Problem(name="net", init=net, loss=loss, batch=lambda key, B: jnp.ones((B, 16)))
    return pegprof.profile(problem, batch=8, methods=("grad", "surgery"), time=False)


def test_a_strategy_that_is_switched_off_fails_the_gate_and_is_named(monkeypatch):
    before = profile()
    assert before.plans[8].row("hidden").strategy == "factored"
    monkeypatch.delitem(RULES, "factored")
    found = changes(profile(), before=before)
    failure = found["surgery strategy of hidden"]
    assert failure.is_failure
    assert failure.words.startswith("hidden: factored -> ")


# What people and programs read.

WORSE = with_surgery(peak_bytes=26 * 2**30, plan=MATERIALISING)


@pytest.fixture
def failed_gate():
    found = compare_results(BASELINE, WORSE, limits=lambda method: Limits(), time=False)
    return Gate(baseline="b.json", before=BASELINE, after=WORSE, changes=tuple(found), time=False)


def test_the_text_names_failures_first(failed_gate):
    assert gate_report.render_gates([failed_gate]).splitlines() == [
        "transformer-151m against b.json: 3 failed; 5 within the limits (bytes, flops and plans)",
        "  FAIL: surgery at batch 64 on cpu: peak_bytes 13.0 GiB -> 26.0 GiB (+100.0%; the limit is 1%)",
        "  FAIL: surgery at batch 64 on cpu: block_0/attention/key/kernel: loop -> batched, holding 4.0 MiB",
        "-> 1.0 GiB",
        "  FAIL: surgery at batch 64 on cpu: gradients materialised of 1 parameters, and before of 0",
    ]


def test_github_gets_one_annotation_a_model_with_its_marks_escaped(failed_gate):
    text = gate_report.render_annotations([failed_gate])
    assert text.startswith("::error title=pegprof gate%3A transformer-151m::surgery at batch 64 on cpu: peak_bytes")
    assert "(+100.0%25; the limit is 1%25)%0Asurgery" in text
    assert text.count("\n") == 1


def test_junit_has_a_case_for_each_number_and_says_what_failed(failed_gate):
    suite = ET.fromstring(gate_report.render_junit([failed_gate]).split("\n", 1)[1]).find("testsuite")
    assert (suite.get("tests"), suite.get("failures")) == ("8", "3")
    messages = [failure.get("message") for failure in suite.iter("failure")]
    assert messages[0] == "peak_bytes 13.0 GiB -> 26.0 GiB (+100.0%; the limit is 1%)"


def test_json_has_every_number_that_was_compared(failed_gate):
    (found,) = json.loads(gate_report.render_json([failed_gate]))["gates"]
    assert not found["passed"]
    assert len(found["changes"]) == len(failed_gate.changes)


def test_the_outcome_of_a_gate_is_told_from_a_result(failed_gate, tmp_path):
    path = write(tmp_path / "outcome.json", gate_report.render_json([failed_gate]))
    with pytest.raises(PegprofError, match="this is not a result of pegprof: it is the outcome of a gate") as caught:
        gate(path)
    assert caught.value.where == str(path)


INCOMPARABLE = Refusal(
    baseline="old.json",
    error=PegprofError("jax was 1, is 2\x1b", where="old.json", hint="make a new one", exit_code=ExitCode.INCOMPARABLE),
)


def test_junit_has_an_error_for_a_baseline_that_was_not_compared(failed_gate):
    suites = ET.fromstring(gate_report.render_junit([failed_gate], [INCOMPARABLE]).split("\n", 1)[1])
    assert [(suite.get("name"), suite.get("errors")) for suite in suites] == [
        ("transformer-151m", "0"),
        ("old.json", "1"),
    ]
    (error,) = suites.iter("error")
    assert (error.get("type"), error.get("message")) == ("incomparable", "jax was 1, is 2�")
    assert error.text.endswith("hint: make a new one")


def test_github_and_the_files_know_of_a_baseline_that_was_not_compared_even_if_it_is_the_only_one(tmp_path):
    summary, json_file = tmp_path / "summary.md", tmp_path / "g.json"
    github = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(summary)}
    assert ci.publish([], [INCOMPARABLE], exports=Exports(files={"json": json_file}), environment=github) == []
    assert (
        ci.annotate([], [INCOMPARABLE], environment=github)
        == "::error title=pegprof gate%3A old.json::jax was 1, is 2\x1b%0Ahint: make a new one\n"
    )
    assert summary.read_text().startswith("### ❌ pegprof gate: old.json was not compared\n\njax was 1, is 2")
    assert json.loads(json_file.read_text())["errors"] == [
        {"baseline": "old.json", "exit_code": 4, "what": "jax was 1, is 2\x1b", "hint": "make a new one"}
    ]


def test_on_github_the_jobs_summary_grows_and_elsewhere_nothing_is_said(failed_gate, tmp_path):
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    nowhere = Exports(files={})
    github = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(summary)}
    assert ci.publish([failed_gate], exports=nowhere, environment=github) == []
    assert ci.annotate([failed_gate], environment=github).startswith("::error")
    assert summary.read_text().startswith("before\n### ❌ pegprof gate: transformer-151m")
    assert ci.annotate([failed_gate], environment={}) == ""


def test_a_file_that_cannot_be_written_hides_neither_the_others_nor_a_regression(failed_gate, tmp_path):
    exports = Exports(files={"junit": tmp_path / "gone" / "j.xml", "json": tmp_path / "g.json"})
    errors = ci.publish([failed_gate], exports=exports, environment={"GITHUB_STEP_SUMMARY": str(tmp_path)})
    assert [error.what.partition(":")[0] for error in errors] == [
        f"cannot write {tmp_path / 'gone' / 'j.xml'}",
        "cannot write the job's summary",
    ]
    assert (tmp_path / "g.json").exists()
    assert exit_code([failed_gate], errors) == ExitCode.NO
    assert exit_code([], errors) == ExitCode.USAGE
