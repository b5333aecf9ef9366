"""Program and case -> findings: what differs from a loop over the examples, and which pass changes values.

A case is a way to call ``grad_stats``: a batch size, statistics, microbatches, a backend to plan for, strategies forced
on the sites, an outer ``vmap``. It is drawn from the program's seed, so that the seed says everything.
"""

import collections
import dataclasses
import itertools
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pegprof import value_and_grad_stats
from pegprof.engine.jaxpr import evaluate, start
from pegprof.engine.options import Options
from pegprof.engine.plan import Plan
from pegprof.engine.planner import find_sites, plan_sites
from pegprof.engine.rules import strategies as all_strategies
from pegprof.engine.sites import Cut, InnerLoop
from pegprof.engine.statistics import Statistic, accumulators_of
from pegprof.engine.trace import Trace, trace_example
from tests.engine.cases import ALL_STATISTICS
from tests.fuzz.grammar import MOST_EXAMPLES, Program
from tests.oracles import Truth, assert_stats_agree, loop_stats, quick_jit

PAIR = ("mean", "second_moment")
NOISE = 1e-9
"""A gradient below this part of the largest is what rounding leaves of zero: a bias before a softmax."""

TOLERANCES = {"bfloat16": 0.1, "float16": 2e-2, "float32": 1e-4}
PASSES_RTOL = 1e-10
_FITS_MOST = ("batched", "loop", "direct")  # the others come up seldom, and are drawn more often
_BY_NAME = {stat.name: stat for stat in ALL_STATISTICS}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A way to call ``grad_stats``; the defaults are the plainest."""

    B: int = 3
    stats: tuple[str, ...] = PAIR
    microbatch_size: int | None = None
    backend: str = "cpu"
    forced: bool = False  # strategies drawn at random for every site, and followed by ``plan=``
    outer_vmap: str = ""  # over two members that differ in their params, their batch or both
    has_aux: bool = False
    eager: bool = False  # nothing is compiled as a whole, the loop and the passes neither
    memory_budget: int | None = None
    passes: bool = True  # whether each pass is evaluated as well

    def reset(self, names: Sequence[str]) -> "Case":
        """The same with some options as plain as can be."""
        plain = Case()
        return dataclasses.replace(self, **{name: getattr(plain, name) for name in names})


def draw_case(program: Program) -> Case:
    """The case of a program's seed."""
    rng = np.random.default_rng([program.seed, 1_000])
    B = int(rng.integers(1, MOST_EXAMPLES + 1))
    narrow = bool(program.tags.intersection(TOLERANCES))
    microbatch = [None, None, 1, int(rng.integers(1, B + 2)), int(rng.integers(1, B + 2))]
    return Case(
        B=B,
        stats=PAIR if narrow else _draw_stats(rng, B),
        microbatch_size=microbatch[int(rng.integers(len(microbatch)))],
        backend=str(rng.choice(["cpu", "gpu", "tpu"])),
        forced=bool(rng.uniform() < 0.5),
        outer_vmap=str(rng.choice(["", "params", "batch", "both"], p=[0.8, 0.1, 0.05, 0.05])),
        has_aux=bool(rng.uniform() < 0.15),
        eager=bool(rng.uniform() < 0.01),
        memory_budget=1 if rng.uniform() < 0.05 else None,
        passes=bool(rng.uniform() < 0.6),
    )


def _draw_stats(rng: np.random.Generator, B: int) -> tuple[str, ...]:
    defined = [stat.name for stat in ALL_STATISTICS if stat.minimum_batch <= B]
    match rng.choice(["pair", "all", "norm", "one", "some"], p=[0.3, 0.2, 0.15, 0.2, 0.15]):
        case "pair":
            return PAIR
        case "all":
            return tuple(defined)
        case "norm":
            return ("norm",) if rng.uniform() < 0.5 else ("norm", "norm_by_param")
        case "one":
            return (str(rng.choice(defined)),)
    return tuple(str(name) for name in rng.choice(defined, size=3, replace=False))


