"""Limits: what surgery's planner is told of the free memory, and how many examples of which methods are timed."""

import pytest

from pegprof.measure.protocol import Subject
from pegprof.measure.schedule import Entrant, candidate_batches, choose, choose_probe
from pegprof.measure.worker import compiling, methods
from pegprof.models.problem import load_problem
from pegprof.result.settings import Settings

HALVINGS = [64, 32, 16, 8, 4, 2, 1]


def _options(problem, capacity_bytes, step=None):
    settings = Settings(model=problem.name, stats=("mean",), microbatch_size=1, step=step)
    return compiling.method_options(Subject(settings=settings), problem, capacity_bytes)


def test_surgery_runs_fewer_at_a_time_where_the_memory_that_is_free_is_little():
    problem = load_problem("transformer-tiny", {})
    about = methods.METHODS["surgery"].about
    little = about(problem, _options(problem, 16 * 2**20), 64)
    assert little.microbatch_size < about(problem, _options(problem, 2**40), 64).microbatch_size
    assert little.notes[0] == f"{little.microbatch_size} at a time"


def test_what_an_optimizer_keeps_is_taken_from_what_surgery_may_use():
    problem = load_problem("mlp", {})
    kept_bytes = 4 + 2 * 4 * 1_863_690
    assert _options(problem, 2**30, step="adam").memory_budget == 2**30 - kept_bytes
    assert _options(problem, 2**20, step="adam").memory_budget == 0
    assert _options(problem, None, step="adam").memory_budget is None


@pytest.mark.parametrize(
    ("batch", "minimum", "multiple_of", "expected"),
    [(64, 1, 1, HALVINGS), (64, 2, 1, HALVINGS[:-1]), (12, 1, 4, [12]), (16, 1, 4, [16, 8, 4]), (1, 1, 1, [1])],
)
def test_the_batch_may_be_halved_while_the_methods_stay_defined(batch, minimum, multiple_of, expected):
    assert candidate_batches(batch, minimum=minimum, multiple_of=multiple_of) == expected


@pytest.mark.parametrize(
    ("batches", "example_s", "expected"),
    [
        (HALVINGS, None, 4),
        (HALVINGS, 0.001, 64),
        (HALVINGS, 0.1, 4),
        (HALVINGS, 1.0, 4),
        (HALVINGS, 10.0, 2),
        (HALVINGS, 1000.0, 2),
        ([6, 3, 1], 1.0, 6),
        ([3, 1], 1.0, 3),
        ([1], 1.0, 1),
        ([16, 8], 1000.0, 8),
    ],
)
def test_methods_first_run_at_four_examples_or_fewer_if_that_takes_long_but_not_at_one_and_at_all_if_it_is_quick(
    batches, example_s, expected
):
    assert choose_probe(batches, example_s=example_s, left_s=100.0) == expected


def _choose(times_s, *, left_s, full_bytes=64, room_bytes=64, runs=None, warmup=1):
    """The choice between methods that need so long, and one byte an example, for four examples."""
    entrants = {
        name: Entrant(time_s=time_s, compile_s=1.0, probe_bytes=4, full_bytes=full_bytes)
        for name, time_s in times_s.items()
    }
    return choose(
        entrants,
        HALVINGS,
        probe=4,
        full=64,
        left_s=left_s,
        warmup=warmup,
        runs=runs,
        has_room=lambda name, need: need <= room_bytes,
    )


def test_the_batch_asked_for_is_timed_if_warm_up_and_three_runs_of_it_fit():
    assert _choose({"grad": 1.0}, left_s=1 + 4 * 16).batch == 64
    assert _choose({"grad": 1.0}, left_s=1 + 4 * 16 - 0.1).batch == 32


def test_runs_are_cut_to_three_before_the_batch_is_cut():
    assert _choose({"grad": 1.0}, left_s=1 + 4 * 16, runs=50).batch == 64


def test_fewer_runs_than_three_are_enough_if_no_more_are_asked_for():
    assert _choose({"grad": 1.0}, left_s=1 + 2 * 16, runs=1).batch == 64


def test_the_batch_is_cut_until_every_method_fits_into_memory():
    assert _choose({"grad": 1.0, "vmap": 1.0}, left_s=1e6, room_bytes=20).batch == 16


def test_no_batch_smaller_than_the_probe_is_timed_since_the_first_runs_are_done_there():
    assert _choose({"grad": 1.0, "vmap": 1.0}, left_s=2 * 2.0).batch == 4


def test_the_slowest_are_left_out_where_three_runs_of_all_do_not_fit():
    choice = _choose({"grad": 9.0, "vmap": 5.0, "surgery": 1.0, "microbatch": 2.0}, left_s=24.5)
    assert (choice.batch, choice.left_out) == (4, ("vmap",))
    choice = _choose({"grad": 9.0, "vmap": 5.0, "surgery": 1.0, "microbatch": 2.0}, left_s=20.5)
    assert choice.left_out == ("vmap", "microbatch")


def test_nobody_is_left_out_where_not_even_two_methods_fit():
    assert _choose({"grad": 9.0, "vmap": 5.0, "surgery": 1.0}, left_s=1.0).left_out == ()
