"""Kernels for TPUs: values by Pallas's interpreter against a loop in float64; and compiled for absent devices.

Nobody here has such a device, so these tests are all that is known of the kernels. The interpreter fills whatever lies
beyond the edge of an array, and all memory on chip, with NaN.
"""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pegprof.engine.accumulators import ABS, CENTRED, MEAN, SIGN, SQUARE, SQUARE_NORM, Accumulator, Spread
from pegprof.engine.jaxpr import Env, Var, dtype_of, shape_of
from pegprof.engine.kernels import tpu, tpu_gram, tpu_rows
from pegprof.engine.kernels.base import Operand, Outer
from pegprof.engine.kernels.blocks import Elementwise
from pegprof.engine.kernels.layout import arrange
from pegprof.engine.options import Options
from pegprof.engine.planner import find_sites
from pegprof.engine.rules.fused import Product, evaluates, product_of
from pegprof.engine.sites import Site
from pegprof.engine.trace import trace_example
from pegprof.targets.chips import CHIPS
from pegprof.targets.devices import DEVICES
from pegprof.targets.selection import absent_target
from tests.compilers import needs_compilers
from tests.engine.tpu_compiles import evaluated_operand
from tests.waiting import LIMIT_S

ROOT = Path(__file__).parent.parent.parent
TPUS = [chip for chip in CHIPS.values() if chip.backend == "tpu"]
V5P = CHIPS["tpu-v5p"]
HOW: Any = dict(precision=jax.lax.Precision.HIGHEST, chip=V5P, interpret=True)
TOLERANCE = {"bfloat16": 2e-5, "float32": 2e-5, "float64": 1e-12}  # products of bfloat16 are exact in float32
ALL = [MEAN, SQUARE, SIGN, ABS, CENTRED, SQUARE_NORM]

random = np.random.default_rng


@dataclasses.dataclass(frozen=True)
class Operands:
    """Both operands in float64, as they lie, and the dtype that they are multiplied in."""

    s: np.ndarray
    r: np.ndarray
    s_minor: bool = True
    r_minor: bool = True
    dtype: str = "float32"

    def stored(self) -> tuple[Operand, Operand]:
        s, r = jnp.asarray(self.s, self.dtype), jnp.asarray(self.r, self.dtype)
        return Operand.stored(s, minor=self.s_minor), Operand.stored(r, minor=self.r_minor)

    def gradients(self) -> np.ndarray:
        """[B, G, X, Y, D, E], one product after the other."""
        s = self.s if self.s_minor else self.s.swapaxes(3, 4)
        r = self.r if self.r_minor else self.r.swapaxes(3, 4)
        g = np.zeros((*s.shape[:3], r.shape[2], s.shape[4], r.shape[4]))
        for b, i, x, y in itertools.product(*map(range, g.shape[:4])):
            g[b, i, x, y] = s[b, i, x].T @ r[b, i, y]
        return g


@st.composite
def products(draw: Any) -> Operands:
    """Numbers have few bits: all sums are exact, and rounding turns no sign."""
    sizes = st.integers(1, 40)
    B, D = draw(st.integers(1, 5)), draw(st.one_of(sizes, st.just(150)))
    T = draw(st.one_of(st.just(1), sizes, st.sampled_from([130, 256, 1100])))
    E = draw(st.one_of(sizes, st.sampled_from([129, 384, 400])))
    G, X, Y = (draw(st.integers(1, 2)) for _ in range(3))
    s_minor, r_minor = draw(st.booleans()), draw(st.booleans())
    numbers = random(draw(st.integers(0, 99)))
    s = numbers.integers(-8, 9, (B, G, X, *((T, D) if s_minor else (D, T)))) / 8
    r = numbers.integers(-8, 9, (B, G, Y, *((T, E) if r_minor else (E, T)))) / 8
    return Operands(s, r, s_minor, r_minor, draw(st.sampled_from(sorted(TOLERANCE))))


