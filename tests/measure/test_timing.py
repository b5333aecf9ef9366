"""The race, with runners of scripts instead of processes, and a clock that only runs move."""

import dataclasses

import pytest

from pegprof.measure.progress import Silence
from pegprof.measure.protocol import ExamplesChecked
from pegprof.result.findings import Peak
from pegprof.result.history import Timed
from tests.measure.races import ALL, Runners, race, times_s, words_of
from tests.result.results import make_samples

MIB = 2**20


def test_all_methods_run_in_turn_at_the_batch_asked_for(clock):
    runners = Runners(clock, ALL)
    timed = race(runners)
    assert {m: (t.batch, len(t.samples)) for m, t in timed.items()} == dict.fromkeys(ALL, (64, 3))
    rounds = runners.log[runners.log.index("prepare 64") + 1 + len(ALL) : -1]
    assert [set(rounds[i : i + 4]) for i in (0, 4, 8)] == [set(ALL)] * 3
    assert len({rounds[i] for i in (0, 4, 8)}) == 3  # another one is first each time


def test_statistics_are_compared_on_a_small_batch_before_anything_is_timed(clock):
    runners = Runners(clock, ALL)
    race(runners)
    assert runners.log[:7] == ["prepare 4", "microbatch", "surgery", "grad", "vmap", "forget", "prepare 64"]


@pytest.mark.parametrize("methods", [("grad", "surgery"), ("vmap", "surgery"), ("grad",)])
def test_examples_are_checked_where_grad_was_not_compared_with_single_examples(clock, methods):
    runners = Runners(clock, dict.fromkeys(methods, 0.1))
    race(runners)
    assert "check 4" in runners.log


def test_examples_are_not_checked_where_all_methods_agree_on_them(clock):
    runners = Runners(clock, ALL)
    race(runners)
    assert "check 4" not in runners.log


def test_a_slow_vmap_runs_once_where_the_others_differ_for_one_draw_of_parameters(clock):
    runners = Runners(clock, ALL, kinks={"grad": 0.01, "surgery": 0.02, "vmap": 0.01})
    timed = race(runners)
    begin = runners.log.index("draw 1")
    assert runners.log[begin : begin + 6] == ["draw 1", "microbatch", "surgery", "grad", "vmap", "forget"]
    assert (timed["vmap"].failure, timed["vmap"].max_rel_error, words_of(timed["vmap"])) == (None, 0.0, ())


def test_without_checks_nothing_is_compared(clock):
    runners = Runners(clock, ALL, errors={"surgery": 1.0})
    timed = race(runners, tolerance=None)
    assert (timed["surgery"].failure, timed["surgery"].max_rel_error) == (None, None)
    assert "check 4" not in runners.log


def test_a_method_that_differs_for_one_draw_of_parameters_and_agrees_for_another_is_right(clock):
    runners = Runners(clock, ALL, kinks={"grad": 0.01, "surgery": 0.02})
    timed = race(runners)
    assert "draw 1" in runners.log
    assert [t.failure for t in timed.values()] == [None] * 4
    assert timed["surgery"].max_rel_error == 0.0
    (remark,) = words_of(timed["surgery"])
    assert "by 2.0e-02 for the first draw" in remark
    assert "rounding decides the gradient at a kink" in remark
    assert words_of(timed["vmap"]) == ()


def test_a_method_whose_statistics_differ_fails_and_is_not_timed(clock):
    timed = race(Runners(clock, ALL, errors={"surgery": 0.25}))
    assert timed["surgery"].failure == "its statistics differ from those of microbatch by 2.5e-01 of their scale"
    assert (timed["surgery"].max_rel_error, len(timed["vmap"].samples)) == (0.25, 3)


def test_where_examples_interact_grad_fails_in_words_but_is_timed_since_the_others_are_compared_with_it(clock):
    check = ExamplesChecked(ok=False, text="...", cause="BatchNorm or so")
    timed = race(Runners(clock, ALL, errors={"grad": 0.5}, check=check))
    assert timed["grad"].failure == (
        "the mean of the examples' gradients is not the gradient of the batch: BatchNorm or so"
    )
    assert len(timed["grad"].samples) == 3
    assert {timed[m].failure for m in ("vmap", "microbatch", "surgery")} == {None}


NAN_IN_W = "NaN in the statistics of 1 of 2 parameters: w"


class Heard(Silence):
    def __init__(self):
        self.lines = []

    def __call__(self, text):
        self.lines.append(text)


def test_methods_that_agree_that_something_is_not_a_number_are_timed_and_say_so(clock):
    heard = Heard()
    timed = race(Runners(clock, ALL, nonfinite=dict.fromkeys(ALL, NAN_IN_W)), talk=heard)
    for result in timed.values():
        assert (result.failure, words_of(result), len(result.samples)) == (None, (NAN_IN_W,), 3)
    assert heard.lines == [f"warning: {NAN_IN_W} (microbatch, surgery, grad, vmap)"]


