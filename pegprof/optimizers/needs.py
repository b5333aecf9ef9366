"""Which statistics an optimizer needs: its update is traced with a mapping that writes down what is looked up.

An optimizer says nowhere what it needs, and so need not be asked: whatever optax wraps around it, the lookup comes
through. The mean gradient, which goes in as the updates, counts as needed if anything of the result depends on it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from pegprof.engine.jaxpr import evaluate, used_inputs
from pegprof.engine.statistics import STATISTICS, Statistic
from pegprof.errors import PegprofError, nearest
from pegprof.optimizers.moments import Tree, cast_like
from pegprof.optimizers.scaling import Marked, Marking, follow

MEAN = "mean"


def needed_statistics(
    opt: Any, params: Tree, *, statistics: Sequence[Statistic] = (), batch_size: int = 2
) -> tuple[str, ...]:
    """The statistics that an optimizer's update looks up; nothing is computed.

    Args:
      opt: any optax transformation, one of ``pegprof.optimizers`` or one that holds such.
      params: the parameters, or their shapes.
      statistics: of one's own, which the update may look up beside those of the table.
      batch_size: how many examples there are; it shapes ``norm`` and ``norm_by_param`` alone.

    Returns:
      Their names, in the order of the table: what to ask ``grad_stats`` for.

    Raises:
      PegprofError: if something before the optimizer does more to the mean gradient than multiply it by a number.

    >>> import optax
    >>> from pegprof.optimizers import micro_adam, micro_sign_sgd
    >>> needed_statistics(optax.chain(optax.clip_by_global_norm(1.0), micro_adam(1e-3)), jnp.zeros(3))
    ('mean', 'second_moment')
    >>> needed_statistics(micro_sign_sgd(1e-3), jnp.zeros(3))
    ('sign_mean',)
    """
    known = {**STATISTICS, **own_statistics(statistics)}
    shapes = jax.eval_shape(lambda tree: tree, params)
    asked = _Asked(shapes, known, batch_size)
    extended = take_stats(opt)

    def run(updates: Tree, state: Any, params: Tree, value: jax.Array) -> Any:
        return extended.update(updates, state, params, stats=asked, value=value)

    value = jax.ShapeDtypeStruct((), jnp.result_type(float))
    closed = jax.make_jaxpr(run)(shapes, jax.eval_shape(extended.init, shapes), shapes, value)
    if isinstance(opt, optax.MultiSteps) and asked.names - {MEAN}:
        raise PegprofError(
            "optax.MultiSteps averages the mean gradients of several batches, but hands the optimizer the "
            f"{', '.join(sorted(asked.names - {MEAN}))} of the last batch alone",
            hint="take one batch that is as large, and microbatch_size, which runs a part of it at a time",
        )
    if any(used_inputs(follow(closed, _names_of(shapes)).program)[: len(jax.tree.leaves(shapes))]):
        asked.names.add(MEAN)
    return tuple(name for name in known if name in asked.names)


def own_statistics(statistics: Sequence[Statistic]) -> dict[str, Statistic]:
    """Statistics of one's own by their names, which must be names of their own."""
    own: dict[str, Statistic] = {}
    for statistic in statistics:
        name = statistic.name
        if STATISTICS.get(name, statistic) is not statistic:
            raise PegprofError(
                f"the name of the statistic {name!r} is one of pegprof's own, which optimizers rely on",
                hint="give it a name of its own",
            )
        if name in own:
            raise PegprofError(f"two statistics are named {name!r}", hint="give each a name of its own")
        own[name] = statistic
    return own


def update(opt: Any, stats: Mapping[str, Any], state: Any, params: Tree, **extra_args: Any) -> tuple[Tree, Any]:
    """What ``opt.update`` returns, with the mean of the statistics as updates and all of them as ``stats``.

    The mean goes in as ``jax.grad`` would give it, in the dtypes of the parameters. It may be missing from the
    statistics where the optimizer makes no use of it.

    What stands before an optimizer of pegprof, as in ``optax.chain(optax.scale(0.5), micro_adam(...))``, changes the
    mean alone. If it multiplies the mean of each parameter by a number, the statistics are scaled to match, as if every
    example's gradient had been multiplied by that number. Anything else is refused. ``opt.update`` itself does neither.

    >>> from pegprof.optimizers import sign_ema
    >>> w, opt = jnp.zeros(2), sign_ema(0.5)
    >>> updates, state = update(opt, {"mean": jnp.array([3.0, -1.0])}, opt.init(w), w)
    >>> updates
    Array([-0.5,  0.5], dtype=float32)
    """
    extended = take_stats(opt)

    def run(updates: Tree, stats: Mapping[str, Any]) -> Any:
        return extended.update(updates, state, params, stats=stats, **extra_args)

    mean = cast_like(stats[MEAN], params) if MEAN in stats else jax.tree.map(jnp.zeros_like, params)
    if set(stats) == {MEAN}:  # there is nothing that would have to be scaled as the mean is
        return run(mean, stats)
    closed, results = jax.make_jaxpr(lambda updates: run(updates, Marked(stats)), return_shape=True)(mean)
    followed = follow(closed, _names_of(params))
    if MEAN not in stats and any(used_inputs(followed.program)):
        raise PegprofError(
            f"the optimizer uses the mean gradient, and the stats have only {', '.join(map(repr, stats))}",
            hint='ask grad_stats for "mean" as well',
        )
    if not followed.scaled:
        return run(mean, stats)
    made = evaluate(followed.program, jax.tree.leaves(mean))
    return jax.tree.unflatten(jax.tree.structure(results), map(jnp.asarray, made))


def _names_of(params: Tree) -> list[str]:
    paths = jax.tree_util.tree_leaves_with_path(params)
    return [jax.tree_util.keystr(path, simple=True, separator="/") or "params" for path, _ in paths]


def take_stats(opt: Any) -> Any:
    """The same optimizer, with an update that takes ``stats`` and ``value``, if only to ignore them."""
    if isinstance(opt, optax.MultiSteps):  # has an update like this, without being of the type that says so
        return optax.GradientTransformationExtraArgs(opt.init, opt.update)
    return optax.with_extra_args_support(opt)


@jax.tree_util.register_static  # so that it goes through a jit, or whatever else an optimizer has around its update
class _Asked(Marking):
    """Statistics of the right shapes, all zero, that remembers which were looked up."""

    def __init__(self, params: Tree, known: Mapping[str, Statistic], batch_size: int):
        self.names: set[str] = set()
        self._params, self._known, self._batch_size = params, known, batch_size

    def __getitem__(self, name: str) -> Any:
        if name not in self._known:
            raise PegprofError(
                f"the optimizer looks up the unknown statistic {name!r}",
                hint=f"{nearest(name, self._known)} One of your own goes into the argument statistics",
            )
        self.names.add(name)
        statistic, B = self._known[name], self._batch_size
        if statistic.scope == "model":
            return jnp.zeros(B, jnp.result_type(*(_wide(p) for p in jax.tree.leaves(self._params))))
        per_example = statistic.scope == "parameter"
        return jax.tree.map(lambda p: jnp.zeros((B,) if per_example else p.shape, _wide(p)), self._params)

    def __iter__(self) -> Iterator[str]:
        raise PegprofError(
            "the optimizer goes over all statistics, so which of them it needs cannot be told",
            hint="look them up by name, or call grad_stats and pegprof.optimizers.update yourself",
        )

    def __len__(self) -> int:
        return len(self._known)

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def _wide(p: Any) -> Any:
    return jnp.promote_types(p.dtype, jnp.float32)
