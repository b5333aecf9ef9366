"""Limits: what surgery's planner is told of the free memory, and how small a batch is still worth timing."""

import time

from pegprof.problem import load_problem
from pegprof.profiling import jobs, methods, timing


def _options(capacity_bytes):
    return jobs.method_options({"stats": ["mean"], "microbatch_size": 1, "capacity_bytes": capacity_bytes})


def test_surgery_runs_fewer_at_a_time_where_the_memory_that_is_free_is_little():
    problem = load_problem("transformer-tiny", {})
    about = methods.METHODS["surgery"].about
    little = about(problem, _options(16 * 2**20), 64)
    assert little.microbatch_size < about(problem, _options(2**40), 64).microbatch_size
    assert little.note == f"{little.microbatch_size} at a time"


def _timing(*, seconds_left):
    """A timing of one method that needs 10 s for two examples."""
    made = object.__new__(timing.Timing)
    made.request = {"batch": 8, "peak_bytes": {"grad": 1}, "warmup": 1, "runs": None, "capacity_bytes": None}
    made.racing, made.deadline_s = ["grad"], time.monotonic() + seconds_left
    program = timing.Program(method="grad", run=lambda: None, peak_bytes=1, output_bytes=1, compile_s=1.0)
    return made._choose_batch([8, 4, 2, 1], 2, {"grad": program}, {"grad": 10.0})


def test_two_examples_are_kept_if_one_more_round_of_them_fits_though_one_example_would_give_more_rounds():
    assert _timing(seconds_left=25) == 2


def test_a_larger_batch_is_timed_where_warm_up_and_three_rounds_of_it_fit():
    assert _timing(seconds_left=100) == 4


def test_where_nothing_fits_the_small_batch_that_is_warm_already_is_taken():
    assert _timing(seconds_left=4) == 2
