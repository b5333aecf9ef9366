"""segment: an embedding's lookup touches T of V rows, so phi is taken on those rows alone.

The gradient of an example is g[v] = Σ_t [id_t = v] u_t: zero but for at most T rows. Add up equal rows within each
example, then, with n_v the number of examples that touch row v,

    mean of phi(g)[v]  = (1/B) Σ_(i touches v) phi(g_i[v]) + (1 - n_v/B) phi(0)
    mean of (g - m)²   = (1/B) Σ_(i touches v) (g_i[v] - m[v])² + (1 - n_v/B) m[v]²
    ‖g_i‖²             = Σ of the squares of its rows:

T·D an example in place of V·D, and one V×D array for each result, like the plain gradient's.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pegprof.engine.accumulators import Accumulator, Centred, Moment, Spread, SquareNorm
from pegprof.engine.costs import Cost, frontier_bytes, gradient_bytes
from pegprof.engine.dtypes import widen
from pegprof.engine.jaxpr import Atom, JaxprEqn, outside_trace, size_of
from pegprof.engine.rules.base import Rule
from pegprof.engine.sites import Site
from pegprof.engine.stages import Accumulators, Frontier, Summaries
from pegprof.engine.structures import Rows, permute
from pegprof.engine.structures.lookups import Table, add_up_equal, ids_of, updates_of
from pegprof.engine.tails import leading_to


def _fits(site: Site, accumulators: Accumulators) -> bool:
    """Each gradient is rows of one table, or else no larger than what those rows are."""
    lookups = _lookups(site)
    rows = sum(size_of(lookup.invars[2]) for lookup in lookups)
    pairs = zip(site.structures, site.tail.outputs, strict=True)
    return all(isinstance(s, Rows) or size_of(v) <= rows for s, v in pairs) and not any(
        eqn in lookups for eqn in leading_to(site.tail.equations, _taken(site))
    )


def _lookups(site: Site) -> list[JaxprEqn]:
    return [eqn for s in site.structures if isinstance(s, Rows) for eqn in s.lookups]


def _taken(site: Site) -> list[Atom]:
    """What has to be known of every example: the lookups' indices and updates, and the gradients that are no rows."""
    pairs = zip(site.structures, site.tail.outputs, strict=True)
    return [v for eqn in _lookups(site) for v in eqn.invars[1:]] + [v for s, v in pairs if not isinstance(s, Rows)]


def _run(site: Site, accumulators: Accumulators, frontier: Frontier, chunk: int) -> Summaries:
    taken = _taken(site)
    values = {id(atom): x_Bx for atom, x_Bx in zip(taken, frontier.values_of(taken), strict=True)}
    return [
        _of_rows(s, accumulators, values)
        if isinstance(s, Rows)
        else [a.of_stack(widen(values[id(v)])) for a in accumulators]
        for s, v in zip(site.structures, site.tail.outputs, strict=True)
    ]


def _of_rows(structure: Rows, accumulators: Accumulators, values: Mapping[int, jax.Array]) -> list[Any]:
    table, lookups = structure.table, structure.lookups
    ids_BxT = jnp.concatenate([ids_of(e, values[id(e.invars[1])], table) for e in lookups], axis=1)
    updates_BxTxD = jnp.concatenate([updates_of(e, widen(values[id(e.invars[2])]), table) for e in lookups], axis=1)
    rows = _Rows(*add_up_equal(ids_BxT, updates_BxTxD, table.V), table=table)

    def in_place(x_VxD: jax.Array) -> jax.Array:
        return permute(structure.steps, table.unflatten(x_VxD))

    def summary_of(accumulator: Accumulator) -> Any:
        match accumulator:
            case Moment():
                return in_place(rows.mean_of(accumulator))
            case Centred():
                return Spread(*map(in_place, rows.centred()))
            case SquareNorm():
                return rows.square_norms()
        raise TypeError(accumulator)

    return [summary_of(a) for a in accumulators]


class _Rows:
    """The rows of B examples' gradients that are not zero, and summaries of them, V×D."""

    def __init__(self, ids_BxT: jax.Array, rows_BxTxD: jax.Array, *, table: Table):
        self.B, self.table = len(ids_BxT), table
        self.ids_N, self.rows_BxTxD = ids_BxT.ravel(), rows_BxTxD
        self.rows_NxD = rows_BxTxD.reshape(-1, table.D)
        self.results = 0

    def mean_of(self, moment: Moment) -> jax.Array:
        touched_VxD = self._mean(moment.phi(self.rows_NxD))
        of_zero = at_zero(moment, self.rows_NxD.dtype)
        return touched_VxD if of_zero is None else touched_VxD + self._rest(of_zero)

    def centred(self) -> tuple[jax.Array, jax.Array]:
        """The mean, and the mean of the squared distances from it."""
        mean_VxD = self._mean(self.rows_NxD)
        apart_NxD = self.rows_NxD - jnp.take(mean_VxD, self.ids_N, axis=0, mode="clip")
        return mean_VxD, self._mean(jnp.square(apart_NxD)) + self._rest(jnp.square(mean_VxD))

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


def at_zero(moment: Moment, dtype: Any) -> jax.Array | None:
    """phi(0), as [1, 1]; None if it is known to be zero."""
    zero = np.zeros((1, 1), dtype)
    try:
        if outside_trace(lambda: bool(moment.phi(jnp.asarray(zero)) == 0)):
            return None
    except TypeError:  # it depends on what is being traced
        pass
    return moment.phi(jnp.asarray(zero))


def _cost(site: Site, accumulators: Accumulators, B: int, chunk: int) -> Cost:
    """The rows are added up, sorted by id, and added to each result; a variance passes over them three times."""
    lookups = _lookups(site)
    T = sum(size_of(lookup.invars[1]) for lookup in lookups)
    rows = sum(size_of(lookup.invars[2]) for lookup in lookups) * 4
    passes = sum(3 if isinstance(a, Centred) else 1 for a in accumulators)
    moved = frontier_bytes(site.tail) + 3 * rows * (1 + passes)
    one = Cost(other_flops=_SORT * T * math.log2(T + 1), bytes_moved=moved)
    return one * B + Cost(bytes_moved=gradient_bytes(site.tail) * passes, bytes_held=2 * B * rows)


_SORT = 50.0  # what comparing two ids in a sort costs, in elementwise operations; measured on CPU

SEGMENT = Rule(
    name="segment",
    why="a lookup: only the rows that an example touches",
    structure=Rows,
    accumulators=(Moment, Centred, SquareNorm),
    fits=_fits,
    run=_run,
    cost=_cost,
)
