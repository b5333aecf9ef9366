"""Stacks of layers: scanned, rematerialised, nested, with weights that the layers share."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tests.programs.registry import program, score


def _stack(draw):
    return {"W": draw(3, 4, 4, scale=0.5), "b": draw(3, 4)}


def _layer(h, p):
    return jnp.tanh(h @ p["W"] + p["b"]), None


@program()
def scanned_layers(draw, B):
    return lambda p, x: score(lax.scan(_layer, x, p)[0]), _stack(draw), draw(B, 4)


@program()
def scanned_layers_over_tokens(draw, B):
    params = _stack(draw) | {"out": draw(4, 2)}
    return lambda p, x: score(lax.scan(_layer, x, {k: p[k] for k in "Wb"})[0] @ p["out"]), params, draw(B, 5, 4)


@program()
def scanned_layers_rematerialised(draw, B):
    return lambda p, x: score(lax.scan(jax.checkpoint(_layer), x, p)[0]), _stack(draw), draw(B, 5, 4)


@program()
def scanned_layers_in_reverse_with_outputs(draw, B):
    def layer(h, p):
        h = jnp.tanh(h @ p["W"] + p["b"])
        return h, jnp.sin(h)

    def loss(p, x):
        h, every = lax.scan(layer, x, p, reverse=True)
        return score(h) + score(every)

    return loss, _stack(draw), draw(B, 5, 4)


@program()
def scanned_layers_unrolled(draw, B):
    return lambda p, x: score(lax.scan(_layer, x, p, unroll=2)[0]), _stack(draw), draw(B, 5, 4)


@program()
def scanned_layers_with_a_weight_shared_by_all(draw, B):
    def loss(p, x):
        def layer(h, own):
            return jnp.tanh(h @ own["W"] + own["b"] + h @ p["shared"]), None

        return score(lax.scan(jax.checkpoint(layer), x, p["stack"])[0])

    return loss, {"stack": _stack(draw), "shared": draw(4, 4, scale=0.5)}, draw(B, 5, 4)


@program()
def scanned_layers_normalised_outside(draw, B):
    def loss(p, x):
        stack = {"W": p["W"] / jnp.linalg.norm(p["W"], axis=1, keepdims=True), "b": p["b"]}
        return score(lax.scan(_layer, x, stack)[0])

    return loss, _stack(draw), draw(B, 5, 4)


@program()
def scanned_layers_transposed_outside(draw, B):
    def loss(p, x):
        return score(lax.scan(_layer, x, {"W": p["W"].transpose(2, 1, 0), "b": p["b"].reshape(3, 4)})[0])

    return loss, {"W": draw(4, 4, 3, scale=0.5), "b": draw(12)}, draw(B, 5, 4)


@program()
def scanned_layers_scaled_outside(draw, B):
    return lambda p, x: score(lax.scan(_layer, x, {"W": 0.5 * p["W"], "b": -p["b"]})[0]), _stack(draw), draw(B, 5, 4)


@program()
def scanned_layers_also_used_outside(draw, B):
    def loss(p, x):
        h, _ = lax.scan(_layer, x, p)
        return score(h @ p["W"][1] + jnp.mean(p["b"], axis=0))

    return loss, _stack(draw), draw(B, 5, 4)


@program()
def scanned_layers_scanned_twice(draw, B):
    def loss(p, x):
        return score(lax.scan(_layer, lax.scan(_layer, x, p)[0], p)[0])

    return loss, _stack(draw), draw(B, 5, 4)


@program()
def scanned_layers_with_a_regulariser(draw, B):
    def loss(p, x):
        return score(lax.scan(_layer, x, p)[0]) + 0.1 * jnp.sum(jnp.square(p["W"]))

    return loss, _stack(draw), draw(B, 4)


@program()
def scanned_layers_with_per_layer_data(draw, B):
    def loss(p, batch):  # the stacked inputs hold weights beside a slice of the batch
        def layer(h, inputs):
            own, skip = inputs
            return jnp.tanh(h @ own["W"] + own["b"] + skip), None

        return score(lax.scan(layer, batch["x"], (p, jnp.moveaxis(batch["skip"], 1, 0)))[0])

    return loss, _stack(draw), {"x": draw(B, 4), "skip": draw(B, 3, 4)}


@program()
def scanned_pairs_of_layers(draw, B):
    def loss(p, x):  # scan over (pairs, 2): the stacked weight is reshaped outside the loop
        def pair(h, own):
            return lax.scan(_layer, h, own)

        return score(lax.scan(pair, x, jax.tree.map(lambda leaf: leaf.reshape(2, 2, *leaf.shape[1:]), p))[0])

    return loss, {"W": draw(4, 3, 3, scale=0.7), "b": draw(4, 3)}, draw(B, 5, 3)


@program()
def time_inside_layers(draw, B):
    params = {"in": draw(2, 4, 4, scale=0.5), "rec": draw(2, 4, 4, scale=0.5), "b": draw(2, 4)}

    def loss(p, x):
        def layer(xs, own):
            def step(h, x_t):
                h = jnp.tanh(x_t @ own["in"] + h @ own["rec"] + own["b"])
                return h, h

            return lax.scan(step, jnp.zeros(xs.shape[1:], xs.dtype), xs)[1], None

        return score(lax.scan(layer, jnp.swapaxes(x, 0, 1), p)[0])

    return loss, params, draw(B, 5, 4)


@program()
def layers_inside_time(draw, B):
    def loss(p, x):
        def step(h, x_t):
            h, _ = lax.scan(_layer, h + x_t, p)
            return h, h

        return score(lax.scan(step, jnp.zeros((x.shape[0], 4), x.dtype), jnp.swapaxes(x, 0, 1))[1])

    return loss, _stack(draw), draw(B, 5, 4)


@program()
def scanned_attention_rematerialised(draw, B):
    params = {"qkv": draw(2, 3, 3, 2, 2, scale=0.5), "out": draw(2, 2, 2, 3), "scale": draw.positive(2, 3)}

    def loss(p, x):
        @jax.checkpoint
        def layer(x, own):
            h = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * own["scale"]
            q, k, v = jnp.einsum("btd,dnhk->nbthk", h, own["qkv"])
            weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
            return x + jnp.einsum("bhqk,bkhd,hde->bqe", weights, v, own["out"]), None

        return score(lax.scan(layer, x, p)[0])

    return loss, params, draw(B, 5, 3)


@program()
def scanned_convolutions(draw, B):
    def loss(p, x):
        def layer(h, kernel):
            numbers = ("NHWC", "HWIO", "NHWC")
            return jnp.tanh(lax.conv_general_dilated(h, kernel, (1, 1), "SAME", dimension_numbers=numbers)), None

        return score(lax.scan(layer, x, p)[0])

    return loss, draw(2, 3, 2, 3, 3, scale=0.5), draw(B, 4, 5, 3)


def _mlp(p, x):
    h = checkpoint_name(jnp.tanh(x @ p["first"] + p["b"]), "hidden")
    return jnp.tanh(h @ p["second"])


def _mlp_params(draw):
    return {"first": draw(3, 4), "b": draw(4), "second": draw(4, 2)}


@program()
def checkpointed_block(draw, B):
    return lambda p, x: score(jax.checkpoint(_mlp)(p, x)), _mlp_params(draw), draw(B, 5, 3)


@program()
def checkpoint_policy_dots_saveable(draw, B):
    block = jax.checkpoint(_mlp, policy=jax.checkpoint_policies.dots_saveable)
    return lambda p, x: score(block(p, x)), _mlp_params(draw), draw(B, 5, 3)


@program()
def checkpoint_policy_nothing_saveable(draw, B):
    block = jax.checkpoint(_mlp, policy=jax.checkpoint_policies.nothing_saveable, prevent_cse=False)
    return lambda p, x: score(block(p, x)), _mlp_params(draw), draw(B, 5, 3)


@program()
def checkpoint_policy_by_name(draw, B):
    block = jax.checkpoint(_mlp, policy=jax.checkpoint_policies.save_only_these_names("hidden"))
    return lambda p, x: score(block(p, x)), _mlp_params(draw), draw(B, 5, 3)


@program()
def checkpoint_within_checkpoint(draw, B):
    def loss(p, x):
        inner = jax.checkpoint(lambda p, x: jnp.tanh(x @ p["first"] + p["b"]))
        return score(jax.checkpoint(lambda p, x: jnp.tanh(inner(p, x) @ p["second"]))(p, x))

    return loss, _mlp_params(draw), draw(B, 5, 3)


@program()
def checkpointed_loss_with_a_tied_weight(draw, B):
    def loss(p, tokens):
        @jax.checkpoint
        def block(p, tokens):
            return jax.nn.log_softmax(jnp.tanh(p["table"][tokens] @ p["W"]) @ p["table"].T)

        return -jnp.mean(jnp.take_along_axis(block(p, tokens[:, :-1]), tokens[:, 1:, None], axis=2))

    return loss, {"table": draw(7, 3), "W": draw(3, 3)}, draw.integers(B, 5, below=7)


@program()
def ensemble_by_vmap_over_stacked_parameters(draw, B):
    def loss(p, x):
        outputs = jax.vmap(lambda member: jnp.tanh(x @ member["W"] + member["b"]))(p)
        return score(jnp.mean(outputs, axis=0)) + score(outputs)

    return loss, {"W": draw(2, 3, 4), "b": draw(2, 4)}, draw(B, 3)


@program()
def blocks_in_a_python_loop(draw, B):
    def loss(p, x):
        for own in p:
            x, _ = _layer(x, own)
        return score(x)

    return loss, [{"W": draw(4, 4, scale=0.5), "b": draw(4)} for _ in range(3)], draw(B, 5, 4)
