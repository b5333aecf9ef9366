"""loop: one example's gradient at a time, all quantities from the same product."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pegprof.engine.jaxpr import primitives as p
from pegprof.engine.quantities import Running, Values
from pegprof.engine.statistics import Quantity
from pegprof.engine.strategies.base import Frontier, Strategy, run_wide
from pegprof.engine.tails import LINEAR, Tail

_KNOWN = LINEAR | {p.jit_p, p.scatter_add_p, p.dynamic_update_slice_p, p.select_n_p}


def _fits(tail: Tail, quantities: Sequence[Quantity]) -> bool:
    return bool(tail.equations) and all(eqn.primitive in _KNOWN for eqn in tail.equations)


def _run(tail: Tail, quantities: Sequence[Quantity], frontier: Frontier, chunk: int) -> list[Values]:
    running = Running(quantities)

    def gradients_of(example: list[Any]) -> list[Any]:
        return run_wide(tail, frontier.with_examples(example))

    def step(state: tuple[Any, list[Values]], example: list[Any]) -> tuple[Any, Any]:
        n, totals = state
        added = [running.add(total, g, n) for total, g in zip(totals, gradients_of(example), strict=True)]
        return (n + 1, [total for total, _ in added]), [own for _, own in added]

    examples = frontier.examples()
    shapes = jax.eval_shape(gradients_of, [x[0] for x in examples])
    start = (jnp.ones((), jnp.float32), [running.start(s) for s in shapes])
    (_, totals), own = jax.lax.scan(step, start, examples)
    return [{**running.finish(total, frontier.B), **norms} for total, norms in zip(totals, own, strict=True)]


LOOP = Strategy(
    name="loop",
    why="one product an example, every statistic from it",
    fits=_fits,
    run=_run,
    gradients_held=lambda B, chunk: 1,
    recomputes=True,
)
