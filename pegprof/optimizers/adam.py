"""Adam, with another second moment.

With ḡ the mean gradient, EMA an exponential moving average over the steps, corrected for its start at zero, and θ the
parameters, all of them are

    m = EMA(ḡ, b1),   v = EMA(q, b2),   θ ← θ - η m / (√(ReLU(v) + eps_root) + eps)

and differ in q alone. Adam has q = ḡ², whose expectation is µ² + σ²/B for gradients of mean µ and variance σ² among the
examples. The others have it from statistics of the batch, in which B has no part:

    micro_adam      second_moment, the mean of g²    µ² + σ²
    micro_adam_var  variance                         σ²
    micro_adam_msq  mean_squared                     µ²
    adam_mix        a · mean_squared + b · variance  a µ² + b σ²

These are exact, batch by batch: a = b = 1 is MicroAdam, and a = 1, b = 1/B is Adam.

``clip`` stands for the paper's cure for MicroAdam's spikes, gradient clipping at 10⁻². Every example's gradient is
scaled by min(1, clip / ‖ḡ‖), so ḡ by that and q by its square, before both moments; for a = 1, b = 1/B this is
``optax.clip_by_global_norm`` before Adam. Our sources leave open whether q is to be scaled. Under ``train_step`` and
``pegprof.optimizers.update``, ``optax.clip_by_global_norm(clip)`` before the optimizer in a chain does the same.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from pegprof.errors import PegprofError
from pegprof.optimizers.moments import (
    Number,
    Tree,
    cast_like,
    clip_factor,
    debias,
    finish,
    look_up,
    move,
    widen,
    zeros_like,
)

Block = Literal["tensor", "row"] | int | None


def micro_adam(
    learning_rate: Number,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    clip: Number | None = None,
    *,
    weight_decay: Number | None = None,
    mask: Any = None,
    mu_dtype: Any = None,
) -> Any:
    """Adam that squares before it averages over the examples: v = EMA(mean of g²).

    m = EMA(ḡ, b1), v = EMA(second_moment, b2), θ ← θ - η m / (√v + eps), as in the paper (arXiv 2510.00236). Another,
    unrelated MicroAdam (Modoranu and others, 2024) compresses the state of Adam; this one does not.

    Args:
      learning_rate: η, a number or a schedule.
      b1: the decay of m.
      b2: the decay of v.
      eps: added to the root.
      clip: the largest global norm of the mean gradient; the paper has 10⁻² against spikes. See above for what it does
        to v, which our sources leave open.
      weight_decay: decoupled, as in AdamW: θ ← θ - η (... + weight_decay · θ). None is none, and needs no params.
      mask: which parameters decay, as for ``optax.add_decayed_weights``.
      mu_dtype: what m is kept in, if not in float32 at least.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` whose update needs ``stats`` with ``second_moment``.

    >>> import jax.numpy as jnp
    >>> opt, w = micro_adam(0.1), jnp.zeros(2)
    >>> stats = {"mean": jnp.array([1.0, 0.0]), "second_moment": jnp.array([4.0, 1.0])}
    >>> updates, state = opt.update(stats["mean"], opt.init(w), w, stats=stats)
    >>> updates.round(3)  # 0.1 · mean / √second_moment: a gradient that the examples disagree on moves less
    Array([-0.05, -0.  ], dtype=float32)
    """
    scale_by = _scale_by_moments(
        "micro_adam", ("second_moment",), lambda second: second, b1=b1, b2=b2, eps=eps, clip=clip, mu_dtype=mu_dtype
    )
    return finish(scale_by, learning_rate, weight_decay, mask)


def micro_adam_var(
    learning_rate: Number,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    clip: Number | None = None,
    *,
    weight_decay: Number | None = None,
    mask: Any = None,
    mu_dtype: Any = None,
) -> Any:
    """Adam with the variance among the examples alone: v = EMA(variance).

    m = EMA(ḡ, b1), v = EMA(Σ(g - ḡ)² / (B - 1), b2), θ ← θ - η m / (√v + eps). The paper finds it less stable than
    Adam. Where examples agree v is near zero, and only eps bounds the step; our sources name no other bound. A batch
    needs two examples. The arguments are those of ``micro_adam``.
    """
    scale_by = _scale_by_moments(
        "micro_adam_var", ("variance",), lambda variance: variance, b1=b1, b2=b2, eps=eps, clip=clip, mu_dtype=mu_dtype
    )
    return finish(scale_by, learning_rate, weight_decay, mask)


def micro_adam_msq(
    learning_rate: Number,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    clip: Number | None = None,
    block: Block = None,
    *,
    weight_decay: Number | None = None,
    mask: Any = None,
    mu_dtype: Any = None,
) -> Any:
    """Adam with the squared mean alone: v = EMA(ḡ² - variance / B), which may be negative.

    m = EMA(ḡ, b1), v = EMA(mean_squared, b2), θ ← θ - η m / √(ReLU(v) + eps). The statistic is the unbiased estimate of
    µ², and an unbiased estimate of something near zero is negative half of the time. ReLU(v) + eps is the paper's fix;
    our sources leave open what it is applied to and where eps stands. Here the moving average is cut off, not each
    step's estimate, which would bias it; and eps is under the root: beside the root, entries with a negative v would
    be divided by 10⁻⁸.

    Args:
      block: averages v over blocks of parameters before it is cut off, the paper's open question: ``"tensor"`` over
        each parameter array, ``"row"`` over its last axis, a number n over each n consecutive entries of an array.
        v is kept entry by entry. With ``optax.inject_hyperparams`` say ``static_args="block"``.

    The other arguments are those of ``micro_adam``. A batch needs two examples.
    """
    scale_by = _scale_by_moments(
        "micro_adam_msq",
        ("mean_squared",),
        lambda mean_squared: mean_squared,
        b1=b1,
        b2=b2,
        eps=0.0,
        eps_root=eps,
        clip=clip,
        block=block,
        mu_dtype=mu_dtype,
    )
    return finish(scale_by, learning_rate, weight_decay, mask)


def adam_mix(
    learning_rate: Number,
    a: Number = 1.0,
    b: Number = 1.0,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    clip: Number | None = None,
    block: Block = None,
    *,
    weight_decay: Number | None = None,
    mask: Any = None,
    mu_dtype: Any = None,
) -> Any:
    """Adam with any mix of squared mean and variance: v = EMA(a · mean_squared + b · variance).

    m = EMA(ḡ, b1), v = EMA(a µ̂² + b σ̂², b2), θ ← θ - η m / (√(ReLU(v) + eps_root) + eps). The other optimizers are
    points of it: a = b = 1, the default, is ``micro_adam``; a = 0, b = 1 is ``micro_adam_var``; a = 1, b = 1/B is
    ``optax.adam``; a = 1, b = 0 with ``eps=0, eps_root=1e-8`` is ``micro_adam_msq``.

    Args:
      a: the weight of µ̂² = ḡ² - variance / B.
      b: the weight of σ̂², the variance. Below a/B, v may be negative: then give an ``eps_root`` as well, for eps alone
        would bound the step there by m / 10⁻⁸.
      eps_root: added under the root.
      block: as for ``micro_adam_msq``.

    The other arguments are those of ``micro_adam``. A batch needs two examples.
    """
    scale_by = _scale_by_moments(
        "adam_mix",
        ("mean_squared", "variance"),
        lambda mean_squared, variance: a * mean_squared + b * variance,
        b1=b1,
        b2=b2,
        eps=eps,
        eps_root=eps_root,
        clip=clip,
        block=block,
        mu_dtype=mu_dtype,
    )
    return finish(scale_by, learning_rate, weight_decay, mask)


def _scale_by_moments(
    name: str,
    needs: tuple[str, ...],
    combine: Callable[..., jax.Array],
    *,
    b1: Number,
    b2: Number,
    eps: Number,
    eps_root: Number = 0.0,
    clip: Number | None,
    block: Block = None,
    mu_dtype: Any,
) -> Any:
    """m / (√(ReLU(v) + eps_root) + eps), where v averages ``combine`` of the statistics in ``needs``."""
    _check_block(block)

    def init(params: Tree) -> Any:
        mu, nu = zeros_like(params, mu_dtype), zeros_like(params)
        return optax.ScaleByAdamState(count=jnp.zeros([], jnp.int32), mu=mu, nu=nu)

    def update(
        updates: Tree, state: Any, params: Tree = None, *, stats: Mapping[str, Any] | None = None, **extra_args: Any
    ) -> tuple[Tree, Any]:
        mean, found = widen(updates), [look_up(stats, need, updates, optimizer=name) for need in needs]
        factor = clip_factor(mean, clip)
        mu = move(state.mu, jax.tree.map(lambda g: factor * g, mean), b1)
        nu = move(state.nu, jax.tree.map(lambda *each: factor**2 * combine(*each), *found), b2)
        count = optax.safe_increment(state.count)
        new = jax.tree.map(
            lambda m, v: m / (jnp.sqrt(jax.nn.relu(_average_blocks(v, block)) + eps_root) + eps),
            debias(mu, b1, count),
            debias(nu, b2, count),
        )
        state = optax.ScaleByAdamState(count=count, mu=cast_like(mu, state.mu), nu=cast_like(nu, state.nu))
        return cast_like(new, updates), state

    return optax.GradientTransformationExtraArgs(init, update)


def _check_block(block: Block) -> None:
    if isinstance(block, jax.Array):
        raise PegprofError(
            "the size of a block must be known before anything is computed",
            hint='say so to inject_hyperparams: static_args="block"',
        )
    if block in (None, "tensor", "row") or (isinstance(block, int) and block >= 1):
        return
    raise PegprofError(f"unknown block {block!r}", hint='a block is None, "tensor", "row" or a number of entries')


def _average_blocks(v: jax.Array, block: Block) -> jax.Array:
    """Each entry is replaced by the mean of its block."""
    if block is None or v.ndim == 0:
        return v
    if block == "row":
        return jnp.broadcast_to(jnp.mean(v, axis=-1, keepdims=True), v.shape)
    if block == "tensor":
        return jnp.full_like(v, jnp.mean(v))
    assert isinstance(block, int)
    whole = v.size // block * block  # the last block may be smaller
    blocks, rest = v.reshape(-1)[:whole].reshape(-1, block), v.reshape(-1)[whole:]
    means = jnp.broadcast_to(jnp.mean(blocks, axis=1, keepdims=True), blocks.shape).reshape(-1)
    last = [jnp.full_like(rest, jnp.mean(rest))] if rest.size else []
    return jnp.concatenate([means, *last]).reshape(v.shape)
