"""The race, with a crew of scripts instead of processes, and a clock that only runs move."""

import pytest

from pegprof.profiling import timing
from pegprof.profiling.crew import NoRoom, Program
from pegprof.profiling.process import ChildFailure, OutOfTime
from pegprof.profiling.progress import Silence
from pegprof.profiling.race import Peak, Terms, Timed
from pegprof.profiling.timing import Timing

MIB = 2**20


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def monotonic(self):
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(timing, "time", made)
    return made


class Crew:
    """Methods that take so many seconds, and one byte, an example.

    ``dies`` is the number of the run that kills a method; ``errors`` are those of its statistics.
    """

    on_host, shared = True, False

    def __init__(
        self, clock, example_s, *, limit_s=1e9, room_bytes=1e9, dies=None, errors=None, check=None, nonfinite=None
    ):
        self.methods, self.programs, self.log = list(example_s), {}, []
        self.clock, self.example_s, self.limit_s, self.room_bytes = clock, example_s, limit_s, room_bytes
        self.dies, self.errors, self.check = dies or {}, errors or {}, check or {"ok": True}
        self.nonfinite = nonfinite or {}
        self.runs = dict.fromkeys(example_s, 0)

    def left_s(self):
        return max(0.0, self.limit_s - self.clock.now_s)

    def set_up(self, batch):
        return self.prepare(batch)

    def prepare(self, batch):
        self.log.append(f"prepare {batch}")
        self.programs = {
            m: Program(batch=batch, compile_s=0.0, peak_bytes=batch, argument_bytes=0) for m in self.methods
        }
        return {}

    def require_room(self, method, peak_bytes):
        if peak_bytes > self.room_bytes:
            raise NoRoom(f"needs {peak_bytes} B, {self.room_bytes} B available")

    def run(self, method, *, limit_s=None, **how):
        self.require_room(method, self.programs[method].peak_bytes)
        self.runs[method] += 1
        self.log.append(method)
        if self.dies.get(method) == self.runs[method]:
            raise ChildFailure("killed", answer={}, output="")
        time_s = self.example_s[method] * self.programs[method].batch
        times = how.get("times", 1)
        allowed_s = min(self.left_s(), self.left_s() if limit_s is None else limit_s)
        self.clock.now_s += min(times * time_s, allowed_s)
        if times * time_s > allowed_s:
            raise OutOfTime("stopped", answer={}, output="")
        answer = {"times_s": times * [time_s]}
        if how.get("keep"):
            answer["kept"] = {"mean": []}
        if how.get("compare_with"):
            answer["max_rel_error"] = self.errors.get(method, 0.0)
        if how.get("find_nonfinite"):
            answer["nonfinite"] = self.nonfinite.get(method, "")
        if how.get("measure_peak"):
            answer |= {"host_bytes": self.programs[method].peak_bytes, "device_peak_bytes": None}
        return answer

    def check_examples(self, examples):
        self.log.append(f"check {examples}")
        return self.check

    def drop(self, method):
        self.methods.remove(method)

    def forget_statistics(self):
        self.log.append("forget")

    def close(self):
        self.log.append("close")


def race(crew, *, batches=(64, 32, 16, 8, 4, 2, 1), warmup=1, runs=3, tolerance=1e-3, talk=None):
    terms = Terms(
        batches=batches,
        peak_bytes=dict.fromkeys(crew.methods, batches[0]),
        example_s=None,
        warmup=warmup,
        runs=runs,
        tolerance=tolerance,
        check_examples=True,
        measure_peaks=True,
    )
    made = Timing(terms, crew=crew, talk=talk or Silence(), changed=lambda: None)
    made.run()
    assert crew.log[-1] == "close"
    return made.timed()


ALL = {"grad": 0.1, "vmap": 0.2, "microbatch": 0.1, "surgery": 0.1}


def test_all_methods_run_in_turn_at_the_batch_asked_for(clock):
    crew = Crew(clock, ALL)
    timed = race(crew)
    assert {m: (t.batch, len(t.samples_s)) for m, t in timed.items()} == dict.fromkeys(ALL, (64, 3))
    rounds = crew.log[crew.log.index("prepare 64") + 1 + len(ALL) : -1]
    assert [set(rounds[i : i + 4]) for i in (0, 4, 8)] == [set(ALL)] * 3
    assert len({rounds[i] for i in (0, 4, 8)}) == 3  # another one is first each time


