"""What changed from one result to another, and what of that is allowed."""

import dataclasses
import re

import pytest

from pegprof.compare.comparison import Looks, compare_results, times_settled
from pegprof.compare.limits import Limits
from pegprof.engine.plan import PlanRow
from tests.compare.baselines import BASELINE, MATERIALISING, UNTIMED, changes, failures, slower, with_surgery
from tests.result.results import GRAD, PLAN, SURGERY, make_row

# What is compared.


def test_the_same_result_has_no_failure_and_nothing_unresolved():
    found = changes(BASELINE, time=True)
    assert found
    assert {change.outcome for change in found.values()} == {"same"}


@pytest.mark.parametrize(
    ("metric", "growth", "outcome"),
    [
        ("peak_bytes", 1.005, "same"),
        ("peak_bytes", 1.02, "worse"),
        ("peak_bytes", 0.9, "better"),
        ("flops", 1.02, "worse"),
    ],
)
def test_a_number_that_is_the_same_in_every_run_may_grow_by_1_percent(metric, growth, outcome):
    after = with_surgery(**{metric: int(getattr(SURGERY, metric) * growth)})
    assert changes(after)[f"surgery {metric}"].outcome == outcome


def test_a_number_that_is_not_known_any_more_is_a_failure():
    assert failures(with_surgery(flops=None)) == ["surgery flops"]


def test_a_row_that_is_gone_is_a_failure_and_a_new_one_is_not():
    without = dataclasses.replace(BASELINE, rows=(GRAD,))
    assert failures(without) == ["surgery status"]
    more = dataclasses.replace(BASELINE, rows=(*BASELINE.rows, make_row("vmap", peak_bytes=1)))
    assert failures(more) == []


@pytest.mark.parametrize("how", [{"status": "failed"}, {"status": "refused", "peak_bytes": 21 * 2**30}], ids=str)
def test_a_method_that_no_longer_runs_or_fits_is_a_failure_with_its_reason(how):
    found = changes(with_surgery(reason="it is broken", **how))["surgery status"]
    assert found.is_failure
    assert found.words == f"was ok, is {how['status']}: it is broken"


NOTHING = dict.fromkeys(("peak_bytes", "temp_bytes", "flops", "time_ratio", "time_s"))


@pytest.mark.parametrize(
    "lacking",
    [
        {"status": "refused", "reason": "not run: batch 64 needs 13.0 GiB, 2.0 GiB available", "time_ratio": None},
        {"status": "skipped", "reason": "stopped: it took longer than the time limit allows", "time_ratio": None},
        {"status": "refused", "reason": "stopped: only 80.0 MiB of memory were left on this machine", **NOTHING},
        {"status": "skipped", "reason": "stopped after 1800 s", **NOTHING},
    ],
    ids=["no room", "no time", "stopped compiling for memory", "stopped compiling for time"],
)
def test_what_the_machine_had_no_memory_or_time_for_is_unresolved(lacking):
    after = dataclasses.replace(with_surgery(**lacking), plans={})
    if lacking.get("peak_bytes", 1) is not None:
        after = dataclasses.replace(after, plans={64: PLAN})
    found = changes(after, time=True, ceilings={"time_ratio": 2.0}).values()
    assert not [change for change in found if change.is_failure and change.method == "surgery"]
    assert lacking["reason"] in next(change.words for change in found if change.metric == "time_ratio")


def test_activations_that_nobody_could_weigh_are_unresolved():
    rows = tuple(dataclasses.replace(row, activation_bytes_per_example=None) for row in BASELINE.rows)
    found = changes(dataclasses.replace(BASELINE, rows=rows, verdict=None))
    assert found["grad activation_bytes_per_example"].outcome == "unresolved"


def test_another_strategy_is_named_with_the_parameter_and_the_bytes():
    found = changes(with_surgery(plan=MATERIALISING))
    change = found["surgery strategy of block_0/attention/key/kernel"]
    assert change.is_failure
    assert change.words == "block_0/attention/key/kernel: loop -> batched, holding 4.0 MiB -> 1.0 GiB"
    assert found["surgery materialised_parameters"].is_failure


def test_a_strategy_that_is_cheaper_in_all_respects_is_no_regression():
    rows = [dataclasses.replace(PLAN.rows[0], strategy="factored", bytes=0), *PLAN.rows[1:]]
    found = changes(with_surgery(plan=dataclasses.replace(PLAN, rows=tuple(rows))))
    assert found["surgery strategy of block_0/attention/key/kernel"].outcome == "better"


def test_a_parameter_or_a_plan_that_is_gone_is_a_failure():
    fewer = dataclasses.replace(PLAN, rows=PLAN.rows[1:])
    assert failures(with_surgery(plan=fewer)) == ["surgery strategy of block_0/attention/key/kernel"]
    assert failures(dataclasses.replace(BASELINE, plans={})) == ["surgery plan"]
    more = dataclasses.replace(PLAN, rows=(*PLAN.rows, PlanRow(parameter="new", shape=(), strategy="loop")))
    assert failures(with_surgery(plan=more)) == []


@pytest.mark.parametrize(("most", "outcome"), [(1.0, "same"), (0.9, "worse")])
def test_a_ceiling_holds_whatever_the_baseline_says(most, outcome):
    found = changes(BASELINE, time=True, ceilings={"time_ratio": most})
    assert found["surgery max time_ratio"].outcome == outcome


def test_a_ceiling_on_what_is_not_known_is_a_failure_but_for_times_that_nobody_asked_for():
    assert failures(BASELINE, ceilings={"device_peak_bytes": 1}) != []
    assert "surgery max time_ratio" not in changes(UNTIMED, ceilings={"time_ratio": 1.0})


