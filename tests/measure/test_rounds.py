"""Rounds and processes: who runs when, how often, and when there is enough."""

import collections
import dataclasses
import itertools

import pytest

from pegprof.measure import rounds
from pegprof.measure.process import Stopped
from pegprof.measure.progress import Silence
from tests.measure.races import ALL, Runners, make_timing, race, timed_by, times_s

WILD = (0.5, 0.7, 1.3, 2.0, 1.0)


def noisy(clock, example_s, noise=None):
    """Runners of which some take that much more or less, run by run."""
    runners, noise = Runners(clock, example_s), {m: itertools.cycle(each) for m, each in (noise or {}).items()}
    run = runners.run

    def run_noisily(method, **how):
        answer, factor = run(method, **how), next(noise[method]) if method in noise else 1.0
        return dataclasses.replace(answer, times_s=tuple(factor * t for t in answer.times_s))

    runners.run = run_noisily
    return runners


def test_a_quick_method_runs_several_times_a_round_and_the_round_has_their_median(clock):
    runners = Runners(clock, {"grad": 0.0001, "vmap": 1.0})
    asked, run = [], runners.run
    runners.run = lambda method, **how: (
        dataclasses.replace(run(method, **how), times_s=(1.0, 9.0, 2.0, 3.0, 90.0))
        if how.get("times") == 5
        else run(method, **how)
    )
    runners.require_room = lambda method, peak_bytes: asked.append(method)
    timed = race(runners, runs=7)
    assert {m: len(t.samples) for m, t in timed.items()} == {"grad": 7, "vmap": 7}
    assert set(times_s(timed["grad"])) == {3.0}


def test_all_methods_of_a_round_are_warmed_up_again_or_none_is(clock):
    def rewarmed(example_s):
        runners, found = Runners(clock, example_s), {}
        run = runners.run
        runners.run = lambda method, **how: found.setdefault(method, set()).add(how.get("rewarm")) or run(method, **how)
        race(runners, batches=(4,))
        return {method: kinds - {None} for method, kinds in found.items()}

    assert rewarmed({"grad": 0.001, "vmap": 0.06}) == {"grad": {True}, "vmap": {True}}
    assert rewarmed({"grad": 0.001, "vmap": 0.07}) == {"grad": {False}, "vmap": {False}}


def test_nobody_goes_on_in_rounds_without_the_others(clock):
    timed = race(Runners(clock, {"grad": 0.001, "vmap": 0.002, "surgery": 0.002}), runs=None)
    ran = [{(sample.process, sample.round) for sample in each.samples} for each in timed.values()]
    assert ran[0] == ran[1] == ran[2]


def test_a_method_that_is_far_slower_than_grad_rests_after_three_rounds_while_the_others_go_on(clock):
    timed = race(noisy(clock, {"grad": 1e-4, "vmap": 1.0, "surgery": 1e-4}, noise={"surgery": WILD}), runs=None)
    assert {method: len(each.samples) for method, each in timed.items() if method != "surgery"} == {
        "vmap": 3,
        "grad": len(timed["surgery"].samples),
    }
    assert len(timed["grad"].samples) > 3


def test_grad_never_rests(clock):
    timed = race(Runners(clock, {"grad": 1.0, "vmap": 0.001}), runs=None)
    assert {len(each.samples) for each in timed.values()} == {3}


def test_whoever_asks_for_a_number_of_runs_gets_it_of_every_method(clock):
    timed = race(Runners(clock, {"grad": 0.001, "vmap": 1.0}), runs=6)
    assert {len(each.samples) for each in timed.values()} == {6}


def test_a_method_that_rests_is_back_in_the_next_process(clock):
    timed = race(noisy(clock, {"grad": 0.001, "vmap": 1.0, "surgery": 0.002}), runs=None, processes=2)
    assert shape(timed["vmap"]) == {0: 3, 1: 3}


def test_without_a_number_of_runs_there_are_at_least_three_rounds_and_no_more_than_fifty(clock):
    assert {len(t.samples) for t in race(Runners(clock, {"grad": 1.0, "vmap": 1.0}), runs=None).values()} == {3}
    assert {len(t.samples) for t in race(Runners(clock, {"grad": 1e-9}), runs=None).values()} == {50}


# Several processes.


def shape(timed):
    counts = {}
    for sample in timed.samples:
        counts[sample.process] = counts.get(sample.process, 0) + 1
    return counts


def test_all_processes_are_started_anew_after_some_rounds_and_warmed_up(clock):
    runners = Runners(clock, ALL)
    timed = race(runners, processes=3)
    assert {m: shape(t) for m, t in timed.items()} == {method: {0: 3, 1: 3, 2: 3} for method in ALL}
    assert runners.log.count("renew") == 2
    after = runners.log[runners.log.index("renew") + 1 :]
    assert set(after[:4]) == set(ALL)  # the first runs, which do not count
    assert runners.runs == dict.fromkeys(ALL, 1 + 3 * (1 + 3))


def test_without_warm_up_the_first_run_of_each_process_counts(clock):
    timed = race(Runners(clock, ALL), processes=2, warmup=0)
    assert [(s.process, s.round) for s in timed["grad"].samples] == [(p, r) for p in (0, 1) for r in (0, 1, 2)]