class Discarded(Exception):
    """The loop has no answer to compare with."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Findings:
    """What is wrong, by what was checked; and what the plan did."""

    wrong: dict[str, str]
    strategies: collections.Counter[str]


def check(program: Program, case: Case) -> Findings:
    """Hold a program against the loop, as a case calls it; ``Discarded`` if the loop cannot."""
    params, batch = program.params, jax.tree.map(lambda x: x[: case.B], program.batch)
    truth = _loop(program, case, params, batch)
    options = Options(**_options(program, case))
    stats = [_BY_NAME[name] for name in case.stats]
    wrong: dict[str, str] = {}
    strategies: collections.Counter[str] = collections.Counter()

    def attempt(name: str, fn: Any, *args: Any) -> None:
        try:
            fn(*args)
        except AssertionError as error:
            wrong[name] = str(error)
        except Exception:
            wrong[name] = "".join(traceback.format_exc(limit=-6))

    def check_all() -> None:
        trace = trace_example(_loss_of(program, case), (params, batch), options)
        cut = find_sites(trace, accumulators_of(stats))
        attempt("statistics", _check_statistics, program, case, trace, cut, truth, strategies)
        if case.passes:
            attempt("passes", _check_passes, program, case, trace, cut, truth)

    attempt("planning", check_all)
    return Findings(wrong=wrong, strategies=strategies)


def _options(program: Program, case: Case) -> dict[str, Any]:
    how = {"microbatch_size": case.microbatch_size, "backend": case.backend, "memory_budget": case.memory_budget}
    return {"keep_batch_dim": program.keep_batch_dim, "has_aux": case.has_aux, **how}


def _compiler(case: Case) -> Any:
    return (lambda fn: fn) if case.eager else quick_jit


def _loss_of(program: Program, case: Case) -> Any:
    if not case.has_aux:
        return program.loss
    return lambda params, batch: (program.loss(params, batch), {"half": 0.5 * program.loss(params, batch)})


def _loop(program: Program, case: Case, params: Any, batch: Any) -> Truth:
    stats = [_BY_NAME[name] for name in case.stats]
    options = {"keep_batch_dim": program.keep_batch_dim, "has_aux": case.has_aux}
    try:
        truth = loop_stats(_loss_of(program, case), stats, params, batch, **options, jit=not case.eager)
    except Exception as error:
        raise Discarded(f"{type(error).__name__}: {error}") from error
    gradients = jax.tree.leaves(truth.gradients)
    if not (np.isfinite(truth.value) and all(np.all(np.isfinite(g)) for g in gradients)):
        raise Discarded("a gradient is not finite")
    if max((np.max(np.abs(g), initial=0.0) for g in gradients), default=0.0) > 1e6:
        raise Discarded("a gradient is huge")
    return truth


def tolerance(program: Program) -> float:
    """How far two right answers may differ, relative to the largest entry."""
    return max([1e-8, *(TOLERANCES[tag] for tag in program.tags if tag in TOLERANCES)])


# ---- the statistics ----------------------------------------------------------------------------------------------


def _check_statistics(
    program: Program, case: Case, trace: Trace, cut: Cut, truth: Truth, strategies: collections.Counter[str]
) -> None:
    loss, stats = _loss_of(program, case), [_BY_NAME[name] for name in case.stats]
    plan = plan_sites(trace, cut, stats)
    if case.forced:
        plan = _with_other_strategies(program, plan, cut, stats)
    strategies.update(row.strategy for row in plan.rows)
    fn = value_and_grad_stats(loss, stats, **_options(program, case), plan=plan if case.forced else None)
    compiled = _compiler(case)
    batch = jax.tree.map(lambda x: x[: case.B], program.batch)
    if not case.outer_vmap:
        _compare(compiled(fn)(program.params, batch), truth, case, program)
        return
    other = jax.tree.map(lambda x: 0.7 * x + 0.05, program.params), jax.tree.map(lambda x: x[-case.B :], program.batch)
    axes = (None if case.outer_vmap == "batch" else 0, None if case.outer_vmap == "params" else 0)
    first = (program.params, batch)
    second = tuple(a if axis is None else b for a, b, axis in zip(first, other, axes, strict=True))
    members = (first, second)
    both = zip(first, second, axes, strict=True)
    args = [a if axis is None else jax.tree.map(_stack, a, b) for a, b, axis in both]
    found = jax.device_get(compiled(jax.vmap(fn, in_axes=axes))(*args))
    for i, member in enumerate(members):
        expected = truth if i == 0 else _loop(program, case, *member)
        _compare(jax.tree.map(lambda x, i=i: x[i], found), expected, case, program)


def _stack(a: Any, b: Any) -> Any:
    return np.stack([a, b]) if isinstance(a, np.ndarray) else jnp.stack([a, b])  # keys are jax's own


def _with_other_strategies(program: Program, plan: Plan, cut: Cut, stats: Sequence[Statistic]) -> Plan:
    """The plan with a random one of the strategies that fit each site, and random chunks."""
    rng = np.random.default_rng([program.seed, 1_001])
    rows = {row.parameter: row for row in plan.rows}
    for site in cut.sites():
        fitting = [s.name for s in all_strategies().values() if s.covers(site, accumulators_of(stats))]
        chances = np.array([1.0 if name in _FITS_MOST else 4.0 for name in fitting])
        strategy = str(rng.choice(fitting, p=chances / chances.sum()))
        chunk = int(rng.integers(1, plan.microbatch_size + 1))
        for name in site.names:
            rows[name] = dataclasses.replace(rows[name], strategy=strategy, chunk=chunk)
    return dataclasses.replace(plan, rows=tuple(rows[row.parameter] for row in plan.rows))


def _compare(found: Any, expected: Truth, case: Case, program: Program) -> None:
    value, stats = found
    rtol = tolerance(program)
    if case.has_aux:
        value, aux = value
        np.testing.assert_allclose(aux["half"], expected.aux["half"], rtol=rtol, atol=rtol, err_msg="aux")
    np.testing.assert_allclose(value, expected.value, rtol=rtol, atol=rtol, err_msg="value")
    assert_stats_agree(*_without_noise(stats, expected), rtol=rtol)


_DEGREES = {"mean": 1, "abs_mean": 1, "norm_by_param": 1, "second_moment": 2, "variance": 2, "fourth_moment": 4}


def _without_noise(stats: Any, expected: Truth) -> tuple[Any, Truth]:
    """The statistics of the parameters whose gradients are more than rounding.

    Of a gradient that is nothing beside the others, zero or not, the sign means nothing. It must be nothing here too.
    """
    sizes = {name: np.max(np.abs(g), initial=0.0) for name, g in expected.gradients.items()}
    floor = NOISE * max(sizes.values(), default=0.0)
    noise = {name for name, size in sizes.items() if size < floor}
    for stat, name in itertools.product(_DEGREES.keys() & stats.keys(), noise):
        size = np.max(np.abs(stats[stat][name]), initial=0.0) ** (1 / _DEGREES[stat])
        assert size < 100 * floor, f"{stat} of {name} is {size:.2g}, expected nothing"

    def kept(tree: Any) -> Any:
        return {name: x for name, x in tree.items() if name not in noise} if isinstance(tree, dict) else tree

    left = Truth({name: kept(tree) for name, tree in expected.items()})
    left.gradients, left.value, left.aux = kept(expected.gradients), expected.value, expected.aux
    return {name: kept(tree) for name, tree in stats.items()}, left


# ---- the passes --------------------------------------------------------------------------------------------------


def _check_passes(program: Program, case: Case, trace: Trace, cut: Cut, truth: Truth) -> None:
    """Every pass, evaluated on the first example: the same gradients as before it, which are the loop's."""
    labels: list[str] = []

    def run(params: Any, batch: Any) -> Any:
        inputs = trace.inputs((params, batch))
        first = [x[0] if own else x for x, own in zip(inputs, trace.depends, strict=True)]
        found = list(tails_of(cut, first))
        labels[:] = [label for label, _, _ in found]
        _, _, squeezed = trace.split_outputs(evaluate(trace.closed, first))
        _, _, hoisted = trace.split_outputs(evaluate(cut.closed, first))
        return squeezed, hoisted, [(before, after) for _, before, after in found]

    batch = jax.tree.map(lambda x: x[: case.B], program.batch)
    squeezed, hoisted, tails = _compiler(case)(run)(program.params, batch)
    names = sorted(program.params)
    gradients = {name: truth.gradients[name][0] for name in names}
    rtol = max(PASSES_RTOL, 0.0 if tolerance(program) == 1e-8 else tolerance(program))
    floor = rtol * max((np.max(np.abs(g), initial=0.0) for g in gradients.values()), default=0.0)
    wrong = []
    for label, values in (("squeeze", squeezed), ("hoist", hoisted)):
        wrong += [
            f"{label} changes the gradient of {name}"
            for name, value in zip(names, values, strict=True)
            if not _same(gradients[name], value, rtol, floor)
        ]
    for label, (before, after) in zip(labels, tails, strict=True):
        if not all(_same(a, b, rtol, floor) for a, b in zip(before, after, strict=True)):
            wrong.append(label)
    assert not wrong, "\n".join(wrong)


