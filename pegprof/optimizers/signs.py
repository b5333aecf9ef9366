"""Sign descent, with the sign in each of the three places that it can have.

A gradient is averaged over the examples of a batch and then over the steps; a sign can stand before both, between them,
or after both:

    micro_sign_sgd  θ ← θ - η EMA(mean of sign(g), b1)
    sign_sgd        θ ← θ - η EMA(sign(ḡ), b1)
    sign_ema        θ ← θ - η sign(EMA(ḡ, b1))

The paper finds the last best: a sign lowers the signal-to-noise ratio where that is low, and each average raises it.
EMA is corrected for its start at zero, so that the first step is as large as the rest; our sources leave that open, and
for ``sign_ema`` it changes nothing. b1 = 0 is without momentum, and then ``sign_sgd`` and ``sign_ema`` are the same.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from pegprof.optimizers.moments import Number, Tree, cast_like, debias, finish, look_up, move, widen, zeros_like


class SignState(NamedTuple):
    """The steps so far, and the moving average."""

    count: Any  # an int32
    mu: Any


def micro_sign_sgd(
    learning_rate: Number, b1: Number = 0.9, *, weight_decay: Number | None = None, mask: Any = None
) -> Any:
    """The sign of each example's gradient: θ ← θ - η EMA(mean of sign(g), b1).

    Args:
      learning_rate: η, a number or a schedule.
      b1: the decay of the moving average.
      weight_decay: decoupled: θ ← θ - η (... + weight_decay · θ). None is none, and needs no params.
      mask: which parameters decay, as for ``optax.add_decayed_weights``.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` whose update needs ``stats`` with ``sign_mean``, and of the mean
      gradient only the shape.

    >>> import jax.numpy as jnp
    >>> opt, w = micro_sign_sgd(0.1), jnp.zeros(2)
    >>> stats = {"mean": jnp.array([1.0, -3.0]), "sign_mean": jnp.array([0.5, -1.0])}
    >>> updates, state = opt.update(stats["mean"], opt.init(w), w, stats=stats)
    >>> updates.round(3)
    Array([-0.05,  0.1 ], dtype=float32)
    """

    def signs(updates: Tree, stats: Mapping[str, Any] | None) -> Tree:
        return look_up(stats, "sign_mean", updates, optimizer="micro_sign_sgd")

    return finish(_scale_by_average(signs, b1), learning_rate, weight_decay, mask)


def sign_sgd(learning_rate: Number, b1: Number = 0.9, *, weight_decay: Number | None = None, mask: Any = None) -> Any:
    """The sign of the mean gradient: θ ← θ - η EMA(sign(ḡ), b1). The arguments are those of ``micro_sign_sgd``."""
    scale_by = _scale_by_average(lambda updates, stats: jax.tree.map(jnp.sign, updates), b1)
    return finish(scale_by, learning_rate, weight_decay, mask)


def sign_ema(learning_rate: Number, b1: Number = 0.9, *, weight_decay: Number | None = None, mask: Any = None) -> Any:
    """The sign of the averaged gradient: θ ← θ - η sign(EMA(ḡ, b1)). The arguments are those of ``micro_sign_sgd``."""
    scale_by = _scale_by_average(lambda updates, stats: updates, b1, after=jnp.sign)
    return finish(scale_by, learning_rate, weight_decay, mask)


def _scale_by_average(
    before: Callable[[Tree, Mapping[str, Any] | None], Tree],
    b1: Number,
    after: Callable[[jax.Array], jax.Array] = lambda m: m,
) -> Any:
    """after(EMA(before(updates, stats)))."""

    def init(params: Tree) -> SignState:
        return SignState(count=jnp.zeros([], jnp.int32), mu=zeros_like(params))

    def update(
        updates: Tree,
        state: SignState,
        params: Tree = None,
        *,
        stats: Mapping[str, Any] | None = None,
        **extra_args: Any,
    ) -> tuple[Tree, SignState]:
        mu = move(state.mu, widen(before(updates, stats)), b1)
        count = optax.safe_increment(state.count)
        new = jax.tree.map(after, debias(mu, b1, count))
        return cast_like(new, updates), SignState(count=count, mu=cast_like(mu, state.mu))

    return optax.GradientTransformationExtraArgs(init, update)
