"""Dense layers, biases, scales, and what people do to a parameter before it meets the data."""

import jax
import jax.numpy as jnp

from tests.programs.registry import program, score


@program()
def dense(draw, B):
    W = draw(3, 4)
    return lambda p, x: score(x @ p), W, draw(B, 3)


@program()
def dense_with_bias(draw, B):
    params = {"W": draw(3, 4), "b": draw(4)}
    return lambda p, x: score(jnp.tanh(x @ p["W"] + p["b"])), params, draw(B, 3)


@program()
def dense_transposed_weight(draw, B):
    return lambda p, x: score(x @ p.T), draw(4, 3), draw(B, 3)


@program()
def dense_with_every_size_equal_to_the_batch(draw, B):
    params = {"W": draw(5, 5, scale=0.5), "b": draw(5)}
    return lambda p, x: score(jnp.tanh(x @ p["W"] + p["b"]) @ p["W"].T), params, draw(B, 5, 5)


@program()
def mlp_regression(draw, B):
    params = [{"W": draw(3, 7), "b": draw(7)}, {"W": draw(7, 2), "b": draw(2)}]

    def loss(p, batch):
        h = jax.nn.gelu(batch["x"] @ p[0]["W"] + p[0]["b"])
        return jnp.mean(jnp.sum(jnp.square(h @ p[1]["W"] + p[1]["b"] - batch["y"]), axis=-1))

    return loss, params, {"x": draw(B, 3), "y": draw(B, 2)}


@program()
def mlp_relu_without_biases(draw, B):
    params = (draw(3, 6), draw(6, 4), draw(4, 2))

    def loss(p, batch):
        x, label = batch
        logits = jax.nn.relu(jax.nn.relu(x @ p[0]) @ p[1]) @ p[2]
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), label[:, None], axis=1))

    return loss, params, (draw(B, 3), draw.integers(B, below=2))


@program()
def logistic_regression_with_boolean_labels(draw, B):
    params = {"w": draw(4), "b": draw()}

    def loss(p, batch):
        logit = batch["x"] @ p["w"] + p["b"]
        return jnp.mean(jnp.where(batch["y"], jax.nn.softplus(-logit), jax.nn.softplus(logit)))

    return loss, params, {"x": draw(B, 4), "y": draw.booleans(B)}


@program()
def dense_over_tokens(draw, B):
    params = {"W": draw(3, 4), "b": draw(4)}
    return lambda p, x: score(jnp.tanh(x @ p["W"] + p["b"])), params, draw(B, 6, 3)


@program()
def dense_over_two_axes_of_positions(draw, B):
    params = {"W": draw(3, 4), "b": draw(4)}
    return (
        lambda p, x: score(jnp.tanh(jnp.einsum("bhwd,de->bewh", x, p["W"]) + p["b"][:, None, None])),
        params,
        draw(B, 2, 6, 3),
    )


@program()
def merged_batch_and_token_axes(draw, B):
    params = {"W": draw(3, 4), "b": draw(4), "out": draw(4, 2)}

    def loss(p, batch):
        x, y = batch
        h = jnp.tanh(x.reshape(-1, 3) @ p["W"] + p["b"])
        return jnp.mean(jnp.square(h @ p["out"] - y.reshape(-1, 2)))

    return loss, params, (draw(B, 6, 3), draw(B, 6, 2))


@program()
def swiglu(draw, B):
    params = {"gate": draw(3, 7), "up": draw(3, 7), "down": draw(7, 3)}
    return lambda p, x: score((jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]), params, draw(B, 4, 3)


@program()
def weight_used_twice(draw, B):
    return lambda p, x: score(jnp.tanh(jnp.tanh(x @ p) @ p)), draw(3, 3), draw(B, 3)


@program()
def weight_used_in_three_roles(draw, B):
    def loss(p, x):
        h = jnp.tanh(x @ p)  # a projection, its transpose, and a scale of the features
        return score(h @ p.T + x * jnp.sum(jnp.square(p), axis=1))

    return loss, draw(3, 4), draw(B, 2, 3)


@program()
def weight_used_on_two_inputs(draw, B):
    def loss(p, batch):  # a siamese network; the two inputs have different lengths
        left, right = (jnp.mean(jnp.tanh(batch[side] @ p["W"] + p["b"]), axis=1) for side in ("left", "right"))
        return jnp.mean(jnp.square(left - right) * p["scale"])

    return loss, {"W": draw(3, 4), "b": draw(4), "scale": draw(4)}, {"left": draw(B, 2, 3), "right": draw(B, 6, 3)}