def test_statistics_are_compared_and_examples_checked_on_a_small_batch_before_anything_is_timed(clock):
    crew = Crew(clock, ALL)
    race(crew)
    assert crew.log[:8] == ["prepare 4", "microbatch", "vmap", "surgery", "grad", "forget", "check 4", "prepare 64"]


def test_without_checks_nothing_is_compared(clock):
    crew = Crew(clock, ALL, errors={"surgery": 1.0})
    timed = race(crew, tolerance=None)
    assert (timed["surgery"].failure, timed["surgery"].max_rel_error) == (None, None)
    assert "check 4" not in crew.log


def test_a_method_whose_statistics_differ_fails_and_is_not_timed(clock):
    timed = race(Crew(clock, ALL, errors={"surgery": 0.25}))
    assert timed["surgery"].failure == "its statistics differ from those of microbatch by 2.5e-01 of their scale"
    assert (timed["surgery"].max_rel_error, len(timed["vmap"].samples_s)) == (0.25, 3)


def test_where_examples_interact_grad_fails_in_words_but_is_timed_since_the_others_are_compared_with_it(clock):
    check = {"ok": False, "text": "...", "cause": "BatchNorm; or so", "engine_fault": None}
    timed = race(Crew(clock, ALL, errors={"grad": 0.5}, check=check))
    assert timed["grad"].failure == (
        "the mean of the examples' gradients is not the gradient of the batch: BatchNorm, or so"
    )
    assert len(timed["grad"].samples_s) == 3
    assert {timed[m].failure for m in ("vmap", "microbatch", "surgery")} == {None}


NAN_IN_W = "NaN in the statistics of 1 of 2 parameters: w"


class Heard(Silence):
    def __init__(self):
        self.lines = []

    def __call__(self, text):
        self.lines.append(text)


def test_methods_that_agree_that_something_is_not_a_number_are_timed_and_say_so(clock):
    heard = Heard()
    timed = race(Crew(clock, ALL, nonfinite=dict.fromkeys(ALL, NAN_IN_W)), talk=heard)
    for result in timed.values():
        assert (result.failure, result.remarks, len(result.samples_s)) == (None, (NAN_IN_W,), 3)
    assert heard.lines == [f"warning: {NAN_IN_W} (microbatch, vmap, surgery, grad)"]


def test_methods_that_have_no_finite_number_to_compare_are_not_verified_and_say_so(clock):
    heard = Heard()
    crew = Crew(clock, ALL, nonfinite=dict.fromkeys(ALL, NAN_IN_W), errors=dict.fromkeys(ALL))
    timed = race(crew, talk=heard)
    unverified = "not verified: no finite number to compare"
    assert {m: (t.failure, t.max_rel_error, t.remarks) for m, t in timed.items()} == {
        "microbatch": (None, None, (NAN_IN_W,)),
        **dict.fromkeys(("vmap", "surgery", "grad"), (None, None, (NAN_IN_W, unverified))),
    }
    assert heard.lines[0].startswith("warning: ")
    assert heard.lines[1:] == [f"warning: {unverified} (vmap, surgery, grad)"]


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
    timed = race(Crew(clock, ALL, nonfinite=nonfinite, errors={"surgery": float("inf")}))
    assert (timed["surgery"].failure, timed["surgery"].samples_s) == (words, ())


def test_a_single_method_is_looked_at_too(clock):
    timed = race(Crew(clock, {"grad": 0.1}, nonfinite={"grad": NAN_IN_W}))
    assert timed["grad"].remarks == (NAN_IN_W,)


def test_a_loss_that_is_not_a_number_is_said(clock):
    words = "the loss of 4 examples is nan"
    heard = Heard()
    timed = race(Crew(clock, ALL, check={"ok": True, "loss": words}), talk=heard)
    assert {t.remarks for t in timed.values()} == {(words,)}
    assert heard.lines == [f"warning: {words}"]


def test_without_grad_the_others_say_that_examples_interact(clock):
    check = {"ok": False, "text": "...", "cause": "BatchNorm", "engine_fault": None}
    timed = race(Crew(clock, {"vmap": 0.1}, check=check))
    assert (timed["vmap"].failure, len(timed["vmap"].remarks)) == (None, 1)


