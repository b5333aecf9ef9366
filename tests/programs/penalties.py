"""Penalties on parameters beside the loss of the examples: in scanned layers, in branches, by member of an ensemble."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs.registry import program, score


def _stacked(draw):
    return {"W": draw(3, 4, 4, scale=0.6), "b": draw(3, 4)}


@program()
def penalty_carried_through_scanned_layers(draw, B):
    def loss(p, x):
        def layer(carry, own):
            h, penalty = carry
            return (jnp.tanh(h @ own["W"] + own["b"]), penalty + jnp.sum(jnp.square(own["W"]))), None

        (h, penalty), _ = lax.scan(layer, (x, 0.0), p)
        return score(h) + 0.1 * penalty

    return loss, _stacked(draw), draw(B, 4)


@program()
def penalty_alone_on_a_parameter_of_scanned_layers(draw, B):
    def loss(p, x):  # the gradient of the width has nothing of the example
        def layer(carry, own):
            h, penalty = carry
            return (jnp.tanh(h @ own["W"]), penalty + jnp.sum(jnp.cosh(own["width"]))), None

        (h, penalty), _ = lax.scan(layer, (x, 0.0), p)
        return score(h) + penalty

    return loss, {"W": draw(3, 4, 4, scale=0.6), "width": draw(3, 2)}, draw(B, 4)


@program()
def penalty_alone_stacked_by_scanned_layers(draw, B):
    def loss(p, x):
        def layer(h, own):
            return jnp.tanh(h @ own["W"]), jnp.sum(jnp.sin(own["log_variance"]) + jnp.exp(own["log_variance"]))

        h, penalties = lax.scan(layer, x, p, reverse=True)
        return score(h) + jnp.mean(penalties * jnp.arange(1.0, 4.0))

    return loss, {"W": draw(3, 4, 4, scale=0.6), "log_variance": draw(3, 4, 4)}, draw(B, 5, 4)


@program()
def penalty_on_a_weight_shared_by_scanned_layers(draw, B):
    def loss(p, x):
        def layer(carry, own):
            h, penalty = carry
            penalty = penalty + jnp.sum(jnp.square(own - p["prior"])) + jnp.sum(jnp.cosh(p["shared"]))
            return (jnp.tanh(h @ (own + p["shared"])), penalty), None

        (h, penalty), _ = lax.scan(layer, (x, 0.0), p["own"])
        return score(h) + 0.1 * penalty

    return loss, {"own": draw(3, 4, 4, scale=0.6), "shared": draw(4, 4, scale=0.3), "prior": draw(4, 4)}, draw(B, 4)


@program()
def penalty_in_rematerialised_layers(draw, B):
    def loss(p, x):
        @jax.checkpoint
        def layer(carry, own):
            h, penalty = carry
            return (h + jnp.tanh(h @ own["W"] + own["b"]), penalty + jnp.sum(jnp.abs(own["b"]) ** 3)), None

        (h, penalty), _ = lax.scan(layer, (x, 0.0), p)
        return score(h) + penalty

    return loss, _stacked(draw), draw(B, 4)


@program()
def penalty_inside_a_loop_over_time(draw, B):
    def loss(p, x):  # zoneout's cousin: each step pays for the weights it uses
        def step(carry, x_t):
            h, penalty = carry
            return (
                jnp.tanh(x_t @ p["in"] + h @ p["rec"]),
                0.9 * penalty + jnp.sum(jnp.square(p["rec"] @ p["mix"])),
            ), None

        start = (jnp.zeros((x.shape[0], 4), x.dtype), 0.0)
        (h, penalty), _ = lax.scan(step, start, jnp.moveaxis(x, 1, 0))
        return score(h) + 0.1 * penalty

    return loss, {"in": draw(3, 4), "rec": draw(4, 4, scale=0.5), "mix": draw(4, 2)}, draw(B, 5, 3)


@program()
def penalty_in_a_branch_chosen_by_the_example(draw, B):
    def one(p, x):
        plain = lambda: score(x @ p["W"])
        regular = lambda: score(x @ p["W"]) + jnp.sum(jnp.square(p["W"])) + jnp.sum(jnp.cosh(p["only"]))
        return lax.cond(x[0] > 0, plain, regular)

    def loss(p, x):
        return jnp.mean(jax.vmap(one, in_axes=(None, 0))(p, x))

    return loss, {"W": draw(3, 4), "only": draw(5)}, draw(B, 3).at[:, 0].set((-1.0) ** jnp.arange(B))


@program()
def variational_weights_in_scanned_layers(draw, B):
    def one(p, example):  # Bayes by backprop: noise of the example, a divergence of the parameters alone
        def layer(carry, own_and_noise):
            (h, divergence), (own, noise) = carry, own_and_noise
            deviation = jnp.exp(own["rho"])
            divergence += jnp.sum(0.5 * (deviation**2 + own["mu"] ** 2) - own["rho"])
            return (jnp.tanh(h @ (own["mu"] + deviation * noise)), divergence), None

        (h, divergence), _ = lax.scan(layer, (example["x"], 0.0), (p, example["noise"]))
        return score(h) + 0.01 * divergence

    def loss(p, batch):
        return jnp.mean(jax.vmap(one, in_axes=(None, 0))(p, batch))

    params = {"mu": draw(2, 3, 3, scale=0.6), "rho": draw(2, 3, 3) - 2}
    return loss, params, {"x": draw(B, 3), "noise": draw(B, 2, 3, 3)}


# ---- ensembles: vmap over stacked members, inside the loss --------------------------------------------------------


def _members(draw):
    return {"W": draw(3, 5, 4), "b": draw(3, 4), "V": draw(3, 4, 2)}


def _predict(member, x):
    return jnp.tanh(x @ member["W"] + member["b"]) @ member["V"]


@program()
def ensemble_with_a_penalty_for_each_member(draw, B):
    def loss(p, x):
        def member_loss(member, strength):
            penalty = sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(member))
            return score(_predict(member, x)) + strength * penalty

        return jnp.mean(jax.vmap(member_loss)(p, jnp.array([0.1, 0.2, 0.3])))

    return loss, _members(draw), draw(B, 5)


@program()
def ensemble_with_bootstrap_weights_and_anchors(draw, B):
    anchors = _members(draw)  # anchored ensembles: each member is pulled to a draw of its own

    def loss(p, batch):
        def member_loss(member, anchor, weight):
            errors = jnp.mean(jnp.square(_predict(member, batch["x"]) - batch["y"]), axis=-1)
            pull = jax.tree.map(lambda a, b: jnp.sum(jnp.square(a - b)), member, anchor)
            return jnp.mean(weight * errors) + 0.1 * sum(jax.tree.leaves(pull))

        return jnp.sum(jax.vmap(member_loss, in_axes=(0, 0, 1))(p, anchors, batch["weights"]))

    return loss, _members(draw), {"x": draw(B, 5), "y": draw(B, 2), "weights": draw.positive(B, 3)}


@program()
def ensemble_of_scanned_layers_with_penalties(draw, B):
    def loss(p, x):
        def member_loss(own):
            def layer(carry, W):
                h, penalty = carry
                return (jnp.tanh(h @ W), penalty + jnp.sum(jnp.square(W))), None

            (h, penalty), _ = lax.scan(layer, (x, 0.0), own["W"])
            return score(h * own["scale"]) + 0.1 * penalty * jnp.square(own["strength"])

        return jnp.mean(jax.vmap(member_loss)(p))

    return loss, {"W": draw(2, 3, 4, 4, scale=0.6), "scale": draw(2, 4), "strength": draw.positive(2)}, draw(B, 4)


@program()
def ensemble_with_a_shared_trunk_and_diversity(draw, B):
    def loss(p, x):
        h = jnp.tanh(x @ p["trunk"])
        outputs = jax.vmap(lambda head: h @ head, out_axes=1)(p["heads"])
        flat = p["heads"].reshape(3, -1)
        return score(outputs) + score(jnp.mean(outputs, axis=1)) - 0.1 * jnp.linalg.slogdet(flat @ flat.T)[1]

    return loss, {"trunk": draw(5, 4), "heads": draw(3, 4, 2)}, draw(B, 5)


@program()
def batch_ensemble_of_rank_one_factors(draw, B):
    def loss(p, x):  # one slow weight for all members, two vectors for each
        def member(r, s):
            return jnp.tanh((x * r) @ p["slow"]) * s

        return score(jax.vmap(member)(p["r"], p["s"])) + 0.1 * jnp.sum(jnp.square(p["r"] - 1))

    return loss, {"slow": draw(5, 4), "r": draw.positive(3, 5), "s": draw.positive(3, 4)}, draw(B, 5)


@program()
def positions_looked_up_and_penalised_in_a_layer_of_one(draw, B):
    """The product of the penalty has nothing of the example, the rows looked up have."""
    params = {"table": draw(1, 7)}

    def loss(params, x):
        @jax.checkpoint
        def step(carry, table):
            h, penalty = carry
            return (jnp.tanh(h + table[jnp.arange(5)][None, None, None]), penalty + jnp.sum(table**3)), None

        (h, penalty), _ = jax.lax.scan(step, (x, 0.0), params["table"], unroll=2)
        return score(h) + 0.1 * penalty

    return loss, params, draw(B, 2, 3, 5)
