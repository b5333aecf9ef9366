"""segment: an embedding's lookup touches T of V rows, so phi is taken on those rows alone.

The gradient of an example is g[v] = Σ_t [id_t = v] u_t: zero but for at most T rows. Add up equal rows within each
example, then, with n_v the number of examples that touch row v,

    mean of phi(g)[v]  = (1/B) Σ_(i touches v) phi(g_i[v]) + (1 - n_v/B) phi(0)
    mean of (g - m)²   = (1/B) Σ_(i touches v) (g_i[v] - m[v])² + (1 - n_v/B) m[v]²
    ‖g_i‖²             = Σ of the squares of its rows:

T·D an example in place of V·D, and one V×D array for each result, like the plain gradient's.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pegprof.engine.costs import Cost, frontier_bytes, gradient_bytes
from pegprof.engine.jaxpr import Atom, Env, JaxprEqn, Var
from pegprof.engine.quantities import Values, of_stack, widen
from pegprof.engine.statistics import Centred, Moment, Quantity, SquareNorm
from pegprof.engine.strategies.base import Frontier, Strategy, bind_wide
from pegprof.engine.strategies.lookups import (
    Table,
    Term,
    add_up_equal,
    ids_of,
    leading_to,
    move,
    same_steps,
    terms_of,
    updates_of,
)
from pegprof.engine.tails import Tail, size


def _fits(tail: Tail, quantities: Sequence[Quantity]) -> bool:
    """Each gradient is a sum of lookups in one table, or else no larger than what those lookups add."""
    lookups = _lookups(tail)
    rows = sum(size(lookup.invars[2]) for lookup in lookups)
    return (
        bool(lookups)
        and all(_are_alike(terms) or size(v) <= rows for v, terms in _sums(tail))
        and not any(eqn in lookups for eqn in leading_to(tail, _taken(tail)))
    )


def _sums(tail: Tail) -> list[tuple[Var, list[Term]]]:
    return [(v, terms_of(tail, v)) for v in tail.outputs]


def _are_alike(terms: Sequence[Term]) -> bool:
    """Whether all terms are lookups in tables of one shape, whose entries move the same way."""
    first = terms[0]
    return all(
        t.lookup and first.lookup and Table.of(t.lookup) == Table.of(first.lookup) and same_steps(t.chain, first.chain)
        for t in terms
    )


def _lookups(tail: Tail) -> list[JaxprEqn]:
    return [t.lookup for _, terms in _sums(tail) if _are_alike(terms) for t in terms if t.lookup]


def _taken(tail: Tail) -> list[Atom]:
    """What has to be known of every example: the lookups' indices and updates, and the gradients that are none."""
    others = [v for v, terms in _sums(tail) if not _are_alike(terms)]
    return [v for lookup in _lookups(tail) for v in lookup.invars[1:]] + others


def _run(tail: Tail, quantities: Sequence[Quantity], frontier: Frontier, chunk: int) -> list[Values]:
    taken = _taken(tail)

    def of_example(*inputs: Any) -> list[Any]:
        env = Env()
        env.write(tail.inputs, inputs)
        env.run(leading_to(tail, taken), bind_wide)
        return [jnp.asarray(x) for x in env.read(taken)]

    axes = [0 if b else None for b in frontier.batched]
    values = jax.vmap(of_example, in_axes=axes, axis_size=frontier.B)(*frontier.values)
    known = {id(atom): x_Bx for atom, x_Bx in zip(taken, values, strict=True)}
    return [
        _of_lookups(terms, quantities, known) if _are_alike(terms) else of_stack(quantities, known[id(v)])
        for v, terms in _sums(tail)
    ]


def _of_lookups(terms: Sequence[Term], quantities: Sequence[Quantity], known: Mapping[int, jax.Array]) -> Values:
    lookups = [t.lookup for t in terms if t.lookup]
    table = Table.of(lookups[0])
    ids_BxT = jnp.concatenate([ids_of(e, known[id(e.invars[1])], table) for e in lookups], axis=1)
    updates_BxTxD = jnp.concatenate([updates_of(e, widen(known[id(e.invars[2])]), table) for e in lookups], axis=1)
    rows = _Rows(*add_up_equal(ids_BxT, updates_BxTxD, table.V), table=table)

    def of(quantity: Quantity) -> jax.Array:
        match quantity:
            case Moment():
                return move(terms[0].chain, table.unflatten(rows.mean_of(quantity)))
            case Centred():
                return move(terms[0].chain, table.unflatten(rows.centred()))
            case SquareNorm():
                return rows.square_norms()

    return {q.name: of(q) for q in quantities}


