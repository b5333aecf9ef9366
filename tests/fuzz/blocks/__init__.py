"""The blocks of the grammar, one file a family; importing this package registers them."""

from tests.fuzz.blocks import control, convolutions, dense, lookups, loops, others, shapes, weights

__all__ = ["control", "convolutions", "dense", "lookups", "loops", "others", "shapes", "weights"]
