"""What all of the optimizers do alike: look statistics up, average over the steps, decay weights, scale.

Moving averages are kept in float32 at least, whatever the parameters are in: with a decay of 0.999 a bfloat16 average
would round each new term away. Updates have the dtype of the gradient that came in, as in optax.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from pegprof.engine.statistics import STATISTICS
from pegprof.errors import PegprofError
from pegprof.optimizers.scaling import Marking, mark

Tree = Any
Number = Any  # a float; an array where optax's inject_hyperparams makes it one; a schedule where that is said


def look_up(stats: Mapping[str, Any] | None, name: str, updates: Tree, *, optimizer: str = "the optimizer") -> Tree:
    """A statistic, as the update of an optimizer should read it.

    Parameters that ``optax.masked`` has taken out of the updates are left out. Under ``pegprof.train_step`` and
    ``pegprof.optimizers.update`` the statistic is scaled as the updates were by what stands before the optimizer. An
    optimizer that reads ``stats[name]`` itself gets the statistic unscaled.

    Args:
      stats: what the update was given as ``stats``.
      name: of the statistic.
      updates: what the update was given as updates, not changed yet.
      optimizer: its name, for error messages.

    >>> import jax.numpy as jnp
    >>> stats = {"mean": jnp.array([1.0]), "second_moment": jnp.array([4.0])}
    >>> look_up(stats, "second_moment", stats["mean"])
    Array([4.], dtype=float32)
    """
    if stats is None:
        raise PegprofError(
            f"{optimizer} needs the statistic {name!r}, and its update was given no statistics",
            hint="use pegprof.train_step or pegprof.optimizers.update, or pass stats=, the dict that grad_stats "
            "returns; a wrapper that is no GradientTransformationExtraArgs does not pass it on",
        )
    if name not in stats:
        raise PegprofError(
            f"{optimizer} needs the statistic {name!r}, and the stats have only {', '.join(map(repr, stats))}",
            hint=f'ask grad_stats for it: stats=("mean", "{name}"); needed_statistics names all that are needed',
        )
    statistic = stats[name]
    if name in STATISTICS and STATISTICS[name].scope == "model":
        masked = any(map(_is_masked, jax.tree.leaves(updates, is_leaf=_is_masked)))
        leaves = [None if masked else leaf for leaf in range(len(jax.tree.leaves(updates)))]
        found = statistic
    else:
        found = _without_masked(statistic, updates)
        positions = jax.tree.unflatten(jax.tree.structure(statistic), range(len(jax.tree.leaves(statistic))))
        leaves = jax.tree.leaves(_without_masked(positions, updates))
    if isinstance(stats, Marking):
        return mark(found, updates, leaves, statistic=name, optimizer=optimizer)
    return found


def _without_masked(tree: Tree, updates: Tree) -> Tree:
    return jax.tree.map(lambda u, x: u if _is_masked(u) else x, updates, tree, is_leaf=_is_masked)


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def zeros_like(params: Tree, dtype: Any = None) -> Tree:
    """Where an average starts, in float32 at least if no dtype is given."""
    return jax.tree.map(lambda p: jnp.zeros_like(p, dtype=dtype or _wide(p)), params)


def widen(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: x.astype(_wide(x)), tree)


def _wide(x: Any) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def move(average: Tree, new: Tree, decay: Number) -> Tree:
    """decay · average + (1 - decay) · new, not yet in the dtype that the average is kept in."""
    return jax.tree.map(lambda a, x: decay * a + (1 - decay) * x, average, new)


def cast_like(tree: Tree, like: Tree) -> Tree:
    return jax.tree.map(lambda x, other: x.astype(other.dtype), tree, like)


def debias(average: Tree, decay: Number, count: jax.Array) -> Tree:
    """The average divided by 1 - decayᵗ: the weights of the t terms so far then add up to one."""
    return optax.tree.bias_correction(average, decay, count)


def clip_factor(mean: Tree, clip: Number | None) -> jax.Array | float:
    """min(1, clip / ‖mean‖), with the norm over all parameters."""
    if clip is None:
        return 1.0
    norm = optax.tree.norm(mean)
    return jnp.where(norm < clip, 1.0, clip / norm)


def finish(scale_by: Any, learning_rate: Number, weight_decay: Number | None, mask: Any) -> Any:
    """A direction, then decoupled weight decay as in AdamW, then minus the learning rate or its schedule."""
    decay = [] if weight_decay is None else [optax.add_decayed_weights(weight_decay, mask)]
    return optax.chain(scale_by, *decay, optax.scale_by_learning_rate(learning_rate))
