"""The arguments of a loss: what one example sees of them, and what is wrong with them, in words."""

import dataclasses
import numbers
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pegprof.engine.jaxpr import abstract
from pegprof.engine.options import Options
from pegprof.errors import PegprofError, first_line
from pegprof.user_code import home_of, line_of

if TYPE_CHECKING:
    from pegprof.engine.statistics import Statistic

Loss = Callable[..., Any]


def batch_size(args: Sequence[Any], options: Options) -> int:
    """The length of the leading axis that all leaves of the batch share."""
    sizes: dict[str, int] = {}
    for argnum in options.batch:
        for path, leaf in jax.tree_util.tree_flatten_with_path(args[argnum])[0]:
            name = f"argument {argnum}{jax.tree_util.keystr(path)}"
            if not jnp.shape(leaf):
                raise PegprofError(
                    f"{name} of the batch is a single number: it has no leading axis of examples",
                    where=name,
                    hint="pass what all examples share as an argument of its own, outside batch_argnums",
                )
            sizes[name] = jnp.shape(leaf)[0]
    if not sizes:
        raise PegprofError("the batch has no arrays in it", hint="see batch_argnums")
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        odd = min(sizes, key=lambda name: list(sizes.values()).count(sizes[name]))
        raise PegprofError(
            f"the leaves of the batch differ in their leading axis: {listed}",
            where=odd,
            hint="every leaf of the batch has one row for each example; pass what they share outside batch_argnums",
        )
    (B,) = set(sizes.values())
    if B == 0:
        raise PegprofError("the batch is empty", hint="statistics need at least one example")
    return B


def check_arguments(args: Sequence[Any], options: Options) -> None:
    """Refuse symbolic sizes, and parameters without real gradients."""
    _check_sizes(args)
    _check_params(args, options)


def _check_sizes(args: Sequence[Any]) -> None:
    """Refuse the symbolic sizes of ``jax.export``: what is cheapest depends on numbers."""
    for argnum, arg in enumerate(args):
        for path, leaf in jax.tree_util.tree_flatten_with_path(arg)[0]:
            if not all(isinstance(n, numbers.Integral) for n in getattr(leaf, "shape", ())):
                name = f"argument {argnum}{jax.tree_util.keystr(path)}"
                raise PegprofError(
                    f"{name} has the symbolic shape {leaf.shape}, and pegprof plans for sizes that are known",
                    where=name,
                    hint="export the function once for each size that you need",
                )


def _check_params(args: Sequence[Any], options: Options) -> None:
    for argnum in options.params:
        if options.differs(argnum):
            raise PegprofError(f"argument {argnum} is both parameters and batch", hint="see argnums and batch_argnums")
        for path, leaf in jax.tree_util.tree_flatten_with_path(args[argnum])[0]:
            dtype = jnp.result_type(leaf)
            if not jnp.issubdtype(dtype, jnp.floating):
                name = jax.tree_util.keystr(path, simple=True, separator="/") or "params"
                raise PegprofError(
                    f"the parameter {name} is {dtype}: statistics need real, floating-point gradients",
                    where=name,
                    hint="keep it out of the parameters: pass it as another argument, or close over it",
                )


def example_of(arg: Any, argnum: int, options: Options) -> Any:
    """An argument as one example sees it, as shapes and dtypes."""

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        x = abstract(x if hasattr(x, "dtype") else _as_array(x, argnum))
        if argnum not in options.batch:
            return x
        return abstract(x, (1, *x.shape[1:]) if options.keep_batch_dim else x.shape[1:])

    return jax.tree.map(shape, arg)


def _as_array(x: Any, argnum: int) -> jax.Array:
    try:
        return jnp.asarray(x)
    except TypeError as error:
        what = f"a {type(x).__name__} is no array: {x!r}"
        raise PegprofError(what, where=f"argument {argnum}", hint=_CLOSE_OVER_IT) from error


