"""Programs on eight virtual CPU devices, against the same statistics on one.

Run as ``python -m tests.engine.sharded SETTING:NAME...`` in a process of its own, since the number of devices is fixed
when JAX starts; with ``--everything`` every program runs in every setting. It prints a line for each, and exits with 1
if one is off.
"""

import functools
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from pegprof import accumulate_stats, grad_stats, make_plan, train_step
from pegprof.errors import PegprofError
from pegprof.optimizers import micro_adam
from tests.engine.cases import tolerance
from tests.oracles import quick_jit
from tests.programs import PROGRAMS

STATS = ("mean", "second_moment", "variance", "norm")
EXAMPLES = 16  # two for each device
Stats = dict[str, Any]


def main(names: Sequence[str]) -> int:
    jax.config.update("jax_enable_x64", True)
    complaints = 0
    if list(names) == ["--everything"]:
        names = [f"{setting}:{name}" for name in PROGRAMS for setting in SETTINGS if setting not in SOME]
    for each in names:
        setting, _, name = each.partition(":")
        complaint = _complaint_of(SETTINGS[setting], name) if name else CHECKS[setting]()
        print(f"{each}: {complaint or 'agrees'}", flush=True)  # noqa: T201
        complaints += bool(complaint)
    return 1 if complaints else 0


def _complaint_of(run: Callable[..., Stats], name: str) -> str:
    program = PROGRAMS[name]
    loss, params, batch = program.make(jax.random.key(0), EXAMPLES)
    how = {"keep_batch_dim": program.keep_batch_dim}
    expected = quick_jit(grad_stats(loss, STATS, **how))(params, batch)
    try:
        return _complaint(run(loss, params, batch, **how), expected, tolerance(program))
    except Exception as error:
        refused = run is SETTINGS["shard_map that checks"] and _is_refused(loss, params, batch, **how)
        return "" if refused else f"{type(error).__name__}: {error}"


def _is_refused(loss: Any, params: Any, batch: Any, *, keep_batch_dim: bool) -> bool:
    """Whether JAX itself refuses a loss where ``check_vma=True``: its loops start at constants, say."""

    def local(params: Any, batch: Any) -> Any:
        params = jax.tree.map(lambda x: jax.lax.pcast(x, "data", to="varying"), params)
        example = jax.tree.map(lambda x: x[:1] if keep_batch_dim else x[0], batch)
        return jax.tree.map(lambda x: x[None], jax.grad(loss)(params, example))

    mesh, spread = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,)), jax.P("data")
    try:
        jax.eval_shape(jax.shard_map(local, mesh=mesh, in_specs=(jax.P(), spread), out_specs=spread), params, batch)
    except (TypeError, ValueError):
        return True
    return False


def _on_mesh(
    sizes: dict[str, int],
    loss: Any,
    params: Any,
    batch: Any,
    *,
    kind: AxisType = AxisType.Auto,
    shards: str = "",
    told: bool = False,
    **options: Any,
) -> Stats:
    """The batch over ``data`` and ``fsdp``, parameters over ``shards``, their largest axis that it divides.

    Where that is ``told``, what is kept is scattered like the parameters.
    """
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))
    own = jax.NamedSharding(mesh, jax.P(tuple(a for a in sizes if a in ("data", "fsdp"))))
    batch = jax.device_put(batch, own)
    shardings = jax.tree.map(lambda x: _sharding(mesh, x, shards), params)
    params = jax.device_put(params, shardings)
    if told:
        options["param_shardings"] = shardings
    with jax.set_mesh(mesh):
        stats = quick_jit(grad_stats(loss, STATS, **options))(params, batch)
    if told:
        _check_shardings([stats[name] for name in STATS if name != "norm"], shardings)
    return stats


def _check_shardings(trees: Sequence[Any], shardings: Any) -> None:
    """Statistics are sharded as the parameters are; XLA keeps an array without entries on every device."""
    for tree in trees:
        for x, wanted in zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True):
            assert x.size == 0 or x.sharding.is_equivalent_to(wanted, x.ndim), f"{x.sharding} in place of {wanted}"


def _sharding(mesh: Any, x: Any, axis: str) -> jax.NamedSharding:
    divided = [n for n in range(x.ndim) if axis and x.shape[n] % mesh.shape[axis] == 0]
    if not divided:
        return jax.NamedSharding(mesh, jax.P())
    largest = max(divided, key=lambda n: x.shape[n])
    return jax.NamedSharding(mesh, jax.P(*(axis if n == largest else None for n in range(x.ndim))))


