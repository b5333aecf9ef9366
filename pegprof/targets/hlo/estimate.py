"""A compiled program in, a price for each of its operations and their sum out.

    roofline  max(flops ÷ peak, elementwise ÷ rate, cache bytes ÷ L2, bytes ÷ bandwidth)
    estimate  the compiler's price where it has one, else max(flops ÷ (peak · efficiency), the rest of the roofline)

A fusion is one operation. The body of a loop counts as often as it runs; of branches the one counts that moves most.
``efficiency`` is what the compiler's cost model grants the matrix products of the same program, so a kernel of ours is
never priced better than a product of XLA's. Operations follow each other: a copy that runs beside others still counts.
Use such seconds for ratios on one device, and to find what is slow.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from pegprof.targets.chips import CHIPS, Chip
from pegprof.targets.hlo.compiler_prices import compiler_price
from pegprof.targets.hlo.flops import Work, count_work
from pegprof.targets.hlo.kernels import find_kernel
from pegprof.targets.hlo.module import Computation, Module, Operation, parse_module
from pegprof.targets.hlo.traffic import FREE, NO_TRAFFIC, moved_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperationPrice:
    """One operation. Figures are for one run of it; the properties are for all its ``trips``.

    Args:
      name: in the compiled program.
      kind: its name without the number.
      opcode: as XLA spells it.
      shape: of its results.
      op_name: the path of JAX's primitive that it comes from.
      source: ``file:line`` of that.
      kernel: the name of a kernel of ours; ``?`` for a kernel that says none, empty for all else.
      trips: how often it runs.
      flops: of matrix products.
      vector_flops: elementwise operations.
      bytes: to and from main memory.
      products_s: the matrix products alone, at the chip's peak.
      compiler_s: what the compiler says; None if nothing.
      roofline_s: from flops and bytes alone.
      estimate_s: what is believed.
    """

    name: str
    kind: str
    opcode: str
    shape: str
    op_name: str
    source: str
    kernel: str
    trips: int
    flops: int
    vector_flops: int
    bytes: int
    products_s: float
    compiler_s: float | None
    roofline_s: float
    estimate_s: float

    @property
    def total_s(self) -> float:
        return self.estimate_s * self.trips

    @property
    def total_flops(self) -> int:
        return self.flops * self.trips

    @property
    def total_bytes(self) -> int:
        return self.bytes * self.trips


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A program on a chip. Its figures are sums over its operations.

    ``unknown_trips`` names loops of which the text does not say how often they run: they are counted once.
    """

    chip: str
    efficiency: float
    operations: tuple[OperationPrice, ...]
    unknown_trips: tuple[str, ...] = ()

    @property
    def time_s(self) -> float:
        return sum(each.total_s for each in self.operations)

    @property
    def floor_s(self) -> float:
        """By the roofline alone."""
        return sum(each.roofline_s * each.trips for each in self.operations)

    @property
    def flops(self) -> int:
        """Of matrix products."""
        return sum(each.total_flops for each in self.operations)

    @property
    def bytes(self) -> int:
        return sum(each.total_bytes for each in self.operations)

    @property
    def flops_coverage(self) -> float:
        """The share of the flops that the compiler has a price for; 1 if there are none."""
        return _share([(each.total_flops, each.compiler_s is not None) for each in self.operations])

    @property
    def bytes_coverage(self) -> float:
        """The share of the bytes that the compiler has a price for."""
        return _share([(each.total_bytes, each.compiler_s is not None) for each in self.operations])

    @property
    def kernels(self) -> tuple[OperationPrice, ...]:
        """The operations that are kernels of ours."""
        return tuple(each for each in self.operations if each.kernel)

    def largest(self, n: int) -> tuple[OperationPrice, ...]:
        """Those that take most of the time."""
        return tuple(sorted(self.operations, key=lambda each: -each.total_s)[:n])

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Estimate":
        operations = tuple(OperationPrice(**each) for each in fields["operations"])
        return cls(**{**fields, "operations": operations, "unknown_trips": tuple(fields["unknown_trips"])})


def estimate(text: str, chip: str) -> Estimate:
    """Price what ``compiled.as_text()`` shows of a program that was compiled for a chip of ``CHIPS``."""
    module, figures = parse_module(text), CHIPS[chip]
    unknown: list[str] = []
    found = [_price(module, *each, figures) for each in _runs(module, module.entry, 1, unknown)]
    efficiency = _efficiency([priced for priced, *_ in found])
    operations = tuple(_grant(priced, work, cache_bytes, figures, efficiency) for priced, work, cache_bytes in found)
    return Estimate(chip=chip, efficiency=efficiency, operations=operations, unknown_trips=tuple(unknown))


def device_flops(text: str) -> int:
    """Of the matrix products of a compiled program, loops included: what one device computes of it."""
    module = parse_module(text)
    runs = _runs(module, module.entry, 1, [])
    return sum(_flops(module, computation, operation) * trips for computation, operation, trips in runs)


