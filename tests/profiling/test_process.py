"""Children: real ones, and all the ways in which they can end."""

import json
import os
import signal

import pytest

from pegprof.profiling.process import Child, ChildFailure, OutOfTime
from pegprof.profiling.progress import Silence
from tests.waiting import LIMIT_S


@pytest.fixture
def child():
    started = Child({"JAX_PLATFORMS": "cpu"}, talk=Silence())
    yield started
    started.close()


def test_a_child_answers_one_request_after_the_other_and_survives_those_that_fail(child):
    child.send("no such job", {})
    child.send("devices", {})
    with pytest.raises(ChildFailure, match="KeyError: 'no such job'") as caught:
        child.receive(limit_s=LIMIT_S)
    assert "Traceback" in caught.value.output
    assert child.alive
    assert child.receive(limit_s=LIMIT_S)["backend"] == "cpu"


def test_a_child_that_takes_too_long_is_ended(child):
    child.send("devices", {})
    with pytest.raises(OutOfTime, match="stopped after 0 s"):
        child.receive(limit_s=0.0)
    assert not child.alive


def test_a_child_is_ended_for_a_reason_that_comes_up_while_it_works(child):
    child.send("devices", {})
    with pytest.raises(ChildFailure, match="enough is enough"):
        child.receive(limit_s=LIMIT_S, watch=lambda: "enough is enough")
    assert not child.alive


def test_a_child_that_is_killed_is_told_from_one_that_gives_up(child):
    os.kill(child._process.pid, signal.SIGKILL)
    child.send("devices", {})
    with pytest.raises(ChildFailure, match="killed by SIGKILL, as the system does when memory runs out"):
        child.receive(limit_s=LIMIT_S)


def test_the_kernel_would_take_a_child_first(child):
    child.send("devices", {})
    child.receive(limit_s=LIMIT_S)
    with open(f"/proc/{child._process.pid}/oom_score_adj") as file:  # noqa: PTH123
        assert json.load(file) == 1000
