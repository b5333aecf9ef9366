"""Operands that are elementwise functions of what is stored: gelu(h) of h, a normalised x of x, a softmax of logits.

XLA fuses such a function into its own products and never stores the result. A kernel must do so itself: it takes blocks
of the stored values, the *leaves*, and evaluates the equations on these. ``elementwise_of`` finds leaves and equations;
``Elementwise.evaluate`` applies them to blocks, or to any other choice of entries.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pegprof.engine.dtypes import is_real, wide_dtype
from pegprof.engine.facts import facts_of, known
from pegprof.engine.jaxpr import Atom, JaxprEqn, Literal, Var, dtype_of, shape_of
from pegprof.engine.jaxpr import primitives as p
from pegprof.engine.passes.widen import bind_wide
from pegprof.engine.tails import Tail, leading_to, makers

Labels = tuple[str, ...]  # for each axis of a value the operand's axis that it runs along, "" where its size is one
Index = Callable[[str], jax.Array]  # the numbers of the entries along an axis, as an array that broadcasts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    """A stored value that an operand is made of."""

    value: Var
    labels: Labels


@dataclasses.dataclass(frozen=True, kw_only=True)
class Elementwise:
    """An operand as equations on leaves."""

    operand: Atom
    labels: Labels  # of the operand
    leaves: tuple[Leaf, ...]
    equations: tuple[JaxprEqn, ...]
    labels_of: Mapping[Var, Labels]
    evaluable: bool = True  # whether a kernel may evaluate it

    @property
    def is_stored(self) -> bool:
        """Whether the operand is itself a stored value."""
        return not self.equations

    def evaluate(self, values: Sequence[jax.Array], index: Index) -> jax.Array:
        """The operand's entries from those of the leaves, which have size one along axes that they do not have."""
        env: dict[Var, Any] = {leaf.value: _wide(x) for leaf, x in zip(self.leaves, values, strict=True)}

        def read(atom: Atom) -> Any:
            return _wide(jnp.asarray(atom.val, dtype_of(atom))) if isinstance(atom, Literal) else env[atom]

        for eqn in self.equations:
            (out,) = eqn.outvars
            operands = [read(v) for v in eqn.invars]
            match known(eqn):
                case p.iota_p:
                    axis = self.labels_of[out][eqn.params["dimension"]]
                    env[out] = index(axis).astype(dtype_of(out)) if axis else jnp.zeros((1, 1), dtype_of(out))
                case p.scatter_add_p:
                    base, at, updates = operands
                    hit = index(self.labels_of[out][_scattered_axis(eqn)]).astype(at.dtype) == at
                    env[out] = base + jnp.where(hit, updates, jnp.zeros((), updates.dtype))
                case p.broadcast_in_dim_p | p.transpose_p | p.squeeze_p | p.reshape_p:  # labels stay with entries
                    env[out] = operands[0]
                case _:
                    shape = jnp.broadcast_shapes(*(x.shape for x in operands))
                    env[out] = bind_wide(eqn, [jnp.broadcast_to(x, shape) for x in operands])[0]
        return read(self.operand)


def _wide(x: jax.Array) -> jax.Array:
    """Narrow floats in float32: so XLA computes an elementwise chain too, and some TPUs can do no other."""
    return x.astype(wide_dtype(x.dtype)) if is_real(x.dtype) else x


_NUMBERS = ("float32", "bfloat16", "int32", "float64")  # what blocks can hold: no masks


def elementwise_of(tail: Tail, operand: Atom, labels: Labels) -> Elementwise:
    """How a tail makes an operand, as far back as every step is elementwise; the operand itself if none is."""
    equations = [*tail.prelude, *leading_to(tail.equations, [operand])]
    made_by = makers(equations)
    labels_of: dict[Var, Labels] = {}
    leaves: dict[Var, Leaf] = {}
    used: set[int] = set()

    def visit(v: Atom, labels: Labels) -> bool:
        if isinstance(v, Literal):
            return not any(labels)
        if v in labels_of:
            return labels_of[v] == labels
        labels_of[v] = labels
        eqn = made_by.get(v)
        inputs = None if eqn is None else _labels_of_inputs(eqn, labels)
        if eqn is None:
            leaves[v] = Leaf(value=v, labels=labels)
            return str(dtype_of(v)) in _NUMBERS
        if inputs is None:
            return False
        used.add(id(eqn))
        return all(visit(u, own) for u, own in zip(eqn.invars, inputs, strict=True))

    if isinstance(operand, Var) and operand in made_by and visit(operand, labels):
        steps = tuple(eqn for eqn in equations if id(eqn) in used)
        found = tuple(leaves.values())
        return Elementwise(operand=operand, labels=labels, leaves=found, equations=steps, labels_of=labels_of)
    return stored(operand, labels)


