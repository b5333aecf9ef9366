"""Convolutions with every option that jax has, in every layout, and windows without weights."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from tests.fuzz.grammar import Context, Maker, Misfit, Shape, block


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _windows(make: Maker, sizes: Shape) -> tuple[Shape, dict[str, Any]]:
    """A kernel's size, and strides, dilations and padding that leave something over."""
    n = len(sizes)

    def each(name: str, *choices: int) -> Shape:
        return tuple(make.option(name, *choices) for _ in range(n))

    kernel = each("kernel", 1, 2, 2, 3)
    strides = each("stride", 1, 1, 2, 3)
    lhs, rhs = each("lhs_dilation", 1, 1, 1, 2), each("rhs_dilation", 1, 1, 1, 2)
    kind = make.option("padding", "SAME", "VALID", "given", "given")
    if kind == "given":
        padding: Any = [(make.size("low", -1, 2), make.size("high", -1, 2)) for _ in range(n)]
    else:
        padding = kind
        lhs = (1,) * n  # jax takes no name of a padding with these
    pads = [(1, 1)] * n if kind == "SAME" else [(0, 0)] * n if kind == "VALID" else padding
    for size, k, d, e, (low, high) in zip(sizes, kernel, rhs, lhs, pads, strict=True):
        dilated = e * (size - 1) + 1
        if dilated + low + high < d * (k - 1) + 1 or min(dilated + low, dilated + high) < 1:
            raise Misfit
    return kernel, {"window_strides": strides, "padding": padding, "lhs_dilation": lhs, "rhs_dilation": rhs}


