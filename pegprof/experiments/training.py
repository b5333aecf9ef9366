"""Trains a task with an optimizer of ``pegprof.optimizers``, and says how it went."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import pegprof
from pegprof.experiments.tasks import TASKS
from pegprof.optimizers import OPTIMIZERS


def train(
    task_name: str, optimizer: str, *, rate: float, steps: int, batch: int, seed: int
) -> Iterator[tuple[int, Any, float]]:
    """After each step: its number, the parameters and the loss that the step had. The rate falls linearly to zero."""
    task = TASKS[task_name]()
    opt, step = _compiled(task_name, optimizer)
    params = task.init(jax.random.key(seed))
    state, rng = opt.init(params), np.random.default_rng(seed + 1)
    for i in range(steps):
        state.hyperparams["learning_rate"] = jnp.asarray(rate * (1 - i / steps), jnp.float32)
        params, state, value = step(params, state, task.draw(rng, batch, False))
        yield i + 1, params, float(value)


def held_out_loss(task_name: str, params: Any) -> float:
    return float(_evaluate(task_name)(params, TASKS[task_name]().held_out()))


@functools.cache
def _compiled(task_name: str, optimizer: str) -> tuple[Any, Callable[..., Any]]:
    """One program for all learning rates."""
    task = TASKS[task_name]()
    opt = optax.inject_hyperparams(OPTIMIZERS[optimizer])(learning_rate=0.0)
    return opt, pegprof.train_step(task.loss, opt, keep_batch_dim=task.keep_batch_dim)


@functools.cache
def _evaluate(task_name: str) -> Callable[..., Any]:
    return jax.jit(TASKS[task_name]().loss)
