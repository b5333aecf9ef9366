"""One kernel alone, on the device that is here: its time beside XLA's plain product, its error, its cost model.

A ``Subject`` is a kernel with its arguments and what it is compared with. Expected values are products in float32 at
the highest precision, one example at a time.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.children.sampling import take_samples
from benchmarks.on_device_cases import Case
from pegprof.engine.accumulators import MEAN, SQUARE
from pegprof.engine.kernels.backends import backend_of
from pegprof.engine.kernels.base import KernelCost, Operand, Outer
from pegprof.measure.worker.main import Reporter
from pegprof.targets.chips import CHIPS
from pegprof.targets.hlo.estimate import estimate

KINDS = [MEAN, SQUARE]
PLAIN = "einsum btd,bte->de"
TOLERANCE = 1e-3
"""Of a kernel whose products are exact. Else it may be off ten times as much as XLA's plain product is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """What is run: the kernel, which returns a list of arrays, and XLA's plain way to the same or similar."""

    arguments: tuple[jax.Array, ...]
    kernel: Callable[..., list[jax.Array]]
    expected: Callable[..., list[jax.Array]]
    plain: Callable[..., jax.Array]
    plain_expected: Callable[..., jax.Array]
    plain_name: str
    cost: KernelCost
    tile: Any = None


def measure_kernel(request: dict[str, Any], reporter: Reporter) -> None:
    """Reports what is known of a kernel before it is compiled, then its error, then its times."""
    case = Case(**request["case"])
    subject = SUBJECTS[case.kernel](case)
    cost, chip = subject.cost, CHIPS[case.chip]
    reporter.update(
        reference=subject.plain_name,
        tile=_describe_tile(subject.tile),
        flops=cost.flops,
        bytes_moved=cost.bytes,
        peak_flops_per_s=chip.product_flops(case.dtype),
        peak_bytes_per_s=chip.bandwidth,
    )
    start_s = time.perf_counter()
    kernel = jax.jit(subject.kernel).lower(*subject.arguments).compile()
    reporter.update(compile_s=time.perf_counter() - start_s)
    if request["estimates"]:
        reporter.update(estimated_s=estimate(kernel.as_text() or "", case.chip).time_s)
    plain = jax.jit(subject.plain).lower(*subject.arguments).compile()
    reporter.update(**_compare(subject, kernel, plain))
    calls = {"kernel": lambda: kernel(*subject.arguments), "plain": lambda: plain(*subject.arguments)}
    samples = take_samples(calls, "plain", rounds=request["rounds"], seconds=request["seconds"])
    reporter.update(
        times_s=samples["kernel"].times_s,
        ratios=samples["kernel"].ratios,
        calls=samples["kernel"].calls,
        reference_times_s=samples["plain"].times_s,
    )


def _compare(subject: Subject, kernel: Any, plain: Any) -> dict[str, Any]:
    expected = jax.jit(subject.expected)(*subject.arguments)
    error = max(_error(x, y) for x, y in zip(kernel(*subject.arguments), expected, strict=True))
    plain_error = _error(plain(*subject.arguments), jax.jit(subject.plain_expected)(*subject.arguments))
    tolerance = max(TOLERANCE, 10 * plain_error)
    return {
        "max_rel_error": error,
        "plain_error": plain_error,
        "compared_with": "float32 at highest precision",
        "wrong": not error <= tolerance,
        "tolerance": tolerance,
    }


@jax.jit
def _largest_error(x: jax.Array, y: jax.Array) -> jax.Array:
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jnp.max(jnp.abs(x - y)) / jnp.max(jnp.abs(y))


def _error(x: jax.Array, y: jax.Array) -> float:
    found = float(_largest_error(x, y))
    return float("inf") if np.isnan(found) else found


def _describe_tile(tile: Any) -> str:
    return "" if tile is None else " ".join(f"{name}={value}" for name, value in dataclasses.asdict(tile).items())


def _how(case: Case) -> dict[str, Any]:
    return {"precision": None, "chip": CHIPS[case.chip], "interpret": case.interpret}


def _operands(*arrays: Any) -> tuple[Operand, Operand]:
    s, r = (Operand.stored(x, minor=True) for x in arrays)
    return s, r


def _product_arguments(case: Case) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0))
    return tuple(
        jax.random.normal(key, (case.B, 1, 1, case.T, n), case.dtype)
        for key, n in zip(keys, (case.D, case.E), strict=True)
    )


def _moments(s: jax.Array, r: jax.Array) -> list[jax.Array]:
    """Mean and mean of squares, without a stack of gradients."""

    def add(sums: list[jax.Array], pair: tuple[jax.Array, jax.Array]) -> tuple[list[jax.Array], None]:
        g = _gradient(*pair)
        return [sums[0] + g, sums[1] + g * g], None

    zeros = jnp.zeros((s.shape[-1], r.shape[-1]), jnp.float32)
    sums, _ = jax.lax.scan(add, [zeros, zeros], (s, r))
    return [x / s.shape[0] for x in sums]


def _gradient(s: jax.Array, r: jax.Array) -> jax.Array:
    """Of one example."""
    s_TxD, r_TxE = (x[0, 0].astype(jnp.float32) for x in (s, r))
    return jnp.einsum("td,te->de", s_TxD, r_TxE, precision="highest")


def _plain_mean(s: jax.Array, r: jax.Array) -> jax.Array:
    total = jnp.einsum("btd,bte->de", s[:, 0, 0], r[:, 0, 0], preferred_element_type=jnp.float32)
    return total / s.shape[0]


def _outer(case: Case) -> Subject:
    """``fold_outer``: mean and mean of squares of all gradients."""
    backend, chip, arguments = backend_of(CHIPS[case.chip]), CHIPS[case.chip], _product_arguments(case)
    s, r = _operands(*arguments)
    product = Outer(s=s, r=r)
    tile = backend.choose_tile(product, KINDS, chip)
    if tile is None:
        raise NotImplementedError(f"no tile of the outer kernel fits {chip.name}")

    def kernel(*arrays: jax.Array) -> list[jax.Array]:
        found = backend.fold_outer(*_operands(*arrays), KINDS, tile=tile, **_how(case))
        return [x[0, 0, 0] for x in found]

    return Subject(
        arguments=arguments,
        kernel=kernel,
        expected=_moments,
        plain=_plain_mean,
        plain_expected=lambda s, r: _moments(s, r)[0],
        plain_name=PLAIN,
        cost=backend.outer_cost(product, tile, KINDS, chip),
        tile=tile,
    )


def _gram(case: Case) -> Subject:
    """``square_norms``: the squared norm of each gradient."""
    backend, arguments = backend_of(CHIPS[case.chip]), _product_arguments(case)
    s, r = _operands(*arguments)
    product = Outer(s=s, r=r)
    return Subject(
        arguments=arguments,
        kernel=lambda *arrays: [backend.square_norms(*_operands(*arrays), **_how(case))],
        expected=lambda s, r: [jax.lax.map(lambda pair: jnp.sum(jnp.square(_gradient(*pair))), (s, r))],
        plain=_plain_mean,
        plain_expected=lambda s, r: _moments(s, r)[0],
        plain_name=PLAIN,
        cost=backend.gram_cost(product, CHIPS[case.chip]),
        tile=backend.gram.choose_tile(product, CHIPS[case.chip]),
    )


def _rows(case: Case) -> Subject:
    """``take_rows``: T rows of each example's V × T."""
    from pegprof.engine.kernels import tpu_rows

    x_key, ids_key = jax.random.split(jax.random.key(0))
    x_BxVxT = jax.random.normal(x_key, (case.B, case.V, case.T), case.dtype)
    ids_BxK = jax.random.randint(ids_key, (case.B, case.T), 0, case.V, jnp.int32)

    def gather(x: jax.Array, ids: jax.Array) -> jax.Array:
        return jax.vmap(lambda x_VxT, ids_K: x_VxT[ids_K])(x, ids)

    return Subject(
        arguments=(x_BxVxT, ids_BxK),
        kernel=lambda x, ids: [tpu_rows.take_rows(x, ids, interpret=case.interpret)],
        expected=lambda x, ids: [gather(x, ids)],
        plain=gather,
        plain_expected=gather,
        plain_name="gather bvt,bk->bkt",
        cost=KernelCost(flops=0, vector_flops=0, bytes=2 * case.B * case.T * case.T * x_BxVxT.dtype.itemsize),
    )


SUBJECTS: dict[str, Callable[[Case], Subject]] = {"outer": _outer, "gram": _gram, "rows": _rows}
