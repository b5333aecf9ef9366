"""batched: products with a batch axis, a chunk of examples at a time. Right for accelerators, slow on a CPU."""

from pegprof.engine.strategies import loop, materialise
from pegprof.engine.strategies.base import Strategy

BATCHED = Strategy(
    name="batched",
    why="products of a chunk of examples at once",
    fits=loop.fits,
    run=materialise.run,
    cost=materialise.cost,
    recomputes=True,
)
