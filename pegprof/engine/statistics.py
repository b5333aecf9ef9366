"""The table of statistics: what may be asked of the per-example gradients g_1..g_B.

A statistic is *finished* from the summaries of *accumulators* (``accumulators.py``), which a site can fill without
keeping B gradients. To add one, add an entry to ``STATISTICS``, or pass a ``Statistic`` to ``grad_stats``.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pegprof.engine.accumulators import ABS, CENTRED, MEAN, SIGN, SQUARE, SQUARE_NORM, Accumulator, Moment, Summary
from pegprof.engine.checks.functions import check_accumulator, check_moment
from pegprof.errors import PegprofError, nearest

Summaries = Mapping[Accumulator, Summary]
Elementwise = Callable[[Any], Any]
Scaled = Callable[[jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Statistic:
    """One entry of the table.

    Args:
      name: the key under which ``grad_stats`` returns it.
      formula: how a person would write it.
      needs: the accumulators that it is finished from.
      finish: from the summary of each of these, and B, to the statistic of one parameter. For the scope ``"model"``
        the summaries are already added up over all parameters.
      oracle: the same from the stacked gradients, examples first, in NumPy: the slow truth.
      scope: ``"entry"`` is shaped like the parameter, ``"parameter"`` is [B] for each, ``"model"`` is one [B].
      minimum_batch: the smallest batch for which it is defined.
      scaled: the statistic of c · g from that of g and c, for optimizers behind a transformation that scales the mean;
        None if that is not known.
    """

    name: str
    formula: str
    needs: tuple[Accumulator, ...]
    finish: Callable[[Summaries, Any], jax.Array]
    oracle: Callable[[np.ndarray], np.ndarray]
    scope: Literal["entry", "parameter", "model"] = "entry"
    minimum_batch: int = 1
    scaled: Scaled | None = None

    @classmethod
    def elementwise(
        cls, phi: Elementwise, *, name: str | None = None, factor: Elementwise | None = None
    ) -> "Statistic":
        """The mean over the examples of any elementwise function of the gradient.

        Both functions are tried on a few numbers, and refused if they are not what they should be: a function that
        looks at several entries, such as g / ‖g‖, would give answers that depend on how the gradient is cut up.

        Args:
          phi: a function of an array, applied entry by entry. It may give truth values, which count as 0 and 1.
          name: its key in the result; the function's own name by default.
          factor: where phi(x·y) = factor(x)·factor(y), that function; it makes rank-one gradients cheap.

        >>> cube = Statistic.elementwise(lambda g: g**3, name="third_moment", factor=lambda x: x**3)
        >>> cube.formula
        'mean of third_moment(g)'
        """
        name = name or str(getattr(phi, "__name__", "phi"))
        moment = Moment(name=name, phi=_keeping_dtype(phi), factor=factor and _keeping_dtype(factor))
        check_moment(moment)
        return cls(
            name=name,
            formula=f"mean of {name}(g)",
            needs=(moment,),
            finish=lambda q, _: q[moment],
            oracle=lambda g: np.mean(np.asarray(phi(g)), axis=0),
        )


def _keeping_dtype(fn: Elementwise) -> Elementwise:
    """A function whose result has its argument's dtype: sums and means of truth values or of whole numbers go wrong."""
    return lambda x: jnp.asarray(fn(x), jnp.result_type(x))


def _homogeneous(degree: int) -> Scaled:
    """The statistic of c · g is c^degree times that of g."""

    def scaled(statistic: jax.Array, c: jax.Array) -> jax.Array:
        for _ in range(degree):  # a power of c alone may underflow
            statistic = c * statistic
        return statistic

    return scaled


def _absolutely_homogeneous(statistic: jax.Array, c: jax.Array) -> jax.Array:
    return jnp.abs(c) * statistic


def _of_moment(name: str, formula: str, moment: Moment, oracle: Elementwise, scaled: Scaled) -> Statistic:
    return Statistic(
        name=name,
        formula=formula,
        needs=(moment,),
        finish=lambda q, _: q[moment],
        oracle=lambda g: np.mean(oracle(g), axis=0),
        scaled=scaled,
    )


def _variance(q: Summaries, B: Any) -> jax.Array:
    return q[CENTRED].square * (B / (B - 1))


def _mean_squared(q: Summaries, B: Any) -> jax.Array:
    return jnp.square(q[MEAN]) - _variance(q, B) / B


def _snr(q: Summaries, B: Any) -> jax.Array:
    return jnp.square(q[MEAN]) / _variance(q, B)


def _snr_oracle(g: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):  # an entry with no variance has no finite SNR
        return np.mean(g, axis=0) ** 2 / np.var(g, axis=0, ddof=1)