def _inside(loss: Any, params: Any, batch: Any, *, check_vma: bool, **options: Any) -> Stats:
    """Inside a user's own ``shard_map``, with one batch for all devices."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    spread, same = jax.P("data"), jax.P()
    specs = {name: spread if name == "norm" else same for name in STATS}
    stats_of = grad_stats(loss, STATS, batch_axes="data", **options)
    sharded = jax.shard_map(stats_of, mesh=mesh, in_specs=(same, spread), out_specs=specs, check_vma=check_vma)
    return quick_jit(sharded)(params, batch)


SETTINGS: dict[str, Callable[..., Stats]] = {
    "automatic": functools.partial(_on_mesh, {"data": 8}),
    "one at a time": functools.partial(_on_mesh, {"data": 8}, microbatch_size=1),
    "fsdp": functools.partial(_on_mesh, {"data": 2, "fsdp": 4}, shards="fsdp", told=True),
    "fsdp untold": functools.partial(_on_mesh, {"data": 2, "fsdp": 4}, shards="fsdp"),
    "explicit": functools.partial(_on_mesh, {"data": 8}, kind=AxisType.Explicit),
    "explicit fsdp": functools.partial(_on_mesh, {"data": 2, "fsdp": 4}, kind=AxisType.Explicit, shards="fsdp"),
    "shard_map": functools.partial(_inside, check_vma=False),
    "shard_map that checks": functools.partial(_inside, check_vma=True),
    "model": functools.partial(_on_mesh, {"data": 4, "model": 2}, shards="model"),
}
SOME = ("model", "fsdp untold")  # settings that are for some programs


def _kernel_complaint() -> str:
    """Plans with kernels can be traced on a mesh; on a CPU XLA's own operations take their place."""
    rng = np.random.default_rng(0)
    loss = lambda w, x: jnp.mean(jnp.square(jax.nn.gelu(x @ w)))
    w, x = (rng.normal(size=shape).astype(np.float32) for shape in ((3, 4), (EXAMPLES, 5, 3)))
    expected = quick_jit(grad_stats(loss, STATS))(w, x)
    for backend in ("tpu-v5e", "h100"):
        if not make_plan(loss, w, x, backend=backend).kernel_sites:
            return f"no kernel for {backend}"
        for setting in ("automatic", "shard_map", "shard_map that checks"):
            found = SETTINGS[setting](loss, w, x, backend=backend)
            if complaint := _complaint(found, expected, 1e-4):
                return f"{backend}, {setting}: {complaint}"
    return ""


def _training_complaint() -> str:
    """Twenty steps on a mesh equal those on one device; parameters and state keep their shardings."""
    rng = np.random.default_rng(0)
    loss = lambda p, x: jnp.mean(jnp.square(jnp.tanh(x @ p["in"]) @ p["out"] - 1))
    params = {"in": jnp.asarray(rng.normal(size=(8, 16))), "out": jnp.asarray(rng.normal(size=(16, 8)))}
    batches = [jnp.asarray(rng.normal(size=(EXAMPLES, 3, 8))) for _ in range(20)]

    def train(params: Any, put: Callable[[Any], Any], **options: Any) -> tuple[Any, Any]:
        opt = micro_adam(0.01)
        step, state = train_step(loss, opt, **options), opt.init(params)
        for batch in batches:
            params, state, _ = step(params, state, put(batch))
        return params, state

    expected, _ = train(params, lambda x: x)
    for sizes, shards in (({"data": 8}, ""), ({"data": 2, "fsdp": 4}, "fsdp"), ({"data": 4, "model": 2}, "model")):
        for kind in (AxisType.Auto,) if shards == "model" else (AxisType.Auto, AxisType.Explicit):
            mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))
            own = jax.NamedSharding(mesh, jax.P(tuple(a for a in sizes if a != "model")))
            placed = jax.tree.map(lambda x, m=mesh, a=shards: jax.device_put(x, _sharding(m, x, a)), params)
            for microbatch_size in (None, 1):
                put = lambda x, s=own: jax.device_put(x, s)
                found, state = train(placed, put, microbatch_size=microbatch_size)
                moments = [x for x in jax.tree.leaves(state) if x.ndim == 2]
                for a, b, w in zip(*map(jax.tree.leaves, (found, expected, placed)), strict=True):
                    if not np.allclose(a, b, rtol=1e-8, atol=1e-10):
                        return f"{sizes}, {kind}, {microbatch_size}: off by {np.max(np.abs(a - b)):.2g}"
                    same = [x for x in (a, *moments) if x.shape == w.shape]
                    if not all(x.sharding.is_equivalent_to(w.sharding, 2) for x in same):
                        return f"{sizes}, {kind}, {microbatch_size}: {[x.sharding for x in same]} for {w.sharding}"
    return ""