def stored(operand: Atom, labels: Labels) -> Elementwise:
    """An operand that is itself a stored value."""
    assert isinstance(operand, Var)
    leaf = Leaf(value=operand, labels=labels)
    return Elementwise(operand=operand, labels=labels, leaves=(leaf,), equations=(), labels_of={})


def _labels_of_inputs(eqn: JaxprEqn, labels: Labels) -> list[Labels] | None:
    """The labels of what an equation takes, from those of its result; None if it is not elementwise."""
    if len(eqn.outvars) != 1:
        return None
    out = shape_of(eqn.outvars[0])
    match known(eqn):
        case p.iota_p:
            return []
        case p.broadcast_in_dim_p:
            return [_of_broadcast(eqn, labels)] if len(eqn.invars) == 1 else None
        case p.transpose_p:
            inputs = [""] * len(out)
            for axis, source in enumerate(eqn.params["permutation"]):
                inputs[source] = labels[axis]
            return [tuple(inputs)]
        case p.squeeze_p | p.reshape_p:
            return _of_reshape(shape_of(eqn.invars[0]), out, labels)
        case p.scatter_add_p if _adds_one_entry(eqn):
            others = tuple(a for axis, a in enumerate(labels) if axis != _scattered_axis(eqn))
            ranks = [len(shape_of(v)) for v in eqn.invars[1:]]
            return [labels, *((*others, *[""] * (rank - len(others))) for rank in ranks)]
    facts, dtype = facts_of(eqn), dtype_of(eqn.outvars[0])
    narrow = is_real(dtype) and wide_dtype(dtype) != dtype
    if not facts.elementwise or (narrow and (facts.widen is None or _is_quantised(dtype))):
        return None
    shapes = [shape_of(v) for v in eqn.invars]
    if any(shape and len(shape) != len(out) for shape in shapes):
        return None
    return [tuple(a if n == m else "" for a, n, m in zip(labels, shape, out, strict=False)) for shape in shapes]


def _is_quantised(dtype: Any) -> bool:
    """Whether a dtype has so few bits that its rounding is meant: a kernel, which evaluates in float32, drops it."""
    return bool(jnp.finfo(dtype).bits < 16)


def _scattered_axis(eqn: JaxprEqn) -> int:
    return eqn.params["dimension_numbers"].scatter_dims_to_operand_dims[0]


def _adds_one_entry(eqn: JaxprEqn) -> bool:
    """Whether a scatter-add adds one number in each row, at a place along one axis: the gradient of picking labels."""
    numbers, out = eqn.params["dimension_numbers"], shape_of(eqn.outvars[0])
    axis = numbers.scatter_dims_to_operand_dims[:1]
    others = tuple(n for n in range(len(out)) if n not in axis)
    rows = tuple(out[n] for n in others)
    return (
        len(numbers.scatter_dims_to_operand_dims) == 1
        and numbers.inserted_window_dims == axis
        and not numbers.update_window_dims
        and numbers.operand_batching_dims == others
        and numbers.scatter_indices_batching_dims == tuple(range(len(others)))
        and eqn.params["mode"] != jax.lax.GatherScatterMode.CLIP
        and all(_only_adds_ones(rows, shape_of(v)) for v in eqn.invars[1:])
    )


def _only_adds_ones(rows: Sequence[int], shape: Sequence[int]) -> bool:
    return tuple(shape[: len(rows)]) == tuple(rows) and all(n == 1 for n in shape[len(rows) :])


def _of_broadcast(eqn: JaxprEqn, labels: Labels) -> Labels:
    shape, out = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    places = eqn.params["broadcast_dimensions"]
    return tuple(labels[axis] if n == out[axis] else "" for axis, n in zip(places, shape, strict=True))


def _of_reshape(shape: Sequence[int], out: Sequence[int], labels: Labels) -> list[Labels] | None:
    """Where only axes of size one come or go."""
    if [n for n in shape if n != 1] != [n for n in out if n != 1]:
        return None
    long = iter(a for a, n in zip(labels, out, strict=True) if n != 1)
    return [tuple("" if n == 1 else next(long) for n in shape)]
