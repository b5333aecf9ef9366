"""Kernels for NVIDIA GPUs: values by Pallas's interpreter against a loop in float64; and compiled for absent devices.

Nobody here has such a device, so these tests are all that is known of the kernels.
"""

import itertools
import re
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pegprof.engine.accumulators import ABS, CENTRED, MEAN, SIGN, SQUARE, SQUARE_NORM, Accumulator, Moment, Spread
from pegprof.engine.kernels import gpu, gpu_gram
from pegprof.engine.kernels.base import Operand, Outer
from pegprof.measure.worker.place import Place
from pegprof.targets.chips import CHIPS
from tests.compilers import needs_compilers

H100 = CHIPS["h100"]
HIGHEST = jax.lax.Precision.HIGHEST
TOLERANCE = {"bfloat16": 2e-5, "float32": 2e-5, "float64": 1e-12}  # products of bfloat16 are exact in float32


@st.composite
def products(draw: Any, *, skipping: bool = False) -> tuple[Any, ...]:
    """Operands, how they lie, and which rows to skip. Numbers have few bits: rounding turns no sign."""
    sizes = st.integers(1, 40)
    B, T, D, E = draw(st.integers(1, 6)), draw(st.one_of(st.just(1), sizes, st.just(130))), draw(sizes), draw(sizes)
    G, X, Y = (draw(st.integers(1, 2)) for _ in range(3))
    s_minor, r_minor = draw(st.booleans()), draw(st.booleans())
    dtype = draw(st.sampled_from(sorted(TOLERANCE)))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    s = random.integers(-8, 9, (B, G, X, *((T, D) if s_minor else (D, T)))) / 8
    r = random.integers(-8, 9, (B, G, Y, *((T, E) if r_minor else (E, T)))) / 8
    skip = random.random((B, D)) < 0.3 if skipping else None
    return s, r, s_minor, r_minor, dtype, skip


def gradients(s: np.ndarray, r: np.ndarray, s_minor: bool, r_minor: bool) -> np.ndarray:
    """[B, G, X, Y, D, E], one product after the other."""
    s = s if s_minor else s.swapaxes(3, 4)
    r = r if r_minor else r.swapaxes(3, 4)
    g = np.zeros((*s.shape[:3], r.shape[2], s.shape[4], r.shape[4]))
    for b, i, x, y in itertools.product(*map(range, g.shape[:4])):
        g[b, i, x, y] = s[b, i, x].T @ r[b, i, y]
    return g


IN_NUMPY = {MEAN: lambda g: g, SQUARE: np.square, SIGN: np.sign, ABS: np.abs}


def expected(kind: Accumulator, g: np.ndarray, skip: np.ndarray | None) -> Any:
    kept = True if skip is None else ~skip[:, None, None, None, :, None]
    if kind == SQUARE_NORM:
        return np.where(kept, g**2, 0).sum((1, 2, 3, 4, 5))
    if kind in IN_NUMPY:
        return np.where(kept, IN_NUMPY[kind](g), 0).mean(0)
    return Spread(g.mean(0), g.var(0))


def assert_close(found: Any, wanted: Any, dtype: str) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == (np.float64 if dtype == "float64" else np.float32)
        np.testing.assert_allclose(x, y, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * max(1, np.abs(y).max()))


def fold(product: Any, kinds: list[Accumulator], **more: Any) -> list[Any]:
    s, r, s_minor, r_minor, dtype, skip = product
    with jax.enable_x64(dtype == "float64"), jax.numpy_rank_promotion("raise"):
        return gpu.fold_outer(
            Operand.stored(jnp.asarray(s, dtype), minor=s_minor),
            Operand.stored(jnp.asarray(r, dtype), minor=r_minor),
            kinds,
            precision=HIGHEST,
            chip=H100,
            skip=None if skip is None else jnp.asarray(skip),
            interpret=True,
            **more,
        )


some_kinds = st.lists(st.sampled_from([MEAN, SQUARE, SIGN, ABS, CENTRED, SQUARE_NORM]), min_size=1, unique=True)


@hypothesis.settings(max_examples=12)
@hypothesis.given(products(), some_kinds)
def test_summaries_are_those_of_the_gradients_formed_one_by_one(product: Any, kinds: list[Accumulator]) -> None:
    g = gradients(*product[:4])
    for kind, found in zip(kinds, fold(product, kinds), strict=True):
        assert_close(found, expected(kind, g, None), product[4])


@hypothesis.settings(max_examples=6)
@hypothesis.given(products(skipping=True))
def test_skipped_rows_add_nothing_and_still_count_as_examples(product: Any) -> None:
    g, kinds = gradients(*product[:4]), [MEAN, ABS, SQUARE_NORM]
    for kind, found in zip(kinds, fold(product, kinds), strict=True):
        assert_close(found, expected(kind, g, product[5]), product[4])


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_parts_of_the_examples_merge(parts: int) -> None:
    random = np.random.default_rng(0)
    product = (
        random.normal(size=(4, 1, 2, 21, 19)),
        random.normal(size=(4, 1, 1, 21, 35)),
        True,
        True,
        "float32",
        None,
    )
    tile = gpu.Tile(T=16, D=16, E=16, parts=parts)
    kinds = [CENTRED, SQUARE, SQUARE_NORM]
    g = gradients(*product[:4])
    for kind, found in zip(kinds, fold(product, kinds, tile=tile), strict=True):
        assert_close(found, expected(kind, g, None), "float32")


