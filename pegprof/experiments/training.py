"""Trains a task with an optimizer by name, and says how it went."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import pegprof
from pegprof.experiments.tasks import TASKS
from pegprof.optimizers import BY_NAME


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """After a step of training: its number, from one on, the parameters and the optimizer's state, and the loss that
    the step had before it."""

    number: int
    params: Any
    state: Any
    loss: float


def train(
    task_name: str,
    optimizer: str,
    *,
    rate: float,
    steps: int,
    batch: int,
    seed: int,
    options: Mapping[str, Any] | None = None,
    warmup: float = 0.0,
) -> Iterator[Step]:
    """Step by step.

    Args:
      task_name: of ``TASKS``.
      optimizer: ``adam``, or one of pegprof's.
      rate: the largest learning rate; it falls linearly to zero.
      steps: how many.
      batch: examples of each.
      seed: of the parameters and the data.
      options: of the optimizer.
      warmup: the share of the steps in which the rate rises from zero before that.
    """
    task = TASKS[task_name]()
    opt, step = _compiled(task_name, optimizer, tuple(sorted((options or {}).items())))
    params = task.init(jax.random.key(seed))
    state, rng = opt.init(params), np.random.default_rng(seed + 1)
    for i in range(steps):
        state.hyperparams["learning_rate"] = jnp.asarray(rate * shape_of_rate(i / steps, warmup), jnp.float32)
        params, state, value = step(params, state, task.draw(rng, batch, False))
        yield Step(number=i + 1, params=params, state=state, loss=float(value))


def shape_of_rate(progress: float, warmup: float) -> float:
    """The learning rate over its largest value: up in a line, and down in a line.

    >>> [shape_of_rate(progress, 0.5) for progress in (0, 0.25, 0.5, 0.75, 1)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    return progress / warmup if progress < warmup else (1 - progress) / (1 - warmup)


def held_out_loss(task_name: str, params: Any) -> float:
    return float(_evaluate(task_name)(params, TASKS[task_name]().held_out()))


@functools.cache
def _compiled(task_name: str, optimizer: str, options: tuple[tuple[str, Any], ...]) -> tuple[Any, Callable[..., Any]]:
    """One program for all learning rates."""
    task = TASKS[task_name]()
    make = BY_NAME[optimizer]
    static = [name for name in ("block",) if name in inspect.signature(make).parameters]
    opt = optax.inject_hyperparams(make, static_args=static)(learning_rate=0.0, **dict(options))
    return opt, pegprof.train_step(task.loss, opt, keep_batch_dim=task.keep_batch_dim)


@functools.cache
def _evaluate(task_name: str) -> Callable[..., Any]:
    return jax.jit(TASKS[task_name]().loss)


def share_negative(state: Any) -> float:
    """Of the entries of an Adam's second moment, how many are below zero."""
    (adam,) = (
        part
        for part in jax.tree.leaves(state, is_leaf=lambda part: isinstance(part, optax.ScaleByAdamState))
        if isinstance(part, optax.ScaleByAdamState)
    )
    entries = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(adam.nu)])
    return float(np.mean(entries < 0))
