"""Flax modules to Problems: ``from_flax`` for linen, ``from_nnx`` for nnx.

Both take the loss as one writes it for a model in hand, ``loss(model, batch)``, and one example, in whose image batches
are drawn. What a module holds beside its parameters stays as it is. A module that would change it, as BatchNorm does
in training, makes the examples of a batch depend on each other: it is refused.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from pegprof.errors import PegprofError, first_line
from pegprof.models import logical_axes
from pegprof.models.problem import Problem
from pegprof.user_code import calling_line, home_of

Loss = Callable[[Any, Any], Any]
Draw = Callable[[jax.Array, int], Any]
Function = Callable[..., Any]


def from_flax(
    module: linen.Module,
    loss: Loss,
    example: Any = None,
    *,
    batch: Draw | None = None,
    name: str | None = None,
    description: str = "",
    keep_batch_dim: bool = True,
) -> Problem:
    """A Problem out of a linen module.

    Args:
      module: the module; its parameters are the collection ``params`` that ``loss`` makes it create.
      loss: ``loss(model, batch) -> scalar``, the mean over the examples, where ``model`` is ``module.apply`` with its
        variables filled in: ``model(x)``, ``model(x, train=False)``, ``model(x, method="encode")``.
      example: one example, without the leading axis of a batch: a pytree of arrays, numbers or
        ``jax.ShapeDtypeStruct``. Batches are drawn in its image: floats are normal, integers run from 0 to the largest
        one in the leaf, booleans are either, random keys are split.
      batch: ``batch(key, B) -> batch``, instead of an example.
      name: how reports call it; the name of the module's class, if not given.
      description: one line for a person.
      keep_batch_dim: False where ``loss`` also takes a bare example, one without its leading axis.

    Returns:
      The Problem. On a mesh, parameters with logical axis names lie as ``pegprof.models.logical_axes`` says. Noise such
      as dropout's needs a key for each example, or an example alone would not be what it is in a batch: have a seed in
      ``example``, say ``2**30``, and ``jax.vmap`` over ``model(x, rngs={"dropout": jax.random.key(seed)})``.

    >>> import optax
    >>> def loss(model, batch):
    ...     return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["label"]).mean()
    >>> problem = from_flax(linen.Dense(10), loss, example={"x": jnp.zeros(784), "label": 9})
    >>> problem.abstract_params()["kernel"].shape, problem.abstract_batch(64)["label"].shape
    ((784, 10), (64,))
    """
    if not isinstance(module, linen.Module):
        _refuse(f"from_flax takes a linen module, not a {type(module).__name__}", hint="for nnx there is from_nnx")
    draw = _choose_batch(example, batch)

    @functools.cache
    def calls() -> list[tuple[Any, Any]]:
        return _record_calls(module, loss, draw)

    def init_boxed(key: jax.Array) -> dict[str, Any]:
        variables: dict[str, Any] = {}
        for args, kwargs in calls():
            variables = _merge(variables, module.init(key, *_zeros(args), **_zeros(kwargs)))
        return variables

    def init_variables(key: jax.Array) -> Any:
        return logical_axes.unbox(init_boxed(key))

    @functools.cache
    def has_constants() -> bool:
        return bool(jax.eval_shape(lambda: init_variables(jax.random.key(0))).keys() - {"params"})

    @_placed_at(loss)
    def init(key: jax.Array) -> Any:
        # Under jit, or making the parameters would run the module.
        return jax.jit(lambda key: init_variables(key).get("params", {}))(key)

    @_placed_at(loss)
    def loss_of_params(params: Any, batch: Any) -> Any:
        constants = init_variables(jax.random.key(0)) if has_constants() else {}
        return loss(functools.partial(_apply, module, {**constants, "params": params}), batch)

    @_placed_at(loss)
    def sharding(params: Any, mesh: Any) -> Any:
        boxed = jax.eval_shape(lambda: init_boxed(jax.random.key(0)))
        return logical_axes.boxed_specs(boxed.get("params", {}), mesh)

    return Problem(
        name=name or type(module).__name__,
        init=init,
        loss=loss_of_params,
        batch=draw,
        description=description,
        keep_batch_dim=keep_batch_dim,
        sharding=sharding,
    )


def _record_calls(module: linen.Module, loss: Loss, draw: Draw) -> list[tuple[Any, Any]]:
    """The arguments that a loss calls its model with, arrays as shapes: what it takes to create the parameters."""
    calls = []

    def model(*args: Any, rngs: Any = None, mutable: Any = False, **kwargs: Any) -> Any:
        calls.append(jax.tree.map(_abstract, (args, kwargs)))
        outputs, variables = module.init_with_output(jax.random.key(0), *args, **kwargs)
        changed = {collection: variables[collection] for collection in variables.keys() - {"params"}}
        return (outputs, changed) if mutable else outputs  # as module.apply does

    jax.eval_shape(lambda: loss(model, draw(jax.random.key(0), 2)))
    return calls


def _apply(module: linen.Module, variables: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return module.apply(variables, *args, **kwargs)
    except flax.errors.ModifyScopeVariableError as error:
        hint = "use its stored statistics (use_running_average=True for BatchNorm), or a norm over features"
        _refuse(f"the examples of a batch would depend on each other: {first_line(error)}", hint=hint)
    except flax.errors.InvalidRngError as error:
        hint = "turn the noise off, or give each example a key: see pegprof.from_flax"
        _refuse(f"the module draws noise: {first_line(error)}", hint=hint)


def from_nnx(
    module: nnx.Module | Callable[[nnx.Rngs], nnx.Module],
    loss: Loss,
    example: Any = None,
    *,
    batch: Draw | None = None,
    name: str | None = None,
    description: str = "",
    keep_batch_dim: bool = True,
) -> Problem:
    """A Problem out of an nnx module.

    Args:
      module: a function of ``rngs`` that makes the module, so that nothing is allocated until something is measured; or
        a module, whose parameters are then taken as they are, whatever the seed.
      loss: ``loss(model, batch) -> scalar``, the mean over the examples.
      example: and all further arguments: as for ``from_flax``.

    Returns:
      The Problem; its parameters are the module's ``nnx.Param`` variables, as a nested dict.

    >>> def loss(model, batch):
    ...     return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
    >>> example = {"x": jnp.zeros(3), "y": jnp.zeros(1)}
    >>> problem = from_nnx(lambda rngs: nnx.Linear(3, 1, rngs=rngs), loss, example)
    >>> problem.abstract_params()["kernel"].shape
    (3, 1)
    """
    if not (isinstance(module, nnx.Module) or (callable(module) and not isinstance(module, linen.Module))):
        hint = "for linen there is from_flax"
        _refuse(f"from_nnx takes an nnx module or a function that makes one, not a {type(module).__name__}", hint=hint)

    def make(rngs: nnx.Rngs) -> nnx.Module:
        if isinstance(module, nnx.Module):
            return module
        with nnx.use_eager_sharding(False):  # or variables with axis names would need the names' mesh
            return module(rngs)

    abstract = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    structure, *abstract_states = nnx.split(abstract, nnx.Param, ...)
    abstract_params, abstract_rest = abstract_states
    has_constants = bool(jax.tree.leaves(abstract_rest))

    @_placed_at(loss)
    def init(key: jax.Array) -> Any:
        return nnx.to_pure_dict(nnx.state(make(nnx.Rngs(key)), nnx.Param))

    @_placed_at(loss)
    def loss_of_params(params: Any, batch: Any) -> Any:
        constants = nnx.state(make(nnx.Rngs(0)), nnx.Not(nnx.Param)) if has_constants else abstract_rest
        # Copies, or what the loss does to its model would be done to a module in hand.
        param_state, constant_state = _copy(abstract_params), _copy(constants)
        nnx.replace_by_pure_dict(param_state, params)
        model = nnx.merge(structure, param_state, constant_state)
        before = _constants_of(model)
        value = loss(model, batch)
        _refuse_changes(before, _constants_of(model), where=home_of(loss))
        return value

    @_placed_at(loss)
    def sharding(params: Any, mesh: Any) -> Any:
        names = nnx.to_pure_dict(nnx.get_partition_spec(abstract_params))
        return logical_axes.spec_parameters(names, params, mesh) if logical_axes.has_names(names) else None

    return Problem(
        name=name or type(abstract).__name__,
        init=init,
        loss=loss_of_params,
        batch=_choose_batch(example, batch),
        description=description,
        keep_batch_dim=keep_batch_dim,
        sharding=sharding,
    )


def _copy(state: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf, state)


def _constants_of(model: nnx.Module) -> dict[str, Any]:
    """What a module holds beside its parameters: running averages, the state of random streams."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param))))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _refuse_changes(before: Mapping[str, Any], after: Mapping[str, Any], *, where: str) -> None:
    changed = [name for name, array in before.items() if after.get(name) is not array]
    if changed:
        what = f"the examples of a batch would depend on each other: the loss changes {', '.join(changed)}"
        hint = "call model.eval() first: it turns dropout off, and makes norms use their stored statistics"
        raise PegprofError(what, where=where, hint=hint)