@block(ranks=(2, 4), weights=True, chance=4.0)
def convolution(make: Maker, shape: Shape) -> Any:
    """One, two or three axes of positions; the example may have an axis of images of its own."""
    own = make.flag("axis of images", 0.3) and len(shape) > 2
    spatial = len(shape) - 1 - own
    order = make.order("axes (images, channels, positions)", len(shape))
    sizes = [shape[axis] for axis in order]
    images, channels, positions = sizes[0] if own else 1, sizes[own], tuple(sizes[own + 1 :])
    kernel, options = _windows(make, positions)
    groups = make.option("groups", 1, 1, channels, *_divisors(channels))
    features = groups * make.size("features of a group", 1, 2 if groups > 1 else 4)
    batch_groups = make.option("batch_groups", 1, *_divisors(images)) if groups == 1 else 1
    if features % batch_groups or (batch_groups > 1 and make.lead):
        raise Misfit  # with a batch axis beside it, a group would be several examples
    fan_in = math.prod(kernel) * channels // groups
    w = make.weight(features, channels // groups, *kernel, fan_in=fan_in)
    layouts = [make.order(name, spatial + 2) for name in ("lhs_spec", "rhs_spec", "out_spec")]
    numbers = jax.lax.ConvDimensionNumbers(*layouts)

    def apply(context: Context, h: Any) -> Any:
        lead = h.shape[: make.lead]
        x = jnp.transpose(h, (*range(make.lead), *(make.lead + axis for axis in order)))
        x = x.reshape(math.prod(lead) * images, channels, *positions)
        y = jax.lax.conv_general_dilated(
            _laid_out(x, layouts[0]),
            _laid_out(w(context), layouts[1]),
            **options,
            dimension_numbers=numbers,
            feature_group_count=groups,
            batch_group_count=batch_groups,
        )
        y = jnp.transpose(y, layouts[2])
        return y.reshape(*lead, *((images // batch_groups,) if own else ()), *y.shape[1:])

    return apply, _shape_of(apply, make, shape)


def _laid_out(x: jax.Array, spec: Shape) -> jax.Array:
    """An array whose axis ``spec[j]`` is axis j of x."""
    order = [0] * len(spec)
    for j, axis in enumerate(spec):
        order[axis] = j
    return jnp.transpose(x, order)


def _shape_of(apply: Any, make: Maker, shape: Shape) -> Shape:
    """The shape of what a block gives, for one example."""
    params = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in make.scope.shareable().items()}
    h = jax.ShapeDtypeStruct((1,) * make.lead + shape, "float64")
    try:
        after = jax.eval_shape(lambda params, h: apply(Context(params=params, batch={}, penalties=[]), h), params, h)
    except (TypeError, ValueError) as error:
        raise Misfit from error
    return tuple(after.shape[make.lead :])


@block(ranks=(2, 3), weights=True, chance=1.5)
def convolution_as_named(make: Maker, shape: Shape) -> Any:
    """In the layouts that people use, with the padding by its name."""
    spatial = len(shape) - 1
    letters = "HW"[:spatial]
    lhs = make.option("input", f"N{letters}C", f"NC{letters}")
    rhs = make.option("kernel", f"{letters}IO", f"OI{letters}")
    channels = shape[-1] if lhs.endswith("C") else shape[0]
    features, k = make.size("features", 1, 4), make.size("size", 1, 3)
    groups = make.option("groups", 1, channels)
    features = features * groups if groups > 1 else features
    sizes = {"O": features, "I": channels // groups, **dict.fromkeys(letters, k)}
    w = make.weight(*(sizes[x] for x in rhs), fan_in=k**spatial * channels // groups)
    strides = (make.option("stride", 1, 2),) * spatial
    padding = make.option("padding", "SAME", "VALID")
    bias = make.weight(features) if make.flag("bias") else None

    def apply(context: Context, h: Any) -> Any:
        x = h if make.lead else h[None]
        y = jax.lax.conv_general_dilated(
            x, w(context), strides, padding, dimension_numbers=(lhs, rhs, lhs), feature_group_count=groups
        )
        if bias is not None:
            b = bias(context)
            y = y + (b if lhs.endswith("C") else b.reshape(-1, *[1] * spatial))
        return y if make.lead else y[0]

    return apply, _shape_of(apply, make, shape)


@block(ranks=(2, 3), weights=True)
def convolution_transposed(make: Maker, shape: Shape) -> Any:
    spatial = len(shape) - 1
    features, k = make.size("features", 1, 3), make.size("size", 1, 3)
    flipped = make.flag("transpose_kernel")
    ends = (features, shape[-1]) if flipped else (shape[-1], features)
    w = make.weight(*[k] * spatial, *ends, fan_in=k**spatial * shape[-1])
    strides, padding = [make.size("stride", 1, 2) for _ in range(spatial)], make.option("padding", "SAME", "VALID")
    letters = "HW"[:spatial]
    numbers = (f"N{letters}C", f"{letters}IO", f"N{letters}C")

    def apply(context: Context, h: Any) -> Any:
        x = h if make.lead else h[None]
        y = jax.lax.conv_transpose(x, w(context), strides, padding, dimension_numbers=numbers, transpose_kernel=flipped)
        return y if make.lead else y[0]

    return apply, _shape_of(apply, make, shape)


@block(ranks=(2, 3), weights=True, chance=0.7)
def convolution_local(make: Maker, shape: Shape) -> Any:
    """With a kernel of its own at every position, by patches, or by numpy's convolve."""
    kind = make.option("kind", "local", "patches", "convolve")
    if kind == "convolve":
        w, mode = make.weight(2, fan_in=2), make.option("mode", "full", "same", "valid")
        if shape[-1] < 2:
            raise Misfit

        def convolved(context: Context, h: Any) -> Any:
            rows = h.reshape(-1, h.shape[-1])
            return jax.vmap(lambda row: jnp.convolve(row, w(context), mode=mode))(rows).reshape(*h.shape[:-1], -1)

        return convolved, _shape_of(convolved, make, shape)
    spatial, k, features = len(shape) - 1, make.size("size", 1, 2), make.size("features", 1, 3)
    if min(shape[:-1]) < k:
        raise Misfit
    letters = "HW"[:spatial]
    numbers = (f"N{letters}C", f"{letters}IO", f"N{letters}C")
    places = tuple(n - k + 1 for n in shape[:-1])
    taps = k**spatial * shape[-1]
    w = make.weight(*(places if kind == "local" else ()), taps, features, fan_in=taps)

    def apply(context: Context, h: Any) -> Any:
        x = h if make.lead else h[None]
        if kind == "local":
            y = jax.lax.conv_general_dilated_local(
                x, w(context), (1,) * spatial, "VALID", (k,) * spatial, dimension_numbers=numbers
            )
        else:
            y = jax.lax.conv_general_dilated_patches(
                x, (k,) * spatial, (1,) * spatial, "VALID", dimension_numbers=numbers
            )
            y = y @ w(context)
        return y if make.lead else y[0]

    return apply, _shape_of(apply, make, shape)


@block(ranks=(1, 4))
def pool(make: Maker, shape: Shape) -> Any:
    """``reduce_window`` over some axes: sums with every option, extremes with strides and padding."""
    by = make.option("by", "sum", "mean", "max", "min")
    axes = make.some("axes", range(len(shape)), 1)
    n = len(shape)

    def each(name: str, *choices: int) -> Shape:
        return tuple(make.option(name, *choices) if axis in axes else 1 for axis in range(n))

    window, strides = each("window", 1, 2, 3), each("stride", 1, 2)
    dilation = each("base_dilation", 1, 1, 2) if by == "sum" else (1,) * n
    spread = each("window_dilation", 1, 1, 2) if by in ("sum", "mean") else (1,) * n
    low, high = each("low", 0, 0, 1), each("high", 0, 1)
    padding = [(a, b) if axis in axes else (0, 0) for axis, (a, b) in enumerate(zip(low, high, strict=True))]
    for size, k, d, e, (a, b) in zip(shape, window, spread, dilation, padding, strict=True):
        if e * (size - 1) + 1 + a + b < d * (k - 1) + 1 or (by in ("max", "min") and max(a, b) >= k):
            raise Misfit  # a window of nothing but padding has no largest entry
    offsets = jnp.asarray(make.constant(*shape))
    first = (1,) * make.lead
    reduction, start = {"max": (jax.lax.max, -jnp.inf), "min": (jax.lax.min, jnp.inf)}.get(by, (jax.lax.add, 0.0))
    scale = 1 / math.prod(window) if by == "mean" else 1.0

    def apply(_: Context, h: Any) -> Any:
        return scale * jax.lax.reduce_window(
            h + offsets,
            start,
            reduction,
            (*first, *window),
            (*first, *strides),
            [(0, 0)] * make.lead + padding,
            base_dilation=(*first, *dilation),
            window_dilation=(*first, *spread),
        )

    return apply, _shape_of(apply, make, shape)
