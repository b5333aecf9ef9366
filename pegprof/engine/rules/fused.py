"""Rules that run kernels: fused for products and convolutions, fused_gram for norms alone.

**fused** forms the gradients of an outer product tile by tile on chip, one example after the other, and takes every
accumulator from them in one pass. It reads the operands and writes the results, and nothing of the size of a gradient
for each example. A convolution is such a product of the input's patches.

**fused_gram** takes norms by ⟨S Sᵀ, R Rᵀ⟩, a tile of T×T at a time.

What follows the product in the tail permutes entries or scales them by numbers that are the same for all examples. So
it is applied to the summaries, as for ``factored``.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pegprof.engine.accumulators import Centred, Moment, Spread, SquareNorm
from pegprof.engine.costs import Cost
from pegprof.engine.dtypes import wide_dtype
from pegprof.engine.facts import known
from pegprof.engine.jaxpr import Env, JaxprEqn, Var, dtype_of, shape_of
from pegprof.engine.jaxpr import primitives as p
from pegprof.engine.kernels import switch
from pegprof.engine.kernels.anywhere import kernel_or_plain
from pegprof.engine.kernels.backends import backend_of
from pegprof.engine.kernels.base import KernelCost, Operand, one_precision
from pegprof.engine.kernels.base import Outer as KernelProduct
from pegprof.engine.kernels.blocks import Elementwise, elementwise_of, stored
from pegprof.engine.kernels.layout import Arrangement, Contraction, Side, arrange, contraction_of
from pegprof.engine.rules.base import Rule, Strategy
from pegprof.engine.rules.conv import in_result_layout, is_expressible, patches_of, windows_of
from pegprof.engine.rules.folds import BATCHED
from pegprof.engine.rules.outer import follow, only_permutes, only_scales
from pegprof.engine.sites import Site
from pegprof.engine.stages import Accumulators, Frontier, Stage, Summaries
from pegprof.engine.structures import Conv, Outer, Structure
from pegprof.engine.tails import Tail
from pegprof.targets.chips import Chip

Values = Callable[[Sequence[Var]], list[tuple[Any, bool]]]  # values of all examples, and whether they have their axis


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """What starts a tail, as a contraction of two operands for a kernel.

    Args:
      contraction: of one example, in letters.
      dtype: of the operands as they are multiplied.
      precision: of the product.
      sources: for each operand, how the tail makes it of stored values.
      patches: the operands of all examples from those of the start, where they have to be written out.
      result: the start's own result, from one with the contraction's letters.
    """

    contraction: Contraction
    dtype: Any
    precision: Any
    sources: tuple[Elementwise, Elementwise]
    result: Callable[[jax.Array], jax.Array]
    patches: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]] | None = None
    copies: bool = False  # whether the patches are larger than what they are made of

    def operands(self, values: Values, arrangement: Arrangement, chip: Chip) -> tuple[Operand, Operand]:
        """The operands as a kernel takes them: rows, columns."""
        if self.patches:
            written = self.patches(*(x.astype(self.dtype) for v in self.sources for x in self._written(v, values)))
            copied = (self.copies, False)
            made = [
                Operand.stored(side.put(x, side.letters, batched=True), minor=side.minor, written=copy)
                for side, x, copy in zip(self.sides(arrangement), written, copied, strict=True)
            ]
        else:
            pairs = zip(self.sides(arrangement), self.sources, strict=True)
            made = [operand_of(side, source, values, self.dtype, chip) for side, source in pairs]
        rows, columns = reversed(made) if arrangement.swapped else made
        return rows, columns

    def sides(self, arrangement: Arrangement) -> tuple[Side, Side]:
        """Those of s and r."""
        rows, columns = arrangement.rows, arrangement.columns
        return (columns, rows) if arrangement.swapped else (rows, columns)

    def _written(self, source: Elementwise, values: Values) -> list[jax.Array]:
        assert isinstance(source.operand, Var)
        return [x for x, _ in values([source.operand])]


def operand_of(side: Side, source: Elementwise, values: Values, dtype: Any, chip: Chip) -> Operand:
    """An operand that a kernel evaluates from blocks of stored values, or one that is stored."""
    if source.is_stored or not evaluates(side, source, chip):
        assert isinstance(source.operand, Var)
        ((x, batched),) = values([source.operand])
        x = side.put(x, source.labels, batched=batched).astype(dtype)
        return Operand.stored(x, minor=side.minor, written=not source.is_stored)
    found = values([leaf.value for leaf in source.leaves])
    arrays = tuple(side.put(x, leaf.labels, batched=b) for leaf, (x, b) in zip(source.leaves, found, strict=True))

    def evaluate(blocks: Sequence[Any], index: Callable[..., Any]) -> Any:
        return source.evaluate(blocks, lambda letter: index(free=letter in side.inner))

    return Operand(
        arrays=arrays,
        evaluate=evaluate,
        shape=tuple(max(sizes) for sizes in zip(*(x.shape for x in arrays), strict=True)),
        dtype=dtype,
        minor=side.minor,
        steps=len(source.equations),
        whole=(False,) * len(arrays),
    )


def evaluates(side: Side, source: Elementwise, chip: Chip) -> bool:
    """Whether a kernel can make an operand of blocks of its leaves. Numbers along an axis must be along one letter."""
    scatters = any(known(eqn) in (p.iota_p, p.scatter_add_p) for eqn in source.equations)
    return (
        source.evaluable
        and all(side.has_whole_parts(leaf.labels) for leaf in source.leaves)
        and (not scatters or max(len(side.positions), len(side.inner)) == 1)
    )


def product_of(tail: Tail, start: JaxprEqn) -> Product | None:
    """The start of a tail as a product, if it is one."""
    dtypes = {dtype_of(v) for v in start.invars}
    dtype = dtypes.pop() if len(dtypes) == 1 else wide_dtype(jnp.result_type(*dtypes))
    match known(start):
        case p.dot_general_p:
            contraction = contraction_of(start)
            labels = (tuple(contraction.s), tuple(contraction.r))
            s, r = (elementwise_of(tail, v, own) for v, own in zip(start.invars, labels, strict=True))
            return Product(
                contraction=contraction,
                dtype=dtype,
                precision=start.params["precision"],
                sources=(s, r),
                result=lambda x: x,
            )
        case p.conv_general_dilated_p if is_expressible(start):
            return _product_of_convolution(start, dtype)
    return None


def _product_of_convolution(start: JaxprEqn, dtype: Any) -> Product:
    """The patches of one operand by the other."""
    windows = windows_of(start)
    shapes = [jax.ShapeDtypeStruct(shape_of(v), dtype) for v in start.invars]
    moving, resting = windows.patch_letters
    x, r = jax.eval_shape(lambda *values: patches_of(windows, values), *shapes)
    result = "".join(a for a in windows.result if a in moving + resting)
    s_source, r_source = (stored(v, tuple(str(n) for n in range(len(shape_of(v))))) for v in start.invars)
    return Product(
        contraction=Contraction(
            s=moving, r=resting, result=result, sizes=dict(zip(moving + resting, (*x.shape, *r.shape), strict=True))
        ),
        dtype=dtype,
        precision=start.params["precision"],
        sources=(s_source, r_source),
        patches=jax.vmap(lambda *values: patches_of(windows, values)),
        result=lambda x: in_result_layout(x, result, windows, start),
        copies=windows.taps > 1,
    )


def kernel_dtypes() -> set[Any]:
    """Of operands that kernels multiply; of 64 bits only in tests, on a CPU."""
    narrow = {jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)}
    return narrow | {jnp.dtype(jnp.float64)} if switch.interprets() else narrow


def has_kernel(product: Product | None) -> bool:
    """Whether kernels take such operands."""
    if product is None:
        return False
    precisions = product.precision if isinstance(product.precision, tuple) else (product.precision,)
    plain = all(x is None or isinstance(x, jax.lax.Precision) for x in precisions)
    return jnp.dtype(product.dtype) in kernel_dtypes() and plain and 0 not in product.contraction.sizes.values()


def fold_product(product: Product, values: Values, accumulators: Accumulators, chip: Chip) -> list[Any]:
    """The summaries of a product of all examples, in the layout of the start's result."""
    arrangement = arrange(product.contraction, chip)
    product = as_multiplied(product, chip)
    rows, columns = product.operands(values, arrangement, chip)
    summaries = backend_of(chip).fold_outer(
        rows, columns, accumulators, precision=product.precision, chip=chip, interpret=switch.interprets()
    )

    def placed(x: jax.Array) -> jax.Array:
        return product.result(arrangement.take(x))

    return [x if a.per_example else jax.tree.map(placed, x) for a, x in zip(accumulators, summaries, strict=True)]