tiles = st.one_of(
    st.none(),  # the one that is chosen
    st.builds(
        tpu.Tile,
        T=st.sampled_from([8, 100, 128, 256]),
        D=st.sampled_from([8, 16, 128]),
        E=st.sampled_from([16, 128, 384]),  # 384 columns are formed in three parts
    ),
)


def in_bounds(tile: tpu.Tile | None, outer: Outer) -> tpu.Tile | None:
    """A block is never larger than the array, nor so small that the grid has many steps."""
    return tile and tpu.Tile(T=bounded(tile.T, outer.T), D=bounded(tile.D, outer.D), E=bounded(tile.E, outer.E))


def bounded(block: int, size: int) -> int:
    return min(max(block, -(-size // 3)), size)


IN_NUMPY: dict[Any, Any] = {MEAN: lambda g: g, SQUARE: np.square, SIGN: np.sign, ABS: np.abs}


def expected(kind: Accumulator, g: np.ndarray) -> Any:
    if kind == SQUARE_NORM:
        return (g**2).sum((1, 2, 3, 4, 5))
    return IN_NUMPY[kind](g).mean(0) if kind in IN_NUMPY else Spread(g.mean(0), g.var(0))


def assert_close(found: Any, wanted: Any, dtype: str = "float32") -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == (np.float64 if dtype == "float64" else np.float32)
        np.testing.assert_allclose(x, y, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * max(1, np.abs(y).max()))


def assert_summaries(found: list[Any], kinds: list[Accumulator], g: np.ndarray, dtype: str = "float32") -> None:
    for kind, summary in zip(kinds, found, strict=True):
        assert_close(summary, expected(kind, g), dtype)


some_kinds = st.one_of(st.just(ALL), st.lists(st.sampled_from(ALL), min_size=1, max_size=3, unique=True))


LONG = Operands(random(0).integers(-8, 9, (2, 1, 1, 1100, 9)) / 8, random(1).integers(-8, 9, (2, 1, 1, 1100, 7)) / 8)


@hypothesis.settings(max_examples=11)
@hypothesis.given(products(), some_kinds, tiles)
@hypothesis.example(LONG, ALL, None)  # three steps of 512 positions
def test_summaries_are_those_of_the_gradients_formed_one_by_one(
    product: Operands, kinds: list[Accumulator], tile: tpu.Tile | None
) -> None:
    with jax.enable_x64(product.dtype == "float64"), jax.numpy_rank_promotion("raise"):
        s, r = product.stored()
        found = tpu.fold_outer(s, r, kinds, tile=in_bounds(tile, Outer(s=s, r=r)), **HOW)
    assert_summaries(found, kinds, product.gradients(), product.dtype)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: getattr(kind, "name", type(kind).__name__))
def test_each_accumulator_alone_over_several_steps_and_parts(kind: Accumulator) -> None:
    numbers = random(1)
    product = Operands(numbers.normal(size=(3, 1, 1, 21, 19)), numbers.normal(size=(3, 1, 1, 400, 21)), r_minor=False)
    found = tpu.fold_outer(*product.stored(), [kind], tile=tpu.Tile(T=8, D=8, E=384), **HOW)
    assert_summaries(found, [kind], product.gradients())


@hypothesis.settings(max_examples=7)
@hypothesis.given(
    products(),
    st.one_of(st.none(), st.builds(tpu_gram.GramTile, T=st.sampled_from([8, 100]), K=st.sampled_from([8, 128]))),
)
@hypothesis.example(LONG, None)
def test_gram_norms_are_those_of_the_gradients(product: Operands, tile: tpu_gram.GramTile | None) -> None:
    with jax.enable_x64(product.dtype == "float64"), jax.numpy_rank_promotion("raise"):
        s, r = product.stored()
        tile = tile and tpu_gram.GramTile(T=bounded(tile.T, s.T), K=max(tile.K, s.D // 3, r.D // 3))
        norms = tpu_gram.square_norms(s, r, tile=tile, **HOW)
    assert_close(norms, expected(SQUARE_NORM, product.gradients()), product.dtype)


@hypothesis.settings(max_examples=5)
@hypothesis.given(
    st.integers(1, 3), st.integers(8, 40), st.integers(1, 9), st.sampled_from(["float32", "int32", "bfloat16"])
)
@hypothesis.example(2, 19, 9, "bfloat16")  # two tiles of eight rows, and three that are left
def test_rows_are_taken_where_the_ids_say_or_from_the_nearest(B: int, V: int, K: int, dtype: str) -> None:
    x = jnp.asarray(random(0).integers(-99, 99, (B, V, 128)), dtype)
    ids = random(1).integers(-3, V + 3, (B, K)).astype(np.int32)
    assert tpu_rows.can_take(x, ids.shape[1])
    found = tpu_rows.take_rows(x, jnp.asarray(ids), interpret=True)
    assert found.dtype == x.dtype
    np.testing.assert_array_equal(found, np.take_along_axis(np.asarray(x), ids.clip(0, V - 1)[..., None], axis=1))


def test_a_row_that_is_not_finite_stays_alone() -> None:
    x = jnp.ones((1, 16, 128), jnp.bfloat16).at[0, 5].set(jnp.nan)
    found = tpu_rows.take_rows(x, jnp.asarray([[4, 5, 6]], jnp.int32), interpret=True)
    assert jnp.isnan(found).all(axis=2).tolist() == [[False, True, False]]


def test_only_rows_of_whole_lanes_can_be_taken() -> None:
    assert not tpu_rows.can_take(jax.ShapeDtypeStruct((2, 9, 100), jnp.float32), 4)
    assert not tpu_rows.can_take(jax.ShapeDtypeStruct((2, 9, 128), jnp.int8), 4)


# Operands that are evaluated on chip.


@pytest.mark.parametrize("minor", [True, False])
@pytest.mark.parametrize(("T", "D"), [(1, 19), (300, 19), (21, 300)])  # 128 rows at a time, or all at once
def test_an_operand_is_evaluated_from_arrays_of_any_size_one_axes(T: int, D: int, minor: bool) -> None:
    """tanh(h)/scale + bias at even positions and before the last free entries; some arrays are all examples' own."""
    numbers = random(0)
    shapes = [(3, 1, 2, T, D), (1, 1, 1, T, 1), (3, 1, 1, 1, D), (1, 1, 2, T, D)]
    h, scale, bias, shared = (numbers.normal(size=shape).astype(np.float32) for shape in shapes)
    chosen = (np.arange(T) % 2 == 0)[:, None] & (np.arange(D) < D - 3)
    s = np.where(chosen, np.tanh(h) / scale + bias * shared, 0)
    arrays = tuple(jnp.asarray(x if minor else x.swapaxes(3, 4)) for x in (h, scale, bias, shared))

    def evaluate(blocks: Any, index: Any) -> jax.Array:
        h, scale, bias, shared = blocks
        even = jnp.broadcast_to(index(free=False) % 2 == 0, h.shape)
        inside = jnp.broadcast_to(index(free=True) < D - 3, h.shape)
        return jnp.where(even & inside, jnp.tanh(h) / scale + bias * shared, jnp.zeros_like(h))

    operand = Operand(
        arrays=arrays,
        evaluate=evaluate,
        shape=arrays[0].shape,
        dtype=jnp.dtype(jnp.float32),
        minor=minor,
        steps=5,
        whole=(False,) * 4,
    )
    r = numbers.normal(size=(3, 1, 1, T, 35)).astype(np.float32)
    other, kinds = Operand.stored(jnp.asarray(r), minor=True), [MEAN, SQUARE_NORM]
    tile = in_bounds(tpu.Tile(T=256, D=256, E=16), Outer(s=operand, r=other))
    with jax.numpy_rank_promotion("raise"):
        found = tpu.fold_outer(operand, other, kinds, tile=tile, **HOW)
    assert_summaries(found, kinds, Operands(s, r).gradients())


@pytest.mark.parametrize("as_rows", [True, False])
def test_an_array_that_every_block_has_whole(as_rows: bool) -> None:
    """As the ids that a table is looked up with, whose entries are left out; here an operand of rows or of columns."""
    numbers = random(0)
    B, T, D = 3, 40, 50
    h, mean, scale = (
        numbers.normal(size=x).astype(np.float32) for x in [(B, 1, 1, D, T), (B, 1, 1, 1, T), (1, 1, 1, D, 1)]
    )
    ids = numbers.integers(0, D, (B, 1, 1, 1, T)).astype(np.int32)
    r = numbers.normal(size=(B, 1, 1, T, 35)).astype(np.float32)
    hit = (ids == np.arange(D)[:, None]).any(axis=4, keepdims=True)
    s = np.where(hit, 0, jax.nn.gelu((h - mean) * scale))
    operand = evaluated_operand(jnp.asarray(h), jnp.asarray(mean), jnp.asarray(scale), jnp.asarray(ids), jnp.float32)
    other = Operand.stored(jnp.asarray(r), minor=True)
    kinds = [MEAN, SQUARE, SQUARE_NORM]
    pair, tile = (
        ((operand, other), tpu.Tile(T=16, D=32, E=16)) if as_rows else ((other, operand), tpu.Tile(T=16, D=16, E=32))
    )
    product = Operands(s, r, s_minor=False) if as_rows else Operands(r, s, r_minor=False)
    assert_summaries(tpu.fold_outer(*pair, kinds, tile=tile, **HOW), kinds, product.gradients())


# What must not spread.


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("T", [1, 21])
def test_a_number_that_is_not_finite_stays_in_its_own_entries(bad: float, T: int) -> None:
    numbers = random(0)
    s, r = numbers.normal(size=(3, 1, 1, T, 19)), numbers.normal(size=(3, 1, 1, T, 37))
    s[1, 0, 0, T // 2, 2] = bad
    product = Operands(s, r)
    found = tpu.fold_outer(*product.stored(), ALL, tile=tpu.Tile(T=min(8, T), D=8, E=16), **HOW)
    *entrywise, norms = found
    clean = dataclasses.replace(product, s=np.nan_to_num(s, posinf=0)).gradients()
    for kind, summary in zip(ALL, entrywise, strict=False):
        for x, y in zip(jax.tree.leaves(summary), jax.tree.leaves(expected(kind, clean)), strict=True):
            others = np.arange(19) != 2
            assert_close(x[..., others, :], y[..., others, :])
            if kind != SIGN or np.isnan(bad):
                assert not np.isfinite(x[..., 2, :]).any()
    assert_close(norms[::2], expected(SQUARE_NORM, clean)[::2])
    assert np.isnan(norms[1]) if np.isnan(bad) else norms[1] == np.inf


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_gram_norm_that_is_not_finite_stays_in_its_example(bad: float) -> None:
    s, r = np.ones((3, 1, 1, 21, 19)), np.ones((3, 1, 1, 21, 37))
    s[1, 0, 0, 10, 2] = bad
    norms = tpu_gram.square_norms(*Operands(s, r).stored(), tile=tpu_gram.GramTile(T=8, K=8), **HOW)
    assert norms[::2].tolist() == [21**2 * 19 * 37] * 2
    assert not np.isfinite(norms[1])


# Tiles.


@st.composite
def outers(draw: Any) -> Outer:
    """Shapes alone."""
    B, T = draw(st.sampled_from([1, 64])), draw(st.integers(1, 9000))
    D, E = (draw(st.one_of(st.integers(1, 300), st.integers(1, 40000))) for _ in range(2))
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))
    s_minor, r_minor = draw(st.booleans()), draw(st.booleans())
    s = jax.ShapeDtypeStruct((B, 1, 1, T, D) if s_minor else (B, 1, 1, D, T), dtype)
    r = jax.ShapeDtypeStruct((B, 1, 1, T, E) if r_minor else (B, 1, 1, E, T), dtype)
    return Outer(s=Operand.stored(s, minor=s_minor), r=Operand.stored(r, minor=r_minor))


@hypothesis.settings(max_examples=15)
@hypothesis.given(outers(), st.sampled_from([[MEAN, SQUARE], [CENTRED, SQUARE_NORM], ALL]))
def test_chosen_tiles_fit_the_chip_and_keep_all_its_cores_busy(outer: Outer, kinds: list[Accumulator]) -> None:
    for chip in TPUS:
        tile = tpu.choose_tile(outer, kinds, chip)
        assert tile is not None
        assert tpu.held_bytes(outer, tile, kinds) < chip.on_chip_bytes
        assert tile.T * (-(-outer.T // tile.T)) < outer.T + tile.T
        assert outer.count(tile.D, tile.E) >= chip.cores or max(outer.D, outer.E) <= tpu.LANES
        assert tpu_gram.gram_cost(outer, chip).held_bytes < chip.on_chip_bytes


def test_a_chip_that_has_too_little_memory_for_any_tile_has_none() -> None:
    s, r = Operands(np.zeros((1, 1, 1, 512, 300)), np.zeros((1, 1, 1, 512, 300))).stored()
    assert tpu.choose_tile(Outer(s=s, r=r), [MEAN], dataclasses.replace(V5P, on_chip_bytes=2**18)) is None


# Operands of a traced loss: which of them a kernel evaluates, and from what.

T, D, E, V = 6, 8, 16, 24


def gelu_loss(params: Any, x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.tanh(jax.nn.gelu(x @ params["first"]) @ params["last"]))


def norm_loss(params: Any, x: jax.Array) -> jax.Array:
    h = jnp.tanh(x @ params["first"])
    mean = h.mean(-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.square(h - mean).mean(-1, keepdims=True) + 1e-6)
    return jnp.sum(jnp.tanh(((h - mean) * scale * params["scale"] + params["bias"]) @ params["last"]))


def softmax_loss(params: Any, batch: Any) -> jax.Array:
    x, labels = batch
    logits = jax.nn.log_softmax(jnp.tanh(x @ params["first"]) @ params["last"])
    return -jnp.mean(jnp.take_along_axis(logits, labels[..., None], axis=-1))


def abstract(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


OF_LAYER = [("t", "d")]
OF_NORM = [("t", "d"), ("t", ""), ("t", ""), ("", "d"), ("", "d")]  # h, mean, scale of its positions; scale, bias
OF_SOFTMAX = [("t", "", ""), ("t", ""), ("t",), ("t", "d"), ("t", "")]  # labels, their weights, logits, their sum
LOSSES: dict[str, tuple[Any, ...]] = {
    "gelu": (gelu_loss, abstract(4, T, D), (E, D), 1, OF_LAYER),
    "norm": (norm_loss, abstract(4, T, D), (E, D), 1, OF_NORM),
    "softmax": (softmax_loss, (abstract(4, T, D), abstract(4, T, dtype=jnp.int32)), (E, V), 0, OF_SOFTMAX),
}


def site_of(loss: Any, batch: Any, last: tuple[int, int]) -> tuple[Site, Product]:
    """That of the last matrix, whose operand is an elementwise function of what is stored."""
    params = {"first": abstract(D, E), "last": abstract(*last), "scale": abstract(E), "bias": abstract(E)}
    candidates = find_sites(trace_example(loss, (params, batch), Options()), [MEAN, SQUARE])
    (site,) = (site for site in candidates.sites() if site.key == "last")
    product = product_of(site.recomputing, site.tail.starts[0])
    assert product is not None
    return site, product


def numbers_for(v: Var, seed: int, B: int) -> jax.Array:
    shape = (B, *shape_of(v))
    if jnp.issubdtype(dtype_of(v), jnp.integer):
        return jnp.asarray(random(seed).integers(-2, V + 2, shape), dtype_of(v))  # some are no entry at all
    return jnp.asarray(random(seed).normal(size=shape), dtype_of(v))


def letters(source: Elementwise) -> list[tuple[str, ...]]:
    """The labels of its leaves, with t and d for those of the operand."""
    names = dict(zip(source.labels, "td", strict=True)) | {"": ""}
    return [tuple(names[a] for a in leaf.labels) for leaf in source.leaves]


@pytest.mark.parametrize("name", LOSSES)
def test_an_operand_that_is_elementwise_is_evaluated_from_its_leaves(name: str) -> None:
    loss, batch, last, which, leaves = LOSSES[name]
    site, product = site_of(loss, batch, last)
    source, side = product.sources[which], product.sides(arrange(product.contraction, V5P))[which]
    assert not source.is_stored
    assert sorted(letters(source)) == sorted(leaves)
    assert evaluates(side, source, V5P)

    tail = site.recomputing
    values = {v: numbers_for(v, seed, 1)[0] for seed, v in enumerate(tail.inputs)}
    env = Env()
    env.write(tail.inputs, values.values())
    env.run(tail.prelude)
    (traced,) = env.read([source.operand])
    frames = [frame(values[leaf.value], labels) for leaf, labels in zip(source.leaves, letters(source), strict=True)]
    rows, columns = jnp.arange(traced.shape[0])[:, None], jnp.arange(traced.shape[1])[None, :]
    found = source.evaluate(frames, lambda a: rows if a == source.labels[0] else columns)
    np.testing.assert_allclose(found, traced, rtol=1e-6)


def frame(x: jax.Array, labels: tuple[str, ...]) -> jax.Array:
    """A leaf as [T, D], with size one where it has no label."""
    return x.reshape([x.shape[labels.index(a)] if a in labels else 1 for a in "td"])


@pytest.mark.parametrize("name", LOSSES)
def test_the_kernel_forms_the_gradients_of_a_traced_loss(name: str) -> None:
    loss, batch, last, *_ = LOSSES[name]
    site, product = site_of(loss, batch, last)
    tail, B = site.recomputing, 3
    values = {v: numbers_for(v, seed, B) for seed, v in enumerate(tail.inputs)}
    arrangement = arrange(product.contraction, V5P)
    pair = product.operands(lambda wanted: [(values[v], True) for v in wanted], arrangement, V5P)
    assert any(operand.evaluate for operand in pair)
    (mean,) = tpu.fold_outer(*pair, [MEAN], tile=tpu.Tile(T=4, D=8, E=8), **HOW)
    (g,) = jax.vmap(tail.part_that_makes(tail.starts[0].outvars).run)(*values.values())
    assert_close(arrangement.take(mean), np.asarray(g, np.float64).mean(0))


def test_an_operand_that_a_product_made_is_stored() -> None:
    """Of the first matrix: the batch itself, and a cotangent."""
    site, product = site_of(lambda p, x: jnp.sum((x @ p["last"]) ** 2 @ jnp.ones((D, D))), abstract(4, T, E), (E, D))
    (of_input,) = (s for s in product.sources if shape_of(s.operand) == (T, E))
    assert of_input.is_stored
    assert [leaf.value for leaf in of_input.leaves] == [of_input.operand]
    assert of_input.operand in site.recomputing.inputs


# Compiled for TPUs that are not here.


@needs_compilers
@pytest.mark.slow
@pytest.mark.parametrize("chip", TPUS, ids=lambda chip: chip.name)
def test_every_kernel_compiles_for_a_tpu_within_its_memory(chip: Any) -> None:
    """In a process of its own: libtpu reads the environment of the device when it is loaded."""
    environment = {**os.environ, **absent_target(DEVICES[chip.name]).environment}
    command = [sys.executable, "-m", "tests.engine.tpu_compiles", chip.name]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert {case["kernel"] for case in found.values()} == {"outer", "gram", "rows"}
    for case, figures in found.items():
        held, used = figures["held_bytes"], figures["used_bytes"]
        assert held < chip.on_chip_bytes, case
        assert used < chip.on_chip_bytes, case
        if figures["kernel"] != "rows":
            assert used <= held + 2**16, case  # besides, numbers of one block each
    assert any(case["used_bytes"] for case in found.values())  # XLA may give small arrays a place on chip itself
