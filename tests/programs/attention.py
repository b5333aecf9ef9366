"""Embeddings, attention and what else a transformer is made of."""

import jax
import jax.numpy as jnp

from tests.programs.registry import program, score


def _cross_entropy(logits, labels):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1))


@program()
def projection_to_heads(draw, B):
    return lambda p, x: score(jnp.tanh(jnp.einsum("btd,dhk->bthk", x, p))), draw(4, 2, 3), draw(B, 6, 4)


@program()
def projection_from_heads(draw, B):
    return lambda p, x: score(jnp.tanh(jnp.einsum("bthk,hkd->btd", x, p))), draw(2, 3, 4), draw(B, 6, 2, 3)


@program()
def projection_with_axes_in_another_order(draw, B):
    return lambda p, x: score(jnp.tanh(jnp.einsum("bkth,kdh->tdb", x, p))), draw(3, 4, 2), draw(B, 3, 6, 2)


@program()
def head_by_head_projection(draw, B):
    return lambda p, x: score(jnp.tanh(jnp.einsum("bthk,hkj->bthj", x, p))), draw(2, 3, 4), draw(B, 6, 2, 3)


def _attention(q, k, v, mask):
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(q.shape[-1])
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(mask, logits, -1e9)), v)


@program()
def causal_attention(draw, B):
    params = {name: draw(4, 2, 3, scale=0.5) for name in "qkv"} | {"out": draw(2, 3, 4)}

    def loss(p, x):
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[name]) for name in "qkv")
        return score(jnp.einsum("bthk,hkd->btd", _attention(q, k, v, jnp.tril(jnp.ones((5, 5), bool))), p["out"]))

    return loss, params, draw(B, 5, 4)


@program()
def attention_with_rotary_positions(draw, B):
    def rotate(x):
        angle = jnp.arange(5)[:, None, None] * jnp.array([1.0, 0.1])
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1)

    params = {"qkv": draw(3, 3, 2, 4, scale=0.5), "out": draw(2, 4, 3)}

    def loss(p, x):
        q, k, v = jnp.einsum("btd,dnhk->nbthk", x, p["qkv"])
        return score(jnp.einsum("bthk,hkd->btd", _attention(rotate(q), rotate(k), v, True), p["out"]))

    return loss, params, draw(B, 5, 3)


@program()
def fused_projection_split_by_slices(draw, B):
    params = {"qkv": draw(4, 9, scale=0.5), "bias": draw(9)}

    def loss(p, x):
        q, k, v = jnp.split(x @ p["qkv"] + p["bias"], 3, axis=-1)
        return score(jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q + 0.1, k * v[..., :1])) @ v)

    return loss, params, draw(B, 5, 4)


@program()
def grouped_query_attention(draw, B):
    params = {"q": draw(3, 4, 2, scale=0.5), "k": draw(3, 2, 2, scale=0.5), "v": draw(3, 2, 2)}

    def loss(p, x):
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[name]) for name in "qkv")
        return score(_attention(q, jnp.repeat(k, 2, axis=2), jnp.repeat(v, 2, axis=2), True))

    return loss, params, draw(B, 5, 3)


@program()
def relative_position_bias(draw, B):
    offsets = jnp.arange(5)[:, None] - jnp.arange(5)[None, :] + 4

    def loss(p, x):
        logits = jnp.einsum("bqd,bkd->bqk", x, x) + p["bias"][offsets]
        return score(jax.nn.softmax(logits) @ (x @ p["W"]))

    return loss, {"bias": draw(9), "W": draw(3, 4)}, draw(B, 5, 3)


@program()
def learned_queries(draw, B):
    def loss(p, x):  # a parameter that is broadcast to every example
        attention = jax.nn.softmax(jnp.einsum("qd,bkd->bqk", p["queries"], x @ p["keys"]))
        return score(jnp.einsum("bqk,bkd->bqd", attention, x))

    return loss, {"queries": draw(2, 4), "keys": draw(3, 4)}, draw(B, 5, 3)


