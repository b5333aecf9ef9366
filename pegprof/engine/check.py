"""``check_examples``: do the examples of a batch leave each other alone?

The mean of the per-example gradients is the mini-batch gradient exactly when they do. BatchNorm, a loss divided by a
count over the whole batch, or noise drawn for the whole batch from one key break that; then per-example gradients still
exist, but they are those of another loss. This compares the two on a small batch and says what it finds.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pegprof.engine.inject import grad_stats
from pegprof.engine.jaxpr import ClosedJaxpr, JaxprEqn, Literal, Var, dtype_of, flatten, shape_of, source_line
from pegprof.engine.jaxpr import primitives as p
from pegprof.engine.tails import example_dependent, variables
from pegprof.engine.trace import Loss, Roles, batch_size, parameter_names
from pegprof.errors import PegprofError

EXAMPLES = 4
"""How many examples are compared: enough for them to interact, few enough for any model."""

_TOLERANCES = {"float64": 1e-8, "float32": 1e-3, "bfloat16": 5e-2, "float16": 5e-2}
"""How far two right gradients may be apart, relative to their norm, by the narrowest dtype that they pass through."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """A parameter whose mean per-example gradient is not the gradient of the batch."""

    parameter: str
    relative_difference: float
    cause: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExampleCheck:
    """What ``check_examples`` found; ``str`` of it is a paragraph."""

    findings: tuple[Finding, ...]
    unvaried: tuple[str, ...]  # leaves of the batch that are the same in all the examples compared
    examples: int
    nonfinite: tuple[str, ...] = ()  # parameters with entries that are NaN or infinite on both sides
    compared: bool = True  # whether there was a finite number to compare

    @property
    def ok(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        if not self.compared:
            gradients = f"the gradients of {self.examples} examples"
            lines = [f"Nothing could be compared: {gradients} are NaN or infinite in every entry."]
        elif self.ok:
            lines = [f"The mean of {self.examples} per-example gradients is the gradient of the batch."]
        else:
            worst = sorted(self.findings, key=lambda f: -f.relative_difference)
            lines = [
                f"The mean of {self.examples} per-example gradients is not the gradient of the batch.",
                *(f"  {f.parameter}: {_how_far(f)}" for f in worst[:8]),
                *([f"  and {len(worst) - 8} more parameters"] if len(worst) > 8 else []),
                f"Likely cause: {worst[0].cause}",
            ]
        if self.nonfinite and self.compared:
            names = ", ".join(self.nonfinite)
            lines.append(f"Both are NaN or infinite in some entries, which says nothing about those: {names}.")
        if self.unvaried:
            lines.append(
                f"The same in all examples, so that a dependence on it could not show: {', '.join(self.unvaried)}."
            )
        return "\n".join(lines)


def _how_far(finding: Finding) -> str:
    if np.isinf(finding.relative_difference):
        return "one of them is NaN or infinite where the other is not"
    return f"they differ by {finding.relative_difference:.2g} of its norm"


def check_examples(
    loss: Loss,
    *args: Any,
    argnums: int | tuple[int, ...] = 0,
    batch_argnums: int | tuple[int, ...] = 1,
    keep_batch_dim: bool = True,
    has_aux: bool = False,
    prng_argnum: int | None = None,
) -> ExampleCheck:
    """Compare the mean of the per-example gradients with the plain gradient, on the first few examples of a batch.

    Args:
      loss: as for ``grad_stats``. With ``keep_batch_dim=False`` it sees one example at a time, so that its examples
        cannot interact; a loss that also takes batches is compared on one.
      *args: its arguments; real arrays, at least two examples.
      argnums: and all further options: as for ``grad_stats``.

    Returns:
      An ``ExampleCheck``: ``.ok``, the findings with a likely cause, and the leaves of the batch that did not vary.

    >>> import jax.numpy as jnp
    >>> x = jnp.arange(6.0).reshape(3, 2)
    >>> print(check_examples(lambda w, x: jnp.sum(jnp.tanh(x @ w)), jnp.ones(2), x).findings[0].cause)
    the loss is a sum over the examples, not their mean
    """
    roles = Roles(
        argnums=argnums,
        batch_argnums=batch_argnums,
        keep_batch_dim=keep_batch_dim,
        has_aux=has_aux,
        prng_argnum=prng_argnum,
    ).of(args)
    n = min(EXAMPLES, batch_size(args, roles))
    if n < 2:
        raise PegprofError("one example has no other to interact with", hint="check a batch of at least two examples")
    few = [jax.tree.map(lambda x: x[:n], arg) if i in roles.batch else arg for i, arg in enumerate(args)]
    unvaried = _unvaried(few, roles)
    whole = _whole_batch_loss(loss, few, roles)
    if whole is None:
        return ExampleCheck(findings=(), unvaried=unvaried, examples=n)
    mean = jax.jit(grad_stats(loss, "mean", microbatch_size=1, **dataclasses.asdict(roles)))(*few)["mean"]
    plain = jax.jit(jax.grad(whole, argnums))(*few)
    program = flatten(jax.make_jaxpr(whole)(*few))
    off = _differences(mean, plain, _tolerance(program))
    cause = _likely_cause(program, few, roles, mean, plain) if off else ""
    findings = tuple(Finding(parameter=name, relative_difference=d, cause=cause) for name, d in off.items())
    alike = {name: _alike_but_no_numbers(*pair) for name, pair in _pairs(mean, plain).items()}
    return ExampleCheck(
        findings=findings,
        unvaried=unvaried,
        examples=n,
        nonfinite=tuple(name for name, entries in alike.items() if np.any(entries)),
        compared=not all(np.all(entries) for entries in alike.values()),
    )


def _whole_batch_loss(loss: Loss, args: Sequence[Any], roles: Roles) -> Callable[..., Any] | None:
    """The loss of the whole batch as a number, or None where the loss takes single examples only."""

    def whole(*args: Any) -> Any:
        result = loss(*args)
        return result[0] if roles.has_aux else result

    if roles.keep_batch_dim:
        return whole
    try:
        return whole if jax.eval_shape(whole, *args).shape == () else None
    except Exception:  # a bare example is all that it takes: whatever it says to a batch is not an answer to us
        return None


def _unvaried(args: Sequence[Any], roles: Roles) -> tuple[str, ...]:
    """The names of the batch's leaves that are the same for all examples."""
    names = []
    for argnum in roles.batch:
        for path, leaf in jax.tree_util.tree_flatten_with_path(args[argnum])[0]:
            keys = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            rows = np.asarray(jax.random.key_data(leaf) if keys else leaf)
            if rows.size and bool(np.all(rows == rows[:1])):
                names.append(f"argument {argnum}{jax.tree_util.keystr(path)}")
    return tuple(names)