def as_multiplied(product: Product, chip: Chip) -> Product:
    """A product with its operands as the chip multiplies them: by default a TPU rounds float32 to bfloat16.

    XLA stores such operands in bfloat16 where nothing else takes them. A kernel that takes them so lets it.
    """
    rounds = chip.backend == "tpu" and one_precision(product.precision, product.dtype) is None
    if rounds and product.dtype == jnp.float32 and not switch.interprets():
        return dataclasses.replace(product, dtype=jnp.bfloat16)
    return product


def values_in(frontier: Frontier) -> Values:
    """Values of a tail for all examples. Inputs that are the same for all stay so."""
    places = {v: i for i, v in enumerate(frontier.tail.inputs)}

    def values(wanted: Sequence[Var]) -> list[tuple[Any, bool]]:
        return [
            (jnp.asarray(frontier.values[places[v]]), frontier.batched[places[v]])
            if v in places
            else (frontier.values_of([v])[0], True)
            for v in wanted
        ]

    return values


def abstract_values(B: int) -> Values:
    """Likewise as zeros, for tracing shapes: every value counts as the example's own."""
    return lambda wanted: [(jnp.zeros((B, *shape_of(v)), dtype_of(v)), True) for v in wanted]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel(Rule):
    """A rule that needs a chip's kernel. Where there is no chip, as with kernels turned off, a fold runs instead.

    ``fits_on``, ``cost_on`` and ``stages_on`` are as ``fits``, ``cost`` and ``stages``, for a chip.
    """

    fits_on: Callable[[Site, Accumulators, Chip], bool]
    cost_on: Callable[[Site, Accumulators, int, Chip], Cost]
    stages_on: Callable[[Site, Accumulators, int, Chip], Sequence[Stage]]

    @property
    def is_kernel(self) -> bool:
        return True

    def covers(self, site: Site, accumulators: Accumulators, chip: Chip | None = None) -> bool:
        return chip is not None and super().covers(site, accumulators) and self.fits_on(site, accumulators, chip)

    def cost_at(self, site: Site, accumulators: Accumulators, B: int, chunk: int, chip: Chip | None = None) -> Cost:
        assert chip is not None
        return self.cost_on(site, accumulators, B, chip)

    def stages_at(
        self, site: Site, accumulators: Accumulators, chunk: int, chip: Chip | None = None
    ) -> Sequence[Stage]:
        if chip is None:
            return BATCHED.stages_at(site, accumulators, chunk)
        return self.stages_on(site, accumulators, chunk, chip)


