"""The kernels of a chip, by its backend. Loaded on first use: Pallas takes a second to import."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

from pegprof.targets.chips import Chip


@dataclasses.dataclass(frozen=True)
class Backend:
    """What the modules of a backend offer; see ``tpu.py`` and ``tpu_gram.py``."""

    outer: Any
    gram: Any

    @property
    def choose_tile(self) -> Callable[..., Any]:
        return self.outer.choose_tile

    @property
    def fold_outer(self) -> Callable[..., Any]:
        return self.outer.fold_outer

    @property
    def outer_cost(self) -> Callable[..., Any]:
        return self.outer.outer_cost

    @property
    def square_norms(self) -> Callable[..., Any]:
        return self.gram.square_norms

    @property
    def gram_cost(self) -> Callable[..., Any]:
        return self.gram.gram_cost


def backend_of(chip: Chip) -> Backend:
    """The kernels for a chip."""
    outer, gram = (importlib.import_module(f"pegprof.engine.kernels.{chip.backend}{part}") for part in ("", "_gram"))
    return Backend(outer, gram)
