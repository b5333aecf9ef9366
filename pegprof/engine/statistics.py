"""The table of statistics: what may be asked of the per-example gradients g_1..g_B.

A statistic is *finished* from *quantities* that a site can accumulate without keeping B gradients:

- a ``Moment``: the mean over the examples of phi(g_i), elementwise;
- ``CENTRED``: the mean of (g_i - mean)², accumulated as such, not as a difference of moments;
- ``SQUARE_NORM``: the sum of g_i² over one parameter, for each example.

All three merge over chunks of examples (``inject.py``), so microbatching changes no statistic.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pegprof.errors import PegprofError, first_line, nearest

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
SIGN = Moment(name="sign", phi=jnp.sign, factor=jnp.sign)
ABS = Moment(name="abs", phi=jnp.abs, factor=jnp.abs)
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
      scaled: the statistic of c · g from that of g and c, for optimizers behind a transformation that scales the mean;
        None if that is not known.
    """

    name: str
    formula: str
    needs: tuple[Quantity, ...]
    finish: Callable[[Mapping[str, jax.Array], int], jax.Array]
    oracle: Callable[[np.ndarray], np.ndarray]
    scope: Literal["entry", "parameter", "model"] = "entry"
    minimum_batch: int = 1
    scaled: Callable[[jax.Array, jax.Array], jax.Array] | None = None

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
            finish=lambda q, _: q[moment.name],
            oracle=lambda g: np.mean(np.asarray(phi(g)), axis=0),
        )


def _keeping_dtype(fn: Elementwise) -> Elementwise:
    """A function whose result has its argument's dtype: sums and means of truth values or of whole numbers go wrong."""

    def converted(x: Any) -> jax.Array:
        return jnp.asarray(fn(x), jnp.result_type(x))

    return converted