WRONG_ENGINE = {"ok": False, "text": "...", "cause": None, "engine_fault": "a bug in pegprof: w: mean differs"}


def test_where_the_engine_is_wrong_surgery_fails_and_grad_does_not(clock):
    timed = race(Crew(clock, ALL, check=WRONG_ENGINE))
    assert (timed["surgery"].failure, timed["surgery"].samples_s) == ("a bug in pegprof: w: mean differs", ())
    assert {(timed[m].failure, len(timed[m].samples_s)) for m in ("grad", "vmap", "microbatch")} == {(None, 3)}


def test_grad_that_differs_from_an_engine_that_is_wrong_is_not_to_blame(clock):
    pair = {"grad": 0.1, "surgery": 0.1}
    timed = race(Crew(clock, pair, errors={"grad": 0.5}, check=WRONG_ENGINE))
    assert (timed["surgery"].failure, timed["surgery"].max_rel_error) == ("a bug in pegprof: w: mean differs", 0.5)
    assert (timed["grad"].failure, timed["grad"].max_rel_error, len(timed["grad"].samples_s)) == (None, None, 3)


def test_where_the_engine_and_the_loss_are_wrong_each_row_says_its_own(clock):
    timed = race(Crew(clock, ALL, check={**WRONG_ENGINE, "cause": "BatchNorm"}))
    assert timed["surgery"].failure == "a bug in pegprof: w: mean differs"
    assert timed["grad"].failure.endswith("is not the gradient of the batch: BatchNorm")


def test_without_surgery_a_wrong_engine_fails_nobody(clock):
    timed = race(Crew(clock, {"grad": 0.1, "vmap": 0.1}, check=WRONG_ENGINE))
    assert {(t.failure, t.remarks) for t in timed.values()} == {(None, ())}


def test_the_examples_of_a_slow_model_are_checked_only_if_grad_differs(clock):
    slow = {"grad": 10.0, "vmap": 10.0}
    agreeing, differing = Crew(clock, slow, limit_s=700), Crew(clock, slow, limit_s=1000, errors={"grad": 0.5})
    race(agreeing)
    race(differing)
    assert ("check 4" in agreeing.log, "check 4" in differing.log) == (False, True)


def test_a_method_that_dies_in_its_first_run_or_later_fails_alone(clock):
    timed = race(Crew(clock, ALL, dies={"vmap": 1, "surgery": 4}))
    assert (timed["vmap"].failure, timed["vmap"].samples_s) == ("killed", ())
    assert (timed["surgery"].failure, len(timed["surgery"].samples_s)) == ("killed", 2)
    assert {m: (timed[m].failure, len(timed[m].samples_s)) for m in ("grad", "microbatch")} == {
        "grad": (None, 3),
        "microbatch": (None, 3),
    }


def test_a_method_that_dies_at_the_batch_that_is_timed_has_no_time_of_a_smaller_one(clock):
    timed = race(Crew(clock, ALL, dies={"vmap": 2}))
    assert (timed["vmap"].failure, timed["vmap"].samples_s, timed["vmap"].batch) == ("killed", (), None)
    assert timed["grad"].batch == 64


def test_runs_that_the_time_limit_did_not_allow_are_said(clock):
    timed = race(Crew(clock, {"grad": 1.0}, limit_s=450), runs=50)
    assert (timed["grad"].batch, timed["grad"].remarks) == (64, ("5 runs: the time limit allowed no more",))


def test_what_does_not_fit_even_at_the_smallest_batch_is_refused(clock):
    timed = race(Crew(clock, ALL, room_bytes=3))
    assert {t.refused for t in timed.values()} == {"not run: batch 4 needs 4 B, 3 B available"}


def test_where_memory_is_short_all_are_timed_at_a_smaller_batch(clock):
    assert {t.batch for t in race(Crew(clock, ALL, room_bytes=20)).values()} == {16}


