"""Times as a busy machine makes them, and gates that look at them after each process.

A time is  base · (what drifts, the same for all methods of a round) · (the process) · (the run), where

- the drift is a slow random walk, with steps when other work begins or ends;
- a process is slower or faster than others by a spread of its own, for as long as it lives;
- a run is hit by heavy-tailed noise: now and then it takes half as long again.
"""

import numpy as np

from pegprof.compare.significance import FIRST_LOOK, change_of_ratio
from pegprof.result.samples import Sample

GRAD_S, METHOD_S = 0.05, 0.06


def simulate(rng, *, processes=8, rounds=6, slowdown=1.0, spread=0.03, noise=0.05, tails="t"):
    """The samples of ``grad`` and of a method in one run. ``tails`` are those of the spread: t, normal or two modes."""
    drift = np.cumsum(rng.normal(0, 0.02, (processes, rounds)).ravel()).reshape(processes, rounds)
    drift += 0.3 * (rng.random((processes, 1)) < 0.3)
    found = []
    for base_s in (GRAD_S, METHOD_S * slowdown):
        process = spread / np.sqrt(2) * draw(rng, tails, processes)[:, None]  # two of them make the ratio's
        run = noise * rng.standard_t(3, (processes, rounds)) / np.sqrt(3)
        run += 0.4 * (rng.random((processes, rounds)) < 0.05)
        times_s = base_s * np.exp(drift + process + run)
        found.append(
            tuple(
                Sample(process=p, round=r, time_s=float(times_s[p, r])) for p in range(processes) for r in range(rounds)
            )
        )
    return tuple(found)


def draw(rng, tails, count):
    """With a standard deviation of one."""
    if tails == "normal":
        return rng.normal(0, 1, count)
    if tails == "modes":
        return (2.0 * (rng.random(count) < 0.3) - 0.6) / (2 * np.sqrt(0.21))
    return rng.standard_t(3, count) / np.sqrt(3)


def first(times, processes):
    return tuple(tuple(sample for sample in samples if sample.process < processes) for samples in times)


def decide(before, after, *, planned=8, limit=0.10, together=False):
    """As a gate does: looks after each process until the interval is on one side of the limit."""
    for processes in range(FIRST_LOOK, planned + 1):
        found = change_of_ratio(
            first(before, processes) if together else before, first(after, processes), planned=planned
        )
        if (position := found.position(limit)) != "across":
            return position, processes
    return "across", planned


def rates(*, gates, seed=0, slowdown=1.0, baseline=8, planned=8, together=False, **how):
    """How often such gates fail and pass, and after how many processes they end."""
    rng = np.random.default_rng(seed)
    outcomes = [
        decide(
            simulate(rng, processes=planned if together else baseline, **how),
            simulate(rng, processes=planned, slowdown=slowdown, **how),
            planned=planned,
            together=together,
        )
        for _ in range(gates)
    ]
    positions = [position for position, _ in outcomes]
    return {
        "failed": positions.count("above") / gates,
        "passed": positions.count("below") / gates,
        "processes": float(np.mean([processes for _, processes in outcomes])),
    }
