"""Scans over layers and over time, also within each other, and other loops of a fixed length."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from tests.fuzz.grammar import Context, Layer, Maker, Misfit, Shape, block


@block(weights=True, holds=True, chance=3.0)
def scan_over_layers(make: Maker, shape: Shape) -> Any:
    """A layer with stacked parameters; what a layer adds to a penalty goes along in the carry."""
    length = make.size("length", 1, 3)
    layer, names = make.stacked(shape, length)
    if not names:
        raise Misfit
    shared = make.weight(*shape) if make.flag("a weight for all layers", 0.4) else None
    penalty = make.option("penalty", "none", "none", "in the carry", "stacked")
    if make.depth and penalty != "none":
        raise Misfit  # a penalty leaves a loop by its carry, and only the outermost looks for it
    alone = make.scope.name("w") if penalty != "none" and make.flag("of weights that nothing else uses") else None
    if alone:
        make.scope.params[alone] = make.constant(length, *shape)
    residual, remat = make.flag("residual"), make.flag("remat", 0.3)
    stacks = make.flag("outputs of all layers", 0.3)
    reverse, unroll = make.flag("reverse", 0.3), make.option("unroll", 1, 1, 2)

    def apply(context: Context, h: Any) -> Any:
        def step(carry: Any, params: Any) -> Any:
            h, total = carry
            after = layer.apply(context.with_params(params), h)
            after = h + 0.5 * after if residual else after
            if shared is not None:
                after = jnp.tanh(after) * (1 + shared(context))
            penalised = [params[alone]] if alone else params.values()
            size = sum(jnp.mean(jnp.square(x) + 0.1 * x) for x in penalised)
            total = total + 0.1 * size if penalty == "in the carry" else total
            return (after, total), (after if stacks else 0.0, size if penalty == "stacked" else 0.0)

        step = jax.checkpoint(step) if remat else step
        params = {name: context.params[name] for name in ([*names, alone] if alone else names)}
        start = (h, jnp.zeros(()) if penalty == "in the carry" else ())
        (h, total), (all_h, sizes) = jax.lax.scan(step, start, params, reverse=reverse, unroll=unroll)
        if penalty == "in the carry":
            context.penalties.append(total)
        elif penalty == "stacked":
            context.penalties.append(0.1 * jnp.sum(jnp.sin(sizes)))
        return h + 0.3 * jnp.sum(jnp.sin(all_h), axis=0) if stacks else h

    return apply, shape


@block(ranks=(2, 3), weights=True, holds=True, chance=3.0)
def scan_over_time(make: Maker, shape: Shape) -> Any:
    """A recurrence: x_t goes through any block, the state through a matrix."""
    axis = make.axis(shape, "time")
    rest = tuple(n for i, n in enumerate(shape) if i != axis % len(shape))
    states = make.size("states", 1, 3)
    inside = make.inner(rest, to=(states,), most=1)
    w = make.weight(states, states, fan_in=states)
    start = make.weight(states) if make.flag("learned start", 0.4) else None
    gated = make.weight(states) if make.flag("gate", 0.3) else None
    by_time = make.weight(shape[axis], states) if make.flag("weights by the time step", 0.3) else None
    remat, reverse = make.flag("remat", 0.3), make.flag("reverse", 0.3)
    unroll = make.option("unroll", 1, 1, 2)
    last = make.flag("last state only", 0.4)

    def apply(context: Context, h: Any) -> Any:
        xs = jnp.moveaxis(h, axis, 0)

        def step(state: Any, x: Any) -> Any:
            t, x_t = x
            new = jnp.tanh(inside.apply(context, x_t) + state @ w(context))
            if by_time is not None:
                new = new + by_time(context)[t]
            if gated is not None:
                g = jax.nn.sigmoid(gated(context) * new)
                new = g * state + (1 - g) * new
            return new, new

        state = jnp.zeros((*h.shape[: make.lead], states)) if start is None else start(context)
        state = jnp.broadcast_to(state, (*h.shape[: make.lead], states))
        step = jax.checkpoint(step) if remat else step
        state, all_states = jax.lax.scan(step, state, (jnp.arange(len(xs)), xs), reverse=reverse, unroll=unroll)
        return state if last else jnp.moveaxis(all_states, 0, make.lead)

    return apply, (states,) if last else (shape[axis], states)


@block(ranks=(2, 4), weights=True, holds=True)
def map_over_axis(make: Maker, shape: Shape) -> Any:
    """``lax.map`` or ``vmap`` along an axis, with the same parameters for all or with some for each."""
    axis = make.axis(shape)
    rest = tuple(n for i, n in enumerate(shape) if i != axis % len(shape))
    by = make.option("by", "map", "vmap", "batched map")
    if make.flag("parameters for each"):
        layer, names = make.stacked(rest, shape[axis])
    else:
        layer, names = make.inner(rest, to=rest), []

    def apply(context: Context, h: Any) -> Any:
        def one(x: Any) -> Any:
            params, h = x
            return layer.apply(context.with_params(params), h)

        xs = ({name: context.params[name] for name in names}, jnp.moveaxis(h, axis, 0))
        if by == "vmap":
            return jnp.moveaxis(jax.vmap(one)(xs), 0, axis)
        return jnp.moveaxis(jax.lax.map(one, xs, batch_size=2 if by == "batched map" else None), 0, axis)

    return apply, shape


@block(weights=True, holds=True)
def fori_loop(make: Maker, shape: Shape) -> Any:
    """``fori_loop`` with fixed bounds: the same parameters at every step, or a row of them by the step's number."""
    steps = make.size("steps", 1, 3)
    layer = make.inner(shape, to=shape)
    rows = make.weight(steps, shape[-1]) if make.flag("rows by the step") else None
    unroll = make.flag("unroll", 0.2)

    def apply(context: Context, h: Any) -> Any:
        def body(i: Any, h: Any) -> Any:
            after = jnp.sin(layer.apply(context, h)) + 0.5 * h
            return (
                after if rows is None else after * (1 + jax.lax.dynamic_index_in_dim(rows(context), i, keepdims=False))
            )

        return jax.lax.fori_loop(0, steps, body, h, unroll=unroll or None)

    return apply, shape


