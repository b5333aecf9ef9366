"""Branches, remat, jit, rules for derivatives, and blocks side by side."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from tests.fuzz.blocks.loops import remat_of
from tests.fuzz.grammar import Context, Getter, Maker, Shape, block, project


def _predicate(make: Maker, shape: Shape) -> Any:
    """A truth value: of the example, of the hidden value, or the same for all; as a function of (context, h)."""
    kind = make.option("on", "input", "value", "weight", "constant")
    if kind == "input":
        get = make.scalar(make.booleans())
        return lambda context, _: get(context)
    if kind == "value":
        return lambda _, h: jnp.sum(h) > 0.0123
    if kind == "weight":
        w = make.parameter(3)
        return lambda context, _: w(context)[0] > 0
    truth = make.option("truth", False, True)
    return lambda context, _: jnp.asarray(truth)


@block(holds=True, chance=2.5)
def cond(make: Maker, shape: Shape) -> Any:
    """Two branches; each may have parameters that the other has not."""
    predicate = _predicate(make, shape)
    to = shape if make.flag("same shape", 0.6) else (make.size("width", 1, 4),)
    yes = make.inner(shape, to=to, most=1)
    no = make.inner(shape, to=to, most=1) if make.flag("two branches", 0.8) or to != shape else None

    def apply(context: Context, h: Any) -> Any:
        return jax.lax.cond(
            predicate(context, h),
            lambda h: yes.apply(context, h),
            lambda h: h if no is None else no.apply(context, h),
            h,
        )

    return apply, to


@block(weights=True, holds=True)
def switch(make: Maker, shape: Shape) -> Any:
    which = make.scalar(make.integers(below=3))
    w = make.weight(shape[-1], shape[-1], fan_in=shape[-1])
    layer = make.inner(shape, to=shape, most=1)
    shared = make.flag("one weight in two branches")

    def apply(context: Context, h: Any) -> Any:
        last = (lambda h: jnp.tanh(h) @ w(context).T) if shared else jnp.sin
        branches = [lambda h: layer.apply(context, h), lambda h: h @ w(context), last]
        return jax.lax.switch(which(context), branches, h)

    return apply, shape


@block(weights=True)
def where(make: Maker, shape: Shape) -> Any:
    """A choice entry by entry: by a mask of the example, of the value, or a fixed one."""
    kind = make.option("by", "input", "value", "constant", "one for all entries")
    w = make.weight(*shape)
    mask: Getter = lambda _: None
    if kind == "input":
        mask = make.booleans(*shape)
    elif kind == "constant":
        fixed = make.rng.uniform(size=shape) < 0.5
        mask = lambda _: fixed
    elif kind == "one for all entries":
        mask = make.scalar(make.booleans())

    def apply(context: Context, h: Any) -> Any:
        chosen = h > 0.0234 if kind == "value" else mask(context)
        return jnp.where(chosen, h * w(context), jnp.sin(h) + w(context))

    return apply, shape


_POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots without batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("kept"),
}


@block(holds=True, chance=2.0)
def remat(make: Maker, shape: Shape) -> Any:
    layer = make.inner(shape)
    policy = make.option("policy", None, *_POLICIES)
    options = {} if policy is None else {"policy": _POLICIES[policy]}
    if make.flag("no barrier", 0.3):
        options["prevent_cse"] = False
    return remat_of(layer, **options), layer.shape


@block()
def named(make: Maker, shape: Shape) -> Any:
    """A name for checkpoint policies, an optimization barrier, or a gradient that is stopped in part."""
    kind = make.option("kind", "name", "barrier", "stop_gradient")
    if kind == "name":
        return (lambda _, h: checkpoint_name(jnp.sin(h), "kept")), shape
    if kind == "barrier":
        return (lambda _, h: jax.lax.optimization_barrier((h, 0.5 * h))[1]), shape
    return (lambda _, h: h * jax.lax.stop_gradient(jnp.cos(h)) + 0.2 * h), shape


@block(holds=True)
def jitted(make: Maker, shape: Shape) -> Any:
    layer = make.inner(shape)
    inline = make.flag("inline", 0.3)

    def apply(context: Context, h: Any) -> Any:
        fn = jax.jit(
            lambda params, batch, h: layer.apply(Context(params=params, batch=batch, penalties=[]), h), inline=inline
        )
        return fn(context.params, context.batch, h)

    return apply, layer.shape


@block(weights=True)
def custom_jvp(make: Maker, shape: Shape) -> Any:
    """A function of the value and a weight with a rule that is not its derivative."""
    a = make.weight(shape[-1])

    @jax.custom_jvp
    def fn(x: Any, a: Any) -> Any:
        return jnp.tanh(x * a)

    @fn.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        (x, a), (dx, da) = primals, tangents
        y = fn(x, a)
        return y, (1.1 - y) * (a * dx + x * da)

    return (lambda context, h: fn(h, jnp.broadcast_to(a(context), h.shape))), shape


@block(weights=True, holds=True, chance=1.5)
def custom_vjp(make: Maker, shape: Shape) -> Any:
    """A dense layer with its backward pass by hand, or any blocks with a cotangent that is changed on its way."""
    if make.flag("dense"):
        width = make.size("width", 1, 4)
        w = make.weight(shape[-1], width, fan_in=shape[-1])

        @jax.custom_vjp
        def dense(x: Any, w: Any) -> Any:
            return x @ w

        def backward(kept: Any, g: Any) -> Any:
            x, w = kept
            return jnp.clip(g, -0.4, 0.6) @ w.T, jnp.einsum("...i,...o->io", x, jnp.sin(g))

        dense.defvjp(lambda x, w: (x @ w, (x, w)), backward)
        return (lambda context, h: dense(h, w(context))), (*shape[:-1], width)

    layer, names = make.parameters_only(shape, (*shape[:-1], 2))

    @jax.custom_vjp
    def blocks(params: Any, h: Any) -> Any:
        return layer.apply(Context(params=params, batch={}, penalties=[]), h)

    def forward(params: Any, h: Any) -> Any:
        return jax.vjp(lambda p, h: layer.apply(Context(params=p, batch={}, penalties=[]), h), params, h)

    blocks.defvjp(forward, lambda pullback, g: pullback(1.5 * g + 0.01))
    del names  # blocks inside may share parameters of blocks outside, so it is given all
    return (lambda context, h: blocks(context.params, h)), layer.shape


@block(holds=True)
def residual(make: Maker, shape: Shape) -> Any:
    layer = make.inner(shape, to=shape)
    return (lambda context, h: h + layer.apply(context, h)), shape


@block(holds=True)
def side_by_side(make: Maker, shape: Shape) -> Any:
    """The same value through two chains, or through one chain twice."""
    width = (make.size("width", 1, 4),)
    left = make.inner(shape, to=width)
    if make.flag("the same twice"):
        return (lambda context, h: left.apply(context, h) * jnp.sin(left.apply(context, 0.5 * h))), width
    right = make.inner(shape, to=width)
    if make.option("join", "add", "multiply") == "add":
        return (lambda context, h: left.apply(context, h) + right.apply(context, h)), width
    return (lambda context, h: left.apply(context, h) * right.apply(context, h)), width


@block(weights=True, holds=True)
def inner_gradient(make: Maker, shape: Shape) -> Any:
    """A derivative within the loss: the gradient of an energy, or a product of a Jacobian with a vector."""
    layer, _ = make.parameters_only(shape, shape)
    out = project(make, shape, (1,))
    kind = "grad" if "custom_vjp" in layer.text else make.option("kind", "grad", "jvp")

    def apply(context: Context, h: Any) -> Any:
        if kind == "grad":
            energy = lambda h: jnp.sum(jnp.sin(out.apply(context, layer.apply(context, h))))
            return h - 0.3 * jax.grad(energy)(h)
        return jax.jvp(lambda h: layer.apply(context, h), (h,), (jnp.cos(h),))[1] + h

    return apply, shape
