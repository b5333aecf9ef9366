"""Why a loss does not give each example the gradient that the batch has: the likely causes of what ``check.py`` finds.

In: the loss as a program, for the batch and for one example. Out: a cause in words, with the user's line where one is
known. The two programs come from the same code, so that their equations pair up; where the shapes of a pair differ in
what goes in but not in what comes out, the batch is reduced there.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pegprof.engine.dtypes import is_real
from pegprof.engine.facts import FACTS, UNKNOWN
from pegprof.engine.jaxpr import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    dtype_of,
    shape_of,
    source_line,
    start,
    variables,
)
from pegprof.engine.jaxpr import primitives as p
from pegprof.engine.options import Options
from pegprof.engine.passes.flatten import flatten
from pegprof.engine.tails import Loop, example_dependent


def explain_difference(
    whole: ClosedJaxpr, one: ClosedJaxpr, args: Sequence[Any], options: Options, *, is_sum: bool
) -> str:
    """The first of the usual suspects that is found in the program."""
    if is_sum:
        return "the loss is a sum over the examples, not their mean"
    if eqn := _shared_noise(whole, one, _leaves_of(args, options.batch)):
        return (
            f"noise is drawn for the whole batch from one random key{_at(eqn)}; "
            "give each example a key, or name the key's argument with prng_argnum"
        )
    of_batch = example_dependent(whole.jaxpr, _leaves_of(args, options.batch))
    of_params = example_dependent(whole.jaxpr, _leaves_of(args, options.params))
    for eqn in whole.jaxpr.eqns:
        if _divides_by_a_count(eqn, of_batch, of_params):
            return (
                f"the loss is divided by a count over the whole batch{_at(eqn)}; "
                "use a denominator that is the same for every example"
            )
    own = "per-example statistics are those of examples on their own"
    if eqn := _statistic_over_batch(whole, one):
        return f"the examples interact: a mean, variance or the like is taken over the batch{_at(eqn)}; {own}"
    return f"the examples interact: something like BatchNorm or a contrastive loss looks across the batch; {own}"


def draws_from(program: ClosedJaxpr, args: Sequence[Any], argnum: int) -> bool:
    """Whether noise depends on an argument, which is a key."""
    return any(reached and _draws(eqn) for eqn, reached in _equations(program.jaxpr, _leaves_of(args, [argnum])))


def find_nonfinite(fun: Callable[..., Any], calls: Sequence[Sequence[Any]]) -> str:
    """Where the NaN in the results of the first call that has one comes from, or else an infinity; "" if unknown."""
    return next((where for args in calls if (where := _nonfinite_origin(fun, args))), "")


def _nonfinite_origin(fun: Callable[..., Any], args: Sequence[Any]) -> str:
    """Walks back from a result that is NaN, through operands that are, to a step of which none is."""
    closed = flatten(jax.make_jaxpr(fun)(*args))
    jaxpr = closed.jaxpr
    values = [*jaxpr.constvars, *jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]
    values = [v for v in values if is_real(dtype_of(v))]

    @jax.jit
    def look(*inputs: Any) -> tuple[Any, Any]:
        env = start(closed, inputs)
        env.run(jaxpr.eqns)
        found = env.read(values)
        return jnp.stack([jnp.isnan(x).any() for x in found]), jnp.stack([jnp.isinf(x).any() for x in found])

    nan, inf = ({v for v, flag in zip(values, flags.tolist(), strict=True) if flag} for flags in look(*_leaves(args)))
    results = variables(jaxpr.outvars)
    bad = nan if nan.intersection(results) else inf
    at = next((v for v in results if v in bad), None)
    made_by = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    while at in made_by:
        eqn = made_by[at]
        before = next((v for v in variables(eqn.invars) if v in bad), None)
        if before is None:
            return _at(eqn)
        at = before
    if at is None:
        return ""
    names = dict(zip(jaxpr.invars, _names_of_leaves(args), strict=True))
    return f" ({names.get(at, 'a constant in the loss')})"


def _leaves(args: Sequence[Any]) -> list[Any]:
    return jax.tree.leaves(list(args))


def _names_of_leaves(args: Sequence[Any]) -> list[str]:
    return [
        f"argument {argnum}{jax.tree_util.keystr(path)}"
        for argnum, arg in enumerate(args)
        for path, _ in jax.tree_util.tree_flatten_with_path(arg)[0]
    ]


def _leaves_of(args: Sequence[Any], argnums: Sequence[int]) -> list[bool]:
    """Of each input of a program: whether it belongs to some arguments."""
    return [argnum in argnums for argnum, arg in enumerate(args) for _ in jax.tree.leaves(arg)]


def _at(eqn: JaxprEqn) -> str:
    line = source_line(eqn)
    return f" ({line})" if line else ""


def _equations(jaxpr: Jaxpr, depends: Sequence[bool]) -> Iterator[tuple[JaxprEqn, bool]]:
    """The equations, also those in loops, each with whether it depends on some inputs."""
    found = example_dependent(jaxpr, depends)
    for eqn in jaxpr.eqns:
        yield eqn, any(v in found for v in variables(eqn.invars))
        if eqn.primitive is p.scan_p:
            loop = Loop.of(eqn, found)
            yield from _equations(loop.body.jaxpr, loop.depends)


def _draws(eqn: JaxprEqn) -> bool:
    return FACTS.get(eqn.primitive, UNKNOWN).random


def _shared_noise(whole: ClosedJaxpr, one: ClosedJaxpr, of_batch: Sequence[bool]) -> JaxprEqn | None:
    """A step that draws numbers from a key that is not of the batch, more of them for a batch than for an example."""
    drawn = [(eqn, depends) for eqn, depends in _equations(whole.jaxpr, of_batch) if _draws(eqn)]
    alone = [eqn for eqn, _ in _equations(one.jaxpr, of_batch) if _draws(eqn)]
    for i, (eqn, depends) in enumerate(drawn):
        same = len(alone) == len(drawn) and _shapes(alone[i].outvars) == _shapes(eqn.outvars)
        if not depends and not same:
            return eqn
    return None


def _divides_by_a_count(eqn: JaxprEqn, of_batch: set[Var], of_params: set[Var]) -> bool:
    """A division by one number that comes from the batch alone."""
    if eqn.primitive is not p.div_p:
        return False
    below = eqn.invars[1]
    return not isinstance(below, Literal) and shape_of(below) == () and below in of_batch and below not in of_params


def _statistic_over_batch(whole: ClosedJaxpr, one: ClosedJaxpr) -> JaxprEqn | None:
    """A step that reduces the batch to an array, not to a number as the last step of a loss does."""
    pairs = list(zip(whole.jaxpr.eqns, one.jaxpr.eqns, strict=False))
    if len(whole.jaxpr.eqns) != len(one.jaxpr.eqns) or any(a.primitive is not b.primitive for a, b in pairs):
        return None
    for eqn, alone in pairs:
        result = _shapes(eqn.outvars)
        if () not in result and result == _shapes(alone.outvars) and _shapes(eqn.invars) != _shapes(alone.invars):
            return eqn
    return None


def _shapes(atoms: Sequence[Any]) -> list[tuple[int, ...]]:
    return [shape_of(atom) for atom in atoms]