_CLOSE_OVER_IT = "close over it, as in lambda params, batch: loss(params, batch, train=True)"


def split_aux(result: Any, loss: Loss, options: Options) -> tuple[Any, Any]:
    """The loss's result as (value, aux), checked."""
    if options.has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise PegprofError(
            "with has_aux=True the loss must return a pair (value, aux)",
            where=home_of(loss),
            hint="return (value, aux), or leave has_aux out",
        )
    value, aux = result if options.has_aux else (result, ())
    is_array = hasattr(value, "dtype") or isinstance(value, (int, float, complex))
    dtype = jnp.result_type(value) if is_array else None
    if dtype is None or jnp.shape(value) != () or not jnp.issubdtype(dtype, jnp.floating):
        found = f"an array of shape {jnp.shape(value)} and dtype {dtype}" if is_array else f"a {type(value).__name__}"
        raise PegprofError(
            f"the loss returned {found} for one example; it must return a real scalar",
            where=home_of(loss),
            hint="average over tokens and examples; to return more beside it, return (value, aux) with has_aux=True",
        )
    return value, aux


def explain_failure(error: Exception, loss: Loss, args: Sequence[Any], options: Options) -> None:
    """Raise a better error where a loss fails on one example but takes it in another form, or the whole batch."""
    other = dataclasses.replace(options, keep_batch_dim=not options.keep_batch_dim)
    forms = {True: "a batch of one", False: "a bare example"}
    what = f"the loss cannot take {forms[options.keep_batch_dim]}"
    if python := _needed_as_python_values(loss, args, options):
        numbers = " or ".join(map(str, python))
        what, hint = f"the loss cannot take argument {numbers} as a traced array", _CLOSE_OVER_IT
    elif _takes(loss, [example_of(arg, i, other) for i, arg in enumerate(args)]):
        hint = f"it takes {forms[other.keep_batch_dim]}: say keep_batch_dim={other.keep_batch_dim}"
    elif _takes(loss, args):
        hint = "it takes the whole batch; write it for any number of examples, or for one with keep_batch_dim=False"
    else:
        return  # it fails on everything: the user's own error says more
    raise PegprofError(
        f"{what}: {first_line(error)}",
        where=line_of(error) or home_of(loss),
        hint=hint,
    ) from error


def _needed_as_python_values(loss: Loss, args: Sequence[Any], options: Options) -> list[int]:
    """The arguments with flags and numbers of Python, if it is for want of these that a loss fails on one example."""
    others = [i for i in range(len(args)) if i not in options.params and not options.differs(i)]
    python = [i for i in others if any(isinstance(x, int | float) for x in jax.tree.leaves(args[i]))]
    example = [example_of(arg, i, options) for i, arg in enumerate(args)]

    def with_python_values(*traced: Any) -> Any:
        return loss(*(args[i] if i in python else x for i, x in enumerate(traced)))

    return python if python and not _takes(loss, example) and _takes(with_python_values, example) else []


def _takes(loss: Loss, args: Sequence[Any]) -> bool:
    try:
        jax.eval_shape(loss, *args)
    except Exception:  # whatever a loss says to arguments that it was not written for
        return False
    return True


def check_batch(B: int, stats: "Sequence[Statistic]", microbatch_size: Any) -> None:
    """Refuse a batch that is too small for a statistic, and a microbatch that is no number of examples."""
    for stat in stats:
        if stat.minimum_batch > B:
            raise PegprofError(
                f"{stat.name} is not defined for a batch of {B}: {stat.formula}",
                where=stat.name,
                hint=f"give it at least {stat.minimum_batch} examples, or ask for another statistic",
            )
    if microbatch_size is not None and (not isinstance(microbatch_size, numbers.Integral) or microbatch_size < 1):
        raise PegprofError(f"microbatch_size is {microbatch_size!r}", hint="it is a whole number of examples, or None")
