"""Is a user's Problem one that can be measured? ``check_problem`` finds out on abstract values: nothing is allocated.

What is wrong is a PegprofError at the user's own file and line: where a function raised, or where it is defined.
"""

import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pegprof.engine.jaxpr import ClosedJaxpr, Jaxpr, close
from pegprof.engine.trace import parameter_names
from pegprof.errors import PegprofError
from pegprof.models.problem import Problem
from pegprof.user_code import home_of, users_code


def check_problem(problem: Problem, B: int) -> tuple[Any, Any]:
    """The shapes and dtypes of the parameters and of a batch of B examples.

    Raises:
      PegprofError: ``init`` or ``batch`` depends on more than its arguments, a parameter is not floating-point,
        ``batch`` does not make as many examples as it is asked for, or ``loss`` does not return a number.
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    params = _trace_twice("init", problem.init, key)
    _check_params(params, where=home_of(problem.init))
    # Of one size a function that ignores B could be right by chance. Timing halves the batch too.
    for size in (max(B // 2, 1), B):
        batch = _trace_twice("batch", problem.batch, key, size)
        _check_batch(batch, size, where=home_of(problem.batch))
    _, value = _trace("loss", problem.loss, params, batch)
    _check_loss(value, where=home_of(problem.loss))
    return params, batch


def _check_params(params: Any, *, where: str) -> None:
    leaves = jax.tree.leaves(params)
    if not leaves:
        raise PegprofError("init returned no parameters", where=where, hint="return a pytree of arrays")
    for name, leaf in zip(parameter_names(params), leaves, strict=True):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            hint = "leave arrays that are not trained out of the parameters: close over them"
            raise PegprofError(f"the parameter {name} is {leaf.dtype}, not floating-point", where=where, hint=hint)


def _check_batch(batch: Any, B: int, *, where: str) -> None:
    hint = "every array that batch(key, B) returns has B rows, one for each example"
    if not jax.tree.leaves(batch):
        raise PegprofError("batch returned no arrays", where=where, hint=hint)
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if leaf.shape[:1] != (B,):
            name = f"{jax.tree_util.keystr(path)} of " if path else ""
            what = f"batch was asked for {B} examples and returned {name}shape {leaf.shape}"
            raise PegprofError(what, where=where, hint=hint)


def _check_loss(value: Any, *, where: str) -> None:
    is_array = isinstance(value, jax.ShapeDtypeStruct)
    if is_array and value.shape == () and jnp.issubdtype(value.dtype, jnp.floating):
        return
    found = f"an array of shape {value.shape} and dtype {value.dtype}" if is_array else f"a {type(value).__name__}"
    hint = "return one number, the mean over the examples"
    raise PegprofError(f"loss returned {found}, not a scalar", where=where, hint=hint)


def _trace_twice(role: str, fn: Callable[..., Any], key: Any, *static: Any) -> Any:
    """The shapes that a function of a key returns, if it makes the same program of the same arguments every time.

    The host's randomness, be it NumPy's, the clock's or a counter's, shows as constants that differ.
    """
    jax.clear_caches()
    first, shapes = _trace(role, fn, key, static=static)
    jax.clear_caches()  # or what is under jit would not run a second time
    second, _ = _trace(role, fn, key, static=static)
    if _fingerprint(first) != _fingerprint(second):
        hint = "draw all that is random from the key, with jax.random"
        raise PegprofError(f"{role} is not deterministic: called twice, it differs", where=home_of(fn), hint=hint)
    return shapes


def _trace(role: str, fn: Callable[..., Any], *args: Any, static: tuple[Any, ...] = ()) -> tuple[ClosedJaxpr, Any]:
    """A function's program, and what it returns as shapes."""
    with users_code(home_of(fn), role):
        return jax.make_jaxpr(lambda *args: fn(*args, *static), return_shape=True)(*args)


def _fingerprint(program: ClosedJaxpr) -> str:
    """What tells two programs apart: their text, without the addresses of functions in it, and their constants."""
    text = re.sub(r"0x[0-9a-f]+", "", str(program.jaxpr))
    digest = hashlib.sha256(text.encode())
    for array in _constants(program):
        is_key = jnp.issubdtype(jnp.result_type(array), jax.dtypes.prng_key)
        digest.update(np.asarray(jax.random.key_data(array) if is_key else array).tobytes())
    return digest.hexdigest()


def _constants(closed: ClosedJaxpr) -> Iterator[Any]:
    """The arrays that a program holds, its own and those of the programs within."""
    yield from closed.consts
    params = (param for eqn in closed.jaxpr.eqns for param in eqn.params.values())
    for param in params:
        for inner in param if isinstance(param, tuple) else (param,):
            if isinstance(inner, ClosedJaxpr):
                yield from _constants(inner)
            elif isinstance(inner, Jaxpr):
                yield from _constants(close(inner))