_NORM = Statistic(
    name="norm",
    formula="‖g‖ over all parameters, for each example",
    needs=(SQUARE_NORM,),
    finish=lambda q, _: jnp.sqrt(q[SQUARE_NORM]),
    oracle=lambda g: np.sqrt(np.sum(np.square(g), axis=tuple(range(1, g.ndim)))),
    scope="model",
    scaled=_absolutely_homogeneous,
)

STATISTICS: dict[str, Statistic] = {
    statistic.name: statistic
    for statistic in (
        _of_moment("mean", "mean of g", MEAN, lambda g: g, _homogeneous(1)),
        _of_moment("second_moment", "mean of g²", SQUARE, np.square, _homogeneous(2)),
        _of_moment("sign_mean", "mean of sign(g)", SIGN, np.sign, lambda s, c: jnp.sign(c) * s),
        _of_moment("abs_mean", "mean of |g|", ABS, np.abs, _absolutely_homogeneous),
        _of_moment(
            "fourth_moment",
            "mean of g⁴",
            Moment(name="fourth", phi=lambda g: jnp.square(jnp.square(g)), factor=lambda x: jnp.square(jnp.square(x))),
            lambda g: g**4,
            _homogeneous(4),
        ),
        Statistic(
            name="variance",
            formula="sum of (g - mean)² / (B - 1)",
            needs=(CENTRED,),
            finish=_variance,
            oracle=lambda g: np.var(g, axis=0, ddof=1),
            minimum_batch=2,
            scaled=_homogeneous(2),
        ),
        Statistic(
            name="mean_squared",
            formula="mean² - variance / B, the unbiased estimate of µ²",
            needs=(MEAN, CENTRED),
            finish=_mean_squared,
            oracle=lambda g: np.mean(g, axis=0) ** 2 - np.var(g, axis=0, ddof=1) / len(g),
            minimum_batch=2,
            scaled=_homogeneous(2),
        ),
        Statistic(
            name="snr",
            formula="mean² / variance",
            needs=(MEAN, CENTRED),
            finish=_snr,
            oracle=_snr_oracle,
            minimum_batch=2,
            scaled=lambda s, c: jnp.where(c == 0, jnp.nan, s),
        ),
        _NORM,
        dataclasses.replace(
            _NORM, name="norm_by_param", formula="‖g‖ over one parameter, for each example", scope="parameter"
        ),
    )
}


def resolve(stats: Sequence[str | Statistic] | str | Statistic) -> tuple[Statistic, ...]:
    """Names and statistics, as a user gives them, to entries of the table."""
    if isinstance(stats, (str, Statistic)):
        stats = (stats,)
    resolved = tuple(_resolve_one(stat) for stat in stats)
    names = [stat.name for stat in resolved]
    if not resolved:
        raise PegprofError("no statistic was asked for", hint=f"known: {', '.join(STATISTICS)}")
    if len(set(names)) != len(names):
        raise PegprofError(
            f"the statistics {', '.join(names)} are not all different", hint="give each a name of its own"
        )
    return resolved


def _resolve_one(stat: str | Statistic) -> Statistic:
    if isinstance(stat, Statistic):
        if stat != STATISTICS.get(stat.name, stat):
            raise PegprofError(
                f"{stat.name!r} is a statistic of pegprof's own: {STATISTICS[stat.name].formula}",
                where=stat.name,
                hint="give yours another name",
            )
        if stat.name not in STATISTICS:
            for accumulator in stat.needs:
                check_accumulator(accumulator, statistic=stat.name, of_model=stat.scope == "model")
        return stat
    if stat not in STATISTICS:
        raise PegprofError(f"unknown statistic {stat!r}", hint=nearest(stat, STATISTICS))
    return STATISTICS[stat]


def accumulators_of(stats: Sequence[Statistic]) -> tuple[Accumulator, ...]:
    """The accumulators that some statistics need, each once. One that another contains is not kept beside it."""
    needed = dict.fromkeys(a for stat in stats for a in stat.needs)
    contained = {a for other in needed for a in other.contains}
    return tuple(a for a in needed if a not in contained)


def finish(
    stat: Statistic, accumulators: Sequence[Accumulator], leaves: Sequence[Sequence[Summary]], B: Any
) -> list[Any]:
    """A statistic of each parameter, from its summaries; of the whole model, as a list of one."""
    by_leaf = [_with_contained(accumulators, summaries) for summaries in leaves]
    if stat.scope != "model":
        return [stat.finish(summaries, B) for summaries in by_leaf]
    if not by_leaf:
        return [stat.finish(dict.fromkeys(stat.needs, jnp.zeros(B)), B)]
    return [stat.finish({a: sum(summaries[a] for summaries in by_leaf) for a in stat.needs}, B)]


def _with_contained(accumulators: Sequence[Accumulator], summaries: Sequence[Summary]) -> Summaries:
    found = dict(zip(accumulators, summaries, strict=True))
    return {other: read(x) for a, x in found.items() for other, read in a.contains.items()} | found
