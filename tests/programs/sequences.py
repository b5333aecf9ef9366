"""Recurrences over time: weights that every step shares."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs.registry import program, score


def _time_first(x):
    return jnp.swapaxes(x, 0, 1)


@program()
def rnn_by_scan(draw, B):
    params = {"in": draw(3, 4), "rec": draw(4, 4, scale=0.5), "b": draw(4)}

    def loss(p, x):
        def step(h, x_t):
            h = jnp.tanh(x_t @ p["in"] + h @ p["rec"] + p["b"])
            return h, h

        _, hs = lax.scan(step, jnp.zeros((x.shape[0], 4), x.dtype), _time_first(x))
        return score(hs)

    return loss, params, draw(B, 6, 3)


@program()
def rnn_with_a_reverse_scan_and_last_state_only(draw, B):
    params = {"in": draw(3, 4), "rec": draw(4, 4, scale=0.5), "h0": draw(4), "out": draw(4, 2)}

    def loss(p, x):
        def step(h, x_t):
            return jnp.tanh(x_t @ p["in"] + h @ p["rec"]), None

        h, _ = lax.scan(step, jnp.broadcast_to(p["h0"], (x.shape[0], 4)), _time_first(x), reverse=True)
        return score(h @ p["out"])

    return loss, params, draw(B, 6, 3)


@program()
def bidirectional_rnn(draw, B):
    params = [{"in": draw(3, 4), "rec": draw(4, 4, scale=0.5)} for _ in range(2)]

    def run(p, x, reverse):
        def step(h, x_t):
            h = jnp.tanh(x_t @ p["in"] + h @ p["rec"])
            return h, h

        return lax.scan(step, jnp.zeros((x.shape[0], 4), x.dtype), _time_first(x), reverse=reverse)[1]

    return lambda p, x: score(run(p[0], x, False) * run(p[1], x, True)), params, draw(B, 6, 3)


@program()
def gru_with_a_learned_initial_state(draw, B):
    params = {"in": draw(3, 12, scale=0.5), "rec": draw(4, 12, scale=0.5), "b": draw(12), "h0": draw(4)}

    def loss(p, x):
        def step(h, x_t):
            from_x, from_h = jnp.split(x_t @ p["in"] + p["b"], 3, -1), jnp.split(h @ p["rec"], 3, -1)
            z, r = (jax.nn.sigmoid(a + b) for a, b in zip(from_x[:2], from_h[:2], strict=True))
            h = (1 - z) * h + z * jnp.tanh(from_x[2] + r * from_h[2])
            return h, h

        return score(lax.scan(step, jnp.tile(p["h0"], (x.shape[0], 1)), _time_first(x))[1])

    return loss, params, draw(B, 5, 3)


@program()
def lstm_with_an_embedding_inside_the_loop(draw, B):
    params = {
        "table": draw(7, 3),
        "in": draw(3, 16, scale=0.5),
        "rec": draw(4, 16, scale=0.5),
        "b": draw(16),
        "out": draw(4, 7),
    }

    def loss(p, tokens):
        def step(state, token):
            c, h = state
            i, f, g, o = jnp.split(p["table"][token[0]] @ p["in"] + h @ p["rec"] + p["b"], 4, axis=-1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            picked = jnp.take_along_axis(jax.nn.log_softmax(h @ p["out"]), token[1][:, None], axis=1)
            return (c, h), -jnp.mean(picked)

        zero = jnp.zeros((tokens.shape[0], 4), p["in"].dtype)
        pairs = jnp.stack([tokens[:, :-1], tokens[:, 1:]])
        return jnp.mean(lax.scan(step, (zero, zero), jnp.moveaxis(pairs, 2, 0))[1])

    return loss, params, draw.integers(B, 6, below=7)


@program()
def rnn_with_unroll_and_remat(draw, B):
    params = {"in": draw(3, 4), "rec": draw(4, 4, scale=0.5)}

    def loss(p, x):
        @jax.checkpoint
        def step(h, x_t):
            h = jnp.tanh(x_t @ p["in"] + h @ p["rec"])
            return h, jnp.sum(h, axis=-1)

        return score(lax.scan(step, jnp.zeros((x.shape[0], 4), x.dtype), _time_first(x), unroll=2)[1])

    return loss, params, draw(B, 5, 3)


@program()
def rnn_unrolled_in_python(draw, B):
    params = {"in": draw(3, 4), "rec": draw(4, 4, scale=0.5), "b": draw(4)}

    def loss(p, x):
        h = jnp.zeros((x.shape[0], 4), x.dtype)
        for t in range(3):
            h = jnp.tanh(x[:, t] @ p["in"] + h @ p["rec"] + p["b"])
        return score(h)

    return loss, params, draw(B, 3, 3)


@program()
def rnn_with_weights_transformed_outside_the_loop(draw, B):
    def loss(p, x):
        decay, W = jax.nn.sigmoid(p["decay"]), p["W"] / jnp.linalg.norm(p["W"])

        def step(h, x_t):
            h = decay * h + jnp.tanh(x_t @ W + h @ W.T @ W)
            return h, h

        return score(lax.scan(step, jnp.zeros((x.shape[0], 4), x.dtype), _time_first(x))[1])

    return loss, {"W": draw(3, 4), "decay": draw(4)}, draw(B, 6, 3)


@program()
def rnn_weight_used_in_the_loop_and_outside(draw, B):
    def loss(p, x):
        def step(h, x_t):
            return jnp.tanh(x_t @ p["in"] + h @ p["rec"]), None

        h, _ = lax.scan(step, x[:, 0] @ p["in"], _time_first(x))
        return score(h @ p["rec"].T)

    return loss, {"in": draw(3, 4), "rec": draw(4, 4, scale=0.5)}, draw(B, 5, 3)


@program()
def weights_chosen_by_the_time_step(draw, B):
    def loss(p, x):
        def step(h, step_input):
            t, x_t = step_input
            return jnp.tanh(x_t * p["scale"][t] + h @ lax.dynamic_index_in_dim(p["rec"], t % 2, keepdims=False)), None

        h, _ = lax.scan(step, jnp.zeros((x.shape[0], 3), x.dtype), (jnp.arange(5), _time_first(x)))
        return score(h)

    return loss, {"scale": draw(5, 3), "rec": draw(2, 3, 3)}, draw(B, 5, 3)


@program()
def fori_loop_with_a_fixed_trip_count(draw, B):
    def loss(p, x):
        return score(lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ p["W"] + i * p["b"]), x))

    return loss, {"W": draw(4, 4, scale=0.7), "b": draw(4)}, draw(B, 2, 4)


@program()
def state_space_by_associative_scan(draw, B):
    def loss(p, x):
        decay = jnp.broadcast_to(jax.nn.sigmoid(p["decay"]), (*x.shape[:2], 4))
        _, h = lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (decay, x @ p["in"]), axis=1)
        return score(h @ p["out"] + x * p["skip"])

    return loss, {"decay": draw(4), "in": draw(3, 4), "out": draw(4, 3), "skip": draw(3)}, draw(B, 6, 3)


@program()
def selective_state_space(draw, B):
    params = {"A": draw(3, 4), "step": draw(3, 3, scale=0.5), "B": draw(3, 4), "C": draw(3, 4), "D": draw(3)}

    def loss(p, x):
        delta = jax.nn.softplus(x @ p["step"])
        decay = jnp.exp(-delta[..., None] * jnp.exp(p["A"]))
        drive = (delta * x)[..., None] * (x @ p["B"])[..., None, :]

        def step(h, inputs):
            h = inputs[0] * h + inputs[1]
            return h, jnp.einsum("bds,bs->bd", h, inputs[2])

        zero = jnp.zeros((x.shape[0], 3, 4), x.dtype)
        _, y = lax.scan(step, zero, tuple(_time_first(v) for v in (decay, drive, x @ p["C"])))
        return score(_time_first(y) + x * p["D"])

    return loss, params, draw(B, 5, 3)


@program()
def linear_attention_by_scan(draw, B):
    params = {name: draw(3, 4, scale=0.5) for name in "qkv"}

    def loss(p, x):
        q, k, v = (_time_first(x @ p[name]) for name in "qkv")

        def step(state, inputs):
            q_t, k_t, v_t = inputs
            state = 0.9 * state + k_t[:, :, None] * v_t[:, None, :]
            return state, jnp.einsum("bk,bkv->bv", q_t, state)

        return score(lax.scan(step, jnp.zeros((x.shape[0], 4, 4), x.dtype), (q, k, v))[1])

    return loss, params, draw(B, 5, 3)


@program()
def cumulative_sums_and_products(draw, B):
    def loss(p, x):
        return score(jnp.cumsum(x @ p["W"], axis=1) + jnp.cumprod(1 + 0.1 * x * p["scale"], axis=1) @ p["W"])

    return loss, {"W": draw(3, 4), "scale": draw(3)}, draw(B, 6, 3)


@program()
def cumulative_sum_of_a_parameter(draw, B):
    return lambda p, x: score(x * jnp.cumsum(jax.nn.softplus(p))), draw(4), draw(B, 3, 4)


@program(keep_batch_dim=False)
def bare_rnn(draw, B):
    def loss(p, x):
        def step(h, x_t):
            h = jnp.tanh(p["in"] @ x_t + p["rec"] @ h + p["b"])
            return h, h

        return score(lax.scan(step, p["h0"], x)[1])

    return loss, {"in": draw(4, 3), "rec": draw(4, 4, scale=0.5), "b": draw(4), "h0": draw(4)}, draw(B, 6, 3)
