"""The table of statistics: what may be asked of the per-example gradients g_1..g_B.

A statistic is *finished* from *quantities* that a site can accumulate without keeping B gradients:

- a ``Moment``: the mean over the examples of phi(g_i), elementwise;
- ``CENTRED``: the mean of (g_i - mean)², accumulated as such, not as a difference of moments;
- ``SQUARE_NORM``: the sum of g_i² over one parameter, for each example.

All three merge over chunks of examples (``inject.py``), so microbatching changes no statistic.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pegprof.errors import PegprofError, nearest

Elementwise = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moment:
    """The mean over the examples of ``phi(g)``.

    ``factor`` is set where phi(x·y) = factor(x)·factor(y): then the mean over the examples of phi of a rank-one
    gradient is one contraction of transformed factors.
    """

    name: str
    phi: Elementwise
    factor: Elementwise | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Centred:
    """The mean over the examples of (g - mean)²."""

    name: str = "centred"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SquareNorm:
    """The sum of g² over one parameter, one number for each example."""

    name: str = "square_norm"


Quantity = Moment | Centred | SquareNorm

MEAN = Moment(name="mean", phi=lambda g: g, factor=lambda x: x)
SQUARE = Moment(name="square", phi=jnp.square, factor=jnp.square)
CENTRED = Centred()
SQUARE_NORM = SquareNorm()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Statistic:
    """One entry of the table.

    Args:
      name: the key under which ``grad_stats`` returns it.
      formula: how a person would write it.
      needs: the quantities that it is finished from.
      finish: from a mapping of quantity name to value, and B, to the statistic of one parameter. For the scope
        ``"model"`` the value of ``square_norm`` is already added up over all parameters.
      oracle: the same from the stacked gradients, examples first, in NumPy: the slow truth.
      scope: ``"entry"`` is shaped like the parameter, ``"parameter"`` is [B] for each, ``"model"`` is one [B].
      minimum_batch: the smallest batch for which it is defined.
    """

    name: str
    formula: str
    needs: tuple[Quantity, ...]
    finish: Callable[[Mapping[str, jax.Array], int], jax.Array]
    oracle: Callable[[np.ndarray], np.ndarray]
    scope: Literal["entry", "parameter", "model"] = "entry"
    minimum_batch: int = 1

    @classmethod
    def elementwise(
        cls, phi: Elementwise, *, name: str | None = None, factor: Elementwise | None = None
    ) -> "Statistic":
        """The mean over the examples of any elementwise function of the gradient.

        Args:
          phi: a function of an array, applied entry by entry. It may give truth values, which count as 0 and 1.
          name: its key in the result; the function's own name by default.
          factor: where phi(x·y) = factor(x)·factor(y), that function; it makes rank-one gradients cheap.

        >>> cube = Statistic.elementwise(lambda g: g**3, name="third_moment", factor=lambda x: x**3)
        >>> cube.formula
        'mean of third_moment(g)'
        """
        name = name or str(getattr(phi, "__name__", "phi"))
        moment = Moment(name=f"user:{name}", phi=_keeping_dtype(phi), factor=factor and _keeping_dtype(factor))
        return cls(
            name=name,
            formula=f"mean of {name}(g)",
            needs=(moment,),
            finish=lambda q, _: q[moment.name],
            oracle=lambda g: np.mean(np.asarray(phi(g)), axis=0),
        )


def _keeping_dtype(fn: Elementwise) -> Elementwise:
    """A function whose result has its argument's dtype: sums and means of truth values or of whole numbers go wrong."""

    def converted(x: Any) -> jax.Array:
        return jnp.asarray(fn(x), jnp.result_type(x))

    return converted


def _of_moment(name: str, formula: str, moment: Moment, oracle: Callable[[np.ndarray], np.ndarray]) -> Statistic:
    return Statistic(
        name=name,
        formula=formula,
        needs=(moment,),
        finish=lambda q, _: q[moment.name],
        oracle=lambda g: np.mean(oracle(g), axis=0),
    )


def _variance(q: Mapping[str, jax.Array], B: int) -> jax.Array:
    return q["centred"] * (B / (B - 1))


def _mean_squared(q: Mapping[str, jax.Array], B: int) -> jax.Array:
    return jnp.square(q["mean"]) - _variance(q, B) / B


def _snr(q: Mapping[str, jax.Array], B: int) -> jax.Array:
    return jnp.square(q["mean"]) / _variance(q, B)


def _norm_oracle(g_BxP: np.ndarray) -> np.ndarray:
    return np.sqrt(np.sum(np.square(g_BxP), axis=tuple(range(1, g_BxP.ndim))))


def _snr_oracle(g: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):  # an entry with no variance has no finite SNR
        return np.mean(g, axis=0) ** 2 / np.var(g, axis=0, ddof=1)


def _norm(q: Mapping[str, jax.Array], _: int) -> jax.Array:
    return jnp.sqrt(q["square_norm"])


STATISTICS: dict[str, Statistic] = {
    statistic.name: statistic
    for statistic in (
        _of_moment("mean", "mean of g", MEAN, lambda g: g),
        _of_moment("second_moment", "mean of g²", SQUARE, np.square),
        _of_moment("sign_mean", "mean of sign(g)", Moment(name="sign", phi=jnp.sign, factor=jnp.sign), np.sign),
        _of_moment("abs_mean", "mean of |g|", Moment(name="abs", phi=jnp.abs, factor=jnp.abs), np.abs),
        _of_moment(
            "fourth_moment",
            "mean of g⁴",
            Moment(name="fourth", phi=lambda g: jnp.square(jnp.square(g)), factor=lambda x: jnp.square(jnp.square(x))),
            lambda g: g**4,
        ),
        Statistic(
            name="variance",
            formula="sum of (g - mean)² / (B - 1)",
            needs=(CENTRED,),
            finish=_variance,
            oracle=lambda g: np.var(g, axis=0, ddof=1),
            minimum_batch=2,
        ),
        Statistic(
            name="mean_squared",
            formula="mean² - variance / B, the unbiased estimate of µ²",
            needs=(MEAN, CENTRED),
            finish=_mean_squared,
            oracle=lambda g: np.mean(g, axis=0) ** 2 - np.var(g, axis=0, ddof=1) / len(g),
            minimum_batch=2,
        ),
        Statistic(
            name="snr",
            formula="mean² / variance",
            needs=(MEAN, CENTRED),
            finish=_snr,
            oracle=_snr_oracle,
            minimum_batch=2,
        ),
        Statistic(
            name="norm",
            formula="‖g‖ over all parameters, for each example",
            needs=(SQUARE_NORM,),
            finish=_norm,
            oracle=_norm_oracle,
            scope="model",
        ),
        Statistic(
            name="norm_by_param",
            formula="‖g‖ over one parameter, for each example",
            needs=(SQUARE_NORM,),
            finish=_norm,
            oracle=_norm_oracle,
            scope="parameter",
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
        return stat
    if stat not in STATISTICS:
        raise PegprofError(f"unknown statistic {stat!r}", hint=nearest(stat, STATISTICS))
    return STATISTICS[stat]


def quantities_of(stats: Sequence[Statistic]) -> tuple[Quantity, ...]:
    """The quantities that some statistics need, each once; the mean comes along wherever the centred one does."""
    needed = {q.name: q for stat in stats for q in stat.needs}
    if CENTRED.name in needed:
        needed.setdefault(MEAN.name, MEAN)  # chunks of a centred moment merge by way of their means
    return tuple(needed.values())
