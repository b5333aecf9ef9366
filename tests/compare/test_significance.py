"""When a method counts as slower: only if it is so beyond the noise of rounds and processes, in both runs."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegprof.compare.significance import LEVEL, UNSEEN_SPREAD, change_of_ratio, level_of_look
from tests.compare.simulations import first, rates, simulate
from tests.result.results import make_samples

QUIET = {"spread": 0.03, "noise": 0.02}
LOADED = {"spread": 0.05, "noise": 0.06, "rounds": 10}


def run(seed=0, **how):
    return simulate(np.random.default_rng(seed), **how)


# The interval.


def test_a_method_that_takes_half_as_long_again_is_above_the_limit():
    found = change_of_ratio(run(seed=1), run(seed=2, slowdown=1.5))
    assert found.change == pytest.approx(0.5, abs=0.1)
    assert found.low < found.change < found.high
    assert found.position(0.1) == "above"


def test_a_method_that_is_faster_is_below_the_limit_however_wide_the_interval():
    found = change_of_ratio(*(run(seed=n, slowdown=f, spread=0.2, tails="normal") for n, f in ((1, 1.0), (2, 0.6))))
    assert found.high - found.low > 0.2
    assert found.position(0.1) == "below"


def test_a_machine_that_slows_both_alike_changes_nothing():
    grad, method = run(seed=2)
    slow = [[type(s)(process=s.process, round=s.round, time_s=3 * s.time_s) for s in each] for each in (grad, method)]
    quick, other = (change_of_ratio(run(seed=1), times) for times in ((grad, method), slow))
    assert (quick.low, quick.high) == pytest.approx((other.low, other.high))


def test_more_rounds_of_a_process_do_not_hide_that_processes_differ():
    times = [run(seed=n, spread=0.1, noise=0.0, rounds=200, processes=4, tails="normal") for n in (1, 2)]
    found = change_of_ratio(*times)
    assert found.after.rounds_spread > 0.05  # of which two hundred rounds leave next to nothing
    assert found.high - found.low > 0.2


def test_a_baseline_of_one_process_has_the_spread_of_the_run_that_has_several_and_no_less_than_five_percent():
    def half_width(**how):
        before, after = (run(seed=n, tails="normal", **how) for n in (1, 2))
        found = change_of_ratio(first(before, 1), after)
        assert found.before.spread is None
        return math.log1p(found.high) - math.log1p(found.change), found.after.spread

    half, spread = half_width(spread=0.01, noise=0.01)
    assert 2.0 * UNSEEN_SPREAD < half < 2.6 * UNSEEN_SPREAD
    half, spread = half_width(spread=0.2, noise=0.01)
    assert spread > UNSEEN_SPREAD
    assert half == pytest.approx(2.5 * spread * math.sqrt(1 + 1 / 8), rel=0.1)  # t of 7 to 9 at 2%


def test_where_both_have_one_process_their_spread_is_taken_to_be_five_percent_or_that_of_the_rounds():
    still = [make_samples([t] * 20) for t in (1.0, 1.2)]
    half = math.log(1 + change_of_ratio(still, still).high)
    assert half == pytest.approx(2.054 * math.sqrt(2) * UNSEEN_SPREAD, rel=1e-3)
    wild = [still[0], make_samples([1.0, 1.6] * 10)]
    assert change_of_ratio(still, wild).high > change_of_ratio(still, still).high + 0.5


def test_three_rounds_of_one_process_settle_a_doubling_and_no_less():
    before = [make_samples((1.0, 1.01, 1.02)), make_samples((1.2, 1.21, 1.22))]
    for factor, position in ((2.0, "above"), (1.15, "across")):
        after = [before[0], make_samples([factor * t for t in (1.2, 1.21, 1.22)])]
        assert change_of_ratio(before, after).position(0.1) == position


def test_without_a_common_round_there_is_no_interval():
    grad, method = run()
    elsewhere = [type(s)(process=s.process, round=s.round + 100, time_s=s.time_s) for s in method]
    assert change_of_ratio((grad, method), (grad, elsewhere)) is None
    assert change_of_ratio((grad, method), ((), ())) is None


@given(seed=st.integers(0, 2**32 - 1), before=st.integers(1, 5), after=st.integers(1, 5))
def test_the_interval_holds_its_middle_and_turns_round_with_the_runs(seed, before, after):
    one, other = run(seed=seed, processes=before, rounds=4), run(seed=seed + 1, processes=after, rounds=4)
    there, back = change_of_ratio(one, other), change_of_ratio(other, one)
    assert there.low < there.change < there.high
    assert math.log1p(there.low) == pytest.approx(-math.log1p(back.high), abs=1e-9)


# What would settle it.


def test_what_would_settle_it_is_a_number_of_processes_that_does():
    before, after = (run(seed=n, processes=40, slowdown=f, tails="normal", **QUIET) for n, f in ((1, 1.0), (2, 1.14)))
    unsure = change_of_ratio(first(before, 3), first(after, 3))
    assert unsure.position(0.1) == "across"
    number = unsure.processes_to_settle(0.1, both=True)
    assert 3 < number < 20
    assert change_of_ratio(first(before, 2 * number), first(after, 2 * number)).position(0.1) == "above"


def test_no_number_of_processes_makes_up_for_a_baseline_of_one():
    before, after = (run(seed=n, slowdown=f, spread=0.1, tails="normal") for n, f in ((1, 1.0), (2, 1.15)))
    found = change_of_ratio(first(before, 1), after)
    assert found.processes_to_settle(0.1, both=False) is None
    assert found.processes_to_settle(0.1, both=True) > 8


# Looks.


@given(st.integers(3, 40))
def test_all_looks_together_spend_the_level(planned):
    assert sum(level_of_look(n, planned) for n in range(3, planned + 1)) == pytest.approx(LEVEL)


def test_a_run_that_ended_before_its_first_look_has_had_one():
    assert level_of_look(2, 8) <= level_of_look(3, 8) <= LEVEL


# How often a gate is wrong, and how often it finds what is there. Seeded: these are the same in every run.


@pytest.mark.parametrize("tails", ["t", "normal", "modes"])
@pytest.mark.parametrize("machine", [QUIET, LOADED], ids=["quiet", "loaded"])
@pytest.mark.parametrize(
    "how", [{"baseline": 8}, {"baseline": 1}, {"together": True}], ids=["baseline", "baseline of one", "interleaved"]
)
def test_a_change_of_exactly_the_limit_fails_no_more_often_than_the_level(how, machine, tails):
    found = rates(gates=100, slowdown=1.1, tails=tails, **how, **machine)
    assert found["failed"] <= LEVEL + 2 * math.sqrt(LEVEL / 100)


@pytest.mark.parametrize("tails", ["t", "normal", "modes"])
@pytest.mark.parametrize("how", [{"baseline": 8}, {"together": True}], ids=["baseline", "interleaved"])
def test_an_unchanged_program_never_fails_and_passes_on_a_quiet_machine(how, tails):
    assert rates(gates=100, tails=tails, **how, **LOADED)["failed"] == 0
    quiet = rates(gates=100, tails=tails, **how, **QUIET)
    assert quiet["failed"] == 0
    assert quiet["passed"] >= 0.85  # the rest is unresolved


@pytest.mark.parametrize("tails", ["t", "normal", "modes"])
@pytest.mark.parametrize("how", [{"baseline": 8}, {"together": True}], ids=["baseline", "interleaved"])
@pytest.mark.parametrize(("slowdown", "machine"), [(1.2, QUIET), (1.3, LOADED)], ids=["1.2 quiet", "1.3 loaded"])
def test_a_slowdown_fails_in_nine_of_ten_gates(slowdown, machine, how, tails):
    assert rates(gates=100, slowdown=slowdown, tails=tails, **how, **machine)["failed"] >= 0.9


def test_looks_end_a_gate_early_when_there_is_nothing_to_see():
    assert rates(gates=60, together=True, **QUIET)["processes"] < 6