def test_methods_that_have_no_finite_number_to_compare_are_not_verified_and_say_so(clock):
    heard = Heard()
    runners = Runners(clock, ALL, nonfinite=dict.fromkeys(ALL, NAN_IN_W), errors=dict.fromkeys(ALL))
    timed = race(runners, talk=heard)
    unverified = "not verified: no finite number to compare"
    assert {m: (t.failure, t.max_rel_error, words_of(t)) for m, t in timed.items()} == {
        "microbatch": (None, None, (NAN_IN_W,)),
        **dict.fromkeys(("vmap", "surgery", "grad"), (None, None, (NAN_IN_W, unverified))),
    }
    assert heard.lines[0].startswith("warning: ")
    assert heard.lines[1:] == [f"warning: {unverified} (surgery, grad, vmap)"]


@pytest.mark.parametrize(
    ("nonfinite", "words"),
    [
        ({"surgery": NAN_IN_W}, "its statistics are NaN or infinite where those of microbatch are finite"),
        ({"microbatch": NAN_IN_W}, "its statistics are finite where those of microbatch are NaN or infinite"),
        (
            dict.fromkeys(ALL, NAN_IN_W),
            "its statistics and those of microbatch are NaN or infinite in different places",
        ),
    ],
)
def test_not_a_number_against_a_number_is_a_failure_in_words(clock, nonfinite, words):
    timed = race(Runners(clock, ALL, nonfinite=nonfinite, errors={"surgery": float("inf")}))
    assert (timed["surgery"].failure, timed["surgery"].samples) == (words, ())


def test_a_single_method_is_looked_at_too(clock):
    timed = race(Runners(clock, {"grad": 0.1}, nonfinite={"grad": NAN_IN_W}))
    assert words_of(timed["grad"]) == (NAN_IN_W,)


def test_a_loss_that_is_not_a_number_is_said(clock):
    words = "the loss of 4 examples is nan"
    heard = Heard()
    pair = {"grad": 0.1, "surgery": 0.1}
    timed = race(Runners(clock, pair, check=ExamplesChecked(ok=True, loss=words)), talk=heard)
    assert {words_of(t) for t in timed.values()} == {(words,)}
    assert heard.lines == [f"warning: {words}"]


def test_without_grad_the_others_say_that_examples_interact(clock):
    check = ExamplesChecked(ok=False, text="...", cause="BatchNorm")
    timed = race(Runners(clock, {"vmap": 0.1}, check=check))
    assert (timed["vmap"].failure, len(words_of(timed["vmap"]))) == (None, 1)


WRONG_ENGINE = ExamplesChecked(ok=False, text="...", engine_fault="a bug in pegprof: w: mean differs")


def test_where_the_engine_is_wrong_surgery_fails_and_grad_does_not(clock):
    timed = race(Runners(clock, {"grad": 0.1, "surgery": 0.1}, check=WRONG_ENGINE))
    assert (timed["surgery"].failure, timed["surgery"].samples) == ("a bug in pegprof: w: mean differs", ())
    assert (timed["grad"].failure, len(timed["grad"].samples)) == (None, 3)


def test_grad_that_differs_from_an_engine_that_is_wrong_is_not_to_blame(clock):
    pair = {"grad": 0.1, "surgery": 0.1}
    timed = race(Runners(clock, pair, errors={"grad": 0.5}, check=WRONG_ENGINE))
    assert (timed["surgery"].failure, timed["surgery"].max_rel_error) == ("a bug in pegprof: w: mean differs", 0.5)
    assert (timed["grad"].failure, timed["grad"].max_rel_error, len(timed["grad"].samples)) == (None, None, 3)


def test_where_the_engine_and_the_loss_are_wrong_each_row_says_its_own(clock):
    both = dataclasses.replace(WRONG_ENGINE, cause="BatchNorm")
    timed = race(Runners(clock, {"grad": 0.1, "surgery": 0.1}, check=both))
    assert timed["surgery"].failure == "a bug in pegprof: w: mean differs"
    assert timed["grad"].failure.endswith("is not the gradient of the batch: BatchNorm")


def test_without_surgery_a_wrong_engine_fails_nobody(clock):
    timed = race(Runners(clock, {"grad": 0.1, "vmap": 0.1}, check=WRONG_ENGINE))
    assert {(t.failure, words_of(t)) for t in timed.values()} == {(None, ())}


def test_the_examples_of_a_slow_model_are_checked_only_if_grad_differs(clock):
    slow = {"grad": 10.0, "vmap": 10.0}
    agreeing, differing = Runners(clock, slow, limit_s=700), Runners(clock, slow, limit_s=1000, errors={"grad": 0.5})
    race(agreeing)
    race(differing)
    assert ("check 4" in agreeing.log, "check 4" in differing.log) == (False, True)


