"""When a method counts as slower: only if it is so beyond the noise of both runs."""

import random

import pytest

from pegprof.profiling.significance import change_of_ratio

GRAD, METHOD = 1.0, 1.2


def times(median, *, noise=0.02, runs=40, seed=0):
    """Times around a median, drifting slowly as those of a busy machine do."""
    draw = random.Random(seed)
    drift = 0.0
    found = []
    for _ in range(runs):
        drift = 0.8 * drift + draw.gauss(0, noise)
        found.append(median * (1 + abs(drift) + draw.gauss(0, noise / 4)))
    return found


def run(factor=1.0, seed=0, **how):
    return times(GRAD, seed=seed, **how), times(METHOD * factor, seed=seed + 1, **how)


def test_a_method_that_takes_half_as_long_again_is_significantly_slower():
    found = change_of_ratio(run(seed=1), run(1.5, seed=5))
    assert found.change == pytest.approx(0.5, abs=0.08)
    assert found.low < found.change < found.high
    assert found.is_significantly_over(0.1)


def test_a_busy_machine_that_slows_both_alike_is_no_change():
    slow = [[2 * time_s for time_s in each] for each in run(seed=5)]
    assert not change_of_ratio(run(seed=1), slow).is_significantly_over(0.1)


def test_an_unchanged_program_is_never_significantly_slower_in_a_hundred_noisy_pairs_of_runs():
    found = [change_of_ratio(run(seed=4 * i, noise=0.1), run(seed=4 * i + 2, noise=0.1)) for i in range(100)]
    assert sum(each.is_significantly_over(0.1) for each in found) == 0


def test_three_runs_settle_nothing_however_far_apart_they_are():
    found = change_of_ratio(run(seed=1, runs=3), run(3.0, seed=5, runs=3))
    assert found.change > 1
    assert found.low is None
    assert not found.is_significantly_over(0.1)
    assert found.runs_to_settle(0.1) > 3


def test_noise_wider_than_the_limit_is_said_with_the_runs_that_would_settle_it():
    found = change_of_ratio(run(seed=1, noise=0.3), run(1.15, seed=5, noise=0.3))
    assert found.is_too_wide_for(0.1)
    assert found.runs_to_settle(0.1) > 40


def test_the_same_times_give_the_same_interval():
    assert change_of_ratio(run(seed=1), run(seed=5)) == change_of_ratio(run(seed=1), run(seed=5))