def test_a_grid_of_many_tiles_is_run_through_whole() -> None:
    """More rows and columns than a band has."""
    random = np.random.default_rng(0)
    product = (
        random.normal(size=(1, 1, 1, 2, 230)),
        random.normal(size=(1, 1, 1, 2, 210)),
        True,
        True,
        "float32",
        None,
    )
    (mean,) = fold(product, [MEAN], tile=gpu.Tile(T=16, D=16, E=16))
    assert_close(mean, gradients(*product[:4])[0], "float32")


def test_what_lies_beyond_an_edge_does_not_count() -> None:
    """An infinite gradient stays infinite: 0 · inf, from a masked entry, would make its norm NaN."""
    s = np.ones((2, 1, 1, 3, 5))
    s[0, 0, 0, 1, 2] = np.inf
    mean, norm = fold((s, np.ones((2, 1, 1, 3, 7)), True, True, "float32", None), [MEAN, SQUARE_NORM])
    assert norm.tolist() == [np.inf, 9 * 35]
    assert np.isinf(mean[0, 0, 0, 2]).all()
    assert np.isfinite(np.delete(mean[0, 0, 0], 2, axis=0)).all()


def test_operands_of_two_dtypes_are_multiplied_in_the_wider() -> None:
    s, r = jnp.full((2, 1, 1, 3, 4), 1 / 3, jnp.float32), jnp.ones((2, 1, 1, 3, 4), jnp.bfloat16)
    how: Any = dict(precision=(HIGHEST, None), chip=H100, interpret=True)
    (mean,) = gpu.fold_outer(*(Operand.stored(x, minor=True) for x in (s, r)), [MEAN], **how)
    np.testing.assert_allclose(mean, 1, rtol=1e-6)


@pytest.mark.parametrize("minor", [True, False])
@pytest.mark.parametrize("T", [1, 21])
def test_operands_that_are_evaluated_on_chip(T: int, minor: bool) -> None:
    """tanh(h)/scale + bias where the position is even: arrays with axes of size one, and NaN beyond the edges."""
    random = np.random.default_rng(0)
    shapes = [(3, 1, 2, T, 19), (1, 1, 1, T, 1), (3, 1, 1, 1, 19)]
    h, scale, bias = (random.normal(size=shape).astype(np.float32) for shape in shapes)
    even = (np.arange(T) % 2 == 0)[:, None]
    s = np.where(even, np.tanh(h) / scale + bias, 0)
    arrays = [jnp.asarray(x if minor else x.swapaxes(3, 4)) for x in (h, scale, bias)]

    def evaluate(blocks: Any, index: Any) -> jax.Array:
        h, scale, bias = blocks
        return jnp.where(index(free=False) % 2 == 0, jnp.tanh(h) / scale + bias, jnp.zeros_like(h))

    r = random.normal(size=(3, 1, 1, T, 35)).astype(np.float32)
    operand = Operand(
        arrays=tuple(arrays),
        evaluate=evaluate,
        shape=arrays[0].shape,
        dtype=jnp.dtype(jnp.float32),
        minor=minor,
        steps=3,
        whole=(False,) * 3,
    )
    how: Any = dict(precision=HIGHEST, chip=H100, interpret=True)
    found = gpu.fold_outer(operand, Operand.stored(jnp.asarray(r), minor=True), [MEAN, SQUARE_NORM], **how)
    g = gradients(s, r, True, True)
    for kind, x in zip([MEAN, SQUARE_NORM], found, strict=True):
        assert_close(x, expected(kind, g, None), "float32")


@pytest.mark.parametrize(("kind", "skips"), [(CENTRED, True), (Accumulator(), False)])
def test_what_no_kernel_takes_is_refused(kind: Accumulator, skips: bool) -> None:
    skip = np.zeros((1, 2), bool) if skips else None
    with pytest.raises(NotImplementedError, match="fused kernel"):
        fold((np.ones((1, 1, 1, 2, 2)), np.ones((1, 1, 1, 2, 2)), True, True, "float32", skip), [kind])


@hypothesis.settings(max_examples=8)
@hypothesis.given(products())
def test_gram_norms_are_those_of_the_gradients(product: Any) -> None:
    s, r, s_minor, r_minor, dtype, _ = product
    with jax.enable_x64(dtype == "float64"), jax.numpy_rank_promotion("raise"):
        norms = gpu_gram.square_norms(
            Operand.stored(jnp.asarray(s, dtype), minor=s_minor),
            Operand.stored(jnp.asarray(r, dtype), minor=r_minor),
            precision=HIGHEST,
            chip=H100,
            interpret=True,
        )
    assert_close(norms, expected(SQUARE_NORM, gradients(s, r, s_minor, r_minor), None), dtype)


