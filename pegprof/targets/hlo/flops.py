"""What an operation computes: flops of matrix products by precision, and elementwise operations.

    dot          2 · (entries of the result) · (contracted entries)
    convolution  2 · (batch) · (features out) · (features in a group) · (pairs of window and output that meet the input)

A TPU's compiler writes every product as a convolution, batch axes as windows over a dilated input. So positions that
meet only padding or dilation must not count.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence

from pegprof.targets.hlo.arrays import Array
from pegprof.targets.hlo.module import Computation, Module, Operation

ELEMENTWISE = {
    "abs", "add", "and", "atan2", "cbrt", "ceil", "clamp", "compare", "convert", "cosine", "divide", "erf",
    "exponential", "exponential-minus-one", "floor", "is-finite", "log", "log-plus-one", "logistic", "maximum",
    "minimum", "multiply", "negate", "not", "or", "popcnt", "power", "remainder", "round-nearest-afz",
    "round-nearest-even", "rsqrt", "select", "shift-left", "shift-right-arithmetic", "shift-right-logical",
    "sign", "sine", "sqrt", "subtract", "tan", "tanh", "xor",
}  # fmt: skip
REDUCTIONS = {"reduce", "reduce-window", "select-and-scatter"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Flops of products, by the class of their precision, and elementwise operations."""

    products: Mapping[str, int] = dataclasses.field(default_factory=dict)
    vector: int = 0

    @property
    def flops(self) -> int:
        return sum(self.products.values())

    def __add__(self, other: "Work") -> "Work":
        classes = {*self.products, *other.products}
        products = {name: self.products.get(name, 0) + other.products.get(name, 0) for name in classes}
        return Work(products=products, vector=self.vector + other.vector)


def count_work(module: Module, computation: Computation, operation: Operation) -> Work:
    """What one operation computes, with all that is fused into it."""
    match operation.opcode:
        case "fusion" | "call" | "async-start":
            inner = [module.computations[name] for name in operation.called if name in module.computations]
            parts = [count_work(module, each, part) for each in inner for part in each.operations]
            return sum(parts, Work())
        case "dot" | "convolution" | "custom-call" | "ragged-dot":
            flops = _product_flops(computation, operation)
            return Work(products={product_class(computation, operation): flops}) if flops else Work()
        case opcode if opcode in ELEMENTWISE:
            return Work(vector=operation.results[0].size)
        case opcode if opcode in REDUCTIONS:
            return Work(vector=computation.by_name[operation.operands[0]].results[0].size)
    return Work()


def product_dtypes(module: Module, computation: Computation, operation: Operation) -> set[tuple[str, ...]]:
    """Of the operands and the result of each dot, as HLO spells them; a fusion's result counts as the dot's too."""
    if operation.opcode == "dot" or operation.custom_call_target.startswith("__cublas$"):
        arrays = [each.results[0] for each in computation.operands(operation)[:2]] + [operation.results[0]]
        return {tuple(array.dtype for array in arrays)}
    if operation.opcode != "fusion":
        return set()
    inner = module.computations[operation.called[0]]
    found = {dtypes for each in inner.operations for dtypes in product_dtypes(module, inner, each)}
    return found | {(*dtypes[:2], operation.results[0].dtype) for dtypes in found}


def product_class(computation: Computation, operation: Operation) -> str:
    """Which of a chip's peaks holds for a product: by its operands' dtype and the precision asked for."""
    dtypes = {array.dtype for each in computation.operands(operation)[:2] for array in each.results[:1]}
    if not dtypes & {"f32", "f64"}:
        return "bfloat16"
    config = operation.attribute("operand_precision") + operation.backend_config
    precision = re.search(r"\b(highest|high)\b", config, re.IGNORECASE)
    return precision[1].lower() if precision else "float32"


def _product_flops(computation: Computation, operation: Operation) -> int:
    operands = [each.results[0] for each in computation.operands(operation) if each.results]
    result, target = operation.results[0], operation.custom_call_target
    if operation.opcode == "dot":
        contracted = operation.dims("lhs_contracting_dims")
    elif target.startswith("__cublas$"):
        found = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', operation.backend_config)
        contracted = tuple(int(n) for n in re.findall(r"\d+", found[1])) if found else ()
    elif operation.opcode == "convolution":
        return _convolution_flops(operation, operands[0], operands[1], result)
    elif target.startswith("__cudnn$conv"):
        return _cudnn_flops(operation, operands, result)
    else:
        return 0
    return 2 * result.size * math.prod(operands[0].shape[axis] for axis in contracted)


def _cudnn_flops(operation: Operation, operands: Sequence[Array], result: Array) -> int:
    """All three kinds carry the window and the labels of the forward convolution."""
    match operation.custom_call_target:
        case "__cudnn$convBackwardInput":
            return _convolution_flops(operation, result, operands[1], operands[0])
        case "__cudnn$convBackwardFilter":
            return _convolution_flops(operation, operands[0], result, operands[1])
    return _convolution_flops(operation, operands[0], operands[1], result)


def _convolution_flops(operation: Operation, input_: Array, kernel: Array, output: Array) -> int:
    labels = re.match(r"(\w+)_(\w+)->(\w+)", operation.attribute("dim_labels"))
    if labels is None:
        return 0
    of_input, of_kernel, of_output = labels.groups()
    window = parse_window(operation.attribute("window"), len(of_input) - 2)
    pairs = math.prod(
        count_pairs(
            input_.shape[of_input.index(str(axis))],
            kernel.shape[of_kernel.index(str(axis))],
            output.shape[of_output.index(str(axis))],
            *window[axis],
        )
        for axis in range(len(window))
    )
    batch = input_.shape[of_input.index("b")] // int(operation.attribute("batch_group_count") or 1)
    features = kernel.shape[of_kernel.index("i")] * kernel.shape[of_kernel.index("o")]
    return 2 * batch * features * pairs


def parse_window(text: str, axes: int) -> list[tuple[int, int, int, int]]:
    """Stride, padding before, dilation of the input and of the kernel, for each axis.

    >>> parse_window("{size=1x16 stride=1x2 pad=0_0x15_15}", 2)
    [(1, 0, 1, 1), (2, 15, 1, 1)]
    """

    def values(name: str, default: str) -> list[str]:
        found = re.search(rf"\b{name}=(\S+?)[ }}]", text)
        return found[1].split("x") if found else [default] * axes

    columns = values("stride", "1"), values("pad", "0_0"), values("lhs_dilate", "1"), values("rhs_dilate", "1")
    return [(int(s), int(p.split("_")[0]), int(i), int(k)) for s, p, i, k in zip(*columns, strict=True)]


@functools.lru_cache(maxsize=2**12)
def count_pairs(length: int, size: int, outputs: int, stride: int, pad: int, dilate: int, dilate_kernel: int) -> int:
    """How many (output o, kernel position k) read an entry of the input along one axis.

    That entry is p / dilate for p = o·stride + k·dilate_kernel - pad, where p is in range and a multiple of dilate.

    >>> count_pairs(64, 64, 64, 63, 0, 64, 1)  # a batch axis, as a TPU's compiler writes it
    64
    """
    count, last = 0, (length - 1) * dilate
    step = dilate // math.gcd(stride, dilate)  # of the outputs that meet an entry and not a gap
    for k in range(size):
        shift = k * dilate_kernel - pad
        low, high = max(0, -(shift // stride)), min(outputs - 1, (last - shift) // stride)
        first = next((o for o in range(low, min(high, low + step - 1) + 1) if (o * stride + shift) % dilate == 0), None)
        if first is not None:
            count += (high - first) // step + 1
    return count