@block(ranks=(2, 2), weights=True, chance=1.5)
def scan_in_scan(make: Maker, shape: Shape) -> Any:
    """Layers around time: each layer of a stack is a recurrence."""
    D, length = shape[-1], make.size("layers", 1, 3)
    into, across = make.weight(length, D, D, fan_in=D), make.weight(length, D, D, fan_in=D)
    for_all = make.weight(D, D, fan_in=D) if make.flag("a weight for all layers") else None
    remat, reverse = make.flag("remat", 0.3), make.flag("reverse", 0.3)

    def apply(context: Context, h: Any) -> Any:
        def layer(h: Any, weights: Any) -> Any:
            w, u = weights

            def step(state: Any, x: Any) -> Any:
                new = jnp.tanh(x @ w + state @ u)
                if for_all is not None:
                    new = new + 0.3 * jnp.sin(new @ for_all(context))
                return new, new

            step = jax.checkpoint(step) if remat else step
            xs = jnp.swapaxes(h, 0, 1) if make.lead else h
            _, ys = jax.lax.scan(step, jnp.zeros_like(xs[0]), xs, reverse=reverse)
            return (jnp.swapaxes(ys, 0, 1) if make.lead else ys), None

        return jax.lax.scan(layer, h, (into(context), across(context)))[0]

    return apply, shape


@block(chance=0.5)
def while_loop(make: Maker, shape: Shape) -> Any:
    """A loop whose length the example decides, of which no gradient is taken."""
    bound = 1.0 + float(make.rng.uniform()) * math.prod(shape)

    def apply(_: Context, h: Any) -> Any:
        fixed = jax.lax.stop_gradient(h)
        n, _ = jax.lax.while_loop(
            lambda c: (c[0] < 5) & (jnp.sum(jnp.square(c[1])) < bound), lambda c: (c[0] + 1, 1.3 * c[1]), (0, fixed)
        )
        return h * (1 + 0.2 * n)

    return apply, shape


def remat_of(layer: Layer, **options: Any) -> Any:
    """A layer under ``jax.checkpoint``."""

    def apply(context: Context, h: Any) -> Any:
        fn = lambda params, h: layer.apply(Context(params=params, batch=context.batch, penalties=[]), h)
        return jax.checkpoint(fn, **options)(context.params, h)

    return apply