def _same(before: Any, after: Any, rtol: float, atol: float) -> bool:
    before, after = np.asarray(before, np.float64), np.asarray(after, np.float64)
    largest = np.max(np.abs(before), initial=0.0)
    return before.shape == after.shape and bool(np.all(np.abs(before - after) <= rtol * largest + atol))


def tails_of(cut: Cut, inputs: Sequence[Any]) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """For each site what the program gives, and what its tail gives: whole, with operands recomputed, by structure."""
    env = start(cut.closed, inputs)
    env.run(cut.closed.jaxpr.eqns)
    for site in cut.own_sites:
        gives, which = env.read(site.outputs), ", ".join(site.names)
        values = env.read(site.tail.inputs)
        yield f"the tail of {which} is cut wrong", gives, site.tail.run(*values)
        recomputed = site.recomputing.run(*env.read(site.recomputing.inputs))
        yield f"recompute changes the gradient of {which}", gives, recomputed
        full = [structure.full(*values) for structure in site.structures]
        yield f"a structure of {which} gives another gradient", gives, full
    for step in cut.body:
        if isinstance(step, InnerLoop):
            consts, carry, xs = step.loop.split_inputs(env.read(step.loop.eqn.invars))
            yield from tails_of(step.cut, [*consts, *carry, *(x[0] for x in xs)])