def one_stage(
    run: Callable[[Site, Accumulators, Frontier, Chip], Summaries], *, plain: Strategy = BATCHED
) -> Callable[[Site, Accumulators, int, Chip], Sequence[Stage]]:
    """The stages of a kernel that has one; ``plain`` takes its place on other platforms.

    Nothing waits for it: XLA schedules a kernel where its operands are, and stores them as the kernel takes them.
    """

    def stages(site: Site, accumulators: Accumulators, chunk: int, chip: Chip) -> Sequence[Stage]:
        (stage,) = plain.stages_at(site, accumulators, chunk)
        return [replace_run(stage, lambda frontier: run(site, accumulators, frontier, chip), chip)]

    return stages


def replace_run(plain: Stage, run: Callable[[Frontier], Summaries], chip: Chip) -> Stage:
    """A stage that runs a kernel on its chip, and as before elsewhere."""

    def run_anywhere(frontier: Frontier, before: Summaries) -> Summaries:
        def with_values(fn: Callable[[Frontier], Summaries]) -> Callable[..., Summaries]:
            return lambda *values: fn(dataclasses.replace(frontier, values=values))

        kernel, folds = with_values(run), with_values(lambda frontier: plain.run(frontier, before))
        return kernel_or_plain(kernel, folds, chip)(*map(jnp.asarray, frontier.values))

    return dataclasses.replace(plain, run=run_anywhere, recomputes=False)


def _start(site: Site) -> JaxprEqn | None:
    """The one product that all gradients of a site come from."""
    starts = site.tail.starts
    matched = all(isinstance(s, Outer | Conv) for s in site.structures)
    return starts[0] if len(starts) == 1 and matched else None


def _fits(site: Site, accumulators: Accumulators, chip: Chip) -> bool:
    start = _start(site)
    return (
        start is not None
        and has_kernel(product_of(site.recomputing, start))
        and (only_permutes(site.tail) or (only_scales(site.tail) and _commute_with_scales(accumulators)))
        and tile_of(_product(site), 1, accumulators, chip) is not None
    )


def tile_of(product: Product, B: int, accumulators: Accumulators, chip: Chip) -> Any:
    """The tile of a kernel, None if there is none for such a product."""
    return backend_of(chip).choose_tile(outer_of(product, B, chip), accumulators, chip, product.precision)


def _commute_with_scales(accumulators: Accumulators) -> bool:
    return all(isinstance(a, Centred) or (isinstance(a, Moment) and a.factor is not None) for a in accumulators)


def _product(site: Site) -> Product:
    start = _start(site)
    assert start is not None
    product = product_of(site.recomputing, start)
    assert product is not None
    return product


