"""Who runs in which process, what is loaded where, and what does not fit, with workers that only take notes."""

import dataclasses
import time

import pytest

from pegprof.measure.process import ChildFailure
from pegprof.measure.progress import Silence
from pegprof.measure.protocol import Times
from pegprof.measure.runners import NoRoom, Runners
from pegprof.measure.workers import Program, Workers
from pegprof.result.settings import Settings
from pegprof.targets import selection

GIB = 2**30


class Worker:
    """Answers every job; ``deadly`` are methods that take it down when they run."""

    def __init__(self, deadly=()):
        self.alive, self.closed, self.log, self.queue, self.deadly = True, False, [], [], deadly

    def send(self, job, request):
        self.queue.append((job, request))

    def receive(self, *, limit_s, watch=None):
        job, request = self.queue.pop(0)
        self.log.append(f"{job} {request.get('method', '')}".strip())
        if job == "Run" and request["method"] in self.deadly:
            self.alive = False
            raise ChildFailure("killed", answer={}, output="")
        return {
            "MakeArguments": {"params": [], "batch": []},
            "Compile": {"compile_s": 1.0, "peak_bytes": 4 * GIB, "argument_bytes": GIB},
            "Run": {"times_s": [0.5]},
            "CheckExamples": {"ok": True},
        }.get(job, {})

    def close(self):
        self.closed = True


@pytest.fixture
def free(monkeypatch):
    """Sets what the machine has left, in GiB."""

    def set_free(gib):
        monkeypatch.setattr(selection, "available_host_bytes", lambda: int(gib * GIB))

    set_free(100)
    return set_free


class Pool(Workers):
    """Workers that only take notes, of which ``made`` are all."""

    def start(self, target):
        self.made.append(Worker(self.deadly))
        return self.made[-1]


@pytest.fixture
def make_runners(free):
    pools = []

    def make(*methods, deadly=(), on_host=True, one_process=False, capacity_bytes=None, step=None):
        problem = object() if one_process else None
        pool = Pool(settings=Settings(model="m", methods=methods, step=step), talk=Silence(), problem=problem)
        vars(pool).update(made=[], deadly=deadly)
        pools.append(pool)
        runners = Runners(
            {method: Program(batch=64, compile_s=1.0, peak_bytes=4 * GIB, argument_bytes=GIB) for method in methods},
            workers=pool,
            host=selection.cpu_target() if on_host else dataclasses.replace(selection.cpu_target(), name="gpu"),
            full_batch=64,
            argument_bytes=GIB,
            deadline_s=time.monotonic() + 100,
            capacity_bytes=capacity_bytes,
        )
        runners.workers = pool.made
        runners.pool = pool
        assert runners.set_up(4) == {}
        return runners

    yield make
    for pool in pools:
        pool.close()


def test_each_method_has_a_process_of_its_own_and_the_first_makes_the_arguments(make_runners):
    runners = make_runners("grad", "vmap")
    runners.run("grad")
    runners.run("vmap")
    runners.run("vmap")
    assert [worker.log for worker in runners.workers] == [
        ["MakeArguments", "Compile grad", "Load grad", "Run grad"],
        ["Compile vmap", "Load vmap", "Run vmap", "Run vmap"],
    ]
    runners.pool.close()
    assert all(worker.closed for worker in runners.workers)


def test_what_a_worker_has_compiled_for_its_bytes_is_run_without_compiling_again(make_runners):
    runners = make_runners("grad", "vmap")
    for method in ("grad", "vmap"):
        runners.pool.seat(selection.cpu_target(), method).compiled.add((method, 64))
    assert runners.prepare(64) == {}
    runners.run("vmap")
    assert [worker.log.count("Compile vmap") for worker in runners.workers] == [0, 1]
    assert runners.programs["vmap"].batch == 64


@pytest.mark.parametrize("how", [{"on_host": False}, {"one_process": True}], ids=["one owner", "a notebook"])
def test_where_there_can_be_but_one_process_all_methods_share_it(make_runners, how):
    runners = make_runners("grad", "vmap", **how)
    runners.run("grad")
    runners.run("vmap")
    assert runners.shared
    assert [worker.log for worker in runners.workers] == [
        ["MakeArguments", "Compile grad", "Compile vmap", "Load grad", "Run grad", "Run vmap"],
    ]