class _Rows:
    """The rows of B examples' gradients that are not zero, and quantities of them, V×D."""

    def __init__(self, ids_BxT: jax.Array, rows_BxTxD: jax.Array, *, table: Table):
        self.B, self.table = len(ids_BxT), table
        self.ids_N, self.rows_BxTxD = ids_BxT.ravel(), rows_BxTxD
        self.rows_NxD = rows_BxTxD.reshape(-1, table.D)
        self.results = 0

    def mean_of(self, moment: Moment) -> jax.Array:
        touched_VxD = self._mean(moment.phi(self.rows_NxD))
        at_zero = _at_zero(moment, self.rows_NxD.dtype)
        return touched_VxD if at_zero is None else touched_VxD + self._rest(at_zero)

    def centred(self) -> jax.Array:
        mean_VxD = self._mean(self.rows_NxD)
        apart_NxD = self.rows_NxD - jnp.take(mean_VxD, self.ids_N, axis=0, mode="clip")
        return self._mean(jnp.square(apart_NxD)) + self._rest(jnp.square(mean_VxD))

    def square_norms(self) -> jax.Array:
        return jnp.sum(jnp.square(self.rows_BxTxD), axis=(1, 2))

    def _mean(self, x_NxD: jax.Array) -> jax.Array:
        return self._zeros(x_NxD.dtype).at[self.ids_N].add(x_NxD / self.B, mode="drop")

    def _rest(self, x: jax.Array) -> jax.Array:
        """The part in the mean of the examples that do not touch a row, where all have the same value."""
        touching_V = jnp.zeros(self.table.V, jnp.int32).at[self.ids_N].add(1, mode="drop")
        share_Vx1 = ((self.B - touching_V).astype(x.dtype) / self.B)[:, None]
        return jnp.where(share_Vx1 > 0, share_Vx1 * x, 0)  # x may be infinite: log|g| at zero

    def _zeros(self, dtype: Any) -> jax.Array:
        """Zeros V×D that XLA cannot know to be zeros: of those it makes one array, and a copy for each result.

        An id is never negative. With a copy each, two moments took six times as long on CPU.
        """
        self.results += 1
        zero = jnp.minimum(self.ids_N[self.results % len(self.ids_N)], 0).astype(dtype)
        return jnp.broadcast_to(zero, (self.table.V, self.table.D))


def _at_zero(moment: Moment, dtype: Any) -> jax.Array | None:
    """phi(0), as [1, 1]; None if it is known to be zero."""
    zero = np.zeros((1, 1), dtype)
    try:
        with jax.ensure_compile_time_eval():
            if bool(moment.phi(jnp.asarray(zero)) == 0):
                return None
    except TypeError:  # it depends on what is being traced
        pass
    return moment.phi(jnp.asarray(zero))


def _cost(tail: Tail, quantities: Sequence[Quantity], B: int, chunk: int) -> Cost:
    """The rows are added up, sorted by id, and added to each result; a variance passes over them once more."""
    lookups = _lookups(tail)
    T = sum(size(lookup.invars[1]) for lookup in lookups)
    rows = sum(size(lookup.invars[2]) for lookup in lookups) * 4
    passes = sum(2 if isinstance(q, Centred) else 1 for q in quantities)
    one = Cost(other_flops=_SORT * T * math.log2(T + 1), bytes_moved=frontier_bytes(tail) + 3 * rows * (1 + passes))
    return one * B + Cost(bytes_moved=gradient_bytes(tail) * passes, bytes_held=2 * B * rows)


_SORT = 50.0
"""What comparing two ids in a sort costs, in elementwise operations; measured on CPU."""

SEGMENT = Strategy(
    name="segment",
    why="a lookup: only the rows that an example touches",
    fits=_fits,
    run=_run,
    cost=_cost,
)
