"""Train on two hosts of four devices each with ``jax.distributed``: here two processes, each with four virtual devices.

Every process has half of each batch. ``pegprof.train_step`` finds the mesh from the arrays: each device runs its own
examples, and what the optimizer needs of them is reduced once a step. Run it with

    python examples/train_on_two_hosts.py

and compare with ``--processes 1``, where one process has all eight devices. On a cluster, call ``train`` in every
process after ``jax.distributed.initialize()``; nothing else changes.
"""

import argparse
import os
import socket
import subprocess
import sys

DEVICES, STEPS, BATCH, WIDTH = 8, 20, 32, 64


def train():
    """The loss before each step, and the sum of the trained parameters. Every process calls this."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import pegprof
    from pegprof.optimizers import micro_adam

    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    shared, spread = jax.NamedSharding(mesh, jax.P()), jax.NamedSharding(mesh, jax.P("data"))
    rng = np.random.default_rng(0)  # the same numbers in every process, of which each takes its own part
    teacher = rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5

    def loss(params, batch):
        x_BxD, y_BxD = batch
        return jnp.mean(jnp.square(jnp.tanh(x_BxD @ params["in"]) @ params["out"] - y_BxD))

    def make_batch():
        x = rng.normal(size=(BATCH, WIDTH)).astype(np.float32)
        return tuple(jax.make_array_from_callback(a.shape, spread, lambda at, a=a: a[at]) for a in (x, x @ teacher))

    start = {name: rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5 for name in ("in", "out")}
    params = jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, shared, lambda at: x[at]), start)
    opt = micro_adam(1e-2)
    step, state, values = pegprof.train_step(loss, opt), jax.jit(opt.init)(params), []
    for _ in range(STEPS):
        params, state, value = step(params, state, make_batch())
        values.append(float(value))
    return values, float(jax.jit(lambda p: sum(jnp.sum(jnp.abs(x)) for x in p.values()))(params))


def run_process(number, processes, address):
    """One of the processes; the first one prints."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES // processes}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    if processes > 1:
        jax.distributed.initialize(address, num_processes=processes, process_id=number)
    values, total = train()
    if number == 0:
        print(f"processes {processes}, devices {jax.device_count()}")
        print("loss " + "  ".join(f"{value:.5f}" for value in (values[0], values[STEPS // 2], values[-1])))
        print(f"sum of |parameters| {total:.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2, choices=(1, 2, 4, 8))
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.number is not None:
        run_process(given.number, given.processes, given.address)
        return
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, __file__, "--processes", str(given.processes), "--address", address, "--number"]
    started = [subprocess.Popen([*command, str(number)]) for number in range(given.processes)]
    sys.exit(max(process.wait() for process in started))


if __name__ == "__main__":
    main()
