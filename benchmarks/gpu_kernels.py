"""What the kernels for NVIDIA GPUs take of a chip: registers, spills and shared memory, as compiled; nothing is run.

One table has ``fold_outer`` of ``pegprof/engine/kernels/gpu.py``, in Triton, at several tiles. One has the alternative
that was not taken, the same in Mosaic GPU, which is below. The last has the time that the products, the cache and the
memory of an H100 would take at least, for the chosen tile.
"""

import dataclasses
import functools
import glob
import importlib.util
import itertools
import math
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before the first import of jax: nothing is run on a GPU

import jax
import jax.numpy as jnp
import typer
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from rich.table import Table

from benchmarks.command import make_console, run_command, say
from pegprof.engine.accumulators import MEAN, SQUARE
from pegprof.engine.kernels import gpu
from pegprof.engine.kernels.base import KernelCost, Operand, Outer
from pegprof.errors import ExitCode, PegprofError, first_line
from pegprof.measure.worker.place import Place
from pegprof.targets.chips import CHIPS
from pegprof.targets.compilers import CUDA, why_not

B, T, D, E = 64, 512, 1024, 4096
KINDS = [MEAN, SQUARE]
ARCHITECTURES = {"a100": "sm_80", "h100": "sm_90a"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resources:
    """What one program of a kernel takes, by ptxas and by XLA."""

    registers: int  # of a thread
    spilled_bytes: int  # of a thread
    shared_bytes: int
    products: str  # by which instruction


def find_ptxas() -> str:
    """NVIDIA's assembler, from the wheel that XLA takes it from."""
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    for folder in folders:
        if found := glob.glob(f"{folder}/*/bin/ptxas"):
            return found[0]
    raise PegprofError("ptxas is not installed", hint=why_not(CUDA) or "", exit_code=ExitCode.UNMEASURED)


def compile_in(folder: Path, chip: str, fun: Callable[..., Any], *args: Any) -> None:
    jax.jit(fun).lower(*map(Place(chip).put, args)).compile({"xla_dump_to": str(folder)})


def triton_resources(chip: str, dtype: str, tile: gpu.Tile) -> Resources:
    """Of ``fold_outer`` at a tile."""

    def run(s: Any, r: Any) -> Any:
        s, r = (Operand.stored(x, minor=True) for x in (s, r))
        return gpu.fold_outer(s, r, KINDS, precision=None, chip=CHIPS[chip], tile=tile)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        compile_in(folder, chip, run, *(jax.ShapeDtypeStruct((B, 1, 1, T, n), dtype) for n in (D, E)))
        (ptx,) = (path for path in folder.glob("*.ptx") if "pegprof_outer" in path.read_text())
        command = [find_ptxas(), "-v", f"-arch={ARCHITECTURES[chip]}", str(ptx), "-o", str(folder / "cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        (sequence,) = folder.glob("*.thunk_sequence.txt")
        (shared,) = re.findall(r"pegprof_outer .*shared_memory: (\d+) bytes", sequence.read_text())
        return _resources(said, ptx.read_text(), int(shared))


def _resources(said: str, ptx: str, shared_bytes: int) -> Resources:
    instructions = {"wgmma": "wgmma.mma_async", "mma.sync": "mma.sync", "fma": "fma.rn.f32"}
    return Resources(
        registers=int(re.findall(r"Used (\d+) registers", said)[0]),
        spilled_bytes=int(re.findall(r"(\d+) bytes spill stores", said)[0]),
        shared_bytes=shared_bytes,
        products=next((name for name, text in instructions.items() if text in ptx), "none"),
    )


def tiles(dtype: str, *, every: bool) -> Iterator[gpu.Tile]:
    """Sizes and warps; then steps of positions and stages at 128×128, or all with all."""
    sizes = [(64, 64), (64, 128), (128, 128), (128, 256)]
    step = 128 // jnp.dtype(dtype).itemsize
    for (rows, columns), warps, stages, t in itertools.product(sizes, (4, 8), (2, 3, 4), (16, 32, 64)):
        usual = (t, stages) == (step, 3)
        varied = (rows, columns, warps) == (128, 128, 8) and (t == step or stages == 3)
        if every or usual or varied:
            yield gpu.Tile(T=t, D=rows, E=columns, warps=warps, stages=stages)


def mosaic_outer(
    s: jax.Array, r: jax.Array, *, minor: bool, cluster: int, rows: int = 128, columns: int = 128, slots: int = 3
) -> Any:
    """Mean and mean of squares in Mosaic GPU: s [B, T, D] and r [B, T, E], or positions last if not ``minor``.

    One warpgroup loads blocks by TMA into ``slots`` of shared memory. Two warpgroups multiply them, 64 rows each. The
    programs of a cluster lie below each other and share the columns of r: each loads a part, for all of them.
    """
    size = s.dtype.itemsize
    step = 128 // size
    steps = T // step
    names = ("cluster",) if cluster > 1 else None

    def kernel(s_ref: Any, r_ref: Any, mean_ref: Any, square_ref: Any, *scratch: Any) -> None:
        s_slots, r_slots, result, full, empty = scratch
        group, i, j = (lax.axis_index(name) for name in ("group", "i", "j"))
        i = i * cluster + lax.axis_index("cluster") if cluster > 1 else i

        def block(ref: Any, b: Any, t: Any, k: Any, width: int) -> Any:
            positions, free = pl.ds(t * step, step), pl.ds(k * width, width)
            return ref.at[b, positions, free] if minor else ref.at[b, free, positions]

        @pl.when(group == 2)
        def _() -> None:
            mosaic_gpu.set_max_registers(40, action="decrease")

            def load(k: Any, _: Any) -> None:
                b, t, slot = lax.div(k, steps), lax.rem(k, steps), lax.rem(k, slots)
                pl.when(k >= slots)(lambda: mosaic_gpu.barrier_wait(empty.at[slot]))
                copy = mosaic_gpu.copy_gmem_to_smem
                copy(block(s_ref, b, t, i, rows), s_slots.at[slot], full.at[slot])
                copy(block(r_ref, b, t, j, columns), r_slots.at[slot], full.at[slot], collective_axes=names)

            lax.fori_loop(0, B * steps, load, None)

        @pl.when(group < 2)
        def _() -> None:
            mosaic_gpu.set_max_registers(232, action="increase")
            half = pl.ds(group * 64, 64)

            def turned(ref: Any) -> Any:
                return mosaic_gpu.transpose_ref(ref, (1, 0))

            def example(b: Any, states: Any) -> Any:
                def product(accumulator: Any) -> Any:
                    def multiply(t: Any, _: Any) -> None:
                        slot = lax.rem(b * steps + t, slots)
                        mosaic_gpu.barrier_wait(full.at[slot])
                        x = turned(s_slots.at[slot, :, half]) if minor else s_slots.at[slot, half]
                        y = r_slots.at[slot] if minor else turned(r_slots.at[slot])
                        mosaic_gpu.wgmma(accumulator, x, y)
                        mosaic_gpu.wgmma_wait(0)
                        mosaic_gpu.barrier_arrive(empty.at[slot])

                    lax.fori_loop(0, steps, multiply, None)
                    return accumulator[...]

                p = pl.run_scoped(product, mosaic_gpu.WGMMAAccumulatorRef((64, columns), jnp.float32))
                mean, square = states
                return mean + p, square + p * p

            zeros = mosaic_gpu.layout_cast(jnp.zeros((64, columns), jnp.float32), mosaic_gpu.Layout.WGMMA)
            for state, ref in zip(lax.fori_loop(0, B, example, (zeros, zeros)), (mean_ref, square_ref), strict=True):
                result[half] = state / B
                mosaic_gpu.commit_smem()
                place = ref.at[pl.ds(i * rows + group * 64, 64), pl.ds(j * columns, columns)]
                mosaic_gpu.copy_smem_to_gmem(result.at[half], place)
                mosaic_gpu.wait_smem_to_gmem(0)

    def slots_of(width: int) -> Any:
        transforms = (mosaic_gpu.TilingTransform((8, step)), mosaic_gpu.SwizzleTransform(128))
        return mosaic_gpu.SMEM((slots, *((step, width) if minor else (width, step))), s.dtype, transforms=transforms)

    arrivals: Any = dict(num_arrivals=2, num_barriers=slots)
    clusters: Any = dict(cluster=(cluster,), cluster_names=names) if names else {}
    return mosaic_gpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct((D, E), jnp.float32)] * 2,
        scratch_types=[
            slots_of(rows),
            slots_of(columns),
            mosaic_gpu.SMEM((rows, columns), jnp.float32),
            mosaic_gpu.Barrier(**arrivals),
            mosaic_gpu.ClusterBarrier(collective_axes=names, **arrivals) if names else mosaic_gpu.Barrier(**arrivals),
        ],
        grid=(D // rows // cluster, E // columns),
        grid_names=("i", "j"),
        **clusters,
        num_threads=3,
        thread_name="group",
    )(s, r)


def mosaic_resources(dtype: str, *, minor: bool, cluster: int) -> Resources:
    """Of the kernel in Mosaic GPU, whose compiler says them to a folder that the environment names.

    Registers are those at the start. Then the warpgroups that multiply take 232, and the one that loads keeps 40.
    Shared memory is counted from the kernel's own blocks.
    """
    shapes = [(B, T, n) if minor else (B, n, T) for n in (D, E)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        asked = {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_TO": name}
        os.environ |= asked
        try:
            run = functools.partial(mosaic_outer, minor=minor, cluster=cluster)
            compile_in(folder / "xla", "h100", run, *(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))
        finally:
            for variable in asked:
                del os.environ[variable]
        (said,), (ptx,) = folder.glob("*.ptxas"), folder.glob("*.ptx")
        counted = 3 * 128 * (128 + 128) + 128 * 128 * 4  # three steps of 128 bytes, and a result
        return _resources(said.read_text(), ptx.read_text(), counted)


def floors(outer: Outer, cost: KernelCost) -> list[tuple[str, float]]:
    """Milliseconds that each part of an H100 needs at least."""
    chip = CHIPS["h100"]
    assert chip.cache_bandwidth is not None
    return [
        ("products", 1e3 * cost.flops / gpu.matmul_rate(outer.dtype, None, chip)),
        ("entries", 1e3 * cost.vector_flops / chip.vector_flops),
        ("L2 cache", 1e3 * cost.cache_bytes / chip.cache_bandwidth),
        ("memory", 1e3 * cost.bytes / chip.bandwidth),
    ]


def floors_table() -> Table:
    table = Table(
        "dtype", "operands", "tile", "products", "entries", "L2 cache", "memory", title="H100, at least, in ms"
    )
    for dtype in ("float32", "bfloat16"):
        s, r = (Operand.stored(jax.ShapeDtypeStruct((B, 1, 1, T, n), dtype), minor=True) for n in (D, E))
        outer = Outer(s=s, r=r)
        tile = gpu.choose_tile(outer, KINDS, CHIPS["h100"])
        assert tile is not None
        cost = gpu.outer_cost(outer, tile, KINDS, CHIPS["h100"])
        # A cluster loads what its programs share once: as if they were one program with a larger tile.
        for title, down, across in (("each for itself", 1, 1), ("shared by two", 2, 1), ("shared by 2×2", 2, 2)):
            share = (tile.D / across + tile.E / down) / (tile.D + tile.E)
            shared = dataclasses.replace(cost, cache_bytes=math.ceil(cost.cache_bytes * share))
            times = [f"{ms:.2f}" for _, ms in floors(outer, shared)]
            table.add_row(dtype, title, f"{tile.D}×{tile.E}×{tile.T}", *times)
    return table


def triton_table(*, every: bool) -> Table:
    table = _table("Triton: mean and mean of squares", "chip", "dtype", "tile", "warps", "stages")
    for chip, dtype in itertools.product(ARCHITECTURES, ("float32", "bfloat16")):
        for tile in tiles(dtype, every=every):
            say(f"compiling {tile} in {dtype} for {chip}")
            labels = (chip, dtype, f"{tile.D}×{tile.E}×{tile.T}", str(tile.warps), str(tile.stages))
            _add_row(table, labels, functools.partial(triton_resources, chip, dtype, tile))
    return table


def mosaic_table() -> Table:
    table = _table("Mosaic GPU: the same, 128×128, three slots, on h100", "dtype", "last axis", "cluster")
    for dtype, minor, cluster in itertools.product(("float32", "bfloat16"), (True, False), (1, 2)):
        labels = (dtype, "D and E" if minor else "positions", str(cluster))
        say(f"compiling {labels} in Mosaic GPU")
        _add_row(table, labels, functools.partial(mosaic_resources, dtype, minor=minor, cluster=cluster))
    return table


def _table(title: str, *labels: str) -> Table:
    return Table(*labels, "products", "registers", "spilled bytes", "shared KiB", title=title)


def _add_row(table: Table, labels: tuple[str, ...], measure: Callable[[], Resources]) -> None:
    """A kernel that does not compile is a row too, with the reason."""
    try:
        found = measure()
    except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
        table.add_row(*labels, f"fails: {first_line(error)[:60]}", "–", "–", "–")
        return
    figures = (found.registers, found.spilled_bytes, f"{found.shared_bytes / 2**10:.0f}")
    table.add_row(*labels, found.products, *map(str, figures))


def main(
    every: Annotated[bool, typer.Option("--every", help="All tiles, warps, stages and steps: ten minutes.")] = False,
) -> None:
    """Compile the kernels for GPUs that are not here, and print what they take."""
    console = make_console()
    for table in (triton_table(every=every), mosaic_table(), floors_table()):
        console.print(table)


if __name__ == "__main__":
    run_command(main)
