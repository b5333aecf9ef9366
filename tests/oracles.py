"""The slow truth: a Python loop over the examples, one gradient at a time, the statistics in NumPy float64.

In: a loss, statistics, its arguments. Out: a ``Truth``, a mapping from the name of each statistic to a pytree like the
parameters. Nothing here is batched, so nothing here can mix two examples up.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pegprof.engine.statistics import Statistic, resolve

# A variance far below g² is lost in rounding if it is taken as a difference; float64 still has it to this part of g².
RESOLVED = 1e-6


# XLA spends nearly all of a test's time on making code fast that runs once; without that a test takes a fifth of it.
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}


def quick_jit(fun: Callable[..., Any]) -> Callable[..., Any]:
    """``jax.jit``, compiled in a hurry: the same program, slower code."""
    return jax.jit(fun, compiler_options=QUICK)


class Truth(dict[str, Any]):
    """``{name: pytree}`` of the statistics, and what they were computed from."""

    gradients: Any  # a pytree like the parameters, each leaf [B, ...]
    value: np.ndarray  # the mean of the losses
    aux: Any  # stacked, examples first; None without has_aux

    def only(self, names: Sequence[str]) -> "Truth":
        """Some of the statistics, from the same gradients."""
        some = Truth({name: self[name] for name in names})
        some.gradients, some.value, some.aux = self.gradients, self.value, self.aux
        return some


def loop_stats(
    loss: Callable[..., Any],
    stats: Sequence[str | Statistic] | str | Statistic,
    *args: Any,
    argnums: int | tuple[int, ...] = 0,
    batch_argnums: int | tuple[int, ...] = 1,
    keep_batch_dim: bool = True,
    has_aux: bool = False,
    prng_argnum: int | None = None,
    jit: bool = True,
) -> Truth:
    """Every statistic from the gradients of the examples, taken one at a time."""
    batch_argnums = (batch_argnums,) if isinstance(batch_argnums, int) else batch_argnums
    one_gradient = jax.value_and_grad(loss, argnums=argnums, has_aux=has_aux)
    if jit:
        one_gradient = quick_jit(one_gradient)
    B = batch_size(args, batch_argnums)
    keys = None if prng_argnum is None else jax.random.split(args[prng_argnum], B)

    values, auxes, gradients = [], [], []
    for i in range(B):
        example = slice(i, i + 1) if keep_batch_dim else i
        these = list(args)
        for n in batch_argnums:
            these[n] = jax.tree.map(lambda leaf, example=example: leaf[example], args[n])
        if prng_argnum is not None and keys is not None:
            these[prng_argnum] = keys[i]
        value, gradient = one_gradient(*these)
        value, aux = value if has_aux else (value, None)
        values.append(value)
        auxes.append(aux)
        gradients.append(gradient)

    truth = Truth()
    truth.gradients = jax.tree.map(lambda *g: np.stack([np.asarray(x, np.float64) for x in g]), *gradients)
    truth.value = np.mean([np.asarray(v, np.float64) for v in values])
    truth.aux = jax.tree.map(lambda *a: np.stack([np.asarray(x) for x in a]), *auxes) if has_aux else None
    for stat in resolve(stats):
        truth[stat.name] = _apply(stat, truth.gradients, B)
    return truth


def batch_size(args: Sequence[Any], batch_argnums: Sequence[int]) -> int:
    """The length of the leading axis of the batch arguments."""
    return int(jax.tree.leaves([args[n] for n in batch_argnums])[0].shape[0])


def _apply(stat: Statistic, gradients: Any, B: int) -> Any:
    if stat.scope == "model":
        return stat.oracle(np.concatenate([g.reshape(B, -1) for g in jax.tree.leaves(gradients)], axis=1))
    return jax.tree.map(stat.oracle, gradients)


def assert_stats_agree(actual: Any, expected: Truth, rtol: float = 1e-8) -> None:
    """The same statistics, in the same structure and shapes, to ``rtol`` of the largest magnitude of each leaf."""
    assert sorted(actual) == sorted(expected), f"statistics {sorted(actual)}, expected {sorted(expected)}"
    wrong = []
    for name in expected:
        found, wanted = jax.tree.structure(actual[name]), jax.tree.structure(expected[name])
        assert found == wanted, f"{name}: structure {found}, expected {wanted}"
        by_path = jax.tree_util.tree_leaves_with_path(expected[name])
        gradients = jax.tree.leaves(expected.gradients)
        if len(gradients) != len(by_path):  # a statistic of the whole model: no one parameter's gradients
            gradients = [None] * len(by_path)
        for (path, want), got, g in zip(by_path, jax.tree.leaves(actual[name]), gradients, strict=True):
            complaint = _disagreement(name, got, np.asarray(want), g, rtol)
            if complaint:
                wrong.append(f"{name}{jax.tree_util.keystr(path)}: {complaint}")
    assert not wrong, "\n".join(wrong)


def _disagreement(name: str, got: Any, want: np.ndarray, g: np.ndarray | None, rtol: float) -> str:
    if jnp.result_type(got) not in (jnp.float32, jnp.float64):
        return f"dtype {got.dtype}, expected float32 or float64"
    if got.shape != want.shape:
        return f"shape {got.shape}, expected {want.shape}"
    if want.size == 0:
        return ""
    got = np.asarray(got, np.float64)
    if name == "snr" and g is not None:
        return _snr_disagreement(got, want, g, rtol)
    allowed = np.broadcast_to(rtol * np.max(np.abs(want)), want.shape)
    if name in _DEGREE and g is not None:
        allowed = np.maximum(allowed, rtol * RESOLVED * np.max(np.abs(g)) ** _DEGREE[name])
    if name == "sign_mean" and g is not None:  # the sign of what is nearly zero is anyone's guess
        unsure = (g != 0) & (np.abs(g) < rtol * np.max(np.abs(g)))
        allowed = allowed + 2 * np.mean(unsure, axis=0)
    return _worst(got, want, allowed)


# Statistics whose terms can cancel, and the power of g that bounds a term.
_DEGREE = {"mean": 1, "variance": 2, "mean_squared": 2, "sign_mean": 0, "tanh_mean": 1, "third_moment": 3}


def _snr_disagreement(got: np.ndarray, want: np.ndarray, g: np.ndarray, rtol: float) -> str:
    """SNR = (m/s)². An error e in the gradients moves it by 2 (m/s)(1 + m/s)(e/s), and e is rtol of the largest."""
    mean, std, largest = np.abs(np.mean(g, axis=0)), np.std(g, axis=0, ddof=1), np.max(np.abs(g))
    varies = std > max(1e-7, rtol) * mean
    noise = varies & (std < rtol * RESOLVED * largest)  # what rounding left of zero
    varies &= ~noise
    with np.errstate(over="ignore"):
        ordinary = np.isfinite(got) & (np.abs(got) < min(1e6, 1 / rtol))
    constant = ~varies & ~noise
    if np.any(constant & ordinary):
        at = np.argwhere(constant & ordinary)[0]
        return f"at {at.tolist()} there is no variance, yet it is {got[tuple(at)]:.6g}"
    ratio, spread = mean[varies] / std[varies], largest / std[varies]
    return _worst(got[varies], want[varies], rtol * (1 + ratio**2 + 2 * ratio * (1 + ratio) * spread))


def _worst(got: np.ndarray, want: np.ndarray, allowed: np.ndarray) -> str:
    off = ~(np.abs(got - want) <= allowed)
    if not np.any(off):
        return ""
    excess = np.where(off, np.abs(got - want) - allowed, -np.inf)
    at = np.unravel_index(np.nanargmax(excess) if np.any(np.isfinite(excess)) else np.argmax(off), off.shape)
    return (
        f"{np.count_nonzero(off)} of {off.size} entries differ; at {[int(i) for i in at]} it is {got[at]:.12g}, "
        f"expected {want[at]:.12g}, off by {abs(got[at] - want[at]):.2g} with {allowed[at]:.2g} allowed"
    )
