"""Optimizers that take statistics of per-example gradients, as optax transformations.

    needed_statistics(opt, params) ──> grad_stats(loss, those)(params, batch) ──> update(opt, stats, state, params)

The updates that go in are the mean gradient, as everywhere in optax; what ``grad_stats`` returns comes along as the
keyword argument ``stats``. So ``optax.chain``, ``masked``, ``partition``, ``inject_hyperparams``, ``apply_if_finite``
and schedules work as they do with optax's own, and ``train_step`` takes any optimizer of either kind.

``train_step`` and ``update`` scale the statistics by what stands before an optimizer in a chain, if that multiplies the
mean gradient by a number. They refuse anything else there. A direct call of ``opt.update(..., stats=stats)`` cannot see
what stands before: it uses the statistics as they are.
"""

from collections.abc import Callable, Mapping
from typing import Any

import optax

from pegprof.optimizers.adam import adam_mix, micro_adam, micro_adam_msq, micro_adam_var
from pegprof.optimizers.moments import look_up
from pegprof.optimizers.needs import needed_statistics, update
from pegprof.optimizers.signs import micro_sign_sgd, sign_ema, sign_sgd
from pegprof.optimizers.step import train_step

__all__ = [
    "BY_NAME",
    "OPTIMIZERS",
    "adam_mix",
    "look_up",
    "micro_adam",
    "micro_adam_msq",
    "micro_adam_var",
    "micro_sign_sgd",
    "needed_statistics",
    "sign_ema",
    "sign_sgd",
    "train_step",
    "update",
]

# Each is made from a learning rate alone; everything else has a default.
OPTIMIZERS: Mapping[str, Callable[..., Any]] = {
    make.__name__: make
    for make in (micro_adam, micro_adam_var, micro_adam_msq, adam_mix, micro_sign_sgd, sign_sgd, sign_ema)
}

# What a command can name: ours, and the one that all of them are measured against.
BY_NAME: Mapping[str, Callable[..., Any]] = {"adam": optax.adam, **OPTIMIZERS}