def test_in_a_shared_process_each_method_starts_its_steps_from_arguments_of_its_own(make_runners):
    runners = make_runners("grad", "vmap", one_process=True, step="adam")
    for method in ("grad", "grad", "vmap", "grad"):
        runners.run(method)
    assert runners.workers[0].log[3:] == [
        *("Load grad", "Run grad", "Run grad"),
        *("Load vmap", "Run vmap"),
        *("Load grad", "Run grad"),
    ]


def test_where_memory_is_too_short_for_several_processes_all_methods_share_one(make_runners, free):
    free(5)
    assert make_runners("grad", "vmap", "microbatch", "surgery").shared


def test_those_who_wait_hold_no_arguments_where_they_would_take_an_eighth_of_the_memory(make_runners, free):
    free(15)
    runners = make_runners("grad", "vmap", "surgery")
    runners.run("grad")
    runners.run("grad")
    assert runners.workers[0].log == [
        "MakeArguments",
        "Compile grad",
        "Load grad",
        "Run grad",
        "Unload",
        "Load grad",
        "Run grad",
        "Unload",
    ]


def test_a_method_that_takes_a_shared_process_down_does_not_take_the_others_programs(make_runners):
    runners = make_runners("grad", "vmap", one_process=True, deadly=("vmap",))
    runners.run("grad")
    with pytest.raises(ChildFailure):
        runners.run("vmap")
    runners.drop("vmap")
    assert runners.run("grad") == Times(times_s=(0.5,))
    assert runners.workers[-1].log == ["Compile grad", "Load grad", "Run grad"]


def test_a_method_that_is_dropped_has_no_process_any_more(make_runners):
    runners = make_runners("grad", "vmap")
    runners.drop("vmap")
    assert [worker.closed for worker in runners.workers] == [False, True]


def test_what_does_not_fit_now_is_not_run(make_runners, free):
    runners = make_runners("grad")
    free(4)
    with pytest.raises(NoRoom, match=r"needs 4\.0 GiB, 3\.8 GiB available"):
        runners.run("grad")
    assert "Run grad" not in runners.workers[0].log


def test_arguments_that_are_there_need_no_room_again(make_runners, free):
    runners = make_runners("grad")
    runners.run("grad")
    free(3.5)
    runners.run("grad")


def test_what_is_above_the_limit_is_not_run_however_much_is_free(make_runners):
    with pytest.raises(NoRoom, match=r"needs 4\.0 GiB, 3\.0 GiB available"):
        make_runners("grad", capacity_bytes=3 * GIB).run("grad")


def test_arguments_that_do_not_fit_are_not_made(make_runners, free):
    free(2)
    with pytest.raises(NoRoom, match=r"needs 2\.0 GiB"):
        make_runners("grad")


def test_a_peak_is_taken_in_a_process_that_is_fresh_and_alone_on_its_device(make_runners):
    runners = make_runners("grad", on_host=False)
    runners.run("grad")
    runners.run_afresh("grad")
    *_, shared, fresh = runners.workers
    assert shared.closed
    assert (fresh.log, fresh.closed) == (["Compile grad", "Load grad", "Run grad"], True)


def test_the_examples_are_checked_in_a_process_of_their_own(make_runners):
    runners = make_runners("grad")
    runners.check_examples(4)
    assert (runners.workers[-1].log, runners.workers[-1].closed) == (["CheckExamples"], True)
    assert not runners.workers[0].closed


@pytest.mark.parametrize("one_process", [False, True], ids=["a process each", "one for all"])
def test_processes_are_started_anew_with_the_programs_that_they_had_and_without_those_dropped(
    make_runners, one_process
):
    runners = make_runners("grad", "vmap", "surgery", one_process=one_process)
    runners.run("grad")
    runners.drop("vmap")
    before = list(runners.workers)
    assert runners.renew() == {}
    assert all(worker.closed for worker in before)
    assert runners.run("grad") == Times(times_s=(0.5,))
    logs = [worker.log for worker in runners.workers[len(before) :]]
    each = [["Compile grad", "Load grad", "Run grad"], ["Compile surgery"]]
    assert logs == ([["Compile grad", "Compile surgery", "Load grad", "Run grad"]] if one_process else each)