@program()
def einsum_with_a_weight_repeated(draw, B):
    return lambda p, x: score(jnp.einsum("bi,ij,kj,bk->bj", x, p, p, x)), draw(3, 4), draw(B, 3)


@program()
def bilinear_form(draw, B):
    def loss(p, batch):
        return score(jnp.einsum("bi,ij,bj->b", batch["x"], p["W"], batch["y"]))

    return loss, {"W": draw(3, 4)}, {"x": draw(B, 3), "y": draw(B, 4)}


@program()
def bilinear_layer(draw, B):
    def loss(p, batch):
        return score(jnp.einsum("bti,oij,btj->bto", batch["x"], p["W"], batch["y"]) + p["b"])

    return loss, {"W": draw(2, 3, 4), "b": draw(2)}, {"x": draw(B, 6, 3), "y": draw(B, 6, 4)}


@program()
def outer_product_by_broadcasting(draw, B):
    return lambda p, x: score(jnp.sum(jnp.tanh(x[:, :, None] * p), axis=1)), draw(3, 4), draw(B, 3)


@program()
def scale_and_shift(draw, B):
    return lambda p, x: score(x * p["scale"] + p["shift"]), {"scale": draw(4), "shift": draw(4)}, draw(B, 3, 4)


@program()
def scalar_parameter(draw, B):
    return lambda p, x: jnp.mean(jax.nn.softplus(x * p)), draw(), draw(B, 3)


@program()
def scalar_temperature(draw, B):
    def loss(p, batch):
        logits = batch["x"] @ p["W"] * jnp.exp(p["log_temperature"])
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(batch["y"], 4), axis=-1))

    return loss, {"W": draw(3, 4), "log_temperature": draw()}, {"x": draw(B, 3), "y": draw.integers(B, below=4)}


@program("zero")
def unused_parameter(draw, B):
    return lambda p, x: score(x @ p["W"]), {"W": draw(3, 4), "unused": draw(2, 3)}, draw(B, 3)


@program("zero")
def stopped_parameter(draw, B):
    def loss(p, x):
        return score(x @ p["W"] + jax.lax.stop_gradient(p["W"][0]) + x @ jax.lax.stop_gradient(p["frozen"]))

    return loss, {"W": draw(3, 4), "frozen": draw(3, 4)}, draw(B, 3)


@program()
def partly_stopped_gradient(draw, B):
    def loss(p, x):
        h = x @ p["W"]
        return score(h * jax.lax.stop_gradient(jax.nn.sigmoid(h)) + jax.lax.stop_gradient(p["W"])[0] @ p["V"])

    return loss, {"W": draw(3, 4), "V": draw(4, 4)}, draw(B, 3)


@program()
def regulariser_without_the_batch(draw, B):
    def loss(p, x):
        penalty = sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(p))
        return score(jnp.tanh(x @ p["W"] + p["b"])) + 0.01 * penalty

    return loss, {"W": draw(3, 4), "b": draw(4), "not_in_the_model": draw(2)}, draw(B, 3)


@program()
def bias_with_a_constant_cotangent(draw, B):
    return lambda p, x: jnp.mean(jnp.tanh(x @ p["W"]) + p["b"]), {"W": draw(3, 4), "b": draw(4)}, draw(B, 3)


@program()
def parameters_alone(draw, B):
    return lambda p, x: jnp.mean(jnp.sum(x, axis=1)) + jnp.sum(jnp.sin(p)), draw(3), draw(B, 2)


@program()
def maxout(draw, B):
    params = {"W": draw(3, 4, 2), "b": draw(4, 2)}
    return lambda p, x: score(jnp.max(jnp.einsum("bi,ijk->bjk", x, p["W"]) + p["b"], axis=-1)), params, draw(B, 3)


@program()
def maximum_over_a_parameter(draw, B):
    return lambda p, x: score(x * jnp.max(p, axis=0) + jnp.min(p)), draw(3, 4), draw(B, 4)


@program()
def clipped_parameter(draw, B):
    return lambda p, x: score(x @ jnp.clip(p, -0.7, 0.7)), draw(3, 4), draw(B, 3)


@program()
def masked_parameter(draw, B):
    keep = draw.booleans(3, 4)
    return lambda p, x: score(jnp.tanh(x @ jnp.where(keep, p, 0.0))), draw(3, 4), draw(B, 3)