def test_a_method_that_dies_in_its_first_run_or_later_fails_alone(clock):
    timed = race(Runners(clock, ALL, dies={"vmap": 1, "surgery": 4}))
    assert (timed["vmap"].failure, timed["vmap"].samples) == ("killed", ())
    assert (timed["surgery"].failure, len(timed["surgery"].samples)) == ("killed", 2)
    assert {m: (timed[m].failure, len(timed[m].samples)) for m in ("grad", "microbatch")} == {
        "grad": (None, 3),
        "microbatch": (None, 3),
    }


def test_a_method_that_dies_at_the_batch_that_is_timed_has_no_time_of_a_smaller_one(clock):
    timed = race(Runners(clock, ALL, dies={"vmap": 2}))
    assert (timed["vmap"].failure, timed["vmap"].samples, timed["vmap"].batch) == ("killed", (), None)
    assert timed["grad"].batch == 64


def test_runs_that_the_time_limit_did_not_allow_are_said(clock):
    timed = race(Runners(clock, {"grad": 1.0}, limit_s=450), runs=50)
    assert (timed["grad"].batch, words_of(timed["grad"])) == (64, ("5 runs: the time limit allowed no more",))


def test_what_does_not_fit_even_at_the_smallest_batch_is_refused(clock):
    timed = race(Runners(clock, ALL, room_bytes=3))
    assert {t.refused for t in timed.values()} == {"not run: batch 4 needs 4 B, 3 B available"}


def test_where_memory_is_short_all_are_timed_at_a_smaller_batch(clock):
    assert {t.batch for t in race(Runners(clock, ALL, room_bytes=20)).values()} == {16}


def test_where_time_is_short_the_first_runs_count_and_that_is_said(clock):
    timed = race(Runners(clock, {"grad": 10.0, "vmap": 10.0}, limit_s=250))  # three rounds of four examples
    for result in timed.values():
        assert (result.batch, times_s(result)) == (4, (40.0, 40.0, 40.0))
        assert words_of(result) == ("its first run, not warmed up, counts: the time limit allowed no more",)


def test_where_time_is_shorter_the_slowest_is_left_out_after_its_first_run(clock):
    timed = race(Runners(clock, {"grad": 10.0, "vmap": 20.0, "surgery": 10.0}, limit_s=330))
    assert (len(timed["vmap"].samples), timed["vmap"].skipped) == (1, None)
    assert words_of(timed["vmap"])[-1] == "left out of the rounds: too slow for the time limit"
    assert (len(timed["grad"].samples), len(timed["surgery"].samples)) == (3, 3)


def test_a_first_run_may_not_take_all_the_time_of_the_others(clock):
    timed = race(Runners(clock, {"grad": 1.0, "vmap": 1000.0}, limit_s=100))
    assert (timed["vmap"].skipped, timed["vmap"].samples) == (
        "stopped: it took longer than the time limit allows",
        (),
    )
    assert len(timed["grad"].samples) == 3


def test_no_run_goes_on_after_the_time_limit(clock):
    race(Runners(clock, {"grad": 30.0, "vmap": 50.0}, limit_s=60))
    assert clock.now_s <= 60


def test_without_warm_up_the_first_run_is_a_sample_like_any_other(clock):
    timed = race(Runners(clock, ALL), warmup=0, runs=3)
    assert {(len(t.samples), words_of(t)) for t in timed.values()} == {(3, ())}


def test_further_warm_up_runs_do_not_count(clock):
    runners = Runners(clock, ALL)
    timed = race(runners, warmup=3)
    assert {len(t.samples) for t in timed.values()} == {3}
    assert runners.runs == dict.fromkeys(ALL, 1 + 3 + 3)


def test_statistics_that_could_not_be_kept_are_not_compared_and_that_is_said(clock):
    runners = Runners(clock, ALL)
    run = runners.run
    runners.run = lambda method, **how: (
        dataclasses.replace(run(method, **{**how, "keep": False}), not_kept="No space left on device")
        if how.get("keep")
        else run(method, **how)
    )
    timed = race(runners)
    assert {t.max_rel_error for t in timed.values()} == {None}
    assert {words_of(t) for t in timed.values()} == {("statistics not compared: No space left on device",)}


def test_the_peak_is_that_of_the_batch_that_is_timed(clock):
    assert {t.peak for t in race(Runners(clock, ALL)).values()} == {Peak(batch=64, xla_bytes=64, host_bytes=64)}


@pytest.mark.parametrize(
    ("measured", "far"), [(1000, False), (1101, True), (899, True), (1099, False)], ids=lambda value: str(value)
)
def test_a_peak_is_far_from_xlas_figure_from_ten_percent_on(measured, far):
    assert Peak(batch=1, xla_bytes=1000 * MIB, host_bytes=measured * MIB).is_far_from_xla == far


def test_a_peak_of_little_is_never_far_from_xlas_figure():
    assert not Peak(batch=1, xla_bytes=MIB, host_bytes=32 * MIB).is_far_from_xla


def test_the_spread_is_between_the_quartiles():
    timed = Timed(samples=make_samples((1.0, 2.0, 3.0, 4.0, 100.0)))
    assert (timed.time_s, timed.iqr_s) == (3.0, 2.0)