def test_each_of_several_processes_has_rounds_until_its_ratios_are_certain(clock):
    pair = {"grad": 0.02 / 64, "vmap": 0.02 / 64}
    calm = race(noisy(clock, pair), runs=None, processes=2)
    assert shape(calm["grad"]) == {0: 5, 1: 5}
    wild = race(noisy(clock, pair, noise={"vmap": WILD}), runs=None, processes=2)
    assert min(shape(wild["grad"]).values()) >= 6  # as many as take two and a half seconds


def test_slow_methods_have_three_rounds_in_each_of_several_processes(clock):
    timed = race(Runners(clock, {"grad": 0.1, "vmap": 0.1}), runs=None, processes=2)
    assert shape(timed["grad"]) == {0: 3, 1: 3}


def test_there_is_no_other_process_once_that_is_enough(clock):
    asked = []
    timed = race(Runners(clock, ALL), processes=9, enough=lambda: asked.append(1) or len(asked) == 2)
    assert shape(timed["grad"]) == {0: 3, 1: 3}


def test_the_last_process_is_not_asked_about(clock):
    asked = []
    race(Runners(clock, ALL), processes=2, enough=lambda: asked.append(1) or False)
    assert len(asked) == 1


def test_a_process_that_the_time_limit_would_cut_short_does_not_begin(clock):
    runners = Runners(clock, {"grad": 0.1, "vmap": 0.1}, limit_s=200, start_s=20.0)
    timed = race(runners, processes=9)
    assert 1 < len(shape(timed["grad"])) < 9
    assert set(shape(timed["grad"]).values()) == {3}
    assert clock.now_s <= 200
    assert {t.skipped for t in timed.values()} == {None}


def test_who_is_in_a_hurry_has_three_processes_all_the_same(clock):
    assert len(shape(race(Runners(clock, ALL, start_s=20.0), processes=9, until_s=1.0)["grad"])) == 3


def test_after_two_processes_the_plan_is_what_there_is_time_for(clock):
    runners = Runners(clock, {"grad": 0.1 / 64, "vmap": 0.1 / 64}, start_s=10.0)
    made, log = make_timing(runners, processes=9, runs=5, until_s=62.0)
    asked = []
    rounds.run_together([made], talk=Silence(), enough=lambda: asked.append(log.history.settings.processes) or False)
    planned = log.history.settings.processes
    assert len(shape(timed_by(log, ["grad"])["grad"])) == planned
    assert asked[0] == 9  # after the first, of which nobody knows how long the start takes
    assert set(asked[1:]) == {planned}
    assert 3 <= planned < 9
    assert clock.now_s <= 62.0


def test_a_method_that_dies_in_a_later_process_fails_and_the_others_go_on(clock):
    timed = race(Runners(clock, ALL, dies={"vmap": 8}), processes=3)
    assert (timed["vmap"].failure, shape(timed["vmap"])) == ("killed", {0: 3, 1: 1})
    assert shape(timed["grad"]) == {0: 3, 1: 3, 2: 3}


def test_a_method_that_was_stopped_for_want_of_memory_is_refused_and_did_not_fail(clock):
    timed = race(Runners(clock, ALL, dies={"vmap": 4}, death=Stopped))
    assert (timed["vmap"].failure, timed["vmap"].refused, len(timed["vmap"].samples)) == (None, "killed", 2)


def two(clock, example_s, **how):
    """Two timings, their logs, and what their runners do, in the order in which they do it."""
    done, both = [], [Runners(clock, example_s) for _ in range(2)]
    for name, runners in zip("ab", both, strict=True):
        runners.log = type("Log", (list,), {"append": lambda self, text, name=name: done.append(f"{name} {text}")})()
    made, logs = zip(*(make_timing(runners, **how) for runners in both), strict=True)
    return made, logs, done


def test_two_timings_share_their_rounds(clock):
    made, logs, done = two(clock, {"grad": 0.1, "vmap": 0.2}, processes=2)
    rounds.run_together(made, talk=Silence())
    assert {shape(timed)[1] for each in logs for timed in timed_by(each, ["grad", "vmap"]).values()} == {3}
    begin = done.index("b renew") + 1 + 2 * 2
    each_round = [set(done[i : i + 4]) for i in range(begin - 2, begin + 6, 4)]
    assert each_round == [{"a grad", "a vmap", "b grad", "b vmap"}] * 2
    assert done[-2:] == ["a close", "b close"]


@pytest.mark.parametrize("methods", [("grad", "surgery"), ("grad", "vmap", "surgery")])
def test_no_method_of_one_timing_follows_itself_more_often_than_that_of_the_other(clock, methods):
    made, _, done = two(clock, dict.fromkeys(methods, 0.001), runs=25)
    rounds.run_together(made, talk=Silence())
    counted = done[-2 - 25 * 2 * len(methods) : -2]  # but for the closing
    twice = collections.Counter(run for run, next_run in itertools.pairwise(counted) if run == next_run)
    for method in methods:
        assert abs(twice[f"a {method}"] - twice[f"b {method}"]) <= 1


def test_a_timing_that_has_lost_all_its_methods_ends_the_rounds_of_both(clock):
    fine, broken = Runners(clock, {"grad": 0.1}), Runners(clock, {"grad": 0.1}, dies={"grad": 3})
    made, logs = zip(*(make_timing(runners) for runners in (fine, broken)), strict=True)
    rounds.run_together(made, talk=Silence())
    assert len(timed_by(logs[0], ["grad"])["grad"].samples) <= 2
