"""The log: what goes in comes back, from whole files and from those that were cut short."""

import dataclasses
import json

import pytest

from pegprof.errors import ExitCode, PegprofError
from pegprof.result import events, log
from pegprof.result.findings import Compiled, Peak
from pegprof.result.history import History
from pegprof.result.remarks import Remark
from pegprof.result.settings import Settings
from pegprof.result.verdict import Verdict
from tests.result.results import GIB, PLAN, make_facts

SETTINGS = Settings(model="mlp", batches=(64,), methods=("grad", "surgery"), options={"width": 8})
AT = {"batch": 64, "method": "surgery"}
EVENTS = (
    events.Begun(
        settings=SETTINGS,
        places=(events.Place(name="cpu", runs=True, device="Größter Prozessor"),),
        timestamp="2026-01-02T03:04:05+00:00",
        pegprof="0.1.0",
        xla_flags=None,
    ),
    events.Described(facts=make_facts(), capacity_bytes={"cpu": 20 * GIB}),
    events.MethodCompiled(batch=64, method="grad", target="cpu", compiled=Compiled(peak_bytes=3 * GIB)),
    events.MethodCompiled(
        **AT, target="cpu", compiled=Compiled(peak_bytes=GIB, plan=PLAN, notes=("all at once; no kernels",))
    ),
    events.Weighed(verdict=Verdict(target="cpu", activation_bytes_per_example=5, parameter_bytes=7)),
    events.FirstRun(**AT, time_batch=4, time_s=0.5),
    events.Compared(**AT, max_rel_error=float("inf")),
    events.Ended(**AT, status="failed", words="it differs"),
    events.Cleared(**AT),
    events.PeakMeasured(**AT, peak=Peak(batch=4, xla_bytes=GIB, host_bytes=2 * GIB)),
    events.Remarked(**AT, remark=Remark(kind="examples", words="they interact; maybe", advice="look")),
    events.BatchChosen(batch=64, time_batch=32),
    events.FirstRun(**AT, time_batch=32, time_s=4.0),
    *(events.Ran(**AT, process=0, round=n, time_s=4.0 + n) for n in (1, 2, 3)),
    events.ProcessesPlanned(processes=3),
    events.BatchTimed(batch=64),
    events.Finished(),
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


def write(path, happened=EVENTS):
    written = log.Log(path)
    for event in happened:
        written.add(event)
    written.close()
    return written


def test_a_log_reads_back_to_the_result_that_it_was_written_with(path):
    written = write(path)
    result = log.read_result(path.read_bytes())
    assert result == written.history.result()
    assert result.complete
    assert result.settings.processes == 3
    assert log.is_log(path.read_bytes())


def test_every_kind_of_event_comes_back_as_it_was(path):
    assert {type(event).__name__ for event in EVENTS} == set(log.KINDS)
    write(path)
    assert tuple(log._events(path.read_bytes(), "")) == EVENTS


def test_a_row_is_made_of_what_happened_to_its_method():
    result = History(EVENTS).result()
    grad, surgery = result.rows
    assert (grad.status, grad.evidence, grad.time_s) == ("ok", "compiled", None)
    assert (surgery.status, surgery.evidence, surgery.time_batch, surgery.runs) == ("ok", "measured", 32, 3)
    assert (surgery.time_s, surgery.max_rel_error, surgery.host_peak_bytes) == (6.0, None, None)
    assert surgery.reason == "all at once; no kernels; timed at batch 32; they interact; maybe: look; " + str(
        result.remarks_on(surgery)[-1]
    )
    assert [remark.kind for remark in result.remarks_on(surgery)] == ["method", "batch", "examples", "spread"]
    assert result.plans == {64: PLAN}


def test_a_log_that_is_cut_at_any_byte_reads_back_to_its_last_whole_event(path):
    write(path)
    data = path.read_bytes()
    whole = 0
    for size in range(len(data) + 1):
        whole += data[size - 1 : size] == b"\n"
        assert tuple(log._events(log._whole_lines(data[:size]), "")) == EVENTS[:whole]
    assert whole == len(EVENTS)


@pytest.mark.parametrize("lost", [1, 20, 300])
def test_a_log_goes_on_behind_its_last_whole_event(path, lost):
    write(path)
    path.write_bytes(path.read_bytes()[:-lost])
    again = log.Log(path)
    kept = len(path.read_bytes().splitlines())
    assert kept < len(EVENTS)
    for event in EVENTS[kept:]:
        again.add(event)
    again.close()
    assert log.read_result(path.read_bytes()) == History(EVENTS).result()


def test_two_runs_do_not_write_to_one_log(path):
    first = log.Log(path)
    with pytest.raises(PegprofError, match="another run writes to") as caught:
        log.Log(path)
    assert caught.value.exit_code == ExitCode.USAGE
    first.close()
    log.Log(path).close()


def test_a_log_that_cannot_be_written_is_said(tmp_path):
    with pytest.raises(PegprofError, match="Is a directory"):
        log.Log(tmp_path)


def line(event, /, **changes):
    return json.dumps({"event": type(event).__name__, "at_s": 0.0, **log.records.encode(event), **changes}).encode()


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (b"{}", "'event'"),
        (b"not JSON", "Expecting value"),
        (line(EVENTS[-2], event="Exploded"), "'Exploded'"),
        (line(EVENTS[-2], colour="red"), "colour is not known"),
        (line(EVENTS[-2], batch="many"), "batch is 'many', not of type int"),
        (line(EVENTS[0]), "a log has one beginning"),
    ],
)
def test_a_line_that_is_no_event_is_named_with_what_is_wrong(path, broken, words):
    write(path, EVENTS[:2])
    path.write_bytes(path.read_bytes() + broken + b"\n")
    with pytest.raises(PegprofError) as caught:
        log.Log(path)
    assert words in caught.value.what
    assert caught.value.where == f"{path}:3"
    assert caught.value.exit_code == ExitCode.USAGE


def test_a_log_without_a_model_has_no_result(path):
    write(path, EVENTS[:1])
    with pytest.raises(PegprofError, match="ends before the model was loaded"):
        log.read_result(path.read_bytes())


def test_what_was_skipped_after_a_run_is_a_remark_and_what_never_ran_a_status():
    skipped = events.Ended(**AT, status="skipped", words="too slow")
    ran = History([*EVENTS[:4], events.FirstRun(**AT, time_batch=64, time_s=1.0), skipped])
    timed = ran.timed(64, "surgery")
    assert (timed.skipped, [remark.words for remark in timed.remarks]) == (None, ["too slow"])
    assert History([*EVENTS[:4], skipped]).timed(64, "surgery").skipped == "too slow"


def test_without_warm_up_the_first_run_counts():
    begun = dataclasses.replace(EVENTS[0], settings=dataclasses.replace(SETTINGS, warmup=0))
    timed = History([begun, *EVENTS[1:]]).timed(64, "surgery")
    assert [sample.time_s for sample in timed.samples] == [4.0, 5.0, 6.0, 7.0]
