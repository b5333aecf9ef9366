"""Conditionals, loops on data, nested jits and rules for derivatives."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.programs.registry import program, score


def _mean_of(one):
    """A loss over a batch from a loss of one example."""
    return lambda p, batch: jnp.mean(jax.vmap(one, in_axes=(None, 0))(p, batch))


@program()
def cond_with_a_predicate_that_differs(draw, B):
    def one(p, x):
        return lax.cond(x[0] > 0, lambda: score(x @ p["yes"]), lambda: score(jnp.tanh(x @ p["no"]) + p["b"]))

    return (
        _mean_of(one),
        {"yes": draw(3, 4), "no": draw(3, 4), "b": draw(4)},
        draw(B, 3).at[:, 0].set((-1.0) ** jnp.arange(B)),
    )


@program(keep_batch_dim=False)
def bare_cond_with_a_shared_weight(draw, B):
    def loss(p, x):
        h = jnp.tanh(x @ p["W"])
        h = lax.cond(jnp.sum(x) > 0, lambda h: h @ p["W"].T, lambda h: jnp.sin(h) @ p["other"], h)
        return score(h)

    return loss, {"W": draw(3, 4), "other": draw(4, 3)}, draw(B, 5, 3)


@program("zero")
def cond_on_something_without_the_batch(draw, B):
    def loss(p, x):
        return score(lax.cond(p["W"][0, 0] > 0, lambda h: jnp.tanh(h @ p["W"]), lambda h: h @ p["W"] + p["b"], x))

    return loss, {"W": draw(3, 4).at[0, 0].set(0.5), "b": draw(4)}, draw(B, 5, 3)


@program()
def switch_by_a_class(draw, B):
    def one(p, example):
        branches = [
            lambda x: jnp.sum(x @ p["a"]),
            lambda x: score(x @ p["b"]),
            lambda x: jnp.sum(jnp.square(x)) * p["c"],
        ]
        return lax.switch(example["class"], branches, example["x"])

    params = {"a": draw(3, 4), "b": draw(3, 2), "c": draw()}
    return _mean_of(one), params, {"x": draw(B, 5, 3), "class": jnp.arange(B) % 3}


@program()
def cond_inside_scan(draw, B):
    def one(p, x):
        def step(h, x_t):
            h = lax.cond(x_t[0] > 0, lambda: jnp.tanh(x_t @ p["in"] + h @ p["rec"]), lambda: h * p["decay"])
            return h, h

        return score(lax.scan(step, jnp.zeros(4, x.dtype), x)[1])

    return _mean_of(one), {"in": draw(3, 4), "rec": draw(4, 4, scale=0.5), "decay": draw(4)}, draw(B, 6, 3)


@program()
def scan_inside_cond(draw, B):
    def one(p, x):
        def recur(x):
            return lax.scan(lambda h, x_t: (jnp.tanh(x_t @ p["in"] + h @ p["rec"]), None), p["h0"], x)[0]

        return score(lax.cond(x[0, 0] > 0, recur, lambda x: x[0] @ p["in"], x))

    params = {"in": draw(3, 4), "rec": draw(4, 4, scale=0.5), "h0": draw(4)}
    return _mean_of(one), params, draw(B, 5, 3).at[:, 0, 0].set((-1.0) ** jnp.arange(B))


@program()
def skipped_layers_in_a_scan(draw, B):
    def one(p, x):  # stochastic depth, decided by the data
        def layer(h, own):
            return lax.cond(jnp.sum(h) > 0.1, lambda: h + jnp.tanh(h @ own), lambda: h * 1.1), None

        return score(lax.scan(layer, x, p)[0])

    return _mean_of(one), draw(3, 4, 4, scale=0.5), draw(B, 4) + 0.3


@program()
def while_loop_on_stopped_data(draw, B):
    def one(p, x):
        start = lax.stop_gradient(jnp.abs(x[0]) + 0.1)
        count, scale = lax.while_loop(lambda s: s[1] < 3.0, lambda s: (s[0] + 1, s[1] * 1.7), (0, start))
        return score(jnp.tanh(x @ p["W"]) * scale + p["b"] * count)

    return _mean_of(one), {"W": draw(3, 4), "b": draw(4)}, draw(B, 3)


@program()
def fixed_point_by_a_custom_derivative(draw, B):
    @jax.custom_vjp
    def solve(W, x):
        def further(state):
            step, _, z = state
            return (step < 60) & (jnp.max(jnp.abs(state[1] - z)) > 1e-13)

        def iterate(state):
            step, _, z = state
            return step + 1, z, jnp.tanh(z @ W + x)

        return lax.while_loop(further, iterate, (0, x + 1.0, jnp.zeros_like(x)))[2]

    def forward(W, x):
        z = solve(W, x)
        return z, (W, x, z)

    def backward(residuals, cotangent):
        W, x, z = residuals
        _, vjp_z = jax.vjp(lambda z: jnp.tanh(z @ W + x), z)
        adjoint = lax.scan(lambda u, _: (cotangent + vjp_z(u)[0], None), cotangent, length=60)[0]
        return jax.vjp(lambda W, x: jnp.tanh(z @ W + x), W, x)[1](adjoint)

    solve.defvjp(forward, backward)
    return lambda p, x: score(solve(0.1 * p["W"], x @ p["in"])), {"W": draw(4, 4), "in": draw(3, 4)}, draw(B, 3)


@program()
def custom_vjp_on_the_activations(draw, B):
    @jax.custom_vjp
    def reverse_gradient(x):
        return x

    reverse_gradient.defvjp(lambda x: (x, x), lambda x, g: (-g * jnp.cos(x),))
    params = {"W": draw(3, 4), "V": draw(4, 2)}
    return lambda p, x: score(jnp.tanh(reverse_gradient(x @ p["W"])) @ p["V"]), params, draw(B, 5, 3)


@program()
def custom_vjp_on_the_weights(draw, B):
    @jax.custom_vjp
    def dense(W, x):
        return x @ W

    def backward(residuals, g):
        W, x = residuals
        return jnp.einsum("...i,...o->io", x, g) * jnp.tanh(jnp.abs(W)), g @ W.T  # not the true derivative, on purpose

    dense.defvjp(lambda W, x: (x @ W, (W, x)), backward)
    return (
        lambda p, x: score(dense(p["V"], jnp.tanh(dense(p["W"], x)))),
        {"W": draw(3, 4), "V": draw(4, 2)},
        draw(B, 5, 3),
    )


@program()
def straight_through_quantised_weights(draw, B):
    @jax.custom_vjp
    def quantise(W):
        return jnp.round(W * 4) / 4

    quantise.defvjp(lambda W: (jnp.round(W * 4) / 4, W), lambda W, g: (jnp.where(jnp.abs(W) < 1.5, g, 0.0),))
    return lambda p, x: score(jnp.tanh(x @ quantise(p))), draw(3, 4), draw(B, 5, 3)


@program()
def custom_jvp_activation(draw, B):
    @jax.custom_jvp
    def activation(x, slope):
        return jnp.where(x > 0, x, slope * x)

    @activation.defjvp
    def _(primals, tangents):
        (x, slope), (dx, dslope) = primals, tangents
        return activation(x, slope), jnp.where(x > 0, dx, slope * dx) + jnp.minimum(x, 0) * dslope

    return (
        lambda p, x: score(activation(x @ p["W"], p["slope"])),
        {"W": draw(3, 4), "slope": draw.positive()},
        draw(B, 5, 3),
    )


@program()
def custom_vjp_inside_scanned_layers(draw, B):
    @jax.custom_vjp
    def layer(W, h):
        return jnp.tanh(h @ W)

    def forward(W, h):
        out = jnp.tanh(h @ W)
        return out, (W, h, out)

    def backward(residuals, g):
        W, h, out = residuals
        g = g * (1 - out * out)
        return jnp.einsum("...i,...o->io", h, g), g @ W.T

    layer.defvjp(forward, backward)
    return (
        lambda p, x: score(lax.scan(lambda h, W: (layer(W, h), None), x, p)[0]),
        draw(3, 4, 4, scale=0.7),
        draw(B, 2, 4),
    )


@program()
def nested_jits(draw, B):
    @jax.jit
    def inner(W, x):
        return jnp.tanh(x @ W)

    @partial(jax.jit, static_argnames="twice")
    def outer(p, x, twice):
        h = inner(p["V"], inner(p["W"], x))
        return inner(p["V"], h) if twice else h

    return (
        lambda p, x: jax.jit(score)(outer(p, x, twice=True)),
        {"W": draw(3, 4), "V": draw(4, 4, scale=0.7)},
        draw(B, 5, 3),
    )


@program()
def jit_whose_output_is_used_twice(draw, B):
    @jax.jit
    def project(W, x):
        return x @ W, x @ W[:, ::-1]

    def loss(p, x):
        a, b = project(p, x)
        return score(a * jnp.tanh(b))

    return loss, draw(3, 4), draw(B, 5, 3)


@program()
def gradient_penalty(draw, B):
    def one(p, x):  # a derivative with respect to the input, inside the loss
        def energy(x):
            return jnp.sum(jnp.tanh(x @ p["W"]) @ p["v"])

        return energy(x) + jnp.sum(jnp.square(jax.grad(energy)(x)))

    return _mean_of(one), {"W": draw(3, 4), "v": draw(4)}, draw(B, 3)


@program()
def inner_gradient_step_on_the_parameters(draw, B):
    def one(p, example):  # MAML: each example adapts its own copy of the parameters
        def inner(p, x):
            return score(jnp.tanh(x @ p["W"]) @ p["V"])

        adapted = jax.tree.map(lambda w, g: w - 0.3 * g, p, jax.grad(inner)(p, example["support"]))
        return inner(adapted, example["query"])

    params = {"W": draw(3, 4), "V": draw(4, 2)}
    return _mean_of(one), params, {"support": draw(B, 2, 3), "query": draw(B, 5, 3)}


@program()
def forward_mode_inside_the_loss(draw, B):
    def loss(p, x):
        y, dy = jax.jvp(lambda x: jnp.tanh(x @ p["W"]), (x,), (jnp.cos(x),))
        return score(y * dy)

    return loss, {"W": draw(3, 4)}, draw(B, 3)


@program("no_vmap")
def callback_that_cannot_be_batched(draw, B):
    def host(function, x):
        return jax.pure_callback(lambda x: function(x).astype(x.dtype), jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    @jax.custom_vjp
    def sine(x):
        return host(np.sin, x)

    sine.defvjp(lambda x: (host(np.sin, x), x), lambda x, g: (g * host(np.cos, x),))
    return lambda p, x: score(sine(x @ p["W"]) @ p["V"]), {"W": draw(3, 4), "V": draw(4, 2)}, draw(B, 3)