@pytest.mark.parametrize(("before", "after", "lost"), [(0, None, False), (0, 64, False), (64, None, True)])
def test_activations_of_nothing_in_an_older_baseline_were_unknown_and_are_not_missed(before, after, lost):
    old, new = (
        dataclasses.replace(
            BASELINE, rows=tuple(dataclasses.replace(row, activation_bytes_per_example=size) for row in BASELINE.rows)
        )
        for size in (before, after)
    )
    assert bool(failures(new, before=old)) == lost


@pytest.mark.parametrize("error", [None, float("nan"), float("inf")])
def test_an_error_that_is_no_number_is_below_no_ceiling(error):
    assert "surgery max max_rel_error" in failures(with_surgery(max_rel_error=error), ceilings={"max_rel_error": 0.1})


def test_a_ceiling_on_the_time_of_one_method_that_has_none_where_others_do_is_a_failure():
    assert "surgery max time_ratio" in failures(with_surgery(time_ratio=None), ceilings={"time_ratio": 1.0})


# Time.


def outcome(*args, before=BASELINE, **how):
    return changes(slower(*args, **how), time=True, before=before)["surgery time_ratio"]


def test_time_is_compared_only_if_asked():
    assert failures(slower(2)) == []
    assert failures(slower(2), time=True) == ["surgery time_ratio"]


@pytest.mark.parametrize(
    ("factor", "spread", "expected"),
    [
        (1.05, 0.0, "same"),
        (1.05, 0.01, "same"),
        (1.2, 0.0, "worse"),
        (1.2, 0.05, "worse"),
        (1.12, 0.05, "unresolved"),
        (1.05, 0.1, "unresolved"),
        (0.75, 0.1, "better"),
        (0.95, 0.04, "same"),
        (0.97, 0.0, "same"),
    ],
)
def test_the_position_of_the_interval_alone_decides(factor, spread, expected):
    assert outcome(factor, spread=spread).outcome == expected


def test_a_wide_interval_that_is_all_below_the_limit_passes():
    """As [−40%, −5%], which was unresolved once."""
    found = outcome(0.75, spread=0.2)
    low, high = (float(text) for text in re.search(r"between ([-+.\d]+)% and ([-+.\d]+)%", found.words).groups())
    assert (high < 10, high - low > 20, found.outcome) == (True, True, "better")


def test_the_words_say_by_how_much_and_from_how_many_rounds_and_processes():
    words = outcome(1.5, processes=5).words
    assert re.fullmatch(
        r"time 0\.99 -> 1\.48 of grad's \(\+50\.0%, between \+\d\d\.\d% and \+\d\d\.\d%; "
        r"5 processes × 6 rounds, before 8 processes × 6 rounds\); the limit is 10%",
        words,
    )


def test_what_is_unresolved_says_how_many_processes_would_settle_it():
    found = outcome(1.15, spread=0.08, processes=4)
    assert (found.outcome, found.is_failure) == ("unresolved", False)
    number = re.search(r"about (\d+) processes would settle it \(--processes (\d+)\)", found.words)
    assert int(number[1]) == int(number[2]) > 4


def test_a_baseline_of_one_process_is_told_to_have_more():
    one = {key: tuple(s for s in samples if s.process == 0) for key, samples in BASELINE.samples.items()}
    found = outcome(1.15, spread=0.08, before=dataclasses.replace(BASELINE, samples=one))
    assert re.search(r"the baseline has 1 process; one of about \d+ would settle it \(pegprof run", found.words)


def test_a_look_of_several_is_held_to_a_stricter_level():
    before, after = BASELINE, slower(1.125, spread=0.02, processes=4)
    after = dataclasses.replace(after, settings=dataclasses.replace(after.settings, processes=8))
    widths = []
    for sequential in (False, True):
        found = compare_results(
            before, after, limits=lambda method: Limits(), time=True, looks=Looks(sequential=sequential)
        )
        words = next(change.words for change in found if change.metric == "time_ratio")
        low, high = (float(text) for text in re.search(r"between ([-+.\d]+)% and ([-+.\d]+)%", words).groups())
        widths.append(high - low)
    assert widths[1] > 1.2 * widths[0]


def test_further_processes_are_not_worth_it_once_all_intervals_are_on_one_side():
    def settled(after):
        after = dataclasses.replace(after, settings=dataclasses.replace(after.settings, processes=8))
        return times_settled(BASELINE, after, batch=64, limits=lambda method: Limits())

    assert settled(slower(1.5, processes=3))
    assert settled(slower(1.0, processes=3))
    assert not settled(slower(1.12, processes=3, spread=0.05))
    assert not settled(slower(1.5, processes=2))  # which say nothing about their spread
    assert settled(slower(1.12, time_batch=1))  # there is nothing to settle


def test_a_machine_on_which_grad_itself_is_slower_fails_nobody_but_passes():
    change = outcome(1.5, grad=1.6)
    assert change.outcome == "unresolved"
    assert "the machine is busy, or another one. gate --against REV" in change.words
    assert outcome(1.0, grad=1.6).outcome == "same"


def test_two_revisions_in_the_same_rounds_had_the_same_machine():
    found = compare_results(
        BASELINE, slower(1.5, grad=1.6), limits=lambda method: Limits(), time=True, looks=Looks(interleaved=True)
    )
    assert [change.outcome for change in found if change.metric == "time_ratio"] == ["worse"]


def test_times_at_another_batch_are_not_compared():
    assert outcome(2, time_batch=1).outcome == "unresolved"


def test_a_time_that_is_gone_without_a_reason_is_a_failure():
    assert failures(with_surgery(time_ratio=None), time=True) == ["surgery time_ratio"]
