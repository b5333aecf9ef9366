"""Small programs, compiled for a target that is not here: ``python -m tests.targets.programs NAME`` prints their texts.

A process of its own, because a target's environment must be set before jax is imported.
"""

import functools
import json
import os
import subprocess
import sys

N, D = 5, 256  # steps of loops, sides of matrices
KERNEL = {"kernel": "double", "flops": "1000", "bytes": "2000", "vector_flops": "300", "cache_bytes": "4000"}


@functools.cache
def compile_texts(target: str) -> dict[str, dict[str, object]]:
    """By the program's name: its compiled text and XLA's bytes of arguments and results."""
    from pegprof.targets.devices import DEVICES
    from pegprof.targets.selection import absent_target

    environment = {"JAX_PLATFORMS": "cpu"} if target == "cpu" else absent_target(DEVICES[target]).environment
    command = [sys.executable, "-m", "tests.targets.programs", target]
    run = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def make_programs(target):
    """Functions and the shapes of their arguments."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.xla_metadata import set_xla_metadata

    def double(x_ref, y_ref):
        y_ref[...] = 2 * x_ref[...]

    def call_kernel(x):
        with set_xla_metadata(**{f"pegprof_{name}": value for name, value in KERNEL.items()}):
            return pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    def chain(x, w):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=N)[0]

    def total(xs):
        return jax.lax.scan(lambda y, x: (y + jnp.tanh(x), None), jnp.zeros_like(xs[0]), xs)[0]

    def convolve(x, w):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    matrix = (D, D)
    programs = {
        "add": (lambda x, y: x + y, matrix, matrix),
        "dot": (jnp.dot, (D, 2 * D), (2 * D, 4 * D)),
        "batched": (lambda x, y: jnp.einsum("bij,bjk->bik", x, y), (3, D, D), (3, D, 2 * D)),
        "chain": (chain, matrix, matrix),
        "total": (total, (N, 4 * D, 4 * D)),
        "convolve": (convolve, (8, 32, 32, 128), (3, 3, 128, 256)),
    }
    if target != "cpu":
        programs["kernel"] = (lambda x: call_kernel(x) + 1, (128, 128))
        programs["kernels"] = (lambda x: jax.lax.fori_loop(0, N, lambda _, x: call_kernel(x), x), (128, 128))
    return programs


def main(target):
    import jax

    from pegprof.measure.worker.place import Place
    from pegprof.targets.hlo.compiler_prices import GPU_OPTIONS

    place = Place(None if target == "cpu" else target)
    options = GPU_OPTIONS if place.device and place.device.compiler.backend == "gpu" else {}
    found = {}
    for name, (fun, *shapes) in make_programs(target).items():
        arguments = [place.put(jax.ShapeDtypeStruct(shape, "float32")) for shape in shapes]
        compiled = jax.jit(fun).lower(*arguments).compile(dict(options))
        memory = compiled.memory_analysis()
        found[name] = {
            "text": compiled.as_text(),
            "bytes": memory.argument_size_in_bytes + memory.output_size_in_bytes,
        }
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
