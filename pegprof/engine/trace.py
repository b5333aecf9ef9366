"""Loss -> Jaxpr of one example's gradient.

In: a loss, its arguments (arrays or ``jax.ShapeDtypeStruct``) and which of them are parameters and batch.
Out: a ``Trace``: the flat program ``inputs of one example -> value, aux, gradients``, with the names of the parameters.
"""

import dataclasses
import itertools
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pegprof.engine.flatten import flatten
from pegprof.engine.jaxpr import ClosedJaxpr, abstract
from pegprof.engine.squeeze import squeeze
from pegprof.errors import PegprofError, first_line
from pegprof.user_code import home_of, line_of

Loss = Callable[..., Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roles:
    """Which arguments of a loss are what; the names are those of optax's ``micro_grad`` and of jax_privacy."""

    argnums: int | tuple[int, ...] = 0
    batch_argnums: int | tuple[int, ...] = 1
    keep_batch_dim: bool = True
    has_aux: bool = False
    prng_argnum: int | None = None

    @property
    def batch(self) -> tuple[int, ...]:
        return (self.batch_argnums,) if isinstance(self.batch_argnums, int) else tuple(self.batch_argnums)

    @property
    def params(self) -> tuple[int, ...]:
        return (self.argnums,) if isinstance(self.argnums, int) else tuple(self.argnums)

    def of(self, args: Sequence[Any]) -> "Roles":
        """The same for some arguments: negative numbers, which count from the end, are made positive."""

        def counted(numbers: Any, role: str, option: str) -> Any:
            if isinstance(numbers, tuple | list):
                return tuple(counted(number, role, option) for number in numbers)
            if not -len(args) <= numbers < len(args):
                what = f"{role} argument {numbers}, but only {len(args)} arguments were given"
                raise PegprofError(what, hint=f"see {option}")
            return numbers % len(args)

        return dataclasses.replace(
            self,
            argnums=counted(self.argnums, "the parameters are", "argnums"),
            batch_argnums=counted(self.batch_argnums, "the batch is", "batch_argnums"),
            prng_argnum=None if self.prng_argnum is None else counted(self.prng_argnum, "the key is", "prng_argnum"),
        )

    def differs(self, argnum: int) -> bool:
        """Whether an argument is different for each example."""
        return argnum in self.batch or argnum == self.prng_argnum


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """The gradient of one example as a flat program: inputs -> value, aux, gradients."""

    closed: ClosedJaxpr
    roles: Roles
    B: int
    names: tuple[str, ...]  # of the parameters, in the order of the gradients
    depends: tuple[bool, ...]  # of each input: is it the example's own
    aux_tree: Any
    gradients_tree: Any

    @property
    def num_aux(self) -> int:
        return self.aux_tree.num_leaves

    @property
    def gradient_names(self) -> dict[int, str]:
        """The parameter of each output that is a gradient."""
        return {1 + self.num_aux + i: name for i, name in enumerate(self.names)}

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a parameter."""
        return tuple(self.closed.out_avals[1 + self.num_aux + self.names.index(name)].shape)

    def split_outputs(self, outputs: Sequence[Any]) -> tuple[Any, list[Any], list[Any]]:
        """Value, aux and gradients."""
        return outputs[0], list(outputs[1 : 1 + self.num_aux]), list(outputs[1 + self.num_aux :])

    def inputs(self, args: Sequence[Any]) -> list[Any]:
        """The inputs for all B examples: what is the example's own has a leading axis of B."""
        flat = []
        for argnum, arg in enumerate(args):
            if argnum == self.roles.prng_argnum:
                arg = jax.random.split(arg, self.B)
            elif argnum in self.roles.batch and self.roles.keep_batch_dim:
                arg = jax.tree.map(lambda x: jnp.expand_dims(x, 1), arg)
            flat += jax.tree.leaves(arg)
        return flat


def trace_example(loss: Loss, args: Sequence[Any], roles: Roles) -> Trace:
    """Trace the gradient of one example; nothing is computed, so shapes and dtypes are enough."""
    roles = roles.of(args)
    _check_sizes(args)
    B = batch_size(args, roles)
    example = [_example_of(arg, argnum, roles) for argnum, arg in enumerate(args)]
    _check_params(args, roles)
    leaves, tree = jax.tree.flatten(example)
    trees: dict[str, Any] = {}

    def value_and_gradients(*flat: Any) -> list[Any]:
        checked = jax.value_and_grad(lambda *args: _split_aux(loss(*args), loss, roles), roles.params, has_aux=True)
        (value, aux), gradients = checked(*jax.tree.unflatten(tree, flat))
        gradients = gradients[0] if isinstance(roles.argnums, int) else gradients
        trees["aux"], trees["gradients"] = jax.tree.structure(aux), jax.tree.structure(gradients)
        return [value, *jax.tree.leaves(aux), *jax.tree.leaves(gradients)]

    try:
        closed = jax.make_jaxpr(value_and_gradients)(*leaves)
    except PegprofError:
        raise
    except Exception as error:
        _explain_failure(error, loss, args, roles)
        raise
    params = args[roles.params[0]] if isinstance(roles.argnums, int) else tuple(args[i] for i in roles.params)
    return Trace(
        closed=squeeze(flatten(closed)),
        roles=roles,
        B=B,
        names=parameter_names(params),
        depends=tuple(roles.differs(i) for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)),
        aux_tree=trees["aux"],
        gradients_tree=trees["gradients"],
    )


