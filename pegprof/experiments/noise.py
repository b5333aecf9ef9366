"""How noisy the gradients are: signal-to-noise ratios before and after a sign, and the kurtosis.

The SNR of a random number is µ²/σ². The sign of a Gaussian with SNR x has a squared mean of e(x) = erf²(√(x/2)) and a
second moment of 1, and so the SNR

    f(x) = e(x) / (1 - e(x)),      2x/π for small x,      more than x above x ≈ 1.41.

The average of n independent copies has n times the SNR. So the mean of B signs has B f(x), the sign of a mean of B has
f(B x): the same where B x is small, and the second ever larger beyond. µ² is estimated without bias. An SNR is that of
all entries together, Σµ² / Σσ², each entry scaled to a mean square of one, which signs have anyway: the mean of the
entries' own SNRs would be that of the few with the least noise.

An SNR takes any mean for signal. Where gradients are skewed, the mean of signs may be far from zero and yet point away
from the mean gradient: ``signs_agree`` is the share of the mean gradient, by magnitude, in entries where it does not.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pegprof
from pegprof.experiments.tasks import TASKS


def _is_nonzero(g: Any) -> Any:
    return jnp.abs(jnp.sign(g))


DENSE = 0.9  # an entry counts if this share of the examples has a gradient there: rows of rare bytes have none


def _stats() -> tuple[str | pegprof.Statistic, ...]:
    """What is measured. Made on demand: pegprof tries a function of one's own on a few numbers, which starts JAX."""
    return (
        "mean",
        "second_moment",
        "fourth_moment",
        "sign_mean",
        pegprof.Statistic.elementwise(lambda g: g**3, name="third_moment", factor=lambda x: x**3),
        pegprof.Statistic.elementwise(_is_nonzero, name="nonzero", factor=_is_nonzero),
    )


def predict_sign_snr(x: np.ndarray, *, averaged: int = 1) -> float:
    """The SNR of an average of signs of Gaussians of these SNRs; an estimate below zero has the tangent of e there.

    >>> round(predict_sign_snr(np.array([0.01])), 4), round(predict_sign_snr(np.array([4.0])), 1)
    (0.0064, 10.2)
    >>> round(predict_sign_snr(np.array([0.01]), averaged=10), 3)
    0.064
    """
    e = np.square(np.vectorize(math.erf)(np.sqrt(np.maximum(x, 0) / 2)))
    e = np.where(x > 0, e, 2 * x / np.pi)
    return _together(e, (1 - e) / averaged)


def measure_noise(task_name: str, params: Any, *, batch: int, batches: int, seed: int) -> dict[str, float]:
    """Of some batches at fixed parameters: means over the entries, medians of the kurtosis."""
    task, rng, stats_of = TASKS[task_name](), np.random.default_rng(seed), _compiled(task_name)
    draws = [_flat(stats_of(params, task.draw(rng, batch, False))) for _ in range(batches)]
    moment = {name: np.mean([draw[name] for draw in draws], axis=0) for name in draws[0]}
    dense = (moment["nonzero"] >= DENSE) & (moment["second_moment"] > moment["mean"] ** 2)
    moment = {name: values[dense] for name, values in moment.items()}
    means = np.stack([draw["mean"][dense] for draw in draws])
    signs = np.stack([draw["sign_mean"][dense] for draw in draws])

    n = batch * batches
    signal, noise = _signal_and_noise(moment["mean"], moment["second_moment"], n)
    before, same = signal / noise, np.sign(moment["mean"]) == np.sign(moment["sign_mean"])
    kurtosis = np.quantile(_kurtosis(moment), [0.25, 0.5, 0.75])
    return {
        "share_dense": float(np.mean(dense)),
        "signs_agree": float(np.sum(np.abs(moment["mean"])[same]) / np.sum(np.abs(moment["mean"]))),
        "snr": _together(signal, noise),
        "snr_after_sign": _together(*_signal_and_noise(moment["sign_mean"], moment["nonzero"], n)),
        "snr_after_sign_predicted": predict_sign_snr(before),
        "snr_mean": _together(signal, noise / batch),
        "snr_mean_of_signs": _together_of_draws(signs),
        "snr_mean_of_signs_predicted": predict_sign_snr(before, averaged=batch),
        "snr_sign_of_mean": _together_of_draws(np.sign(means)),
        "snr_sign_of_mean_predicted": predict_sign_snr(batch * before),
        "kurtosis_25": float(kurtosis[0]),
        "kurtosis_50": float(kurtosis[1]),
        "kurtosis_75": float(kurtosis[2]),
    }


@functools.cache
def _compiled(task_name: str) -> Callable[..., dict[str, Any]]:
    task = TASKS[task_name]()
    return jax.jit(pegprof.grad_stats(task.loss, _stats(), keep_batch_dim=task.keep_batch_dim))


def _flat(stats: dict[str, Any]) -> dict[str, np.ndarray]:
    """Each statistic as one vector in double precision."""
    return {
        name: np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])
        for name, tree in stats.items()
    }


def _signal_and_noise(mean: np.ndarray, second_moment: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """µ² and σ² from the moments of n draws, both without bias."""
    variance = (second_moment - mean**2) * n / (n - 1)
    return mean**2 - variance / n, variance


def _together(signal: np.ndarray, noise: np.ndarray) -> float:
    """The SNR of all entries, each scaled to a mean square of one."""
    power = signal + noise
    return float(np.sum(signal / power) / np.sum(noise / power))


def _together_of_draws(draws: np.ndarray) -> float:
    return _together(*_signal_and_noise(draws.mean(axis=0), np.square(draws).mean(axis=0), len(draws)))


def _kurtosis(m: dict[str, np.ndarray]) -> np.ndarray:
    """The fourth central moment over the squared variance; 3 for a Gaussian."""
    mean, variance = m["mean"], m["second_moment"] - m["mean"] ** 2
    fourth = m["fourth_moment"] - 4 * mean * m["third_moment"] + 6 * mean**2 * m["second_moment"] - 3 * mean**4
    return fourth / variance**2