def _flops(module: Module, computation: Computation, operation: Operation) -> int:
    kernel = find_kernel(module, computation, operation)
    return kernel.flops or 0 if kernel else count_work(module, computation, operation).flops


def _runs(
    module: Module, computation: Computation, trips: int, unknown: list[str]
) -> Iterator[tuple[Computation, Operation, int]]:
    """The operations that run, and how often: through loops, calls and branches."""
    for operation in computation.operations:
        called = [module.computations[name] for name in operation.called if name in module.computations]
        match operation.opcode:
            case "while":
                count = module.trip_count(operation, computation)
                if count is None:
                    unknown.append(operation.name)
                body = module.computations[operation.attribute("body").lstrip("%")]
                yield from _runs(module, body, trips * (1 if count is None else count), unknown)
            case "call":
                for each in called:
                    yield from _runs(module, each, trips, unknown)
            case "conditional" if called:
                branches = [list(_runs(module, each, trips, unknown)) for each in called]
                yield from max(branches, key=lambda runs: sum(moved_bytes(module, c, o) * n for c, o, n in runs))
            case opcode if opcode in FREE or opcode.endswith("-done") or operation.custom_call_target in NO_TRAFFIC:
                pass
            case _:
                yield computation, operation, trips


def _price(
    module: Module, computation: Computation, operation: Operation, trips: int, chip: Chip
) -> tuple[OperationPrice, Work, int]:
    """By compiler and roofline; with what it computes, and what a kernel reads through a cache."""
    kernel = find_kernel(module, computation, operation)
    work, moved = count_work(module, computation, operation), moved_bytes(module, computation, operation)
    if kernel:
        work = Work(products={kernel.product_class: kernel.flops or 0}, vector=kernel.vector_flops)
        moved = moved if kernel.bytes is None else kernel.bytes
    compiler_s = None if kernel else compiler_price(module, computation, operation, chip)
    cache_bytes = kernel.cache_bytes if kernel else 0
    roofline_s = _roofline(work, moved, cache_bytes, chip)
    priced = OperationPrice(
        name=operation.name,
        kind=operation.stem,
        opcode=operation.opcode,
        shape=_shape_of(operation),
        op_name=operation.op_name or _inner_name(module, operation),
        source=module.source(operation),
        kernel=(kernel.name or "?") if kernel else "",
        trips=trips,
        flops=work.flops,
        vector_flops=work.vector,
        bytes=moved,
        products_s=_products_s(work, chip),
        compiler_s=compiler_s,
        roofline_s=roofline_s,
        estimate_s=roofline_s if compiler_s is None else compiler_s,
    )
    return priced, work, cache_bytes


def _roofline(work: Work, moved: int, cache_bytes: int, chip: Chip, efficiency: float = 1.0) -> float:
    cache_s = cache_bytes / chip.cache_bandwidth if chip.cache_bandwidth else 0.0
    return max(_products_s(work, chip) / efficiency, work.vector / chip.vector_flops, cache_s, moved / chip.bandwidth)


def _products_s(work: Work, chip: Chip) -> float:
    return sum(flops / chip.product_flops(name) for name, flops in work.products.items())


def _grant(priced: OperationPrice, work: Work, cache_bytes: int, chip: Chip, efficiency: float) -> OperationPrice:
    """What the compiler has no price for, at the efficiency that it grants other products."""
    if priced.compiler_s is not None:
        return priced
    return dataclasses.replace(priced, estimate_s=_roofline(work, priced.bytes, cache_bytes, chip, efficiency))


def _efficiency(operations: list[OperationPrice]) -> float:
    """Roofline ÷ compiler's price of the operations that are mostly products, weighted by flops; at most 1.

    Mostly products: at peak these take at least half of the roofline. Where no operation is like that, all that have
    products count; where the compiler prices none of them, 1.
    """
    products = [each for each in operations if each.flops and each.compiler_s]
    mostly = [each for each in products if 2 * each.products_s >= each.roofline_s]
    chosen = mostly or products
    total = sum(each.total_flops for each in chosen)
    shares = (each.total_flops * min(1.0, each.roofline_s / (each.compiler_s or 1.0)) for each in chosen)
    return sum(shares) / total if total else 1.0


def _shape_of(operation: Operation) -> str:
    """Of the results; of an asynchronous copy only what it makes."""
    arrays = operation.results
    if operation.opcode == "copy-start":
        arrays = arrays[:1]
    elif operation.opcode.endswith("slice-start"):
        arrays = arrays[-2:-1]
    return ", ".join(map(str, arrays))


def _inner_name(module: Module, operation: Operation) -> str:
    """That of a fusion's result, where the fusion has no name of its own."""
    if operation.opcode != "fusion" or not operation.called:
        return ""
    inner = module.computations[operation.called[0]].operations
    return next((each.op_name for each in reversed(inner) if each.op_name), "")


def _share(parts: list[tuple[int, bool]]) -> float:
    total = sum(amount for amount, _ in parts)
    return sum(amount for amount, priced in parts if priced) / total if total else 1.0
