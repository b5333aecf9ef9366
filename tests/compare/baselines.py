"""A baseline, and results that differ from it in one thing."""

import dataclasses

from pegprof.compare.comparison import compare_results
from pegprof.compare.limits import Limits
from pegprof.result.settings import Settings
from tests.result.results import GRAD, PLAN, RESULT, SURGERY, make_samples

STEADY = tuple(tuple((1 + 0.002 * p) * (1.0 + 0.001 * (i % 5)) for i in range(6)) for p in range(8))
"""Times of eight processes."""


def scaled(processes, factor):
    return make_samples(*([factor * time_s for time_s in times_s] for times_s in processes))


BASELINE = dataclasses.replace(
    RESULT,
    settings=Settings(model="transformer-151m", methods=("grad", "surgery")),
    rows=(GRAD, SURGERY),
    samples={(64, "grad"): scaled(STEADY, 1.0), (64, "surgery"): scaled(STEADY, 1.2)},
)


UNTIMED = dataclasses.replace(
    BASELINE,
    settings=dataclasses.replace(BASELINE.settings, time=False),
    rows=tuple(dataclasses.replace(row, time_s=None, time_ratio=None) for row in BASELINE.rows),
    samples={},
)


def with_surgery(result=BASELINE, *, times=None, plan=None, **fields):
    """A result with another row of surgery."""
    rows = tuple(dataclasses.replace(row, **fields) if row.method == "surgery" else row for row in result.rows)
    samples = {**result.samples, **(times or {})}
    return dataclasses.replace(result, rows=rows, samples=samples, plans={64: plan or PLAN})


def changes(after, *, before=BASELINE, time=False, **limits):
    found = compare_results(before, after, limits=lambda method: Limits(**limits), time=time)
    return {f"{change.method} {change.metric}": change for change in found}


def failures(after, **how):
    return [name for name, change in changes(after, **how).items() if change.is_failure]


MATERIALISING = dataclasses.replace(
    PLAN,
    rows=(
        dataclasses.replace(PLAN.rows[0], strategy="batched", materialised=True, bytes=2**30),
        *PLAN.rows[1:],
    ),
)


def slower(factor, *, grad=1.0, processes=8, spread=0.0, **fields):
    """Surgery that takes so many times as long, beside a grad that does, by processes that differ by a spread."""
    apart = [1 + spread * (p % 3 - 1) for p in range(processes)]
    method = make_samples(
        *([1.2 * factor * grad * by * t for t in times] for by, times in zip(apart, STEADY, strict=False))
    )
    times = {(64, "grad"): scaled(STEADY[:processes], grad), (64, "surgery"): method}
    return with_surgery(times=times, time_ratio=SURGERY.time_ratio * factor, **fields)
