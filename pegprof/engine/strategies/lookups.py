"""Tail -> terms: a gradient as a sum of lookups' scatter-adds and of other values, each with its entries moved.

The gradient of ``table[ids]`` is one example's T rows of D added into zeros, V×D. A tied table adds a product to that,
and a table that is looked up twice adds two. What ``segment`` and ``tied`` share is how to see that in a tail.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pegprof.engine.jaxpr import Atom, JaxprEqn, Var, shape_of
from pegprof.engine.jaxpr import primitives as p
from pegprof.engine.strategies.base import bind_wide
from pegprof.engine.tails import Tail, only_moves_entries, variables

Chain = tuple[JaxprEqn, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Term:
    """One summand of a gradient: ``chain(source)``; ``lookup`` is the scatter-add into zeros that makes the source."""

    source: Atom
    lookup: JaxprEqn | None
    chain: Chain = ()


def terms_of(tail: Tail, output: Var) -> list[Term]:
    """The summands of one of a tail's gradients."""
    made_by = {v: eqn for eqn in tail.equations for v in eqn.outvars}

    def terms(atom: Atom) -> list[Term]:
        eqn = made_by.get(atom) if isinstance(atom, Var) else None
        if eqn is not None and eqn.primitive in (p.add_jaxvals_p, p.add_p):
            if all(shape_of(v) == shape_of(atom) for v in eqn.invars):
                return [term for v in eqn.invars for term in terms(v)]
        elif eqn is not None and only_moves_entries(eqn):
            return [dataclasses.replace(t, chain=(*t.chain, eqn)) for t in terms(eqn.invars[0])]
        is_lookup = eqn is not None and adds_rows(eqn) and eqn.invars[0] in tail.zeros
        return [Term(source=atom, lookup=eqn if is_lookup else None)]

    return terms(output)


def leading_to(tail: Tail, atoms: Iterable[Atom]) -> list[JaxprEqn]:
    """The equations of a tail that some values come from, in order."""
    needed: set[Atom] = set(variables(atoms))
    found = []
    for eqn in reversed(tail.equations):
        if needed.intersection(eqn.outvars):
            needed.update(variables(eqn.invars))
            found.append(eqn)
    return found[::-1]


def adds_rows(eqn: JaxprEqn) -> bool:
    """Whether an equation adds whole rows of a table at given places: the transpose of a lookup."""
    if eqn.primitive is not p.scatter_add_p:
        return False
    numbers = eqn.params["dimension_numbers"]
    table, updates = shape_of(eqn.invars[0]), shape_of(eqn.invars[2])
    indexed = numbers.scatter_dims_to_operand_dims
    row = [n for axis, n in enumerate(table) if axis not in indexed]
    return (
        set(numbers.inserted_window_dims) == set(indexed)
        and not numbers.operand_batching_dims
        and [updates[axis] for axis in numbers.update_window_dims] == row
        and math.prod(table[axis] for axis in indexed) < 2**31
    )


def same_steps(a: Chain, b: Chain) -> bool:
    """Whether two chains do the same."""
    return len(a) == len(b) and all(
        x.primitive is y.primitive and x.params == y.params and shape_of(x.invars[0]) == shape_of(y.invars[0])
        for x, y in zip(a, b, strict=True)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """The shape of what is looked up in, V×D: several indexed axes are one, and so are those of a row."""

    shape: tuple[int, ...]
    indexed: tuple[int, ...]

    @classmethod
    def of(cls, lookup: JaxprEqn) -> "Table":
        indexed = tuple(lookup.params["dimension_numbers"].scatter_dims_to_operand_dims)
        return cls(shape=shape_of(lookup.invars[0]), indexed=indexed)

    @property
    def bounds(self) -> tuple[int, ...]:
        return tuple(self.shape[axis] for axis in self.indexed)

    @property
    def row(self) -> tuple[int, ...]:
        return tuple(n for axis, n in enumerate(self.shape) if axis not in self.indexed)

    @property
    def V(self) -> int:
        return math.prod(self.bounds)

    @property
    def D(self) -> int:
        return math.prod(self.row)

    def unflatten(self, x_VxD: jax.Array) -> jax.Array:
        return jnp.moveaxis(x_VxD.reshape(*self.bounds, *self.row), range(len(self.indexed)), self.indexed)


def ids_of(lookup: JaxprEqn, indices_BxPxK: Any, table: Table) -> jax.Array:
    """The rows that B examples look up, [B, T], as numbers below V; V itself where an index is out of bounds.

    XLA drops what is added out of bounds, whatever was promised; only the mode ``CLIP`` takes the nearest row.
    """
    B, *places, K = indices_BxPxK.shape
    indices = indices_BxPxK.reshape(B, math.prod(places), K)
    indices = indices.astype(jnp.promote_types(indices.dtype, jnp.int32))
    bounds = jnp.asarray(table.bounds, indices.dtype)[None, None, :]
    if lookup.params["mode"] == jax.lax.GatherScatterMode.CLIP:
        indices = jnp.clip(indices, 0, bounds - 1)
    valid = jnp.all((indices >= 0) & (indices < bounds), axis=2)
    strides = [math.prod(table.bounds[k + 1 :]) for k in range(K)]
    ids = sum(indices[:, :, k] * stride for k, stride in enumerate(strides))
    return jnp.where(valid, ids, table.V).astype(jnp.int32)


def updates_of(lookup: JaxprEqn, updates_Bx: jax.Array, table: Table) -> jax.Array:
    """What B examples add at those rows, [B, T, D]."""
    windows = [axis + 1 for axis in lookup.params["dimension_numbers"].update_window_dims]
    rows_last = jnp.moveaxis(updates_Bx, windows, range(-len(windows), 0))
    return rows_last.reshape(updates_Bx.shape[0], -1, table.D)


def move(chain: Chain, x: Any) -> Any:
    for eqn in chain:
        (x,) = bind_wide(eqn, [x])
    return x


def undo(chain: Chain, x: Any) -> Any:
    """What a chain makes ``x`` of; see ``can_undo``. A widening stays: nothing here is narrower than float32."""
    for eqn in reversed(chain):
        if eqn.primitive is p.transpose_p:
            order: Sequence[int] = eqn.params["permutation"]
            x = jax.lax.transpose(x, sorted(range(len(order)), key=lambda axis: order[axis]))
        elif eqn.primitive is not p.convert_element_type_p:
            x = jax.lax.reshape(x, shape_of(eqn.invars[0]))
    return x


def can_undo(chain: Chain) -> bool:
    known = (p.transpose_p, p.reshape_p, p.squeeze_p, p.convert_element_type_p, p.copy_p)
    return all(eqn.primitive in known for eqn in chain)