def _tolerance(program: ClosedJaxpr) -> float:
    dtypes = {str(dtype_of(v)) for eqn in program.jaxpr.eqns for v in eqn.outvars}
    return max((t for name, t in _TOLERANCES.items() if name in dtypes), default=1e-3)


def _differences(mean: Any, plain: Any, tolerance: float) -> dict[str, float]:
    """The parameters whose two gradients differ, and by how much of their norm.

    A gradient that is nearly nothing beside the others' is compared with those, or rounding would be a finding. NaN
    against NaN is no difference, nor is an infinity against itself; against a number each is an infinite one.
    """
    pairs = _pairs(mean, plain)
    floor = 1e-3 * max((_norm(b) for _, b in pairs.values()), default=0.0)
    found = {}
    for name, (a, b) in pairs.items():
        with np.errstate(invalid="ignore"):
            apart = np.where(_alike_but_no_numbers(a, b), 0.0, a - b)
        scale = max(_norm(a), _norm(b), floor)
        if not np.all(np.isfinite(apart)):
            found[name] = np.inf
        elif scale and np.linalg.norm(apart) > tolerance * scale:
            found[name] = float(np.linalg.norm(apart) / scale)
    return found


def _pairs(mean: Any, plain: Any) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The two gradients of each parameter."""
    leaves = zip(parameter_names(plain), jax.tree.leaves(mean), jax.tree.leaves(plain), strict=True)
    return {name: (np.asarray(a, np.float64), np.asarray(b, np.float64)) for name, a, b in leaves}


def _alike_but_no_numbers(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Which entries are both NaN, or the same infinity."""
    return (np.isnan(a) & np.isnan(b)) | (np.isinf(a) & (a == b))


def _norm(x: np.ndarray) -> float:
    """Of the entries that are numbers."""
    return float(np.linalg.norm(np.where(np.isfinite(x), x, 0.0)))


def _likely_cause(program: ClosedJaxpr, args: Sequence[Any], roles: Roles, mean: Any, plain: Any) -> str:
    """The first of the usual suspects that is found in the program."""
    n = batch_size(args, roles)
    scaled = jax.tree.map(lambda g: n * g, mean)
    if not _differences(scaled, plain, _tolerance(program)):
        return "the loss is a sum over the examples, not their mean"
    per_argument = [len(jax.tree.leaves(arg)) for arg in args]
    of_batch = _reached(program, [i in roles.batch for i, k in enumerate(per_argument) for _ in range(k)])
    of_params = _reached(program, [i in roles.params for i, k in enumerate(per_argument) for _ in range(k)])
    for eqn in program.jaxpr.eqns:
        if eqn.primitive in _RANDOM and not of_batch.intersection(variables(eqn.invars)):
            return (
                f"noise is drawn for the whole batch from one random key ({source_line(eqn)}); "
                "give each example a key, or name the key's argument with prng_argnum"
            )
    for eqn in program.jaxpr.eqns:
        if _divides_by_a_count(eqn, of_batch, of_params):
            return (
                f"the loss is divided by a count over the whole batch ({source_line(eqn)}); "
                "use a denominator that is the same for every example"
            )
    return (
        "the examples interact: something like BatchNorm or a contrastive loss looks across the batch; "
        "per-example statistics are those of examples on their own"
    )


_RANDOM = (p.random_bits_p, p.threefry2x32_p, p.rng_bit_generator_p, p.random_gamma_p, p.rng_uniform_p)


def _reached(program: ClosedJaxpr, inputs: Sequence[bool]) -> set[Var]:
    return example_dependent(program.jaxpr, inputs)


def _divides_by_a_count(eqn: JaxprEqn, of_batch: set[Var], of_params: set[Var]) -> bool:
    """A division by one number that comes from the batch alone."""
    if eqn.primitive is not p.div_p:
        return False
    below = eqn.invars[1]
    return not isinstance(below, Literal) and shape_of(below) == () and below in of_batch and below not in of_params
