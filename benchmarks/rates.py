"""How fast this machine is at what the planner counts; the CPU's line in ``pegprof/targets/rates.py`` comes from here.

Each rate is measured on what the engine makes XLA do, not on its peak: products of the sizes of small models, the
weight gradient of one example's convolution, a loop's step with a product too small to matter. Best of several runs.
"""

import dataclasses
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from jax import lax

from benchmarks.command import run_command
from benchmarks.timing import geometric_mean, warm_time
from pegprof.targets.rates import Rates, rates_of
from pegprof.targets.selection import cpu_name
from pegprof.units import format_bytes


def _seconds(fn: Callable[..., Any], *args: Any, runs: int) -> float:
    compiled = jax.jit(fn).lower(*args).compile()
    return warm_time(lambda: jax.block_until_ready(compiled(*args)), runs)


def _normal(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(0), shape)


def measure_matmul(runs: int) -> float:
    """Flop/s of plain products, S: [M, K] and R: [M, N] to SᵀR, the shape of a weight gradient."""

    def rate(M: int, K: int, N: int) -> float:
        return 2 * M * K * N / _seconds(lambda s, r: s.T @ r, _normal(M, K), _normal(M, N), runs=runs)

    return _mean(rate(256, 256, 256), rate(256, 256, 1024), rate(1024, 1024, 1024))


def measure_batched(runs: int) -> float:
    """Flop/s of products with a batch axis, as ``vmap`` makes of a weight gradient."""

    def rate(B: int, T: int, D: int) -> float:
        def contract(s: jax.Array, r: jax.Array) -> jax.Array:
            return jnp.einsum("btd,bte->bde", s, r)

        return 2 * B * T * D * D / _seconds(contract, _normal(B, T, D), _normal(B, T, D), runs=runs)

    return _mean(rate(64, 32, 256), rate(16, 128, 512), rate(32, 256, 256))


def measure_conv(runs: int) -> float:
    """Flop/s of XLA's own weight gradient of a 3×3 convolution of a batch."""
    return _convolution_rate(lambda kernel, x, r: _kernel_gradient(kernel, x, r), runs)


def measure_lone_conv(runs: int) -> float:
    """The same of one example after the other, inside a loop."""

    def gradient_by_gradient(kernel: jax.Array, x: jax.Array, r: jax.Array) -> Any:
        def step(total: jax.Array, example: Any) -> Any:
            return total + _kernel_gradient(kernel, *(part[None] for part in example)), None

        return lax.scan(step, jnp.zeros_like(kernel), (x, r))[0]

    return _convolution_rate(gradient_by_gradient, runs)


