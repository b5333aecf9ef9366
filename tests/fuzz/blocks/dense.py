"""Products with weights, biases, elementwise functions, normalisation and attention."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from tests.fuzz.grammar import Context, Maker, Misfit, Shape, block


@block(weights=True, chance=3.0)
def einsum(make: Maker, shape: Shape) -> Any:
    """Axes are contracted, shared with the weight, or left alone; the weight brings new ones; all in any order."""
    letters = "abcdefg"[: len(shape)]
    sizes = dict(zip(letters, shape, strict=True))
    role = {letter: make.rng.choice(["contract", "share", "leave"], p=[0.5, 0.2, 0.3]) for letter in letters}
    new = "xyz"[: int(make.rng.choice([0, 1, 2], p=[0.2, 0.6, 0.2]))]
    sizes.update((letter, int(make.rng.integers(1, 5))) for letter in new)
    of_weight = [*(x for x in letters if role[x] != "leave"), *new]
    of_result = [*(x for x in letters if role[x] != "contract"), *new]
    of_weight = [of_weight[i] for i in make.rng.permutation(len(of_weight))]
    of_result = [of_result[i] for i in make.rng.permutation(len(of_result))]
    if not of_result:
        raise Misfit
    Z = "Z" * make.lead
    operands = [f"{Z}{letters}", "".join(of_weight)]
    weight_first = make.flag("weight first", 0.3)
    spec = make.option("spec", f"{','.join(operands[::-1] if weight_first else operands)}->{Z}{''.join(of_result)}")
    fan_in = math.prod(n for x, n in sizes.items() if role.get(x) == "contract")
    w = make.weight(*(sizes[x] for x in of_weight), fan_in=fan_in)

    def apply(context: Context, h: Any) -> Any:
        pair = (w(context), h) if weight_first else (h, w(context))
        return jnp.einsum(spec, *pair)

    return apply, tuple(sizes[x] for x in of_result)


@block(weights=True, chance=1.5)
def matmul(make: Maker, shape: Shape) -> Any:
    width = make.size("width", 1, 5)
    transposed = make.flag("transposed", 0.3)
    w = make.weight(*((width, shape[-1]) if transposed else (shape[-1], width)), fan_in=shape[-1])
    return (lambda context, h: h @ (w(context).T if transposed else w(context))), (*shape[:-1], width)


@block(weights=True)
def dense_with_bias(make: Maker, shape: Shape) -> Any:
    width = make.size("width", 2, 4)
    w, b = make.weight(shape[-1], width, fan_in=shape[-1]), make.weight(width)
    fn = make.option("activation", jnp.tanh, jax.nn.gelu, jax.nn.softplus, jax.nn.silu)
    return (lambda context, h: fn(h @ w(context) + b(context))), (*shape[:-1], width)


@block(weights=True)
def two_weights(make: Maker, shape: Shape) -> Any:
    """Three operands in one product: the gradient of each weight has the other in it."""
    width, middle = make.size("width", 1, 4), make.size("middle", 1, 3)
    left, right = make.weight(shape[-1], middle, fan_in=shape[-1]), make.weight(middle, width, fan_in=middle)
    if make.flag("weights first"):
        return (lambda context, h: h @ (left(context) @ right(context))), (*shape[:-1], width)
    apply = lambda context, h: jnp.einsum("...a,ab,bc->...c", h, left(context), right(context))
    return apply, (*shape[:-1], width)


@block(weights=True)
def bilinear(make: Maker, shape: Shape) -> Any:
    """A form in the value twice: its gradient is an outer product of the value with itself."""
    width = make.size("width", 1, 3)
    w = make.weight(shape[-1], shape[-1], width, fan_in=shape[-1] ** 2)
    apply = lambda context, h: jnp.einsum("...a,abc,...b->...c", jnp.tanh(h), w(context), h)
    return apply, (*shape[:-1], width)


@block(weights=True)
def bias_or_scale(make: Maker, shape: Shape) -> Any:
    """A parameter over some of the axes, broadcast along the others."""
    kept = make.some("axes", range(len(shape)))
    narrow = tuple(n if axis in kept else 1 for axis, n in enumerate(shape))
    if make.flag("from the last axis") and kept:
        narrow = narrow[min(kept) :]
    p = make.weight(*narrow)
    if make.option("by", "bias", "scale", "both") == "bias":
        return (lambda context, h: h + p(context)), shape
    q = make.weight(*narrow)
    if make.flag("as an outer scale", 0.2):
        return (lambda context, h: (1 + q(context)) * h * jnp.exp(0.3 * p(context))), shape
    return (lambda context, h: h * (1 + p(context)) + q(context)), shape


_FUNCTIONS = {
    "tanh": jnp.tanh,
    "gelu": jax.nn.gelu,
    "softplus": jax.nn.softplus,
    "silu": jax.nn.silu,
    "sin": jnp.sin,
    "erf": jax.scipy.special.erf,
    "log1p": lambda h: jnp.log1p(jnp.square(h)),
    "sqrt": lambda h: jnp.sqrt(1 + jnp.square(h)),
    "power": lambda h: (1 + jnp.square(h)) ** 0.7,
    "cube": lambda h: 0.3 * h**3 - h,
    "relu": lambda h: jax.nn.relu(h + 0.1234),
    "leaky_relu": lambda h: jax.nn.leaky_relu(h - 0.0567),
    "abs": lambda h: jnp.abs(h + 0.0789),
    "clip": lambda h: jnp.clip(h, -1.234, 1.345),
    "elu": lambda h: jax.nn.elu(h + 0.0321),
    "logaddexp": lambda h: jnp.logaddexp(h, 0.3 - h),
    "arctan2": lambda h: jnp.arctan2(h, 1.5 + jnp.cos(h)),
    "exp": lambda h: jnp.exp(-0.3 * jnp.square(h)),
    # JAX finds the larger operand by comparing both with the result. An operand that XLA computes twice, once with a
    # fused multiply-add and once without, equals neither: so the other operand is a constant.
    "maximum": lambda h: jnp.maximum(h, 0.0111),
}


@block()
def elementwise(make: Maker, shape: Shape) -> Any:
    fn = _FUNCTIONS[make.option("fn", *_FUNCTIONS)]
    return (lambda _, h: fn(h)), shape


@block(weights=True)
def parametrised_activation(make: Maker, shape: Shape) -> Any:
    """PReLU, swish with a learned slope, a learned power."""
    a = make.weight(shape[-1]) if make.flag("per channel") else make.weight()
    kind = make.option("kind", "prelu", "swish", "power", "snake")
    if kind == "prelu":
        return (lambda context, h: jnp.where(h > 0.0123, h, a(context) * h)), shape
    if kind == "swish":
        return (lambda context, h: h * jax.nn.sigmoid(a(context) * h)), shape
    if kind == "power":
        return (lambda context, h: (1 + jnp.square(h)) ** (0.4 * jnp.tanh(a(context)))), shape
    return (lambda context, h: h + jnp.square(jnp.sin(a(context) * h))), shape


@block()
def softmax(make: Maker, shape: Shape) -> Any:
    axis = make.axis(shape)
    kind = make.option("kind", "softmax", "log_softmax", "logsumexp", "normalised")
    if kind == "softmax":
        return (lambda _, h: 3 * jax.nn.softmax(h, axis=axis)), shape
    if kind == "log_softmax":
        return (lambda _, h: jax.nn.log_softmax(h, axis=axis)), shape
    if kind == "logsumexp":
        return (lambda _, h: h - 0.5 * jax.nn.logsumexp(h, axis=axis, keepdims=True)), shape
    return (lambda _, h: h / jnp.sqrt(0.5 + jnp.sum(jnp.square(h), axis=axis, keepdims=True))), shape


@block(weights=True)
def norm(make: Maker, shape: Shape) -> Any:
    """LayerNorm, RMSNorm and GroupNorm with a learned scale; the small constant is large, for soft gradients."""
    kind = make.option("kind", "layer", "rms", "group")
    groups = make.option("groups", *(g for g in range(1, shape[-1] + 1) if shape[-1] % g == 0))
    scale, shift = make.weight(shape[-1]), make.weight(shape[-1])
    rank = len(shape)

    def apply(context: Context, h: Any) -> Any:
        lead = h.shape[: h.ndim - rank]
        x = h.reshape(*lead, *shape[:-1], groups, -1) if kind == "group" else h
        axes = tuple(range(len(lead), x.ndim)) if kind == "group" and rank == 1 else (-1,)
        if kind == "group" and rank > 1:
            axes = (*range(len(lead), x.ndim - 2), -1)
        if kind != "rms":
            x = x - jnp.mean(x, axis=axes, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=axes, keepdims=True) + 0.1)
        return x.reshape(h.shape) * (1 + scale(context)) + shift(context)

    return apply, shape


@block(ranks=(2, 3), weights=True, chance=1.5)
def attention(make: Maker, shape: Shape) -> Any:
    """Over the second last axis; heads by a reshape, by an einsum, or by vmap."""
    T, D = shape[-2:]
    heads, width = make.size("heads", 1, 2), make.size("width", 1, 3)
    fused = make.flag("fused")
    if fused:
        qkv = make.weight(D, 3, heads, width, fan_in=D)
    else:
        q, k, v = (make.weight(D, heads, width, fan_in=D) for _ in range(3))
    out = make.weight(heads, width, D, fan_in=heads * width)
    mask = make.option("mask", "none", "causal", "of the example")
    allowed = make.booleans(T) if mask == "of the example" else None
    by_vmap, residual = make.flag("heads by vmap", 0.3), make.flag("residual")

    def of_head(q: Any, k: Any, v: Any, bias: Any) -> Any:
        logits = jnp.einsum("...td,...sd->...ts", q, k) / math.sqrt(width) + bias
        return jnp.einsum("...ts,...sd->...td", jax.nn.softmax(logits, axis=-1), v)

    def apply(context: Context, h: Any) -> Any:
        if fused:
            parts = jnp.einsum("...td,dchk->c...thk", h, qkv(context))
        else:
            parts = [jnp.einsum("...td,dhk->...thk", h, w(context)) for w in (q, k, v)]
        bias = jnp.zeros((T, T))
        if mask == "causal":
            bias = jnp.where(jnp.tril(jnp.ones((T, T), bool)), 0.0, -1e9)
        elif allowed is not None:
            own = allowed(context).reshape(*h.shape[: make.lead], *[1] * (h.ndim - make.lead - 2), 1, T)
            bias = jnp.where(own, 0.0, -3.0)
        if by_vmap:
            mixed = jax.vmap(of_head, in_axes=(-2, -2, -2, None), out_axes=-2)(*parts, bias)
        else:
            swapped = [jnp.swapaxes(x, -2, -3) for x in parts]
            bias = jnp.expand_dims(bias, -3)
            mixed = jnp.swapaxes(of_head(*swapped, bias), -2, -3)
        y = jnp.einsum("...thk,hkd->...td", mixed, out(context))
        return h + y if residual else y

    return apply, shape


@block(weights=True)
def experts(make: Maker, shape: Shape) -> Any:
    """A mixture: all experts weighted by a gate, or the best ones, whose weights are gathered by the example."""
    E, width = make.size("experts", 1, 3), make.size("width", 1, 3)
    gate = make.weight(shape[-1], E, fan_in=shape[-1])
    w = make.weight(E, shape[-1], width, fan_in=shape[-1])
    offsets = make.constant(E)
    if make.flag("all"):

        def apply(context: Context, h: Any) -> Any:
            g = jax.nn.softmax(h @ gate(context), axis=-1)
            return jnp.einsum("...e,...d,edf->...f", g, h, w(context))
    else:
        k = make.size("k", 1, E)

        def apply(context: Context, h: Any) -> Any:
            best, chosen = jax.lax.top_k(h @ gate(context) + offsets, k)
            return jnp.einsum("...k,...d,...kdf->...f", jax.nn.softmax(best, axis=-1), h, w(context)[chosen])

    return apply, (*shape[:-1], width)
