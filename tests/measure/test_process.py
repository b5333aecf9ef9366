"""Children: real ones, and all the ways in which they can end."""

import contextlib
import dataclasses
import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from pegprof.measure import process, protocol
from pegprof.measure.process import Child, ChildFailure, OutOfTime, wait_for_any
from pegprof.measure.progress import Silence
from pegprof.measure.protocol import Request
from pegprof.measure.worker.main import Jobs
from pegprof.result import records
from pegprof.result.settings import Settings
from tests.waiting import LIMIT_S, wait_for

ROOT = Path(__file__).parents[2]


@pytest.fixture
def child():
    started = Child({"JAX_PLATFORMS": "cpu"}, talk=Silence())
    yield started
    started.close()


def test_a_child_answers_one_request_after_the_other_and_survives_those_that_fail(child):
    child.send("no such job", {})
    child.send("ListDevices", {})
    with pytest.raises(ChildFailure, match="KeyError: 'no such job'") as caught:
        child.receive(limit_s=LIMIT_S)
    assert "Traceback" in caught.value.output
    assert child.alive
    assert child.receive(limit_s=LIMIT_S)["backend"] == "cpu"


def test_a_child_that_takes_too_long_is_ended(child):
    child.send("ListDevices", {})
    with pytest.raises(OutOfTime, match="stopped after 0 s"):
        child.receive(limit_s=0.0)
    assert not child.alive


def test_a_child_is_ended_for_a_reason_that_comes_up_while_it_works(child):
    child.send("ListDevices", {})
    with pytest.raises(ChildFailure, match="enough is enough"):
        child.receive(limit_s=LIMIT_S, watch=lambda: "enough is enough")
    assert not child.alive


def test_a_child_that_is_killed_is_told_from_one_that_gives_up(child):
    os.kill(child._process.pid, signal.SIGKILL)
    child.send("ListDevices", {})
    with pytest.raises(ChildFailure, match="killed by SIGKILL, as the system does when memory runs out"):
        child.receive(limit_s=LIMIT_S)


def test_the_kernel_would_take_a_child_first(child):
    child.send("ListDevices", {})
    child.receive(limit_s=LIMIT_S)
    with open(f"/proc/{child._process.pid}/oom_score_adj") as file:  # noqa: PTH123
        assert json.load(file) == 1000


def test_a_field_that_a_request_does_not_have_is_refused_by_its_path(child):
    request = protocol.MakePlan(subject=protocol.Subject(settings=Settings(model="mlp")), batch=4, capacity_bytes=None)
    fields = records.encode(request)
    fields["subject"]["settings"]["colour"] = "red"
    child.send("MakePlan", fields)
    with pytest.raises(ChildFailure, match=r"subject\.settings\.colour is not known"):
        child.receive(limit_s=LIMIT_S)
    assert child.alive


@pytest.mark.parametrize("kind", Request.__subclasses__(), ids=lambda kind: kind.__name__)
def test_every_request_has_an_answer_that_is_a_record_and_a_job(kind):
    assert dataclasses.is_dataclass(kind)
    assert dataclasses.is_dataclass(kind.answer())
    assert Jobs().find(kind.__name__)


@pytest.fixture
def start_odd():
    """Starts children that know the jobs of ``odd_child.py``."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(
            contextlib.closing(Child({"PYTHONPATH": path}, talk=Silence(), module="tests.measure.odd_child"))
        )


def test_a_child_that_dies_is_not_waited_for_though_a_process_of_its_own_holds_the_socket_open(start_odd):
    child = start_odd()
    child.send("die_behind_a_process", {})
    with pytest.raises(ChildFailure, match="killed by SIGKILL") as caught:
        child.receive(limit_s=LIMIT_S)
    assert caught.value.answer == {"found": 1}


def test_a_child_that_stops_in_the_middle_of_a_message_is_given_up(start_odd, monkeypatch):
    monkeypatch.setattr(process, "STALLED_S", 1)
    monkeypatch.setattr(process, "LAST_BREATH_S", 0.1)
    child = start_odd()
    child.send("stop_in_a_message", {})
    with pytest.raises(ChildFailure, match="killed by SIGKILL"):
        child.receive(limit_s=LIMIT_S)
    assert not child.alive


def test_a_request_to_a_child_that_does_not_read_is_given_up(start_odd, monkeypatch):
    monkeypatch.setattr(process, "STALLED_S", 1)
    child = start_odd()
    psutil.Process(child._process.pid).suspend()
    child.send("answer", {"text": "x" * 10**7})  # more than the socket takes
    with pytest.raises(OutOfTime):
        child.receive(limit_s=0.5)
    assert not child.alive


def test_a_child_that_the_kernel_does_not_let_go_is_not_waited_for(start_odd, monkeypatch):
    child = start_odd()
    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", lambda group, number: None)
        patch.setattr(process, "BURIAL_S", 0.1)
        child.end()
    assert child.alive
    os.killpg(child._process.pid, signal.SIGKILL)
    wait_for(lambda: not child.alive)


def test_whoever_waits_for_several_children_gets_those_who_answer_and_those_who_die(start_odd):
    silent, answers, dies, dies_behind = (start_odd() for _ in range(4))
    answers.send("answer", {"text": "fine"})
    dies_behind.send("die_behind_a_process", {})
    os.kill(dies._process.pid, signal.SIGKILL)
    waiting = [silent, answers, dies, dies_behind]
    outcomes = {}

    def receive_from_any():
        for child in wait_for_any(waiting):
            waiting.remove(child)
            try:
                outcomes[child] = child.receive(limit_s=LIMIT_S).get("text")
            except ChildFailure as failure:
                outcomes[child] = failure.reason.split(",")[0]
        return waiting == [silent]

    wait_for(receive_from_any)
    assert outcomes == {answers: "fine", dies: "killed by SIGKILL", dies_behind: "killed by SIGKILL"}
    assert wait_for_any(waiting) == []