def _kernel_gradient(kernel: jax.Array, x: jax.Array, r: jax.Array) -> jax.Array:
    def convolve(kernel: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    return jax.vjp(convolve, kernel)[1](r)[0]


def _convolution_rate(weight_gradient: Callable[..., Any], runs: int, B: int = 8) -> float:
    def rate(size: int, C: int, E: int) -> float:
        args = _normal(3, 3, C, E), _normal(B, size, size, C), _normal(B, size, size, E)
        return B * 2 * 9 * size * size * C * E / _seconds(weight_gradient, *args, runs=runs)

    return _mean(rate(32, 32, 32), rate(16, 32, 64), rate(8, 64, 128))


def measure_other(runs: int) -> float:
    """Elementwise operations a second within the cache: a product, a sum, a maximum and a tanh each."""
    x, steps = _normal(16 * 1024), 200

    def repeat(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, steps, lambda _, y: jnp.tanh(jnp.maximum(y * 1.01 + 0.1, -1.0)), x)

    return 4 * steps * x.size / _seconds(repeat, x, runs=runs)


def measure_bandwidth(runs: int) -> float:
    """Bytes read and written a second, beyond any cache."""
    return _bandwidth(128 * 2**20, steps=5, runs=runs)


def measure_cache_speedup(runs: int) -> float:
    """How much faster bytes move where 1 MiB is used again and again."""
    return _bandwidth(2**20, steps=640, runs=runs) / measure_bandwidth(runs)


def _bandwidth(nbytes: int, *, steps: int, runs: int) -> float:
    # In place, since fresh memory costs page faults besides.
    x = _normal(nbytes // 4)
    return 2 * steps * nbytes / _seconds(lambda x: lax.fori_loop(0, steps, lambda _, y: y + 1, x), x, runs=runs)


def measure_steps(runs: int) -> float:
    """Steps a second of a loop over examples that takes mean and mean of squares of small products.

    Not too small: XLA turns a loop over a few bytes into one function, and its steps then cost nothing. So the product
    is in it, and a step alone is somewhat cheaper.
    """
    D = 64
    s, r = _normal(2048, 2, D), _normal(2048, 2, D)

    def loop(s: jax.Array, r: jax.Array) -> Any:
        def step(totals: tuple[jax.Array, jax.Array], example: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
            g = example[0].T @ example[1]
            return (totals[0] + g, totals[1] + g * g), None

        return lax.scan(step, (jnp.zeros((D, D)), jnp.zeros((D, D))), (s, r))[0]

    return len(s) / _seconds(loop, s, r, runs=runs)


def find_caches(root: Path = Path("/sys/devices/system/cpu")) -> dict[int, int]:
    """The bytes of the caches of each level, of all cores together; empty where the system does not say."""
    sizes: dict[tuple[int, str], int] = {}
    for index in root.glob("cpu[0-9]*/cache/index*"):
        try:
            if (index / "type").read_text().strip() == "Instruction":
                continue
            level, size = int((index / "level").read_text()), (index / "size").read_text().strip()
            shared = (index / "shared_cpu_list").read_text().strip()  # one cache is listed by each of its cores
            sizes[level, shared] = int(size.rstrip("KM")) * {"K": 2**10, "M": 2**20}.get(size[-1], 1)
        except (OSError, ValueError):
            continue
    levels = sorted({level for level, _ in sizes})
    return {level: sum(size for (of, _), size in sizes.items() if of == level) for level in levels}


def _mean(*rates: float) -> float:
    mean = geometric_mean(rates)
    assert mean is not None
    return mean


MEASURES: dict[str, Callable[[int], float]] = {
    "matmul": measure_matmul,
    "batched": measure_batched,
    "conv": measure_conv,
    "lone_conv": measure_lone_conv,
    "other": measure_other,
    "bandwidth": measure_bandwidth,
    "steps": measure_steps,
    "cache_speedup": measure_cache_speedup,
}


def measure_rates(runs: int) -> Rates:
    """What is not measured, ``cache_bytes``, is as in the table: it is a choice, between the sizes of two caches."""
    found = {}
    for name, measure in MEASURES.items():
        print(f"measuring {name}", file=sys.stderr, flush=True)
        found[name] = measure(runs)
    changes: dict[str, Any] = dict(found)
    return dataclasses.replace(rates_of(jax.default_backend()), **changes)


def format_rates(rates: Rates) -> str:
    """A line for the table, to two digits: more would be noise. Bytes are in MiB."""
    texts = {
        name: f"{value / 2**20:g} * 2**20" if name.endswith("_bytes") else _short(value)
        for name, value in dataclasses.asdict(rates).items()
        if name in MEASURES or name == "cache_bytes"  # the others are those of an accelerator
    }
    return f"Rates({', '.join(f'{name}={text}' for name, text in texts.items())})"


def _short(value: float) -> str:
    """
    >>> _short(1.234e11), _short(9.99e10), _short(4.96)
    ('1.2e11', '1e11', '5')
    """
    if value < 1000:
        return f"{value:.2g}"
    exponent = math.floor(math.log10(value))
    mantissa = round(value / 10**exponent, 1)
    if mantissa >= 10:
        mantissa, exponent = mantissa / 10, exponent + 1
    return f"{mantissa:g}e{exponent}"


def main(runs: Annotated[int, typer.Option(min=1, help="The best of how many runs.")] = 10) -> None:
    """Measure this machine's rates and print them as a line of the planner's table, after the line it has."""
    rates = measure_rates(runs)
    print(f"# {cpu_name() if jax.default_backend() == 'cpu' else jax.devices()[0].device_kind}")
    if caches := find_caches():
        print("# caches: " + ", ".join(f"L{level} {format_bytes(size)}" for level, size in caches.items()))
    print(f"# in the table: {format_rates(rates_of(jax.default_backend()))}")
    print(format_rates(rates))


if __name__ == "__main__":
    run_command(main)