def parameter_names(params: Any) -> tuple[str, ...]:
    """A name of its own for each leaf, such as ``layers/0/kernel``; a lone array is ``params``.

    >>> parameter_names({"a": {"b": 1.0}, "a/b": 2.0})
    ('a/b', 'a/b (2)')
    """
    names: dict[str, None] = {}
    for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/") or "params"
        numbered = itertools.chain([name], (f"{name} ({i})" for i in itertools.count(2)))
        names[next(each for each in numbered if each not in names)] = None
    return tuple(names)


def batch_size(args: Sequence[Any], roles: Roles) -> int:
    """The length of the leading axis that all leaves of the batch share."""
    sizes: dict[str, int] = {}
    for argnum in roles.batch:
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


def _check_params(args: Sequence[Any], roles: Roles) -> None:
    for argnum in roles.params:
        if roles.differs(argnum):
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


def _example_of(arg: Any, argnum: int, roles: Roles) -> Any:
    """An argument as one example sees it, as shapes and dtypes."""

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        x = abstract(x if hasattr(x, "dtype") else _as_array(x, argnum))
        if argnum not in roles.batch:
            return x
        return abstract(x, (1, *x.shape[1:]) if roles.keep_batch_dim else x.shape[1:])

    return jax.tree.map(shape, arg)


def _as_array(x: Any, argnum: int) -> jax.Array:
    try:
        return jnp.asarray(x)
    except TypeError as error:
        what = f"a {type(x).__name__} is no array: {x!r}"
        raise PegprofError(what, where=f"argument {argnum}", hint=_CLOSE_OVER_IT) from error


_CLOSE_OVER_IT = "close over it, as in lambda params, batch: loss(params, batch, train=True)"


def _split_aux(result: Any, loss: Loss, roles: Roles) -> tuple[Any, Any]:
    """The loss's result as (value, aux), checked."""
    if roles.has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise PegprofError(
            "with has_aux=True the loss must return a pair (value, aux)",
            where=home_of(loss),
            hint="return (value, aux), or leave has_aux out",
        )
    value, aux = result if roles.has_aux else (result, ())
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


def _explain_failure(error: Exception, loss: Loss, args: Sequence[Any], roles: Roles) -> None:
    """Raise a better error where a loss fails on one example but takes it in another form, or the whole batch."""
    other = dataclasses.replace(roles, keep_batch_dim=not roles.keep_batch_dim)
    forms = {True: "a batch of one", False: "a bare example"}
    what = f"the loss cannot take {forms[roles.keep_batch_dim]}"
    if python := _needed_as_python_values(loss, args, roles):
        numbers = " or ".join(map(str, python))
        what, hint = f"the loss cannot take argument {numbers} as a traced array", _CLOSE_OVER_IT
    elif _takes(loss, [_example_of(arg, i, other) for i, arg in enumerate(args)]):
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


def _needed_as_python_values(loss: Loss, args: Sequence[Any], roles: Roles) -> list[int]:
    """The arguments with flags and numbers of Python, if it is for want of these that a loss fails on one example."""
    others = [i for i in range(len(args)) if i not in roles.params and not roles.differs(i)]
    python = [i for i in others if any(isinstance(x, int | float) for x in jax.tree.leaves(args[i]))]
    example = [_example_of(arg, i, roles) for i, arg in enumerate(args)]

    def with_python_values(*traced: Any) -> Any:
        return loss(*(args[i] if i in python else x for i, x in enumerate(traced)))

    return python if python and not _takes(loss, example) and _takes(with_python_values, example) else []


def _takes(loss: Loss, args: Sequence[Any]) -> bool:
    try:
        jax.eval_shape(loss, *args)
    except Exception:  # whatever a loss says to arguments that it was not written for
        return False
    return True
