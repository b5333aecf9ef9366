"""What stands before an optimizer scales its statistics as it scales the mean gradient.

``optax.chain(optax.scale(0.5), micro_adam(...))`` hands half of the mean to ``micro_adam``. The statistics do not pass
through the chain, so they are scaled here, as if every example's gradient had been multiplied by 0.5:

    an update's Jaxpr, with a marker where statistics are looked up ──> the same program, statistics scaled

The Jaxpr is evaluated with a note beside each value. A note says that the value is a number times the mean gradient of
one parameter, or that it is one number in every entry. At a marker the incoming updates are c times the mean, and the
statistics become those of c times the gradients. c may be computed: ``clip_by_global_norm`` divides by a norm. Updates
that are no multiple of the mean are refused, because the statistics that belong to them are not known.
"""

import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pegprof.engine.facts import facts_of, known
from pegprof.engine.jaxpr import (
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Primitive,
    barrier_p,
    bind,
    called_by,
    dtype_of,
    evaluate,
    marker,
    primitives,
    prune,
    shape_of,
    source_function,
    sub_jaxprs,
    trace,
)
from pegprof.engine.statistics import STATISTICS
from pegprof.errors import PegprofError

p = primitives

look_up_p: Primitive = marker("look_up")


class Marking(Mapping[str, Any]):
    """Statistics that leave a marker in the Jaxpr where an optimizer looks them up."""


@jax.tree_util.register_pytree_node_class  # a type of its own, so that a jit around an update traces it anew
class Marked(Marking):
    """The statistics of a batch, for a trace that ``follow`` reads."""

    def __init__(self, stats: Mapping[str, Any]):
        self._stats = dict(stats)

    def __getitem__(self, name: str) -> Any:
        return self._stats[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stats)

    def __len__(self) -> int:
        return len(self._stats)

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        return tuple(self._stats.values()), tuple(self._stats)

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], values: tuple[Any, ...]) -> "Marked":
        return cls(dict(zip(names, values, strict=True)))


def mark(found: Any, updates: Any, leaves: Sequence[int | None], *, statistic: str, optimizer: str) -> Any:
    """Statistics as they are, with a marker that ties them to the updates that came in.

    Args:
      found: a tree of arrays: one for each update, or one for all.
      updates: the mean gradient, after what stands before the optimizer.
      leaves: for each update the parameter that it belongs to, as a position in the tree of all; None if unknown.
      statistic: its name.
      optimizer: the name of the one that looked it up.
    """
    values, tree = jax.tree.flatten(found)
    if not values:
        return found
    marked = look_up_p.bind(
        *jax.tree.leaves(updates),
        *values,
        returned=len(values),
        leaves=tuple(leaves),
        statistic=statistic,
        optimizer=optimizer,
    )
    return jax.tree.unflatten(tree, marked)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Followed:
    """An update whose statistics are scaled; without a marker, and ``scaled`` is False, if there was nothing to do."""

    program: ClosedJaxpr
    scaled: bool


def follow(closed: ClosedJaxpr, parameters: Sequence[str]) -> Followed:
    """The program of an update, with statistics scaled as the mean gradient is before they are looked up.

    Args:
      closed: the update; its first inputs are the mean gradient, one for each parameter.
      parameters: their names.
    """
    follower = _Follower(parameters)
    program = prune(trace(lambda *args: follower.run(closed, args), closed.in_avals))
    return Followed(program=program, scaled=follower.scaled)


# A factor is an expression, so that two that are computed alike are equal, and what nobody needs is not computed.
@dataclasses.dataclass(frozen=True)
class _Number:
    key: Any
    value: Any = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True)
class _Made:
    fn: Callable[..., Any]
    operands: tuple["_Factor", ...]


_Factor = _Number | _Made
_ONE, _ZERO = _Number(1.0, 1.0), _Number(0.0, 0.0)


def _number(value: Any, dtype: Any) -> _Number:
    """A scalar of the program: equal to another if it is the same value there, or the same constant."""
    if isinstance(value, jax.Array):
        return _Number(("the value", id(value)), value)
    constant = np.asarray(value, dtype).item()
    return _Number(constant, constant)


def _times(a: _Factor, b: _Factor) -> _Factor:
    return b if a == _ONE else a if b == _ONE else _Made(operator.mul, (a, b))


def _over(a: _Factor, b: _Factor) -> _Factor:
    return a if b == _ONE else _Made(operator.truediv, (a, b))


