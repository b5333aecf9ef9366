"""pegprof: what do per-example gradient statistics cost, compared with the plain mini-batch gradient?

The public names are loaded on first use, so that ``import pegprof`` costs neither jax nor pandas.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pegprof import optimizers as optimizers
    from pegprof.engine.accumulators import Accumulator as Accumulator
    from pegprof.engine.accumulators import Moment as Moment
    from pegprof.engine.accumulators import PerExample as PerExample
    from pegprof.engine.kernels.switch import kernels as kernels
    from pegprof.engine.planner import make_plan as make_plan
    from pegprof.engine.run import accumulate_stats as accumulate_stats
    from pegprof.engine.run import grad_stats as grad_stats
    from pegprof.engine.run import value_and_grad_stats as value_and_grad_stats
    from pegprof.engine.statistics import Statistic as Statistic
    from pegprof.errors import PegprofError as PegprofError
    from pegprof.measure import profile as profile
    from pegprof.models.adapters import from_flax as from_flax
    from pegprof.models.adapters import from_nnx as from_nnx
    from pegprof.models.check_examples import check_examples as check_examples
    from pegprof.models.problem import Problem as Problem
    from pegprof.optimizers.step import train_step as train_step
    from pegprof.result.result import Result as Result

__version__ = "0.1.0"

_HOME_OF = {
    "grad_stats": "pegprof.engine.run",
    "accumulate_stats": "pegprof.engine.run",
    "value_and_grad_stats": "pegprof.engine.run",
    "make_plan": "pegprof.engine.planner",
    "kernels": "pegprof.engine.kernels.switch",
    "check_examples": "pegprof.models.check_examples",
    "Statistic": "pegprof.engine.statistics",
    "Accumulator": "pegprof.engine.accumulators",
    "PerExample": "pegprof.engine.accumulators",
    "Moment": "pegprof.engine.accumulators",
    "train_step": "pegprof.optimizers.step",
    "PegprofError": "pegprof.errors",
    "Problem": "pegprof.models.problem",
    "from_flax": "pegprof.models.adapters",
    "from_nnx": "pegprof.models.adapters",
    "profile": "pegprof.measure",
    "Result": "pegprof.result.result",
}
_SUBPACKAGES = ("optimizers",)

__all__ = [*_HOME_OF, *_SUBPACKAGES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"pegprof.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'pegprof' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF, *_SUBPACKAGES})