def _keys_complaint() -> str:
    """A key that is split by example gives every example the key that it has on one device."""
    rng = np.random.default_rng(0)
    loss = lambda w, x, key: jnp.mean(jnp.tanh(x @ w) * jax.random.bernoulli(key, 0.5, x.shape[:1]))
    w, x, key = jnp.asarray(rng.normal(size=3)), jnp.asarray(rng.normal(size=(EXAMPLES, 3))), jax.random.key(1)
    stats_of = grad_stats(loss, STATS, prng_argnum=2)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    return _complaint(stats_of(w, jax.device_put(x, jax.NamedSharding(mesh, jax.P("data"))), key), stats_of(w, x, key))


def _collective_complaint() -> str:
    """One reduction at the end and none in a loop, whatever the schedule; a device does an eighth of the work."""
    rng = np.random.default_rng(0)
    loss = lambda w, x: jnp.mean(jnp.square(jnp.tanh(x @ w)))
    w, x = jnp.asarray(rng.normal(size=(16, 16))), jnp.asarray(rng.normal(size=(32, 24, 16)))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    sharded = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
    for microbatch_size in (None, 1, 2):
        with jax.set_mesh(mesh):
            lowered = jax.jit(grad_stats(loss, microbatch_size=microbatch_size)).lower(w, sharded)
        text = lowered.compile().as_text()
        found = re.findall(r"= .* (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\(", text)
        if set(found) != {"all-reduce"} or len(found) > 2:
            return f"microbatch_size={microbatch_size}: {found}"
        alone = jax.jit(grad_stats(loss, microbatch_size=microbatch_size)).lower(w, x[:4]).compile()
        flops, of_device = (c.cost_analysis()["flops"] for c in (alone, lowered.compile()))
        if of_device > 1.05 * flops:
            return f"microbatch_size={microbatch_size}: {of_device} flops a device, {flops} for its examples alone"
    return ""


def _fsdp_complaint() -> str:
    """Statistics of sharded parameters are scattered as they are reduced, over any of the batch's axes."""
    rng = np.random.default_rng(0)
    loss = lambda w, x: jnp.mean(jnp.square(jnp.tanh(x @ w)))
    w, x = jnp.asarray(rng.normal(size=(16, 16))), jnp.asarray(rng.normal(size=(32, 24, 16)))
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    spread = jax.device_put(x, jax.NamedSharding(mesh, jax.P(("data", "fsdp"))))
    for spec in (jax.P("fsdp"), jax.P(None, ("data", "fsdp")), jax.P("data", "fsdp")):
        for microbatch_size in (None, 1):
            how = dict(microbatch_size=microbatch_size, param_shardings=spec)
            with jax.set_mesh(mesh):
                jitted = jax.jit(grad_stats(loss, **how), in_shardings=(jax.NamedSharding(mesh, spec), spread.sharding))
                compiled = jitted.lower(w, spread).compile()
            found = re.findall(r"= .* (all-gather|all-reduce|all-to-all|reduce-scatter)\(", compiled.as_text())
            if "reduce-scatter" not in found or "all-to-all" in found:
                return f"{spec}, microbatch_size={microbatch_size}: {found}"
            with jax.set_mesh(mesh):
                all_stats = jax.jit(grad_stats(loss, STATS, **how))(w, spread)
            if complaint := _complaint(all_stats, grad_stats(loss, STATS)(w, x)):
                return f"{spec}, microbatch_size={microbatch_size}: {complaint}"
    return ""


