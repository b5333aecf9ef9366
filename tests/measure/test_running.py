"""What runs on a bench: whose peak is taken, and that a peak does not change what is compared."""

import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pegprof
from pegprof.measure import protocol
from pegprof.measure.protocol import Subject
from pegprof.measure.worker import array_files, memory, running
from pegprof.measure.worker.running import Bench
from pegprof.models import check_examples as check
from pegprof.models.problem import provided
from pegprof.result.settings import Settings


class Answer:
    """As a child's reporter; it keeps the answer."""

    def __init__(self):
        self.fields = {}

    def update(self, **fields):
        self.fields |= fields


PROBLEM = pegprof.Problem(
    name="linear",
    init=lambda key: jax.random.normal(key, (3,)),
    loss=lambda w, x_BxD: jnp.mean((x_BxD @ w) ** 2),
    batch=lambda key, B: jax.random.normal(key, (B, 3)),
)


def make_arguments(subject, file):
    made = Answer()
    running.make_arguments(protocol.MakeArguments(subject=subject, batch=4, seed=0, file=file), made)
    return protocol.Arguments(**made.fields)


@pytest.fixture
def run_first(monkeypatch):
    """The first run of a step on a bench, and the peaks that were taken of it: each less than the one before."""
    peaks = []

    def measure_host_peak(run):
        peaks.append(100 - len(peaks))
        return run(), peaks[-1]

    monkeypatch.setattr(memory, "measure_host_peak", measure_host_peak)

    def run(**how):
        peaks.clear()
        with tempfile.TemporaryFile() as stream:
            file = stream.fileno()
            subject = Subject(settings=Settings(model="linear", step="micro_adam", cache=False))
            at, on, answer = {"subject": subject, "method": "surgery", "batch": 4}, Bench(), Answer()
            with provided(PROBLEM):
                arguments = make_arguments(subject, file)
                on.compile(protocol.Compile(**at), Answer())
                on.load(protocol.Load(**at, arguments=arguments, file=file), Answer())
                on.run(protocol.Run(method="surgery", file=file, **how), answer)
            kept = answer.fields.get("kept", {})
            values = {name: [array_files.view(file, slot) for slot in slots] for name, slots in kept.items()}
            return answer.fields, list(peaks), values

    return run


def test_of_a_short_run_the_peak_is_that_of_a_second_one(run_first):
    answer, peaks, _ = run_first(measure_peak=True)
    assert peaks == [100, 99]
    assert answer["host_bytes"] == 99
    assert len(answer["times_s"]) == 1


def test_a_long_run_is_not_repeated_for_its_peak(run_first, monkeypatch):
    monkeypatch.setattr(running, "SHORT_S", 0.0)
    answer, peaks, _ = run_first(measure_peak=True)
    assert peaks == [100]
    assert answer["host_bytes"] == 100


def test_what_is_kept_is_of_the_first_step_whether_a_peak_is_taken_or_not(run_first):
    *_, with_peak = run_first(measure_peak=True, keep=True)
    *_, without = run_first(keep=True)
    assert with_peak.keys() == without.keys() == {"mean", "second_moment"}
    for name, values in without.items():
        np.testing.assert_allclose(with_peak[name], values)


@pytest.mark.parametrize("wrong", [False, True])
def test_a_check_of_the_examples_says_whether_the_loss_or_the_engine_is_off(monkeypatch, wrong):
    if wrong:
        right = check.grad_stats
        twice = lambda fn: lambda *args: jax.tree.map(lambda x: 2 * x, fn(*args))
        monkeypatch.setattr(check, "grad_stats", lambda *args, **options: twice(right(*args, **options)))
    with tempfile.TemporaryFile() as stream:
        subject, file, answer = Subject(settings=Settings(model="linear")), stream.fileno(), Answer()
        with provided(PROBLEM):
            arguments = make_arguments(subject, file)
            request = protocol.CheckExamples(subject=subject, arguments=arguments, examples=4, file=file)
            running.check_examples(request, answer)
    assert (answer.fields["ok"], answer.fields["cause"]) == (not wrong, "")
    fault = "a bug in pegprof: params: mean differs by 0.5 of its norm"
    assert answer.fields["engine_fault"] == (fault if wrong else "")
