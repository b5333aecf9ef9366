"""``train_step``: a loss and an optimizer in, one jitted step of training out."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import jax
import optax

from pegprof.engine.checks.arguments import Loss, batch_size
from pegprof.engine.mesh import find_share, sharding_of
from pegprof.engine.options import BatchAxes, Options, TrainArgs, takes_options
from pegprof.engine.run import value_and_grad_stats
from pegprof.engine.statistics import STATISTICS, Statistic
from pegprof.optimizers.needs import needed_statistics, own_statistics, update


@takes_options(TrainArgs)
def train_step(
    loss: Loss,
    opt: Any,
    *,
    statistics: Sequence[Statistic] = (),
    donate: bool = False,
    **options: Unpack[TrainArgs],
) -> "Step":
    """A jitted step of training that computes, by surgery, the statistics that the optimizer needs and no others.

    Any optax optimizer will do, with or without statistics, and within ``chain``, ``masked``, ``partition``,
    ``inject_hyperparams`` or ``apply_if_finite``, which looks at the mean gradient alone. The update is given the value
    of the loss as ``value`` too, as optax's ``reduce_on_plateau`` wants it. ``optax.MultiSteps`` works for optimizers
    that need nothing but the mean, and is refused for others: it would average the means of several batches, and pass
    on the other statistics of the last one. For large batches there is ``microbatch_size``.

    A transformation that scales the mean before an optimizer in a chain scales the optimizer's statistics too. Anything
    else is refused before an optimizer that takes statistics.

    Args:
      loss: ``loss(params, batch, ...) -> scalar``, a mean over the leading axis of every leaf of ``batch``.
      opt: the optimizer; its state is ``opt.init(params)``.
      batch_argnums: which arguments of the loss have a leading axis of examples.
      keep_batch_dim: whether the loss sees an example as a batch of one, or, if False, without that axis.
      has_aux: whether the loss returns ``(value, aux)``.
      prng_argnum: an argument of the loss that is a PRNG key, to be split by example.
      microbatch_size: how many examples run at a time; None lets the planner decide.
      backend: what the program will be compiled for, if that is not the backend that is here.
      memory_budget: bytes that the planner should stay within, by its own estimate.
      batch_axes: the mesh axes that the batch is sharded over; None finds them. Parameters and state keep their
        shardings, and what is reduced over devices is reduced once a step, however many microbatches there are.
      param_shardings: as for ``grad_stats``; None reads them from the parameters.
      statistics: of one's own, which the optimizer looks up by their names. They need names of their own.
      donate: whether the new parameters and state may take the memory of the old, which are then gone.

    Returns:
      ``step(params, state, batch, ...) -> (params, state, value)``, where ``batch, ...`` are the loss's arguments after
      the parameters. With ``has_aux`` the last is ``(value, aux)``, and ``aux`` has a leading axis of examples.

    >>> import jax.numpy as jnp
    >>> from pegprof.optimizers import micro_adam
    >>> opt, w = micro_adam(0.1), jnp.zeros(2)
    >>> step = train_step(lambda w, x: jnp.mean((x @ w - 1) ** 2), opt)
    >>> w, state, value = step(w, opt.init(w), jnp.array([[1.0, 0.0], [1.0, 1.0]]))
    >>> w.round(3), value
    (Array([0.1  , 0.071], dtype=float32), Array(1., dtype=float32))
    """
    given = Options(**options)
    own = own_statistics(statistics)

    def step(layout: TrainArgs, params: Any, state: Any, *args: Any) -> tuple[Any, Any, Any]:
        B = batch_size((params, *args), given.of((params, *args)))
        needed = needed_statistics(opt, params, statistics=statistics, batch_size=B)
        how: TrainArgs = {**options, **layout}
        value_and_stats = value_and_grad_stats(loss, [own.get(name) or STATISTICS[name] for name in needed], **how)
        value, stats = value_and_stats(params, *args)
        updates, state = update(opt, stats, state, params, value=value[0] if given.has_aux else value)
        return optax.apply_updates(params, updates), state, value

    return Step(step=step, options=given, donate=donate)


class Step:
    """What ``train_step`` returns: a function that is jitted anew for each way in which its arrays are sharded.

    Under ``jit`` an array does not tell how it is sharded. So that is read from the arrays of each call, before.
    """

    def __init__(self, *, step: Callable[..., Any], options: Options, donate: bool):
        self._options = options

        @functools.cache
        def jitted(batch_axes: BatchAxes, shardings: tuple[Any, ...], tree: Any) -> Any:
            params, state = jax.tree.unflatten(tree, shardings)
            layout: TrainArgs = {"batch_axes": batch_axes}
            if any(shardings) and options.param_shardings is None:
                layout["param_shardings"] = params
            return jax.jit(
                functools.partial(step, layout),
                out_shardings=(params, state, None) if any(shardings) else None,
                donate_argnums=(0, 1) if donate else (),
            )

        self._jitted = jitted

    def __call__(self, params: Any, state: Any, *args: Any) -> tuple[Any, Any, Any]:
        return self._jitted(*self._layout(params, state, args))(params, state, *args)

    def lower(self, params: Any, state: Any, *args: Any) -> Any:
        """As for a function that ``jax.jit`` returns."""
        return self._jitted(*self._layout(params, state, args)).lower(params, state, *args)

    def _layout(self, params: Any, state: Any, args: Sequence[Any]) -> tuple[BatchAxes, tuple[Any, ...], Any]:
        """How the batch is sharded, and the parameters and the state, which stay as they are."""
        leaves, tree = jax.tree.flatten((params, state))
        share = find_share((params, *args), self._options)
        if share is None or share.manual:
            return self._options.batch_axes, (None,) * len(leaves), tree
        batch_axes = share.axes if share.mesh is None else jax.NamedSharding(share.mesh, jax.P(share.axes))
        return batch_axes, tuple(map(sharding_of, leaves)), tree
