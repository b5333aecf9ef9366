"""``check_examples``: do the examples of a batch leave each other alone, and does the engine see them as JAX does?

    per-example gradients, each by jax.grad ──┬── their mean, against the gradient of the batch ──> the loss
                                              └── their statistics, against grad_stats          ──> the engine

The mean of the per-example gradients is the mini-batch gradient exactly when examples do not interact. BatchNorm, a
loss divided by a count over the whole batch, or noise drawn for the whole batch from one key break that; then
per-example gradients still exist, but they are those of another loss. The gradients of the examples are not the
engine's, so that a fault of the engine is never taken for one of the loss.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from pegprof import __version__
from pegprof.engine.checks.arguments import Loss, batch_size
from pegprof.engine.jaxpr import ClosedJaxpr, Jaxpr, dtype_of, sub_jaxprs
from pegprof.engine.options import Argnums, Options, takes_options
from pegprof.engine.passes.flatten import flatten
from pegprof.engine.run import grad_stats
from pegprof.engine.trace import parameter_names
from pegprof.errors import PegprofError
from pegprof.models.causes import draws_from, explain_difference, find_nonfinite

EXAMPLES = 4
"""How many examples are compared: enough for them to interact, few enough for any model."""

_TOLERANCES = {"float64": 1e-8, "float32": 1e-3, "bfloat16": 5e-2, "float16": 5e-2}
"""How far two right gradients may be apart, relative to their norm, by the narrowest dtype that they pass through."""

_FLOAT8_TOLERANCE = 0.25

_SMALLEST_SCALE = 1e-3
"""Of a difference, as a share of the largest gradient's norm and of the norm before the examples' gradients cancel:
what is smaller may be rounding."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """A parameter whose mean per-example gradient is not the gradient of the batch, or is not finite."""

    parameter: str
    relative_difference: float  # infinite where either gradient has entries that are not finite
    cause: str
    what: str = ""  # how the two gradients differ, in words
    comparable: bool = True  # False where neither gradient is finite, which says nothing about the examples


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineFinding:
    """A parameter with a statistic that pegprof's engine gets wrong: it is not that of ``jax.grad`` on each example."""

    parameter: str
    statistic: str
    relative_difference: float  # infinite where only one of the two is finite
    what: str = ""  # how the engine's statistic differs, in words


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExampleCheck:
    """What ``check_examples`` found; ``str`` of it is a paragraph."""

    findings: tuple[Finding, ...]  # about the loss
    unvaried: tuple[str, ...]  # leaves of the batch that are the same in all the examples compared
    examples: int
    engine_findings: tuple[EngineFinding, ...] = ()  # about pegprof
    uncompared: str = ""  # why there was no gradient of the batch to compare with

    @property
    def ok(self) -> bool:
        return not self.findings and not self.engine_findings

    @property
    def cause(self) -> str:
        """The likely cause of the worst finding about the loss."""
        return _worst_first(self.findings)[0].cause if self.findings else ""

    @property
    def interaction(self) -> str:
        """The likely cause of the worst finding where the two gradients could be compared: they are not the same."""
        comparable = _worst_first([finding for finding in self.findings if finding.comparable])
        return comparable[0].cause if comparable else ""

    @property
    def engine_fault(self) -> str:
        """The worst finding about pegprof's engine, in a few words."""
        if not self.engine_findings:
            return ""
        worst = _worst_first(self.engine_findings)[0]
        return f"a bug in pegprof: {worst.parameter}: {worst.statistic} {worst.what}"

    def __str__(self) -> str:
        lines = self._about_loss()
        if self.engine_findings:
            lines += [
                "pegprof's own statistics are wrong: they differ from those of jax.grad on each example.",
                *_listed(f"{f.parameter}: {f.statistic} {f.what}" for f in _worst_first(self.engine_findings)),
                "This is a bug in pegprof, not in the loss. Use jax.vmap(jax.grad(loss)) instead. Please report it:",
                f"  the loss, the shapes, pegprof {__version__}, jax {jax.__version__}, {jax.default_backend()}.",
            ]
        if self.unvaried:
            lines.append(
                f"The same in all examples, so that a dependence on it could not show: {', '.join(self.unvaried)}."
            )
        return "\n".join(lines)

    def _about_loss(self) -> list[str]:
        if self.findings:
            compared = f"The mean of {self.examples} per-example gradients is not the gradient of the batch."
            if not self.interaction:
                compared = "The gradients are not finite, so they cannot be compared."
            return [
                *([self.uncompared] if self.uncompared else [compared]),
                *_listed(f"{f.parameter}: {f.what}" for f in _worst_first(self.findings)),
                f"Likely cause: {self.cause}",
            ]
        return [self.uncompared or f"The mean of {self.examples} per-example gradients is the gradient of the batch."]