@program()
def parameter_chosen_by_the_example(draw, B):
    def loss(p, batch):
        W = jnp.where(batch["which"][:, None, None], p["yes"], p["no"])
        return score(jnp.tanh(jnp.einsum("bi,bij->bj", batch["x"], W)))

    return loss, {"yes": draw(3, 4), "no": draw(3, 4)}, {"x": draw(B, 3), "which": jnp.arange(B) % 2 == 0}


@program()
def concatenated_parameters(draw, B):
    params = {"left": draw(3, 4), "right": draw(3, 2)}
    return lambda p, x: score(jnp.tanh(x @ jnp.concatenate([p["left"], p["right"]], axis=1))), params, draw(B, 6, 3)


@program()
def stacked_parameters(draw, B):
    def loss(p, x):
        return score(jnp.tanh(jnp.einsum("bi,nij->bnj", x, jnp.stack(p))))

    return loss, [draw(3, 4), draw(3, 4)], draw(B, 3)


@program()
def parameter_split_into_parts(draw, B):
    def loss(p, x):
        a, b = jnp.split(x @ p["W"][:, :6], 2, axis=-1)
        return score(a * jnp.tanh(b) + x @ p["W"][:, 6:])

    return loss, {"W": draw(3, 9)}, draw(B, 4, 3)


@program()
def padded_parameter(draw, B):
    return lambda p, x: score(x @ jnp.pad(p, ((1, 0), (0, 2)))), draw(3, 4), draw(B, 4)


@program()
def reversed_and_rolled_parameter(draw, B):
    return lambda p, x: score(jnp.tanh(x @ jnp.roll(p[::-1], 1, axis=1))), draw(3, 4), draw(B, 2, 3)


@program()
def toeplitz_weight_gathered_from_a_vector(draw, B):
    index = jnp.arange(3)[:, None] - jnp.arange(4)[None, :] + 3
    return lambda p, x: score(jnp.tanh(x @ p[index])), draw(6), draw(B, 3)


@program()
def symmetric_weight(draw, B):
    return lambda p, x: score(jnp.tanh(x @ (p + p.T))), draw(4, 4), draw(B, 3, 4)


@program()
def cosine_similarity_with_prototypes(draw, B):
    def loss(p, x):
        def unit(v):
            return v / jnp.linalg.norm(v, axis=-1, keepdims=True)

        return score(unit(x) @ unit(p).T)

    return loss, draw(4, 3), draw(B, 3)


@program()
def distances_to_prototypes(draw, B):
    return lambda p, x: score(jnp.exp(-jnp.sum(jnp.square(x[:, None] - p), axis=-1))), draw(4, 3), draw(B, 3)


@program()
def squared_distances_expanded(draw, B):
    def loss(p, x):
        return score(jnp.sum(x * x, -1, keepdims=True) - 2 * x @ p.T + jnp.sum(p * p, -1))

    return loss, draw(4, 3, scale=0.3), draw(B, 3)


@program(keep_batch_dim=False)
def bare_example(draw, B):
    def loss(p, example):
        return score(p["out"] @ jnp.tanh(p["W"] @ example["x"] + p["b"]) - example["y"])

    params = {"W": draw(4, 3), "b": draw(4), "out": draw(2, 4)}
    return loss, params, {"x": draw(B, 3), "y": draw(B, 2)}


@program(keep_batch_dim=False)
def bare_sequence_with_scalar_leaves(draw, B):
    def loss(p, example):
        return jnp.mean(jnp.tanh(example["x"] @ p["W"])) * example["weight"] + jnp.sum(p["bias"]) * example["weight"]

    return loss, {"W": draw(3, 4), "bias": draw(2)}, {"x": draw(B, 6, 3), "weight": draw.positive(B)}


@program()
def vmapped_examples_inside_the_loss(draw, B):
    def one(p, x, y):
        return jnp.sum(jnp.square(p["W"] @ jnp.tanh(p["V"] @ x) - y))

    def loss(p, batch):
        return jnp.mean(jax.vmap(one, in_axes=(None, 0, 0))(p, batch["x"], batch["y"]))

    return loss, {"W": draw(2, 4), "V": draw(4, 3)}, {"x": draw(B, 3), "y": draw(B, 2)}


@program()
def sum_divided_by_the_batch_size(draw, B):
    def loss(p, x):
        return jnp.sum(jnp.square(jnp.tanh(x @ p) - 0.3)) / x.shape[0]

    return loss, draw(3, 4), draw(B, 3)


@program()
def example_axis_moved_to_the_end(draw, B):
    def loss(p, x):
        return score(jnp.tanh(p["W"] @ x.T + p["b"][:, None]))

    return loss, {"W": draw(4, 3), "b": draw(4)}, draw(B, 3)