def _select(which: _Number, cases: Sequence[_Factor]) -> _Factor:
    return cases[0] if len(set(cases)) == 1 else _Made(jax.lax.select_n, (which, *cases))


def _compute(factor: _Factor, dtype: Any) -> Any:
    if isinstance(factor, _Number):
        return jnp.asarray(factor.value, dtype)
    if factor.fn is jax.lax.select_n:
        which, *cases = factor.operands
        assert isinstance(which, _Number)
        return jax.lax.select_n(jnp.asarray(which.value), *(_compute(case, dtype) for case in cases))
    return factor.fn(*(_compute(operand, dtype) for operand in factor.operands))


@dataclasses.dataclass(frozen=True)
class _Multiple:
    """A number times the mean gradient of one parameter."""

    leaf: int
    factor: _Factor


@dataclasses.dataclass(frozen=True)
class _Uniform:
    """One number in every entry."""

    number: _Number


@dataclasses.dataclass(frozen=True)
class _Lost:
    """Made from a mean gradient, and no multiple of it since this equation."""

    eqn: JaxprEqn


_Note = _Multiple | _Uniform | _Lost | None


@dataclasses.dataclass(frozen=True, eq=False)
class _Value:
    value: Any
    note: _Note = None


class _Follower:
    """Evaluates an update with notes; ``scaled`` says afterwards whether a statistic was changed."""

    def __init__(self, parameters: Sequence[str]):
        self.parameters, self.scaled = parameters, False

    def run(self, closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        n = len(self.parameters)
        means = [_Value(x, _Multiple(leaf, _ONE)) for leaf, x in enumerate(args[:n])]
        return [_plain(x) for x in evaluate(closed, [*means, *args[n:]], self.equation)]

    def equation(self, eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
        if eqn.primitive is look_up_p:
            return self._look_up(eqn, values)
        if inner := called_by(eqn):
            results = evaluate(inner, values, self.equation)
            return [_Value(_plain(x), _at_call(_note(x), eqn)) for x in results]
        if eqn.primitive is p.cond_p and (
            any(isinstance(_note(x), _Multiple) for x in values) or any(map(_has_marker, sub_jaxprs(eqn)))
        ):
            return self._cond(eqn, values)
        if any(map(_has_marker, sub_jaxprs(eqn))):
            raise PegprofError(
                f"the optimizer looks statistics up inside a {eqn.primitive.name}, where it cannot be seen what stands "
                "before it",
                where=source_function(eqn),
                hint="look them up before, and hand them in",
            )
        made = bind(eqn, list(map(_plain, values)))
        return [_Value(x, note) for x, note in zip(made, _notes_of(eqn, values, made), strict=True)]

    def _look_up(self, eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
        returned, leaves = eqn.params["returned"], eqn.params["leaves"]
        updates, found = values[: len(leaves)], list(map(_plain, values[-returned:]))
        factors = [self._factor(eqn, _note(x), leaf) for x, leaf in zip(updates, leaves, strict=True)]
        if all(factor == _ONE for factor in factors):
            return found
        self.scaled = True
        name, optimizer = eqn.params["statistic"], eqn.params["optimizer"]
        if name not in STATISTICS or STATISTICS[name].scaled is None:
            raise PegprofError(
                f"what stands before {optimizer} scales the mean gradient, and how the statistic {name!r} scales with "
                "it is not known",
                hint=f"put it after {optimizer} in the chain",
            )
        if None in leaves or len(found) != len(factors):  # one statistic of all parameters
            if None in leaves or len(set(factors)) > 1:
                raise PegprofError(
                    f"what stands before {optimizer} does not scale all parameters alike, and the statistic {name!r} "
                    "is one number for all of them",
                    hint=f"put it after {optimizer} in the chain, or scale all parameters by the same number",
                )
            factors = factors[: len(found)]
        return [_rescaled(name, s, factor) for s, factor in zip(found, factors, strict=True)]

    def _factor(self, eqn: JaxprEqn, note: _Note, leaf: int | None) -> _Factor:
        """What the updates of one parameter are multiplied by; an error if they are no multiple of its mean."""
        if isinstance(note, _Multiple) and leaf in (None, note.leaf):
            return note.factor
        if _is_zero(note):
            return _ZERO
        name, optimizer = eqn.params["statistic"], eqn.params["optimizer"]
        of = "" if leaf is None else f" of {self.parameters[leaf]}"
        raise PegprofError(
            f"{optimizer} takes the statistic {name!r} of the gradients that come in, and what stands before it does "
            f"more to the mean gradient{of} than multiply it by a number: the statistic cannot follow",
            where=source_function(note.eqn) if isinstance(note, _Lost) else "",
            hint=f"put it after {optimizer} in the chain; for weight decay use the argument weight_decay, to clip use "
            "optax.clip_by_global_norm, to skip NaN use optax.apply_if_finite",
        )

    def _cond(self, eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
        """Branches are followed too; what is a multiple in each of them has its factor as one more result."""
        index, operands = values[0], values[1:]
        branches = eqn.params["branches"]

        def run(branch: ClosedJaxpr, plain: Sequence[Any]) -> list[Any]:
            return evaluate(branch, [_Value(x, _note(v)) for x, v in zip(plain, operands, strict=True)], self.equation)

        def notes_of(branch: ClosedJaxpr) -> list[_Note]:
            notes: list[_Note] = []

            def noting(*plain: Any) -> list[Any]:
                results = run(branch, plain)
                notes.extend(map(_note, results))
                return list(map(_plain, results))

            trace(noting, [v.aval for v in eqn.invars[1:]])
            return notes

        by_result = list(zip(*map(notes_of, branches), strict=True))
        multiples = {i: leaf for i, notes in enumerate(by_result) if (leaf := _common_leaf(notes)) is not None}
        same = {i for i in multiples if all(_factor_of(note) == _ONE for note in by_result[i])}
        dtypes = {i: _wide(dtype_of(eqn.outvars[i])) for i in multiples if i not in same}

        def following(branch: ClosedJaxpr) -> Callable[..., Any]:
            def fn(*plain: Any) -> Any:
                results = run(branch, plain)
                factors = {i: _compute(_factor_of(_note(results[i])), dtype) for i, dtype in dtypes.items()}
                return list(map(_plain, results)), factors

            return fn

        which, plain = jnp.asarray(_plain(index)), list(map(_plain, operands))
        made, factors = jax.lax.switch(which, list(map(following, branches)), *plain)

        def note_of(i: int) -> _Note:
            if i in multiples:
                return _Multiple(multiples[i], _ONE if i in same else _number(factors[i], dtypes[i]))
            return _lost(eqn, [*operands, *(_Value(None, note) for note in by_result[i])])

        return [_Value(x, note_of(i)) for i, x in enumerate(made)]


def _rescaled(name: str, statistic: jax.Array, factor: _Factor) -> jax.Array:
    if factor == _ONE:
        return statistic
    if factor == _ZERO:  # no gradient at all, where zero times an infinite statistic would be NaN
        statistic = jnp.zeros_like(statistic)
    scaled = STATISTICS[name].scaled
    assert scaled is not None
    return scaled(statistic, _compute(factor, _wide(statistic.dtype))).astype(statistic.dtype)


def _wide(dtype: Any) -> Any:
    real = jnp.finfo(dtype).dtype if jnp.issubdtype(dtype, jnp.complexfloating) else dtype
    return jnp.promote_types(real, jnp.float32)


def _has_marker(jaxpr: Jaxpr) -> bool:
    return any(eqn.primitive is look_up_p or any(map(_has_marker, sub_jaxprs(eqn))) for eqn in jaxpr.eqns)


def _plain(x: Any) -> Any:
    return x.value if isinstance(x, _Value) else x


def _note(x: Any) -> _Note:
    return x.note if isinstance(x, _Value) else None


def _is_zero(note: _Note) -> bool:
    return isinstance(note, _Uniform) and note.number == _ZERO


def _factor_of(note: _Note) -> _Factor:
    return note.factor if isinstance(note, _Multiple) else _ZERO


def _common_leaf(notes: Sequence[_Note]) -> int | None:
    """The parameter whose mean all are multiples of; zero is a multiple of any."""
    leaves = {note.leaf for note in notes if isinstance(note, _Multiple)}
    fine = all(isinstance(note, _Multiple) or _is_zero(note) for note in notes)
    return leaves.pop() if fine and len(leaves) == 1 else None


def _notes_of(eqn: JaxprEqn, values: Sequence[Any], made: Sequence[Any]) -> list[_Note]:
    """What is known of an equation's results."""
    notes = list(map(_note, values))
    if eqn.primitive is barrier_p:
        return notes
    lost = _lost(eqn, values)
    if len(eqn.outvars) != 1 or not (known(eqn) or eqn.primitive in _SAME):
        return [lost for _ in eqn.outvars]
    numbers = [_one(atom, x) for atom, x in zip(eqn.invars, values, strict=True)]
    return [_multiple(eqn, notes, numbers) or _uniform(eqn, numbers, made[0]) or lost]


def _lost(eqn: JaxprEqn, values: Sequence[Any]) -> _Note:
    notes = list(map(_note, values))
    if any(isinstance(note, _Multiple) for note in notes):
        return _Lost(eqn)
    return next((note for note in notes if isinstance(note, _Lost)), None)


def _at_call(note: _Note, eqn: JaxprEqn) -> _Note:
    """Equations inside jax's own functions have no line of a user; their call has."""
    return _Lost(eqn) if isinstance(note, _Lost) and not source_function(note.eqn) else note


def _one(atom: Atom, x: Any) -> _Number | None:
    """The number that is in every entry of an operand, if there is one."""
    note, dtype = _note(x), dtype_of(atom)
    if isinstance(note, _Uniform):
        return note.number
    return _number(_plain(x), dtype) if shape_of(atom) == () and _is_real(dtype) else None


def _is_real(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.bool_) or (
        jnp.issubdtype(dtype, jnp.number) and not jnp.issubdtype(dtype, jnp.complexfloating)
    )


_SAME = (p.convert_element_type_p, p.copy_p, p.reduce_precision_p, p.sharding_constraint_p)
_SHAPES = (p.broadcast_in_dim_p, p.reshape_p, p.squeeze_p, p.transpose_p)


def _multiple(eqn: JaxprEqn, notes: Sequence[_Note], numbers: Sequence[_Number | None]) -> _Multiple | None:
    """The result as a multiple of a mean gradient, if it is one."""
    leaf = _common_leaf(notes[1:] if eqn.primitive is p.select_n_p else notes)
    first = notes[0] if notes else None
    match eqn.primitive:
        case p.mul_p:
            for note, number in ((notes[0], numbers[1]), (notes[1], numbers[0])):
                if isinstance(note, _Multiple) and number is not None:
                    return _Multiple(note.leaf, _times(note.factor, number))
        case p.div_p if isinstance(first, _Multiple) and numbers[1] is not None:
            return _Multiple(first.leaf, _over(first.factor, numbers[1]))
        case p.neg_p if isinstance(first, _Multiple):
            return _Multiple(first.leaf, _Made(operator.neg, (first.factor,)))
        case p.add_p | p.add_jaxvals_p if leaf is not None:
            return _Multiple(leaf, _Made(operator.add, tuple(map(_factor_of, notes))))
        case p.sub_p if leaf is not None:
            return _Multiple(leaf, _Made(operator.sub, tuple(map(_factor_of, notes))))
        case p.select_n_p if leaf is not None and numbers[0] is not None:
            return _Multiple(leaf, _select(numbers[0], list(map(_factor_of, notes[1:]))))
    unchanged = eqn.primitive in _SAME or (
        eqn.primitive in _SHAPES[:2] and shape_of(eqn.outvars[0]) == shape_of(eqn.invars[0]) and len(notes) == 1
    )
    inexact = jnp.issubdtype(dtype_of(eqn.outvars[0]), jnp.inexact)
    return first if unchanged and inexact and isinstance(first, _Multiple) else None


def _uniform(eqn: JaxprEqn, numbers: Sequence[_Number | None], made: Any) -> _Uniform | None:
    """The result as one number in every entry, if it is that."""
    known, dtype = [number for number in numbers if number is not None], dtype_of(eqn.outvars[0])
    if not known or len(known) < len(numbers) or not _is_real(dtype):
        return None
    if shape_of(eqn.outvars[0]) == ():  # needs no note, but optax copies and converts a factor for each parameter
        if eqn.primitive not in (p.copy_p, p.convert_element_type_p):
            return None
        same = dtype == dtype_of(eqn.invars[0])
        return _Uniform(known[0] if same else _Number((known[0].key, str(dtype)), made))
    if eqn.primitive in _SHAPES and len(known) == 1:
        return _Uniform(known[0])
    if not facts_of(eqn).elementwise:
        return None
    scalars = [jnp.asarray(n.value, dtype_of(atom)) for n, atom in zip(known, eqn.invars, strict=True)]
    return _Uniform(_number(bind(eqn, scalars)[0], dtype))