@program()
def learned_prefix_tokens(draw, B):
    def loss(p, x):
        prefix = jnp.broadcast_to(p["prefix"], (x.shape[0], 2, 3))
        h = jnp.concatenate([prefix, x], axis=1)
        return score(jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", h, h)) @ h @ p["W"])

    return loss, {"prefix": draw(2, 3), "W": draw(3, 4)}, draw(B, 5, 3)


@program()
def embedding_lookup(draw, B):
    return (
        lambda p, tokens: score(jnp.tanh(p["table"][tokens] @ p["W"])),
        {"table": draw(7, 3), "W": draw(3, 4)},
        draw.integers(B, 6, below=7),
    )


@program()
def embedding_with_repeated_tokens(draw, B):
    def loss(p, tokens):
        return score(jnp.sum(jnp.tanh(jnp.cumsum(p[tokens], axis=1)), axis=1))

    return loss, draw(3, 4), draw.integers(B, 9, below=3)


@program()
def embedding_of_one_token(draw, B):
    return lambda p, tokens: score(jnp.sin(p[tokens])), draw(7, 3), draw.integers(B, below=7)


@program()
def embedding_with_padding_tokens(draw, B):
    tokens = draw.integers(B, 6, below=8) - 1  # -1 is padding, and out of bounds for a lookup that drops

    def loss(p, tokens):
        rows = p.at[tokens].get(mode="fill", fill_value=0.0, wrap_negative_indices=False)
        return score(jnp.sum(rows, axis=1))

    return loss, draw(7, 3), tokens


@program()
def two_tables_and_positions(draw, B):
    params = {"tokens": draw(7, 3), "segments": draw(2, 3), "positions": draw(6, 3)}

    def loss(p, batch):
        h = p["tokens"][batch["token"]] + p["segments"][batch["segment"]] + p["positions"]
        return score(jnp.tanh(jnp.mean(h, axis=1)))

    return loss, params, {"token": draw.integers(B, 6, below=7), "segment": draw.integers(B, 6, below=2)}


@program()
def one_hot_matmul(draw, B):
    def loss(p, tokens):
        return score(jnp.tanh(jax.nn.one_hot(tokens, 7, dtype=p["table"].dtype) @ p["table"]) @ p["W"])

    return loss, {"table": draw(7, 3), "W": draw(3, 4)}, draw.integers(B, 6, below=7)


@program()
def tied_embedding(draw, B):
    params = {"table": draw(7, 3), "W": draw(3, 3)}

    def loss(p, tokens):
        h = jnp.tanh(p["table"][tokens[:, :-1]] @ p["W"])
        return _cross_entropy(h @ p["table"].T, tokens[:, 1:])

    return loss, params, draw.integers(B, 6, below=7)


@program()
def transposed_tied_embedding(draw, B):
    params = {"unembed": draw(3, 7), "W": draw(3, 3)}

    def loss(p, tokens):
        h = jnp.tanh(p["unembed"].T[tokens[:, :-1]] @ p["W"])
        return _cross_entropy(h @ p["unembed"], tokens[:, 1:])

    return loss, params, draw.integers(B, 6, below=7)


@program()
def tied_embedding_scaled_by_a_parameter(draw, B):
    params = {"table": draw(7, 3), "scale": draw.positive()}

    def loss(p, tokens):
        h = p["table"][tokens[:, :-1]] * p["scale"] * 3**0.5
        return _cross_entropy(jnp.tanh(h) @ p["table"].T * p["scale"], tokens[:, 1:])

    return loss, params, draw.integers(B, 6, below=7)


@program()
def loss_masked_within_each_example(draw, B):
    def loss(p, batch):  # every example has its own denominator
        error = jnp.sum(jnp.square(jnp.tanh(p["table"][batch["token"]] @ p["W"])), axis=-1)
        mask = batch["mask"].at[:, 0].set(True)
        return jnp.mean(jnp.sum(error * mask, axis=1) / jnp.sum(mask, axis=1))

    return (
        loss,
        {"table": draw(7, 3), "W": draw(3, 4)},
        {"token": draw.integers(B, 6, below=7), "mask": draw.booleans(B, 6)},
    )


@program()
def transformer_block(draw, B):
    params = {
        "table": draw(7, 4, scale=0.4),
        "positions": draw(5, 4),
        "norms": [{"scale": draw.positive(4), "shift": draw(4)} for _ in range(2)],
        "q": draw(4, 2, 3, scale=0.5),
        "k": draw(4, 2, 3, scale=0.5),
        "v": draw(4, 2, 3),
        "out": draw(2, 3, 4),
        "up": {"W": draw(4, 6), "b": draw(6)},
        "down": {"W": draw(6, 4), "b": draw(4)},
    }

    def norm(p, x):
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-5) * p["scale"] + p["shift"]

    def loss(p, tokens):
        x = p["table"][tokens] + p["positions"]
        h = norm(p["norms"][0], x)
        q, k, v = (jnp.einsum("btd,dhk->bthk", h, p[name]) for name in "qkv")
        x = x + jnp.einsum("bthk,hkd->btd", _attention(q, k, v, jnp.tril(jnp.ones((5, 5), bool))), p["out"])
        h = jax.nn.gelu(norm(p["norms"][1], x) @ p["up"]["W"] + p["up"]["b"])
        x = x + h @ p["down"]["W"] + p["down"]["b"]
        return _cross_entropy((x @ p["table"].T)[:, :-1], tokens[:, 1:])

    return loss, params, draw.integers(B, 5, below=7)
