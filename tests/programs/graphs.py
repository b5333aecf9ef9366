"""Graph networks: the edges of an example are arrays of integers; messages are gathered, and scattered back."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.ops import segment_max, segment_sum

from tests.programs.registry import program, score

NODES, EDGES = 4, 6


def _mean_of(one):
    """A loss over a batch from a loss of one graph."""
    return lambda p, batch: jnp.mean(jax.vmap(one, in_axes=(None, 0))(p, batch))


def _graphs(draw, B, features=3):
    return {
        "nodes": draw(B, NODES, features),
        "edges": draw(B, EDGES, 2),
        "senders": draw.integers(B, EDGES, below=NODES),
        "receivers": draw.integers(B, EDGES, below=NODES),
    }


@program()
def message_passing_with_edge_features(draw, B):
    def one(p, g):
        ends = [g["nodes"][g["senders"]], g["nodes"][g["receivers"]], g["edges"]]
        messages = jax.nn.silu(jnp.concatenate(ends, axis=-1) @ p["message"] + p["b"])
        received = segment_sum(messages, g["receivers"], NODES)
        nodes = jnp.tanh(jnp.concatenate([g["nodes"], received], axis=-1) @ p["update"])
        return score(jnp.sum(nodes, axis=0) @ p["readout"])

    params = {"message": draw(8, 5, scale=0.5), "b": draw(5), "update": draw(8, 4, scale=0.3), "readout": draw(4, 2)}
    return _mean_of(one), params, _graphs(draw, B)


@program()
def graph_attention_by_segments(draw, B):
    def one(p, g):
        def layer(nodes, own):
            h = nodes @ own["W"]
            logits = jnp.tanh(nodes[g["senders"]] @ own["from"] + nodes[g["receivers"]] @ own["to"]) @ own["a"]
            largest = lax.stop_gradient(segment_max(logits, g["receivers"], NODES))
            weights = jnp.exp(logits - largest[g["receivers"]])
            weights = weights / segment_sum(weights, g["receivers"], NODES)[g["receivers"]]
            return jnp.tanh(h + segment_sum(weights[:, None] * h[g["senders"]], g["receivers"], NODES))

        return score(layer(layer(g["nodes"], p["first"]), p["second"]))

    def params(wide_in, wide_out):
        return {"W": draw(wide_in, wide_out), "from": draw(wide_in, 2), "to": draw(wide_in, 2), "a": draw(2)}

    return _mean_of(one), {"first": params(3, 5), "second": params(5, 2)}, _graphs(draw, B)


@program()
def gated_graph_network_over_rounds(draw, B):
    def one(p, g):  # the same weights in every round
        def round_of_messages(h, _):
            received = segment_sum((h @ p["message"])[g["senders"]], g["receivers"], NODES)
            both = jnp.concatenate([received, h], axis=-1)
            update, reset = jnp.split(jax.nn.sigmoid(both @ p["gates"] + p["b"]), 2, axis=-1)
            fresh = jnp.tanh(jnp.concatenate([received, reset * h], axis=-1) @ p["fresh"])
            return (1 - update) * h + update * fresh, None

        h = lax.scan(round_of_messages, g["nodes"] @ p["embed"], length=3)[0]
        return score(h @ p["out"])

    params = {"embed": draw(3, 4), "message": draw(4, 4), "gates": draw(8, 8), "b": draw(8), "fresh": draw(8, 4)}
    return _mean_of(one), params | {"out": draw(4, 2)}, _graphs(draw, B)


@program()
def relational_graph_with_weights_by_type(draw, B):
    def one(p, g):
        of_type = p["relations"][g["type"]]
        messages = jnp.einsum("ei,eio->eo", g["nodes"][g["senders"]], of_type) * p["strength"][g["type"], None]
        counts = segment_sum(jnp.ones(EDGES, messages.dtype), g["receivers"], NODES)
        received = segment_sum(messages, g["receivers"], NODES) / jnp.maximum(counts, 1)[:, None]
        return score(jnp.tanh(g["nodes"] @ p["self"] + received))

    params = {"relations": draw(2, 3, 5), "strength": draw(2), "self": draw(3, 5)}
    return _mean_of(one), params, _graphs(draw, B) | {"type": draw.integers(B, EDGES, below=2)}


@program()
def edge_weights_of_one_graph_for_all(draw, B):
    senders, receivers = jnp.array([0, 1, 1, 2, 3, 3]), jnp.array([1, 0, 2, 3, 0, 2])

    def loss(p, x):  # traffic forecasting: the graph is known, its weights are learnt
        def hop(h):
            return jnp.zeros_like(h).at[:, receivers].add(p["edge"][:, None] * h[:, senders])

        return score(jnp.tanh(hop(jax.nn.relu(hop(x) @ p["W"] + p["b"]))))

    return loss, {"edge": draw(EDGES), "W": draw(3, 5), "b": draw(NODES, 5)}, draw(B, NODES, 3)


@program()
def node_embeddings_by_id_and_padding_edges(draw, B):
    def one(p, g):
        h = p["table"][g["ids"]]
        messages = jnp.tanh(h[g["senders"]] @ p["W"]) * g["real"][:, None]
        h = h.at[g["receivers"]].add(messages, mode="drop")
        return score(h) + jnp.vdot(segment_max(h @ p["v"], g["ids"] % 2, 2), jnp.array([0.3, -0.7], h.dtype))

    batch = _graphs(draw, B) | {"real": draw.booleans(B, EDGES).astype(float)}
    batch["ids"] = (jnp.arange(NODES) + draw.integers(B, 1, below=7)) % 7  # both parities in every graph
    return _mean_of(one), {"table": draw(7, 3), "W": draw(3, 3), "v": draw(3)}, batch


@program()
def equivariant_graph_network(draw, B):
    def one(p, g):  # EGNN: messages from distances, coordinates moved along differences
        h, x = g["nodes"], g["x"]
        for own in (p["first"], p["second"]):
            apart = x[g["receivers"]] - x[g["senders"]]
            squared = jnp.sum(jnp.square(apart), axis=-1, keepdims=True)
            ends = [h[g["receivers"]], h[g["senders"]], squared]
            messages = jax.nn.silu(jnp.concatenate(ends, axis=-1) @ own["message"])
            x = x.at[g["receivers"]].add(apart / (1 + squared) * (messages @ own["move"]))
            h = h + segment_sum(messages, g["receivers"], NODES) @ own["update"]
        return score(h) + score(x)

    def params():
        return {"message": draw(7, 5, scale=0.5), "move": draw(5, 1, scale=0.3), "update": draw(5, 3, scale=0.5)}

    return _mean_of(one), {"first": params(), "second": params()}, _graphs(draw, B) | {"x": draw(B, NODES, 2)}