def outer_of(product: Product, B: int, chip: Chip) -> KernelProduct:
    """The shapes of a product, for choosing a tile and for pricing it."""
    product = as_multiplied(product, chip)
    arrangement = arrange(product.contraction, chip)

    def shapes() -> Any:
        rows, columns = product.operands(abstract_values(B), arrangement, chip)
        found.append((rows, columns))
        return rows.arrays, columns.arrays

    found: list[tuple[Operand, Operand]] = []
    arrays = jax.eval_shape(shapes)
    rows, columns = (dataclasses.replace(x, arrays=a) for x, a in zip(found[0], arrays, strict=True))
    return KernelProduct(s=rows, r=columns)


def _run(site: Site, accumulators: Accumulators, frontier: Frontier, chip: Chip) -> Summaries:
    summaries = fold_product(_product(site), values_in(frontier), accumulators, chip)
    return follow_all(frontier, accumulators, summaries)


def follow_all(frontier: Frontier, accumulators: Accumulators, summaries: Sequence[Any]) -> Summaries:
    """The summaries of a tail's gradients from those of the product that starts it."""
    tail = frontier.tail
    env = Env()
    env.write(tail.inputs, frontier.values)

    def of_gradients(accumulator: Any, x: Any) -> list[Any]:
        match accumulator:
            case Moment(factor=factor):
                return follow(tail, env, x, factor or (lambda c: c))  # without a factor there are no scales
            case Centred():
                means = follow(tail, env, x.mean, lambda c: c)
                return list(map(Spread, means, follow(tail, env, x.square, jnp.square)))
        return [x] * len(tail.outputs)

    found = [of_gradients(a, x) for a, x in zip(accumulators, summaries, strict=True)]
    return [list(of_gradient) for of_gradient in zip(*found, strict=True)]


def written_bytes(outer: KernelProduct) -> int:
    """What is written for the kernel alone, and read again."""
    return sum(x.read_bytes(1) for x in (outer.s, outer.r) if x.written)


def _cost(site: Site, accumulators: Accumulators, B: int, chip: Chip) -> Cost:
    product = _product(site)
    outer, tile = outer_of(product, B, chip), tile_of(product, B, accumulators, chip)
    kernel = backend_of(chip).outer_cost(outer, tile, accumulators, chip)
    return as_cost(kernel, written_bytes(outer))


def as_cost(kernel: KernelCost, written_bytes: float) -> Cost:
    """A kernel's cost for the planner, with what is written for it first; the kernel's own bytes have its reading."""
    return Cost(
        matmul_flops=kernel.flops,
        vector_flops=kernel.vector_flops,
        bytes_moved=kernel.bytes + 2 * written_bytes,
        bytes_with_products=kernel.bytes,
        cache_bytes=kernel.cache_bytes,
        bytes_held=written_bytes,
    )


FUSED = Kernel(
    name="fused",
    why="a kernel: each gradient on chip, every statistic from it",
    structure=Structure,
    accumulators=(Moment, Centred, SquareNorm),
    fits=lambda site, accumulators: True,
    cost=BATCHED.cost,
    fits_on=_fits,
    cost_on=_cost,
    stages_on=one_stage(_run),
)


def _fits_gram(site: Site, accumulators: Accumulators, chip: Chip) -> bool:
    return _fits(site, accumulators, chip) and only_permutes(site.tail)


def _run_gram(site: Site, accumulators: Accumulators, frontier: Frontier, chip: Chip) -> Summaries:
    product = _all_stored(_product(site))
    rows, columns = product.operands(values_in(frontier), arrange(product.contraction, chip), chip)
    norms = backend_of(chip).square_norms(
        rows, columns, precision=product.precision, chip=chip, interpret=switch.interprets()
    )
    return [[norms]] * len(site.structures)


def _all_stored(product: Product) -> Product:
    """A product whose operands are written out: the kernel for norms evaluates none."""
    s, r = (dataclasses.replace(source, evaluable=False) for source in product.sources)
    return dataclasses.replace(product, sources=(s, r))


def _cost_gram(site: Site, accumulators: Accumulators, B: int, chip: Chip) -> Cost:
    product = _product(site)
    outer = outer_of(_all_stored(product), B, chip)
    return as_cost(backend_of(chip).gram_cost(outer, chip), written_bytes(outer))


FUSED_GRAM = dataclasses.replace(
    FUSED,
    name="fused_gram",
    why="a kernel for norms alone: ⟨SSᵀ, RRᵀ⟩, a tile at a time",
    accumulators=(SquareNorm,),
    fits_on=_fits_gram,
    cost_on=_cost_gram,
    stages_on=one_stage(_run_gram),
)
