"""Parameters that pass through something before they act as weights."""

import jax
import jax.numpy as jnp

from tests.programs.registry import program, score


@program()
def exponential_of_a_weight(draw, B):
    return lambda p, x: score(jnp.tanh(x @ jnp.exp(p))), draw(3, 4), draw(B, 5, 3)


@program()
def product_of_two_weights(draw, B):
    return lambda p, x: score(jnp.tanh(x @ (p["a"] * jnp.tanh(p["b"])))), {"a": draw(3, 4), "b": draw(3, 4)}, draw(B, 3)


@program()
def merged_lora(draw, B):
    params = {"W": draw(3, 4), "A": draw(3, 2), "B": draw(2, 4)}
    return lambda p, x: score(jnp.tanh(x @ (p["W"] + 0.5 * p["A"] @ p["B"]))), params, draw(B, 5, 3)


@program()
def unmerged_lora(draw, B):
    params = {"W": draw(3, 4), "A": draw(3, 2), "B": draw(2, 4)}
    return lambda p, x: score(jnp.tanh(x @ p["W"] + 0.5 * (x @ p["A"]) @ p["B"])), params, draw(B, 5, 3)


@program()
def lora_beside_frozen_weights(draw, B):
    frozen = draw(3, 4)  # closed over: not a parameter
    params = {"A": draw(3, 2), "B": draw(2, 4)}
    return lambda p, x: score(jnp.tanh(x @ (frozen + p["A"] @ p["B"]))), params, draw(B, 5, 3)


@program()
def low_rank_factors(draw, B):
    return lambda p, x: score(x @ p["U"] @ p["V"] @ p["U"].T), {"U": draw(3, 2), "V": draw(2, 2)}, draw(B, 5, 3)


@program()
def hypernetwork(draw, B):
    def loss(p, batch):  # the example makes its own weights
        W = jnp.tanh(batch["task"] @ p["to_W"]).reshape(-1, 3, 4)
        return score(jnp.einsum("btd,bde->bte", batch["x"], W) + (batch["task"] @ p["to_b"])[:, None])

    return loss, {"to_W": draw(2, 12), "to_b": draw(2, 4)}, {"x": draw(B, 5, 3), "task": draw(B, 2)}


@program()
def hypernetwork_without_the_batch(draw, B):
    def loss(p, x):
        W = (jnp.tanh(p["code"] @ p["to_W"])).reshape(3, 4)
        return score(jnp.tanh(x @ W))

    return loss, {"code": draw(2), "to_W": draw(2, 12)}, draw(B, 5, 3)


@program()
def per_example_scale_of_a_weight(draw, B):
    def loss(p, batch):
        W = p["W"] * batch["gain"][:, None, None]
        return score(jnp.tanh(jnp.einsum("bti,bij->btj", batch["x"], W)))

    return loss, {"W": draw(3, 4)}, {"x": draw(B, 5, 3), "gain": draw(B)}


@program()
def weight_noise_for_each_example(draw, B):
    def loss(p, batch):
        W = p["mean"] + jax.nn.softplus(p["spread"]) * batch["noise"]
        return score(jnp.tanh(jnp.einsum("bi,bij->bj", batch["x"], W)))

    return loss, {"mean": draw(3, 4), "spread": draw(3, 4)}, {"x": draw(B, 3), "noise": draw(B, 3, 4)}


@program()
def orthogonal_weight_by_cayley(draw, B):
    def loss(p, x):
        skew = p - p.T
        return score(jnp.tanh(x @ jnp.linalg.solve(jnp.eye(4) + skew, jnp.eye(4) - skew)))

    return loss, draw(4, 4, scale=0.3), draw(B, 4)


@program()
def householder_product(draw, B):
    def loss(p, x):
        for v in p:
            x = x - 2 * (x @ v)[..., None] * v / jnp.sum(v * v)
        return score(x + 0.1)

    return loss, [draw(4), draw(4)], draw(B, 3, 4)


@program()
def block_diagonal_weight(draw, B):
    def loss(p, x):
        return score(jnp.tanh(jnp.einsum("btnd,nde->btne", x.reshape(*x.shape[:2], 2, 3), p)).reshape(*x.shape[:2], -1))

    return loss, draw(2, 3, 4), draw(B, 5, 6)


@program()
def tensor_train_weight(draw, B):
    def loss(p, x):
        return score(jnp.tanh(jnp.einsum("bij,iar,rjc->bac", x, p["left"], p["right"])))

    return loss, {"left": draw(3, 2, 2), "right": draw(2, 4, 5)}, draw(B, 3, 4)


@program()
def softmax_of_a_parameter(draw, B):
    return lambda p, x: score(x @ jax.nn.softmax(p["mix"], axis=0)), {"mix": draw(3, 4)}, draw(B, 5, 3)


@program()
def averaged_weights(draw, B):
    def loss(p, x):
        return score(jnp.tanh(x @ jnp.tensordot(jax.nn.softmax(p["mix"]), p["W"], axes=1)))

    return loss, {"mix": draw(2), "W": draw(2, 3, 4)}, draw(B, 5, 3)
