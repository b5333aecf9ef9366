"""Sparse matrices of ``jax.experimental.sparse``: of parameters, of data, and as masks."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import sparse

from tests.programs.registry import program, score

INDICES = np.array([[0, 1], [0, 3], [1, 0], [2, 2], [2, 3], [4, 1]], np.int32)  # of a matrix of 5 by 4


def _mean_of(one):
    """A loss over a batch from a loss of one example."""
    return lambda p, batch: jnp.mean(jax.vmap(one, in_axes=(None, 0))(p, batch))


def _matrix(data):
    return sparse.BCOO((data, jnp.asarray(INDICES)), shape=(5, 4), indices_sorted=True, unique_indices=True)


@program()
def sparse_matrix_of_parameters_times_dense(draw, B):
    def loss(p, x):
        h = (_matrix(p["data"]) @ x.T).T + p["b"]
        return score(jnp.tanh(h) @ p["out"])

    return loss, {"data": draw(6), "b": draw(5), "out": draw(5, 2)}, draw(B, 4)


@program()
def sparse_matrix_of_parameters_between_dense_layers(draw, B):
    def one(p, x):
        h = jnp.tanh(x @ p["in"])
        return score(jnp.tanh(_matrix(p["data"]) @ h.T).T @ p["out"])

    return _mean_of(one), {"in": draw(2, 4), "data": draw(6), "out": draw(5, 3)}, draw(B, 3, 2)


@program()
def sparse_data_times_dense_parameters(draw, B):
    def one(p, example):  # a bag of features, given by their places and values
        x = sparse.BCOO((example["values"], example["places"]), shape=(7,))
        return score(jnp.tanh(x @ p["W"] + p["b"]))

    batch = {"values": draw(B, 3), "places": draw.integers(B, 3, 1, below=7)}
    return _mean_of(one), {"W": draw(7, 4), "b": draw(4)}, batch


@program()
def sparse_data_with_a_batch_axis(draw, B):
    def loss(p, batch):
        X = sparse.BCOO((batch["values"], batch["places"]), shape=(batch["values"].shape[0], 7))
        h = sparse.bcoo_dot_general(X, p["W"], dimension_numbers=(((1,), (0,)), ((), ())))
        return score(jnp.tanh(h + p["b"]) @ p["V"])

    batch = {"values": draw(B, 3), "places": draw.integers(B, 3, 1, below=7)}
    return loss, {"W": draw(7, 4), "b": draw(4), "V": draw(4, 2)}, batch


@program()
def sparse_adjacency_of_the_example(draw, B):
    def one(p, g):
        A = sparse.BCOO((jnp.exp(g["edges"] @ p["edge"]), g["ends"]), shape=(4, 4))
        return score(A @ jnp.tanh(A @ (g["nodes"] @ p["W"])) @ p["V"])

    batch = {"edges": draw(B, 6, 2), "ends": draw.integers(B, 6, 2, below=4), "nodes": draw(B, 4, 3)}
    return _mean_of(one), {"edge": draw(2, scale=0.3), "W": draw(3, 5), "V": draw(5, 2)}, batch


@program()
def sparse_matrix_fixed_for_all(draw, B):
    laplacian = sparse.BCOO.fromdense(jnp.asarray([[2.0, -1, 0, 0], [-1, 3, 0, -1], [0, 0, 1, 0], [0, -1, 0, 2]]))

    def one(p, x):  # Chebyshev filters on one graph
        once = laplacian @ x
        twice = 2 * (laplacian @ once) - x
        return score(jnp.tanh(jnp.stack([x, once, twice]).transpose(1, 0, 2).reshape(4, 9) @ p))

    return _mean_of(one), draw(9, 2, scale=0.3), draw(B, 4, 3)


@program()
def sparse_product_by_sparsify(draw, B):
    @sparse.sparsify
    def layer(matrix, x):
        return jnp.tanh(x @ matrix.T * 2.0)

    def loss(p, x):
        return score(layer(_matrix(p["data"]), x) * p["scale"])

    return loss, {"data": draw(6), "scale": draw(5)}, draw(B, 3, 4)


@program()
def product_sampled_at_few_places(draw, B):
    def one(p, x):  # attention scores at the places of a pattern only
        q, k = x["query"] @ p["q"], x["key"] @ p["k"]
        contract = (((1,), (1,)), ((), ()))
        scores = sparse.bcoo_dot_general_sampled(q, k, jnp.asarray(INDICES), dimension_numbers=contract)
        return score(_matrix(jnp.exp(scores)) @ (x["key"] @ p["v"]))

    params = {"q": draw(3, 2, scale=0.5), "k": draw(3, 2, scale=0.5), "v": draw(3, 6)}
    return _mean_of(one), params, {"query": draw(B, 5, 3), "key": draw(B, 4, 3)}


@program()
def pruned_convolution(draw, B):
    places = jnp.array([[0, 1, 2, 3], [1, 0, 0, 0], [1, 1, 1, 2], [2, 0, 2, 1], [2, 1, 0, 3]])
    mask = sparse.BCOO((jnp.ones(5), places), shape=(3, 2, 3, 4))

    def loss(p, x):  # the mask is dense by then: JAX cannot batch the extraction of entries from a kernel's gradient
        kernel = p["kernel"] * mask.todense()
        h = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return score(jnp.tanh(h + p["b"]))

    return loss, {"kernel": draw(3, 2, 3, 4), "b": draw(4)}, draw(B, 4, 5, 3)


@program()
def penalty_on_a_sparse_matrix(draw, B):
    def loss(p, x):
        matrix = _matrix(p["data"])
        return score((matrix @ x.T).T) + 0.1 * sparse.bcoo_reduce_sum(matrix * matrix, axes=(0, 1)).todense()

    return loss, {"data": draw(6)}, draw(B, 4)
