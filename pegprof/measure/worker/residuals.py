"""What the backward pass keeps of the forward pass, and which parameters are looked up: from the trace alone.

In: a loss and the shapes of its arguments. Out: ``Residuals``. What ``jax.vjp`` keeps are the outputs of its forward
half as a Jaxpr. An output is followed back, through steps that only move or repeat entries, to the array that it is a
view of. Each array counts once; parameters and batch, which are there anyway, do not count. XLA goes on to fuse,
recompute and pad, so that what it stores is near this and not the same.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pegprof.engine.checks.arguments import batch_size
from pegprof.engine.facts import FACTS, UNKNOWN
from pegprof.engine.jaxpr import JaxprEqn, barrier_p, called_by, dtype_of, evaluate
from pegprof.engine.jaxpr import primitives as p
from pegprof.engine.options import Options
from pegprof.engine.trace import parameter_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Residuals:
    """The bytes that the backward pass keeps of one example, and the parameters that its integers look rows up in."""

    bytes_per_example: int
    looked_up: tuple[str, ...]


def trace_residuals(loss: Callable[[Any, Any], Any], params: Any, batch: Any) -> Residuals:
    """What the backward pass of a loss keeps; shapes and dtypes are enough.

    >>> import jax.numpy as jnp
    >>> w, x = jnp.ones((3, 4)), jnp.ones((8, 3))
    >>> trace_residuals(lambda w, x: jnp.mean(jnp.sin(x @ w)), w, x)  # the cosine of 4 numbers
    Residuals(bytes_per_example=16, looked_up=())
    """

    def backward(params: Any, batch: Any) -> Any:  # a pytree whose leaves are what it keeps
        return jax.vjp(lambda params: loss(params, batch), params)[1]

    closed = jax.make_jaxpr(backward)(params, batch)
    names = parameter_names(params)
    inputs = [
        _Array(bytes=_bytes(aval), parameter=name, of_params=name is not None, of_batch=name is None, is_input=True)
        for name, aval in itertools.zip_longest(names, closed.in_avals)  # the batch comes after the parameters
    ]
    walk = _Walk()
    kept = {array for array in map(_array, evaluate(closed, inputs, walk.follow)) if array.of_batch}
    B = batch_size((params, batch), Options())
    return Residuals(
        bytes_per_example=sum(array.bytes for array in kept if not array.is_input) // B,
        looked_up=tuple(name for name in names if name in walk.looked_up),
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Array:
    """An array that a program takes or makes. All views of the same entries are one of these: identity counts."""

    bytes: int
    of_params: bool = False
    of_batch: bool = False
    is_input: bool = False
    parameter: str | None = None  # which it is, or is a slice of or in another dtype


class _Walk:
    """A walk over a program, with arrays for values."""

    def __init__(self) -> None:
        self.looked_up: set[str | None] = set()

    def follow(self, eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
        """The arrays that an equation makes or passes on."""
        arrays = [_array(value) for value in values]
        if inner := called_by(eqn):
            return evaluate(inner, arrays, self.follow)
        if eqn.primitive is p.scan_p:
            return self._follow_scan(eqn, arrays)
        if eqn.primitive is barrier_p or _is_view(eqn):
            return arrays
        if eqn.primitive is p.gather_p:
            self._note_lookup(*arrays)
        parameter = arrays[0].parameter if eqn.primitive is p.convert_element_type_p else None
        return [_made_of(arrays, _bytes(v.aval), parameter) for v in eqn.outvars]

    def _follow_scan(self, eqn: JaxprEqn, arrays: Sequence[_Array]) -> list[_Array]:
        """What a loop's body stacks is one array for each that it makes, unless it is a view of what went in."""
        body, length, at = eqn.params["jaxpr"], eqn.params["length"], eqn.params["num_consts"]
        end = at + eqn.params["num_carry"]
        # What a carry starts from says nothing of what it becomes: one input of the example may reach them all.
        carry = [_made_of(arrays, _bytes(aval)) for aval in body.in_avals[at:end]]
        slices = [dataclasses.replace(x, bytes=x.bytes // max(length, 1)) for x in arrays[end:]]
        results = [_array(value) for value in evaluate(body, [*arrays[:at], *carry, *slices], self.follow)]
        stacked = dict(zip([*arrays[:at], *slices], [*arrays[:at], *arrays[end:]], strict=True))
        for y in results[end - at :]:
            stacked.setdefault(y, _made_of([y], y.bytes * length))
        return [*carry, *(stacked[y] for y in results[end - at :])]

    def _note_lookup(self, table: _Array, indices: _Array) -> None:
        """Rows picked by the example's own integers; what a router of experts picks depends on parameters too."""
        if indices.of_batch and not indices.of_params:
            self.looked_up.add(table.parameter)


def _array(value: Any) -> _Array:
    return value if isinstance(value, _Array) else _Array(bytes=0)  # a constant: it is there for all examples


def _made_of(arrays: Sequence[_Array], bytes_: int, parameter: str | None = None) -> _Array:
    return _Array(
        bytes=bytes_,
        of_params=any(array.of_params for array in arrays),
        of_batch=any(array.of_batch for array in arrays),
        parameter=parameter,
    )


def _is_view(eqn: JaxprEqn) -> bool:
    if eqn.primitive is p.convert_element_type_p:
        return dtype_of(eqn.invars[0]) == dtype_of(eqn.outvars[0])
    return FACTS.get(eqn.primitive, UNKNOWN).view


def _bytes(aval: Any) -> int:
    return math.prod(getattr(aval, "shape", ())) * getattr(getattr(aval, "dtype", None), "itemsize", 0)