def test_where_time_is_short_the_first_runs_count_and_that_is_said(clock):
    timed = race(Crew(clock, {"grad": 10.0, "vmap": 10.0}, limit_s=250))  # three rounds of four examples
    for result in timed.values():
        assert (result.batch, result.samples_s) == (4, (40.0, 40.0, 40.0))
        assert result.remarks == ("its first run, not warmed up, counts: the time limit allowed no more",)


def test_where_time_is_shorter_the_slowest_is_left_out_after_its_first_run(clock):
    timed = race(Crew(clock, {"grad": 10.0, "vmap": 20.0, "surgery": 10.0}, limit_s=330))
    assert (len(timed["vmap"].samples_s), timed["vmap"].skipped) == (1, None)
    assert timed["vmap"].remarks[-1] == "left out of the rounds: too slow for the time limit"
    assert (len(timed["grad"].samples_s), len(timed["surgery"].samples_s)) == (3, 3)


def test_a_first_run_may_not_take_all_the_time_of_the_others(clock):
    timed = race(Crew(clock, {"grad": 1.0, "vmap": 1000.0}, limit_s=100))
    assert (timed["vmap"].skipped, timed["vmap"].samples_s) == (
        "stopped: it took longer than the time limit allows",
        (),
    )
    assert len(timed["grad"].samples_s) == 3


def test_no_run_goes_on_after_the_time_limit(clock):
    race(Crew(clock, {"grad": 30.0, "vmap": 50.0}, limit_s=60))
    assert clock.now_s <= 60


def test_without_warm_up_the_first_run_is_a_sample_like_any_other(clock):
    timed = race(Crew(clock, ALL), warmup=0, runs=3)
    assert {(len(t.samples_s), t.remarks) for t in timed.values()} == {(3, ())}


def test_a_quick_method_runs_several_times_a_round_but_no_more_than_asked_for(clock):
    crew = Crew(clock, {"grad": 0.0001, "vmap": 1.0})
    timed = race(crew, runs=7)
    assert {m: len(t.samples_s) for m, t in timed.items()} == {"grad": 7, "vmap": 7}
    assert crew.runs == {"grad": 2 + 2, "vmap": 2 + 7}  # 5 and 2 in two rounds


def test_without_a_number_of_runs_there_are_at_least_three_rounds_and_no_more_than_fifty_runs(clock):
    assert {len(t.samples_s) for t in race(Crew(clock, {"grad": 1.0, "vmap": 1.0}), runs=None).values()} == {3}
    assert {len(t.samples_s) for t in race(Crew(clock, {"grad": 1e-9}), runs=None).values()} == {50}


def test_further_warm_up_runs_do_not_count(clock):
    crew = Crew(clock, ALL)
    timed = race(crew, warmup=3)
    assert {len(t.samples_s) for t in timed.values()} == {3}
    assert crew.runs == dict.fromkeys(ALL, 1 + 3 + 3)


def test_statistics_that_could_not_be_kept_are_not_compared_and_that_is_said(clock):
    crew = Crew(clock, ALL)
    run = crew.run
    crew.run = lambda method, **how: (
        run(method, **{**how, "keep": False}) | ({"not_kept": "No space left on device"} if how.get("keep") else {})
    )
    timed = race(crew)
    assert {t.max_rel_error for t in timed.values()} == {None}
    assert {t.remarks for t in timed.values()} == {("statistics not compared: No space left on device",)}


def test_the_peak_is_that_of_the_batch_that_is_timed(clock):
    assert {t.peak for t in race(Crew(clock, ALL)).values()} == {Peak(batch=64, xla_bytes=64, host_bytes=64)}


@pytest.mark.parametrize(
    ("measured", "far"), [(1000, False), (1101, True), (899, True), (1099, False)], ids=lambda value: str(value)
)
def test_a_peak_is_far_from_xlas_figure_from_ten_percent_on(measured, far):
    assert Peak(batch=1, xla_bytes=1000 * MIB, host_bytes=measured * MIB).is_far_from_xla == far


def test_a_peak_of_little_is_never_far_from_xlas_figure():
    assert not Peak(batch=1, xla_bytes=MIB, host_bytes=32 * MIB).is_far_from_xla


def test_the_spread_is_between_the_quartiles():
    timed = Timed(samples_s=(1.0, 2.0, 3.0, 4.0, 100.0))
    assert (timed.time_s, timed.iqr_s) == (3.0, 2.0)
