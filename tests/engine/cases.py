"""What the tests of the engine share: the statistics to ask for, and the truth about each program, computed once."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pegprof.engine.costs import Cost
from pegprof.engine.jaxpr import ClosedJaxpr, evaluate
from pegprof.engine.rules import RULES
from pegprof.engine.statistics import STATISTICS, Statistic
from tests.oracles import Truth, loop_stats, quick_jit
from tests.programs import PROGRAMS, Program

KEY_SEED = 0

ALL_STATISTICS: tuple[Statistic, ...] = (
    *STATISTICS.values(),
    Statistic.elementwise(jnp.tanh, name="tanh_mean"),
    Statistic.elementwise(lambda g: g**3, name="third_moment", factor=lambda x: x**3),
)


def defined_for(B: int) -> tuple[Statistic, ...]:
    """The statistics that a batch of B examples has."""
    return tuple(stat for stat in ALL_STATISTICS if stat.minimum_batch <= B)


def tolerance(program: Program) -> float:
    """How far two right answers may differ, relative to the largest entry: from the dtype that is computed in."""
    if "bf16" in program.tags:
        return 8 * float(jnp.finfo(jnp.bfloat16).eps)
    if "f32" in program.tags or not jax.config.jax_enable_x64:
        return 1e-4
    return 1e-8


def case(name: str, B: int) -> tuple[Any, Any, Any]:
    """The loss, parameters and batch of a program, made once."""
    return _case(name, B, bool(jax.config.jax_enable_x64))


def truth(name: str, B: int, only: Sequence[str] = ()) -> Truth:
    """The statistics of a program by the slow oracle, computed once."""
    found = _truth(name, B, bool(jax.config.jax_enable_x64))
    return found.only(only) if only else found


@functools.cache
def _case(name: str, B: int, _x64: bool) -> tuple[Any, Any, Any]:
    return PROGRAMS[name].make(jax.random.key(KEY_SEED), B)


@functools.cache
def _truth(name: str, B: int, _x64: bool) -> Truth:
    loss, params, batch = case(name, B)
    return loop_stats(loss, defined_for(B), params, batch, keep_batch_dim=PROGRAMS[name].keep_batch_dim)


def compute(closed: ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
    """What a Jaxpr gives: compiled as a whole, since equation by equation each one would be compiled."""
    return quick_jit(lambda *args: evaluate(closed, args))(*inputs)


def only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Leave no rules but these, and make them free: they are taken wherever they fit, the default fold elsewhere."""
    for name in set(RULES).difference(names):
        monkeypatch.delitem(RULES, name)
    for name in names:
        monkeypatch.setitem(RULES, name, dataclasses.replace(RULES[name], cost=lambda *_: Cost()))


def assert_program_is_worth_testing(program: Program, gradients: Any) -> None:
    """Gradients that are finite, not zero by accident, and no rounding noise, whose sign would mean nothing."""
    for path, g in jax.tree_util.tree_leaves_with_path(gradients):
        where = f"{program.name}{jax.tree_util.keystr(path)}"
        assert np.all(np.isfinite(g)), f"{where}: a gradient is not finite"
        assert np.any(g) or "zero" in program.tags, (
            f"{where}: no gradient at all; tag the program `zero` if that is meant"
        )
        noise = (g != 0) & (np.abs(g) < 1e-9 * np.max(np.abs(g), initial=0.0))
        assert not np.any(noise), f"{where}: a gradient that is nothing but rounding"
