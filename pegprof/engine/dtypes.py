"""The dtype policy: nothing between a contraction and a statistic is rounded below float32.

Products keep their narrow operands, which hardware multiplies fastest, and ask for a float32 result. Every other step
of a tail runs in float32 or wider. Narrowing converts are dropped. ``passes/widen.py`` rewrites tails by these rules.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pegprof.engine.jaxpr import JaxprEqn, bind, dtype_of

Rule = Callable[[JaxprEqn, Sequence[Any]], list[Any]]


def is_real(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


def wide_dtype(dtype: Any) -> Any:
    """The dtype itself if it is at least as wide as float32, else float32. NumPy's promotion fails on float8."""
    is_wide = jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits >= 32
    return dtype if is_wide else jnp.dtype(jnp.float32)


def widen(x: Any) -> jax.Array:
    """The same values in float32 or wider."""
    x = jnp.asarray(x)
    return x.astype(wide_dtype(x.dtype))


def holds_all_of(wide: Any, narrow: Any) -> bool:
    """Whether a dtype has all the values of another."""
    if narrow == wide:
        return True
    if not (is_real(narrow) and is_real(wide)):
        return False
    a, b = jnp.finfo(narrow), jnp.finfo(wide)
    return bool(b.nmant >= a.nmant and b.nexp >= a.nexp)


def widen_operands(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Apply an equation that takes operands of any dtype."""
    wide = _common(x.dtype for x in values)
    return bind(eqn, [x.astype(wide) if is_real(x.dtype) else x for x in values])


def widen_product(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Apply a product to narrow operands and ask for a wide result."""
    floats = {x.dtype for x in values if is_real(x.dtype)}
    wide = _common([*floats, dtype_of(eqn.outvars[0])])
    if len(floats) > 1:
        values = [x.astype(wide) for x in values]
    return bind(eqn, values, preferred_element_type=wide)


def widen_convert(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Apply a convert that does not narrow."""
    (x,), target = values, eqn.params["new_dtype"]
    target = _common([x.dtype, target]) if is_real(target) else target
    return [x] if x.dtype == target else bind(eqn, [x], new_dtype=target)


def widen_scatter_add(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Apply a scatter-add anew: it holds its addition as a Jaxpr of the dtype that it was traced with."""
    wide = _common([values[0].dtype, values[2].dtype])
    operand, indices, updates = values[0].astype(wide), values[1], values[2].astype(wide)
    names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    return [jax.lax.scatter_add(operand, indices, updates, **{name: eqn.params[name] for name in names})]


def _common(dtypes: Iterable[Any]) -> Any:
    """The narrowest of float32 and float64 that holds all."""
    return jnp.dtype(jnp.float64 if any(dtype == jnp.float64 for dtype in dtypes) else jnp.float32)