_F = TypeVar("_F", Finding, EngineFinding)


def _worst_first(findings: Sequence[_F]) -> list[_F]:
    return sorted(findings, key=lambda f: -f.relative_difference)


def _listed(texts: Iterable[str], most: int = 8) -> list[str]:
    lines = [f"  {text}" for text in texts]
    return [*lines[:most], *([f"  and {len(lines) - most} more"] if len(lines) > most else [])]


class LossArgs(TypedDict, total=False):
    """The options that say what a loss takes; see ``Options``."""

    argnums: Argnums
    batch_argnums: Argnums
    keep_batch_dim: bool
    has_aux: bool
    prng_argnum: int | None


@takes_options(LossArgs)
def check_examples(loss: Loss, *args: Any, **options: Unpack[LossArgs]) -> ExampleCheck:
    """Compare the per-example gradients with the gradient of the batch, and the engine with both.

    The gradient of each of the first few examples is computed by ``jax.grad`` alone. Their mean is compared with the
    gradient of the batch, which says something about the loss. Their mean and second moment are compared with those of
    ``grad_stats``, which says something about pegprof.

    Args:
      loss: as for ``grad_stats``. With ``keep_batch_dim=False`` it sees one example at a time, so that its examples
        cannot interact; a loss that also takes batches is compared on one.
      *args: its arguments; real arrays, at least two examples.
      argnums: and all further options: as for ``grad_stats``. Noise from the key of ``prng_argnum`` is not the same in
        the batch as in its examples: a loss that draws some is not compared with a batch.

    Returns:
      An ``ExampleCheck``: ``.ok``, ``.findings`` about the loss with a likely cause, ``.engine_findings`` about
      pegprof, and the leaves of the batch that did not vary. A gradient that is NaN or infinite is always a finding.

    >>> import jax.numpy as jnp
    >>> x = jnp.arange(6.0).reshape(3, 2)
    >>> print(check_examples(lambda w, x: jnp.sum(jnp.tanh(x @ w)), jnp.ones(2), x).findings[0].cause)
    the loss is a sum over the examples, not their mean
    """
    given = Options(**options).of(args)
    n = min(EXAMPLES, batch_size(args, given))
    if n < 2:
        raise PegprofError("one example has no other to interact with", hint="check a batch of at least two examples")
    few = [jax.tree.map(lambda x: x[:n], arg) if i in given.batch else arg for i, arg in enumerate(args)]
    # An accelerator's products in fewer bits than float32 would differ by more than the tolerance for no fault at all.
    with jax.default_matmul_precision("highest"):
        return _check(loss, few, given, n)


def _check(loss: Loss, args: Sequence[Any], options: Options, n: int) -> ExampleCheck:
    # First the engine: where a loss does not take what the options say, it says so in words.
    of_engine = jax.jit(grad_stats(loss, ("mean", "second_moment"), **dataclasses.asdict(options)))(*args)
    value = _value_of(loss, options)
    examples = [_example(args, options, n, i) for i in range(n)]
    plain = _plain_statistics(value, examples, options)
    one = flatten(jax.make_jaxpr(value)(*examples[0]))
    tolerance = _tolerance(one)
    engine_findings = _engine_findings(of_engine, plain, tolerance)
    del of_engine
    whole, uncompared = _whole_batch_program(value, args, options)
    batch = jax.jit(jax.grad(value, options.argnums))(*args) if whole else None
    off = _differences(plain["mean"], plain["mean"] if whole is None else batch, tolerance, before=plain)

    @functools.cache
    def cause(kind: Kind) -> str:
        grad = jax.grad(value, options.argnums)
        match kind:
            case "apart":
                assert whole is not None
                scaled = jax.tree.map(lambda g: n * g, plain["mean"])
                is_sum = not any(d.kind == "apart" for d in _differences(scaled, batch, tolerance).values())
                return explain_difference(whole, one, args, options, is_sum=is_sum)
            case "left":
                what = f"the gradient of one example alone is not finite{find_nonfinite(grad, examples)}"
                return f"{what}; {_NO_SPREAD}" if options.keep_batch_dim else what
            case "right":
                return f"the gradient of the batch is not finite{find_nonfinite(grad, [args])}"
            case "both":
                return f"the gradient itself is not finite{find_nonfinite(grad, examples)}; nothing can be compared"

    findings = tuple(
        Finding(
            parameter=name,
            relative_difference=d.relative,
            cause=cause(d.kind),
            what=_in_words(d, compared=whole is not None),
            comparable=d.kind != "both",
        )
        for name, d in off.items()
    )
    return ExampleCheck(
        findings=findings,
        unvaried=_unvaried(args, options),
        examples=n,
        engine_findings=engine_findings,
        uncompared=uncompared,
    )


