"""A program on eight virtual CPU devices: statistics inside ``shard_map``, against those of the whole batch on one.

Run as ``python -m tests.engine.sharded NAME...`` in a process of its own, since the number of devices is fixed when JAX
starts. It prints a line for each program and setting, and exits with 1 if one is off.
"""

import os
import sys
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import jax
import jax.numpy as jnp
import numpy as np

from pegprof import grad_stats, make_plan
from tests.oracles import quick_jit
from tests.programs import PROGRAMS

STATS = ("mean", "second_moment", "norm")
EXAMPLES = 16  # two for each device


def main(names: list[str]) -> int:
    jax.config.update("jax_enable_x64", True)
    complaints = 0
    for name in names:
        program = PROGRAMS[name]
        loss, params, batch = program.make(jax.random.key(0), EXAMPLES)
        options = {"keep_batch_dim": program.keep_batch_dim}
        expected = quick_jit(grad_stats(loss, STATS, **options))(params, batch)
        for check_vma in (False, True):
            for microbatch_size in (None, 1):
                fn = _on_mesh(grad_stats(loss, STATS, microbatch_size=microbatch_size, **options), check_vma)
                complaint = _complaint(quick_jit(fn)(params, batch), expected)
                print(f"{name} check_vma={check_vma} microbatch_size={microbatch_size}: {complaint or 'agrees'}")  # noqa: T201
                complaints += bool(complaint)
    for what, complaint in {"explicit axes": _explicit_complaint(), "kernels": _kernel_complaint()}.items():
        print(f"{what}: {complaint or 'agrees'}")  # noqa: T201
        complaints += bool(complaint)
    return 1 if complaints else 0


def _kernel_complaint() -> str:
    """Plans with kernels can be traced inside a ``shard_map``; on a CPU XLA's own operations take their place."""
    rng = np.random.default_rng(0)
    loss = lambda w, x: jnp.mean(jnp.square(jax.nn.gelu(x @ w)))
    w, x = (rng.normal(size=shape).astype(np.float32) for shape in ((3, 4), (EXAMPLES, 5, 3)))
    expected = quick_jit(grad_stats(loss, STATS))(w, x)
    for backend in ("tpu-v5e", "h100"):
        if not make_plan(loss, w, x, backend=backend).kernel_sites:
            return f"no kernel for {backend}"
        for check_vma in (False, True):
            found = quick_jit(_on_mesh(grad_stats(loss, STATS, backend=backend), check_vma))(w, x)
            if complaint := _complaint(found, expected, 1e-4):
                return f"{backend}, check_vma={check_vma}: {complaint}"
    return ""


def _explicit_complaint() -> str:
    """A batch that is sharded over an explicit axis, all at once and without a ``shard_map``."""
    mesh = jax.make_mesh((8,), ("data",))
    rng = np.random.default_rng(0)
    loss = lambda w, x: jnp.mean(jnp.tanh(x @ w))
    stats_of = grad_stats(loss, STATS, microbatch_size=EXAMPLES)
    for shape in ((EXAMPLES, 3), (EXAMPLES, 5, 3)):
        w, x = rng.normal(size=(3, 2)), rng.normal(size=shape)
        expected = quick_jit(stats_of)(w, x)
        with jax.set_mesh(mesh):
            sharded = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
            found = quick_jit(stats_of)(jax.device_put(w, jax.NamedSharding(mesh, jax.P())), sharded)
        if complaint := _complaint(found, expected):
            return complaint
    return ""


def _on_mesh(stats_of: Any, check_vma: bool) -> Any:
    """The statistics of a batch spread over eight devices: each takes its own examples, and all are averaged."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spread, same = jax.P("data"), jax.P()

    def local(params: Any, batch: Any) -> Any:
        stats = stats_of(params, batch)
        means = jax.tree.map(lambda x: jax.lax.pmean(x, "data"), {name: stats[name] for name in STATS[:2]})
        return {**means, "norm": stats["norm"]}

    specs = {"mean": same, "second_moment": same, "norm": spread}
    return jax.shard_map(local, mesh=mesh, in_specs=(same, spread), out_specs=specs, check_vma=check_vma)


def _complaint(found: Any, expected: Any, rtol: float = 1e-8) -> str:
    for name in STATS:
        for a, b in zip(jax.tree.leaves(found[name]), jax.tree.leaves(expected[name]), strict=True):
            a, b = np.asarray(a), np.asarray(b)
            off = np.max(np.abs(a - b), initial=0.0)
            if not off <= rtol * np.max(np.abs(b), initial=1e-30):
                return f"{name} is off by {off:.2g}"
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