def outer_of(*, B: int = 64, T: int = 512, D: int = 1024, E: int = 4096, dtype: Any = jnp.float32) -> Outer:
    s, r = (Operand.stored(jax.ShapeDtypeStruct((B, 1, 1, T, n), dtype), minor=True) for n in (D, E))
    return Outer(s=s, r=r)


@hypothesis.given(
    st.integers(1, 300), st.integers(1, 5000), st.integers(1, 40000), st.integers(1, 5000), st.integers(0, 6)
)
def test_chosen_tiles_fit_registers_and_shared_memory(B: int, T: int, D: int, E: int, states: int) -> None:
    outer = outer_of(B=B, T=T, D=D, E=E)
    kinds = [Moment(name=str(n), phi=jnp.abs) for n in range(states)] + [SQUARE_NORM]
    for chip in (CHIPS["l4"], CHIPS["a100"], H100):
        tile = gpu.choose_tile(outer, kinds, chip)
        assert tile is not None
        assert B % tile.parts == 0
        assert (1 + states) * tile.D * tile.E <= 192 * 32 * tile.warps
        assert gpu.shared_bytes(outer, tile) <= chip.on_chip_bytes


def test_costs_are_those_of_the_model() -> None:
    outer, tile = outer_of(), gpu.Tile(T=32, D=128, E=128)
    cost = gpu.outer_cost(outer, tile, [MEAN, SQUARE], H100)
    entries, read = 1024 * 4096, 4 * 64 * 512
    assert cost.flops == 2 * 64 * 512 * entries
    assert cost.vector_flops == 5 * 64 * entries
    assert cost.cache_bytes == read * (1024 * 32 + 4096 * 8)
    results = 2 * 4 * entries
    # 256 tiles on 132 cores are two waves. Both need all of s, each its half of r.
    assert cost.bytes == pytest.approx(results + read * (2 * 1024 + 4096), rel=0.05)


def test_two_parts_keep_the_cores_busy_that_one_would_leave_idle() -> None:
    tile = gpu.choose_tile(outer_of(E=1024), [MEAN, SQUARE], H100)
    assert tile is not None
    assert (tile.D, tile.E, tile.parts) == (128, 128, 2)


KINDS: list[tuple[str, list[Accumulator], tuple[int, ...]]] = [
    ("moments", [MEAN, SQUARE, SIGN], (4, 100, 136, 200)),
    ("centred", [CENTRED, SQUARE_NORM], (4, 64, 128, 128)),
    ("rank one", [CENTRED, ABS], (4, 1, 99, 101)),
]


@needs_compilers
@pytest.mark.parametrize("name", ["a100", "h100"])
def test_kernels_compile_for_absent_gpus_within_their_shared_memory(name: str, tmp_path: Path) -> None:
    place, chip = Place(name), CHIPS[name]
    for dtype, (kind, kinds, (B, T, D, E)) in itertools.product(["float32", "bfloat16"], KINDS):
        s, r = (jax.ShapeDtypeStruct((B, 1, 1, T, n), dtype) for n in (D, E))
        how: Any = dict(precision=None, chip=chip)

        def run(s: Any, r: Any, how: Any = how, kinds: Any = kinds) -> Any:
            pair = [Operand.stored(x, minor=True) for x in (s, r)]
            return gpu.fold_outer(*pair, kinds, **how), gpu_gram.square_norms(*pair, **how)

        folder = tmp_path / f"{dtype} {kind}"
        compiled = jax.jit(run).lower(place.put(s), place.put(r)).compile({"xla_dump_to": str(folder)})
        assert "pegprof_cache_bytes" in compiled.as_text()
        (sequence,) = folder.glob("*.thunk_sequence.txt")
        shared = re.findall(r"pegprof_(outer|gram) .*shared_memory: (\d+) bytes", sequence.read_text())
        assert {kernel for kernel, _ in shared} == {"outer", "gram"}
        assert all(int(size) <= chip.on_chip_bytes for _, size in shared)
        outer = outer_of(B=B, T=T, D=D, E=E, dtype=dtype)
        tile = gpu.choose_tile(outer, kinds, chip)
        assert tile is not None
        assert int(dict(shared)["outer"]) <= gpu.shared_bytes(outer, tile)


@needs_compilers
@pytest.mark.parametrize("name", ["a100", "h100"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernel_for_lookups_compiles_for_absent_gpus(name: str, dtype: str) -> None:
    def run(ids: Any, r: Any) -> Any:
        pair = Operand.of_ids(ids, 300, r.dtype), Operand.stored(r, minor=True)
        return gpu.fold_outer(*pair, [MEAN, CENTRED], precision=HIGHEST, chip=CHIPS[name])

    arguments = jax.ShapeDtypeStruct((4, 100), "int32"), jax.ShapeDtypeStruct((4, 1, 1, 100, 200), dtype)
    assert "pegprof_outer" in jax.jit(run).lower(*map(Place(name).put, arguments)).compile().as_text()
