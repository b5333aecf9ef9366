"""The table of training steps: optimizers by name, what each takes of a batch, and the plain one that it is set beside.

The names are known without JAX, so that a wrong one is told at once; ``programs.py`` makes the optimizers themselves.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from pegprof.errors import PegprofError, nearest
from pegprof.result.settings import STATS, check_stats


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One entry of the table.

    Args:
      optimizer: ``adam`` of optax, or one of ``pegprof.optimizers``.
      stats: the statistics that it takes.
      plain: the optimizer that does the same with the mean gradient alone, which is what the method ``grad`` runs.
      averages: which statistic each moment of its state averages. After the first step, from a state of zeros, a moment
        is a multiple of that statistic, so that two methods can be compared by it. Moments of signs are left out: where
        a gradient is zero but for rounding, the rounding decides them.
    """

    optimizer: str
    stats: tuple[str, ...] = ("mean",)
    plain: str
    averages: Mapping[str, str] = dataclasses.field(default_factory=dict)


def _like_adam(optimizer: str, nu: str, *stats: str) -> Step:
    return Step(optimizer=optimizer, stats=("mean", *stats), plain="adam", averages={"mu": "mean", "nu": nu})


STEPS: Mapping[str, Step] = {
    step.optimizer: step
    for step in (
        _like_adam("adam", "square of the mean"),
        _like_adam("micro_adam", "second_moment", "second_moment"),
        _like_adam("micro_adam_var", "variance", "variance"),
        _like_adam("micro_adam_msq", "mean_squared", "mean_squared"),
        _like_adam("adam_mix", "mixture", "variance", "mean_squared"),
        Step(optimizer="micro_sign_sgd", stats=("sign_mean",), plain="sign_sgd"),
        Step(optimizer="sign_sgd", plain="sign_sgd"),
        Step(optimizer="sign_ema", plain="sign_ema", averages={"mu": "mean"}),
    )
}


def find_step(name: str) -> Step:
    """The entry of a name, as a user gives it."""
    if name not in STEPS:
        raise PegprofError(f"there is no step {name!r}", hint=nearest(name, STEPS))
    return STEPS[name]


def choose_stats(asked: Sequence[str] | None, step: str | None, *, where: str = "") -> tuple[str, ...]:
    """The statistics to compute: those asked for, or the usual ones; with a step those that it takes.

    ``where`` is the place that a user knows a wrong name by.

    >>> choose_stats(None, "micro_adam_var")
    ('mean', 'variance')
    """
    if step is None:
        return STATS if asked is None else check_stats(asked, where=where)
    needed = find_step(step).stats
    if asked is not None and set(asked) != set(needed):
        what = f"a step of {step} takes {', '.join(needed)}, and {', '.join(asked)} was asked for"
        raise PegprofError(what, hint="leave the statistics out")
    return needed