def _sequence_complaint() -> str:
    """Positions of an example on several devices: XLA adds up its gradient before anything is squared."""
    rng = np.random.default_rng(0)
    w, x = jnp.asarray(rng.normal(size=(4, 4))), jnp.asarray(rng.normal(size=(EXAMPLES, 8, 4)))
    mesh = jax.make_mesh((4, 2), ("data", "sequence"), axis_types=(AxisType.Auto,) * 2)

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(jnp.square(jnp.tanh(x @ w)))

    def constrained(w: Any, x: Any) -> Any:  # a sharding constraint of the user's own
        return jnp.mean(jnp.square(jax.lax.with_sharding_constraint(jnp.tanh(x @ w), jax.P(None, "sequence"))))

    expected = grad_stats(loss, STATS)(w, x)
    sharded = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data", "sequence")))
    with jax.set_mesh(mesh):
        found = [jax.jit(grad_stats(each, STATS))(w, sharded) for each in (loss, constrained)]
    return next(filter(None, (_complaint(each, expected) for each in found)), "")


def _transformation_complaint() -> str:
    """Statistics of a sharded batch are differentiated, batched and merged like any; one example a device is enough."""
    rng = np.random.default_rng(0)
    w, x = jnp.asarray(rng.normal(size=(3, 2))), jnp.asarray(rng.normal(size=(EXAMPLES, 4, 3)))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    own = jax.NamedSharding(mesh, jax.P("data"))

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ w))

    def values(x: Any, batch_axes: Any) -> list[Any]:
        stats_of = grad_stats(loss, STATS, batch_axes=batch_axes)
        kept = accumulate_stats(loss, STATS, batch_axes=batch_axes)

        def total(w: Any) -> Any:
            return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(stats_of(w, x)))

        plan = make_plan(loss, w, x, stats=STATS, batch_axes=batch_axes)
        return [
            jax.grad(total)(w),
            jax.vmap(lambda w: stats_of(w, x))(jnp.stack([w, 2 * w])),
            kept(w, x).merge(kept(w, x)).finish(),
            stats_of(w, x[:8]),
            grad_stats(loss, STATS, batch_axes=batch_axes, plan=plan)(w, x),
        ]

    pairs = zip(*map(jax.tree.leaves, (values(jax.device_put(x, own), own), values(x, None))), strict=True)
    off = max(float(jnp.max(jnp.abs(np.asarray(a) - np.asarray(b)))) for a, b in pairs)
    return "" if off < 1e-12 else f"off by {off:.2g}"


def _refusal_complaint() -> str:
    """What cannot be done is said in words."""
    loss = lambda w, x: jnp.mean(jnp.tanh(x @ w))
    w, x = jnp.ones(3), jnp.ones((EXAMPLES, 3))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    own = jax.NamedSharding(mesh, jax.P("data"))

    def summed(w: Any, x: Any) -> Any:
        return jax.lax.psum(loss(w, x), "data")

    def inside(w: Any, x: Any) -> Any:
        return grad_stats(summed, "mean")(w, x)

    specs = dict(mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P(), check_vma=False)
    both = jax.NamedSharding(mesh, jax.P())
    refused = {
        "no tree like the parameters": lambda: grad_stats(loss, param_shardings={"w": both})(w, jax.device_put(x, own)),
        "do not divide it": lambda: grad_stats(loss, batch_axes=own)(w, x[:10]),
        "unknown mesh axis 'dat'": lambda: grad_stats(loss, batch_axes="dat")(w, jax.device_put(x, own)),
        "there is no mesh": lambda: grad_stats(loss, batch_axes="data")(w, x),
        "combines what devices have along the mesh axis data: psum": lambda: jax.shard_map(inside, **specs)(w, x),
    }
    for words, call in refused.items():
        try:
            call()
        except PegprofError as error:
            if words not in str(error):
                return f"{words!r} is not in {error}"
        else:
            return f"not refused: {words}"
    return ""


CHECKS = {
    "collectives": _collective_complaint,
    "kernels": _kernel_complaint,
    "fsdp": _fsdp_complaint,
    "keys": _keys_complaint,
    "refusals": _refusal_complaint,
    "sequence": _sequence_complaint,
    "training": _training_complaint,
    "transformations": _transformation_complaint,
}


def _complaint(found: Stats, expected: Stats, rtol: float = 1e-8) -> str:
    for name in STATS:
        like = expected["second_moment" if name == "variance" else name]  # a variance may be nothing but rounding
        leaves = (jax.tree.leaves(tree) for tree in (found[name], expected[name], like))
        for a, b, scale in zip(*leaves, strict=True):
            off = np.max(np.abs(np.asarray(a) - np.asarray(b)), initial=0.0)
            largest = np.max(np.abs(np.asarray(scale)), initial=1e-30)
            if not off <= rtol * largest:
                return f"{name} is off by {off:.2g} of {largest:.2g}"
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
