"""µ² and σ² of the gradients, layer by layer, and how often the estimate of µ² is negative.

Both are means over the entries of a layer and over some batches, each batch's estimate without bias. Adam's
preconditioner has the expectation µ² + σ²/B: ``dominance`` is the ratio of the first to the second.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import pegprof
from pegprof.experiments.base import Rows
from pegprof.experiments.tasks import TASKS

_STATS = ("mean_squared", "variance")


def measure_moments(task_name: str, params: Any, *, batch: int, batches: int, seed: int) -> Rows:
    """A row for each layer, in the order of the parameters."""
    task, rng, stats_of = TASKS[task_name](), np.random.default_rng(seed), _compiled(task_name)
    draws = [_by_layer(stats_of(params, task.draw(rng, batch, False))) for _ in range(batches)]
    return [_summarize(layer, [draw[layer] for draw in draws], batch) for layer in draws[0]]


def _summarize(layer: str, draws: list[dict[str, np.ndarray]], batch: int) -> dict[str, Any]:
    squared_means, variances = (np.stack([draw[name] for draw in draws]) for name in _STATS)
    mean_squared, variance = float(squared_means.mean()), float(variances.mean())
    return {
        "layer": layer,
        "mean_squared": mean_squared,
        "variance": variance,
        "dominance": mean_squared / (variance / batch) if variance else None,
        "share_negative": float(np.mean(squared_means < 0)),
    }


@functools.cache
def _compiled(task_name: str) -> Callable[..., dict[str, Any]]:
    task = TASKS[task_name]()
    return jax.jit(pegprof.grad_stats(task.loss, _STATS, keep_batch_dim=task.keep_batch_dim))


def _by_layer(stats: dict[str, Any]) -> dict[str, dict[str, np.ndarray]]:
    """By the path of a parameter without its last name, such as kernel or bias: all entries in one vector."""
    found: dict[str, dict[str, list[np.ndarray]]] = {}
    for name, tree in stats.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            layer = "/".join(jax.tree_util.keystr((key,), simple=True) for key in path[:-1] or path)
            values = np.asarray(leaf, np.float64).ravel()
            found.setdefault(layer.removeprefix("params/"), {}).setdefault(name, []).append(values)
    return {layer: {name: np.concatenate(each) for name, each in of.items()} for layer, of in found.items()}
