"""Who runs in which process, what is loaded where, and what does not fit, with workers that only take notes."""

import time

import pytest

from pegprof.profiling import targets
from pegprof.profiling.crew import Crew, NoRoom
from pegprof.profiling.process import ChildFailure

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
        if job == "run" and request["method"] in self.deadly:
            self.alive = False
            raise ChildFailure("killed", answer={}, output="")
        return {
            "arguments": {"params": [], "batch": []},
            "prepare": {"compile_s": 1.0, "peak_bytes": 4 * GIB, "argument_bytes": GIB},
            "run": {"times_s": [0.5]},
        }.get(job, {})

    def close(self):
        self.closed = True


@pytest.fixture
def free(monkeypatch):
    """Sets what the machine has left, in GiB."""

    def set_free(gib):
        monkeypatch.setattr(targets, "available_host_bytes", lambda: int(gib * GIB))

    set_free(100)
    return set_free


@pytest.fixture
def make_crew(free):
    made = []

    def make(*methods, deadly=(), on_host=True, one_process=False, capacity_bytes=None, step=None):
        workers = []

        def start(file):
            workers.append(Worker(deadly))
            return workers[-1]

        crew = Crew(
            methods,
            request={"model": "m", "step": step},
            full_batch=64,
            argument_bytes=GIB,
            start=start,
            deadline_s=time.monotonic() + 100,
            capacity_bytes=capacity_bytes,
            on_host=on_host,
            one_process=one_process,
        )
        crew.workers = workers
        made.append(crew)
        assert crew.set_up(4) == {}
        return crew

    yield make
    for crew in made:
        crew.close()


def test_each_method_has_a_process_of_its_own_and_arguments_are_made_in_another(make_crew):
    crew = make_crew("grad", "vmap")
    crew.run("grad")
    crew.run("vmap")
    crew.run("vmap")
    assert [worker.log for worker in crew.workers] == [
        ["arguments"],
        ["prepare grad", "load grad", "run grad"],
        ["prepare vmap", "load vmap", "run vmap", "run vmap"],
    ]
    crew.close()
    assert all(worker.closed for worker in crew.workers)


@pytest.mark.parametrize("how", [{"on_host": False}, {"one_process": True}], ids=["one owner", "a notebook"])
def test_where_there_can_be_but_one_process_all_methods_share_it_after_the_arguments_are_made(make_crew, how):
    crew = make_crew("grad", "vmap", **how)
    crew.run("grad")
    crew.run("vmap")
    assert crew.shared
    assert [worker.log for worker in crew.workers] == [
        ["arguments"],
        ["prepare grad", "prepare vmap", "load grad", "run grad", "run vmap"],
    ]


def test_in_a_shared_process_each_method_starts_its_steps_from_arguments_of_its_own(make_crew):
    crew = make_crew("grad", "vmap", one_process=True, step="adam")
    for method in ("grad", "grad", "vmap", "grad"):
        crew.run(method)
    assert crew.workers[1].log[2:] == [
        *("load grad", "run grad", "run grad"),
        *("load vmap", "run vmap"),
        *("load grad", "run grad"),
    ]


def test_where_memory_is_too_short_for_several_processes_all_methods_share_one(make_crew, free):
    free(5)
    assert make_crew("grad", "vmap", "microbatch", "surgery").shared


def test_those_who_wait_hold_no_arguments_where_they_would_take_an_eighth_of_the_memory(make_crew, free):
    free(15)
    crew = make_crew("grad", "vmap", "surgery")
    crew.run("grad")
    crew.run("grad")
    assert crew.workers[1].log == ["prepare grad", "load grad", "run grad", "unload", "load grad", "run grad", "unload"]


def test_a_method_that_takes_a_shared_process_down_does_not_take_the_others_programs(make_crew):
    crew = make_crew("grad", "vmap", one_process=True, deadly=("vmap",))
    crew.run("grad")
    with pytest.raises(ChildFailure):
        crew.run("vmap")
    crew.drop("vmap")
    assert crew.run("grad") == {"times_s": [0.5]}
    assert crew.workers[-1].log == ["prepare grad", "load grad", "run grad"]


def test_a_method_that_is_dropped_has_no_process_any_more(make_crew):
    crew = make_crew("grad", "vmap")
    crew.drop("vmap")
    assert [worker.closed for worker in crew.workers] == [True, False, True]


def test_what_does_not_fit_now_is_not_run(make_crew, free):
    crew = make_crew("grad")
    free(4)
    with pytest.raises(NoRoom, match=r"needs 4\.0 GiB, 3\.8 GiB available"):
        crew.run("grad")
    assert "run grad" not in crew.workers[1].log


def test_arguments_that_are_there_need_no_room_again(make_crew, free):
    crew = make_crew("grad")
    crew.run("grad")
    free(3.5)
    crew.run("grad")


def test_what_is_above_the_limit_is_not_run_however_much_is_free(make_crew):
    with pytest.raises(NoRoom, match=r"needs 4\.0 GiB, 3\.0 GiB available"):
        make_crew("grad", capacity_bytes=3 * GIB).run("grad")


def test_arguments_that_do_not_fit_are_not_made(make_crew, free):
    free(2)
    with pytest.raises(NoRoom, match=r"needs 2\.0 GiB"):
        make_crew("grad")


def test_a_peak_is_taken_in_a_process_that_is_fresh_and_alone_on_its_device(make_crew):
    crew = make_crew("grad", on_host=False)
    crew.run("grad")
    crew.run_afresh("grad")
    *_, shared, fresh = crew.workers
    assert shared.closed
    assert (fresh.log, fresh.closed) == (["prepare grad", "load grad", "run grad"], True)


def test_the_examples_are_checked_in_a_process_of_their_own(make_crew):
    crew = make_crew("grad")
    crew.check_examples(4)
    assert (crew.workers[-1].log, crew.workers[-1].closed) == (["check"], True)
    assert not crew.workers[1].closed