def _homogeneous(degree: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The statistic of c · g is c^degree times that of g."""

    def scaled(statistic: jax.Array, c: jax.Array) -> jax.Array:
        for _ in range(degree):  # a power of c alone may underflow
            statistic = c * statistic
        return statistic

    return scaled


def _absolutely_homogeneous(statistic: jax.Array, c: jax.Array) -> jax.Array:
    return jnp.abs(c) * statistic


def _of_moment(
    name: str,
    formula: str,
    moment: Moment,
    oracle: Callable[[np.ndarray], np.ndarray],
    scaled: Callable[[jax.Array, jax.Array], jax.Array],
) -> Statistic:
    return Statistic(
        name=name,
        formula=formula,
        needs=(moment,),
        finish=lambda q, _: q[moment.name],
        oracle=lambda g: np.mean(oracle(g), axis=0),
        scaled=scaled,
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
        Statistic(
            name="norm",
            formula="‖g‖ over all parameters, for each example",
            needs=(SQUARE_NORM,),
            finish=_norm,
            oracle=_norm_oracle,
            scope="model",
            scaled=_absolutely_homogeneous,
        ),
        Statistic(
            name="norm_by_param",
            formula="‖g‖ over one parameter, for each example",
            needs=(SQUARE_NORM,),
            finish=_norm,
            oracle=_norm_oracle,
            scope="parameter",
            scaled=_absolutely_homogeneous,
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
            for quantity in stat.needs:
                check_moment(quantity)
        return stat
    if stat not in STATISTICS:
        raise PegprofError(f"unknown statistic {stat!r}", hint=nearest(stat, STATISTICS))
    return STATISTICS[stat]


def quantities_of(stats: Sequence[Statistic]) -> dict[Quantity, Quantity]:
    """The quantities that some statistics need: each once, and as it is accumulated, under a name that no other has.

    The names of pegprof's own are theirs. The mean comes along wherever the centred quantity does: chunks of that merge
    by way of their means.
    """
    needed = dict.fromkeys(q for stat in stats for q in stat.needs)
    if CENTRED in needed:
        needed[MEAN] = None
    owner: dict[str, Quantity] = {q.name: q for q in (MEAN, SQUARE, CENTRED, SQUARE_NORM)}
    named: dict[Quantity, Quantity] = {}
    for quantity in needed:
        names = itertools.chain([quantity.name], (f"{quantity.name} ({i})" for i in itertools.count(2)))
        name = next(name for name in names if owner.get(name, quantity) == quantity)
        owner[name] = quantity
        named[quantity] = dataclasses.replace(quantity, name=name)
    return named


def finish(stat: Statistic, values: Mapping[str, Any], named: Mapping[Quantity, Quantity], B: int) -> Any:
    """A statistic from the values of its quantities, which go by the names that ``quantities_of`` gave them."""
    return stat.finish({q.name: values[named[q].name] for q in stat.needs}, B)


# ---- functions of users ---------------------------------------------------------------------------------------------

_NUMBERS = (0.7137, -1.3291, 0.0, 2.1173, -0.4519, 1.0461)
"""Of both signs, zero among them, in no order: what a function must map one by one."""


@functools.lru_cache
def check_moment(moment: Quantity) -> None:
    """Refuse a moment whose ``phi`` is not elementwise, or whose ``factor`` is not a factor of it."""
    if not isinstance(moment, Moment):
        return
    try:
        _check_elementwise(moment)
        _check_factor(moment)
    except _TRACED:  # it depends on what is being traced, and cannot be tried here
        return


_TRACED = (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError)


def _check_elementwise(moment: Moment) -> None:
    together = _tried(moment, moment.phi, np.asarray(_NUMBERS))
    alone = [_tried(moment, moment.phi, np.asarray([x])) for x in _NUMBERS]
    in_rows = _tried(moment, moment.phi, np.asarray(_NUMBERS).reshape(2, 3))
    for x, here, row, own in zip(_NUMBERS, together, in_rows.ravel(), np.ravel(alone), strict=True):
        for found in (here, row):
            if not _agree(found, own):
                raise PegprofError(
                    f"the function of the statistic {moment.name!r} is not elementwise: it gives {own:.6g} for "
                    f"{x} alone, and {found:.6g} beside other numbers",
                    where=moment.name,
                    hint="it must map each entry of a gradient by itself; for norms, ask for norm or norm_by_param",
                )


def _check_factor(moment: Moment) -> None:
    if moment.factor is None:
        return
    products = _tried(moment, moment.phi, np.multiply.outer(_NUMBERS, _NUMBERS))
    factors = _tried(moment, moment.factor, np.asarray(_NUMBERS))
    for (i, x), (j, y) in itertools.product(enumerate(_NUMBERS), repeat=2):
        if not _agree(products[i, j], factors[i] * factors[j]):
            raise PegprofError(
                f"the factor of the statistic {moment.name!r} is none: phi({x} · {y}) is {products[i, j]:.6g}, "
                f"factor({x}) · factor({y}) is {factors[i] * factors[j]:.6g}",
                where=moment.name,
                hint="leave factor out: it makes rank-one gradients cheaper, and changes no value",
            )


def _tried(moment: Moment, fn: Elementwise, x: np.ndarray) -> np.ndarray:
    """What a function gives for numbers, now, whatever is being traced."""
    try:
        with jax.ensure_compile_time_eval(), jax.debug_nans(False), np.errstate(all="ignore"):
            y = np.asarray(fn(jnp.asarray(x, jnp.result_type(float))))
    except _TRACED:
        raise
    except Exception as error:  # whatever a user's function says
        what = f"a function of the statistic {moment.name!r} fails for an array of shape {x.shape}: {first_line(error)}"
        raise PegprofError(what, where=moment.name, hint="it must map arrays of any shape, entry by entry") from error
    if y.shape != x.shape:
        raise PegprofError(
            f"a function of the statistic {moment.name!r} gives shape {y.shape} for an array of shape {x.shape}",
            where=moment.name,
            hint="it must map each entry of a gradient to one number",
        )
    return y


def _agree(a: Any, b: Any) -> bool:
    with np.errstate(all="ignore"):
        return bool(np.isclose(a, b, rtol=1e-4, atol=1e-30, equal_nan=True))