_NO_SPREAD = "a standard deviation or variance over the batch is 0 for a batch of one, and dividing by it gives NaN"


def _value_of(loss: Loss, options: Options) -> Callable[..., Any]:
    """The loss as a number, without what it returns beside."""

    def value(*args: Any) -> Any:
        result = loss(*args)
        return result[0] if options.has_aux else result

    return value


def _example(args: Sequence[Any], options: Options, n: int, i: int) -> list[Any]:
    """The arguments of one of n examples."""

    def own(argnum: int, arg: Any) -> Any:
        if argnum == options.prng_argnum:
            return jax.random.split(arg, n)[i]
        if argnum not in options.batch:
            return arg
        return jax.tree.map(lambda x: x[i : i + 1] if options.keep_batch_dim else x[i], arg)

    return [own(argnum, arg) for argnum, arg in enumerate(args)]


def _plain_statistics(value: Callable[..., Any], examples: Sequence[Sequence[Any]], options: Options) -> dict[str, Any]:
    """The mean and second moment of the examples' gradients, one at a time, by nothing but ``jax.grad``."""
    grad, n = jax.grad(value, options.argnums), len(examples)

    @functools.partial(jax.jit, donate_argnums=0)
    def add(sums: dict[str, Any], example: Sequence[Any]) -> dict[str, Any]:
        wide = jax.tree.map(lambda g: g.astype(_widened(g.dtype)), grad(*example))
        return {
            "mean": jax.tree.map(lambda s, g: s + g / n, sums["mean"], wide),
            "second_moment": jax.tree.map(lambda s, g: s + g * g / n, sums["second_moment"], wide),
        }

    shapes = jax.eval_shape(grad, *examples[0])
    sums = {
        name: jax.tree.map(lambda g: jnp.zeros(g.shape, _widened(g.dtype)), shapes)
        for name in ("mean", "second_moment")
    }
    for example in examples:
        sums = add(sums, example)
    return sums


def _widened(dtype: Any) -> Any:
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.float32


def _whole_batch_program(
    value: Callable[..., Any], args: Sequence[Any], options: Options
) -> tuple[ClosedJaxpr | None, str]:
    """The loss of the whole batch as a program, or None and why there is nothing to compare with."""
    try:
        program = flatten(jax.make_jaxpr(value)(*args))
    except Exception:
        if options.keep_batch_dim:
            raise
        program = None  # a bare example is all that it takes: whatever it says to a batch is not an answer to us
    if program is None or [aval.shape for aval in program.out_avals] != [()]:
        return None, "The loss takes one example at a time, so that examples cannot interact."
    if options.prng_argnum is not None and draws_from(program, args, options.prng_argnum):
        return None, (
            "The mean of the per-example gradients was not compared with the gradient of the batch: each example has "
            "a key of its own, so that the noise is another. To see if examples interact, check without noise."
        )
    return program, ""


def _unvaried(args: Sequence[Any], options: Options) -> tuple[str, ...]:
    """The names of the batch's leaves that are the same for all examples."""
    names = []
    for argnum in options.batch:
        for path, leaf in jax.tree_util.tree_flatten_with_path(args[argnum])[0]:
            keys = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            rows = np.asarray(jax.random.key_data(leaf) if keys else leaf)
            if rows.size and bool(np.all(rows == rows[:1])):
                names.append(f"argument {argnum}{jax.tree_util.keystr(path)}")
    return tuple(names)


def _tolerance(program: ClosedJaxpr) -> float:
    dtypes = set(_dtypes(program.jaxpr))
    if any(name.startswith("float8") for name in dtypes):
        return _FLOAT8_TOLERANCE
    return max((t for name, t in _TOLERANCES.items() if name in dtypes), default=1e-3)