def _placed_at(loss: Loss) -> Callable[[Function], Function]:
    """Has errors about a function of ours placed where the user's loss is."""
    return functools.partial(functools.update_wrapper, wrapped=loss, assigned=(), updated=())


# Batches in the image of an example.


def _choose_batch(example: Any, batch: Draw | None) -> Draw:
    if (example is None) == (batch is None):
        _refuse("either an example or a batch function is needed", hint="example=..., or batch=lambda key, B: ...")
    return batch or _draw_like(example)


def _draw_like(example: Any) -> Draw:
    paths_and_leaves, tree = jax.tree_util.tree_flatten_with_path(example)
    draws = [_draw_leaf_like(leaf, jax.tree_util.keystr(path)) for path, leaf in paths_and_leaves]

    def batch(key: jax.Array, B: int) -> Any:
        keys = jax.random.split(key, len(draws))
        return jax.tree.unflatten(tree, [draw(keys[i], B) for i, draw in enumerate(draws)])

    return batch


def _draw_leaf_like(leaf: Any, path: str) -> Draw:
    shape, dtype = jnp.shape(leaf), leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return lambda key, B: jax.random.split(key, (B, *shape))
    dtype = jax.dtypes.canonicalize_dtype(dtype)  # NumPy's own are of 64 bits
    if jnp.issubdtype(dtype, jnp.inexact):
        return lambda key, B: jax.random.normal(key, (B, *shape), dtype)
    if dtype == jnp.bool_:
        return lambda key, B: jax.random.bernoulli(key, shape=(B, *shape))
    if isinstance(leaf, jax.ShapeDtypeStruct):
        hint = f"give an array that holds it, such as numpy.full({shape}, vocabulary - 1)"
        _refuse(f"example{path} does not say how large its integers get", hint=hint)
    values = np.asarray(leaf)
    low, high = min(int(values.min(initial=0)), 0), int(values.max(initial=0))
    return lambda key, B: jax.random.randint(key, (B, *shape), low, high + 1).astype(dtype)


def _refuse(what: str, *, hint: str) -> NoReturn:
    raise PegprofError(what, where=calling_line(), hint=hint)


# Shapes and trees.


def _abstract(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "shape") else x


def _zeros(tree: Any) -> Any:
    def zeros(x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jnp.broadcast_to(jax.random.key(0), x.shape) if is_key else jnp.zeros(x.shape, x.dtype)

    return jax.tree.map(zeros, tree)


def _merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Both of two nested dicts."""
    both = {key: _merge(old[key], new[key]) for key in old.keys() & new.keys() if isinstance(new[key], Mapping)}
    return {**old, **new, **both}