def _dtypes(jaxpr: Jaxpr) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        yield from (str(dtype_of(v)) for v in eqn.outvars)
        for inner in sub_jaxprs(eqn):
            yield from _dtypes(inner)


Kind = Literal["apart", "left", "right", "both"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Difference:
    """How two arrays differ: they are apart, or one of them is not finite where the other is, or neither is finite."""

    kind: Kind
    relative: float
    nonfinite: str = ""  # NaN or infinite


def _differences(
    left: Any, right: Any, tolerance: float, *, before: Mapping[str, Any] | None = None
) -> dict[str, _Difference]:
    """The parameters for which two trees differ, and those for which they are not finite.

    A gradient that is nearly nothing beside the others', or beside those of the examples ``before`` they cancelled in
    the mean, is compared with these, or rounding would be a finding.
    """
    lefts, rights = jax.tree.leaves(left), jax.tree.leaves(right)
    squares = jax.tree.leaves(before["second_moment"]) if before else [0.0] * len(lefts)
    floor = _SMALLEST_SCALE * max((_norm(b) for b in rights), default=0.0)
    found = {}
    for name, a, b, square in zip(parameter_names(right), lefts, rights, squares, strict=True):
        cancelled = _SMALLEST_SCALE * _norm(np.sqrt(_finite(square)))
        if difference := _difference(
            np.asarray(a, np.float64), np.asarray(b, np.float64), max(floor, cancelled), tolerance
        ):
            found[name] = difference
    return found


def _difference(a: np.ndarray, b: np.ndarray, floor: float, tolerance: float) -> _Difference | None:
    of_a, of_b = np.isfinite(a), np.isfinite(b)
    if np.any(~of_a & of_b):
        return _Difference(kind="left", relative=np.inf, nonfinite=_nonfinite(a))
    if np.any(of_a & ~of_b):
        return _Difference(kind="right", relative=np.inf, nonfinite=_nonfinite(b))
    nonfinite, is_finite = _nonfinite(b), bool(np.all(of_b))
    a, b = a[of_a], b[of_b]
    largest = max(np.max(np.abs(a), initial=0.0), np.max(np.abs(b), initial=0.0), floor)
    if largest:  # squares of what is divided by it neither overflow nor vanish
        a, b = a / largest, b / largest
        apart, scale = np.linalg.norm(a - b), max(np.linalg.norm(a), np.linalg.norm(b), floor / largest)
        if apart > tolerance * scale:
            return _Difference(kind="apart", relative=float(apart / scale))
    return None if is_finite else _Difference(kind="both", relative=np.inf, nonfinite=nonfinite)


def _finite(x: Any) -> np.ndarray:
    x = np.asarray(x, np.float64)
    return x[np.isfinite(x)]


def _norm(x: Any) -> float:
    """Of the entries that are finite."""
    x = _finite(x)
    largest = np.max(np.abs(x), initial=0.0)
    return float(largest * np.linalg.norm(x / largest)) if largest else 0.0


def _nonfinite(x: np.ndarray) -> str:
    return "NaN" if np.any(np.isnan(x)) else "infinite"


def _in_words(difference: _Difference, *, compared: bool) -> str:
    alone, batch = "in the per-example gradients", "in the gradient of the batch"
    match difference.kind:
        case "apart":
            return f"they differ by {difference.relative:.2g} of its norm"
        case "left":
            return f"{difference.nonfinite} {alone}, finite {batch}"
        case "right":
            return f"{difference.nonfinite} {batch}, finite {alone}"
        case "both":
            return f"{difference.nonfinite} both {alone} and {batch}" if compared else f"{difference.nonfinite} {alone}"


def _engine_findings(
    of_engine: Mapping[str, Any], plain: Mapping[str, Any], tolerance: float
) -> tuple[EngineFinding, ...]:
    """Where the engine's statistics are not those of the plain gradients. Where neither is finite, they agree."""
    found = []
    for statistic, share, before in (("mean", tolerance, plain), ("second_moment", 2 * tolerance, None)):
        for name, d in _differences(of_engine[statistic], plain[statistic], share, before=before).items():
            if d.kind != "both":
                what = {
                    "apart": f"differs by {d.relative:.2g} of its norm",
                    "left": f"is {d.nonfinite} where that of jax.grad is finite",
                    "right": f"is finite where that of jax.grad is {d.nonfinite}",
                }[d.kind]
                found.append(
                    EngineFinding(parameter=name, statistic=statistic, relative_difference=d.relative, what=what)
                )
    return tuple(found)
