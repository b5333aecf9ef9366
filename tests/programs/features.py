"""Weights on features of the example that nothing but the gradient sees, since the forward pass is made anew for it.

So what follows a contraction on its way to a gradient is not a backward pass, and need not be linear in anything.
"""

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs.registry import program, score


def weighted(feature):
    """A loss whose gradient is a feature of the example, computed on the way back."""
    return jax.checkpoint(lambda p, x: jnp.sum(p * feature(x)))


def summed_over_time(term):
    """A feature that a loop over time adds up."""

    def feature(x):
        return lax.scan(lambda total, row: (total + term(row), None), jnp.zeros((), x.dtype), x)[0]

    return feature


@program(keep_batch_dim=False)
def one_over_a_product_summed_over_time(draw, B):
    return weighted(summed_over_time(lambda row: 1 / jnp.dot(row, row))), draw(), draw(B, 4, 3)


@program(keep_batch_dim=False)
def the_square_of_a_product_summed_over_time(draw, B):
    def square(row):
        made = jnp.dot(row, row)
        return made * made

    return weighted(summed_over_time(square)), draw(), draw(B, 4, 3)


@program(keep_batch_dim=False)
def a_product_of_products_summed_over_time(draw, B):
    def term(row):
        made = jnp.outer(row, row) @ jnp.arange(3.0)
        return made @ made

    return weighted(summed_over_time(term)), draw(), draw(B, 4, 3)


@program("zero", keep_batch_dim=False)
def the_whole_part_of_a_product_summed_over_time(draw, B):
    feature = summed_over_time(lambda row: jnp.dot(row, row).astype(jnp.int32).astype(row.dtype))
    return weighted(feature), draw(), draw(B, 4, 3)


@program(keep_batch_dim=False)
def the_square_of_an_outer_product(draw, B):
    def feature(x):
        made = jnp.einsum("i,j->ij", x, x + 1)
        return made * made

    return weighted(feature), draw(3, 3), draw(B, 3)


@program(keep_batch_dim=False)
def one_over_an_outer_product(draw, B):
    return weighted(lambda x: 1 / jnp.einsum("i,j->ij", x, x + 1)), draw(3, 3), draw.positive(B, 3)


@program("zero", keep_batch_dim=False)
def the_whole_part_of_a_product(draw, B):
    return weighted(lambda x: jnp.einsum("ti,tj->ij", x, x).astype(jnp.int32)), draw(3, 3), draw(B, 4, 3)


@program("zero", keep_batch_dim=False)
def a_product_as_a_mask(draw, B):
    return weighted(lambda x: jnp.where((x.T @ x).astype(bool), 2.0, 1.0)), draw(3, 3), draw(B, 4, 3)


@program("bf16", keep_batch_dim=False)
def the_sign_bit_of_a_product(draw, B):
    return weighted(lambda x: jnp.signbit((x.T @ x).astype(jnp.bfloat16)) + 1.0), draw(3, 3), draw(B, 4, 3)


@program(keep_batch_dim=False)
def a_histogram(draw, B):
    return weighted(lambda x: jnp.zeros(9).at[(4 * x).astype(jnp.int32)].add(x)), draw(9), draw.positive(B, 5)


@program(keep_batch_dim=False)
def a_lookup_and_a_penalty(draw, B):
    def loss(p, tokens):
        return score(p[tokens]) + 0.1 * jnp.sum(jnp.square(p))

    return loss, draw(11, 2), draw.integers(B, 4, below=11)


@program(keep_batch_dim=False)
def a_lookup_and_a_weighted_penalty(draw, B):
    def loss(p, example):
        return score(p[example["tokens"]]) + example["weight"] * jnp.sum(jnp.square(p))

    return loss, draw(11, 2), {"tokens": draw.integers(B, 4, below=11), "weight": draw.positive(B)}


@program(keep_batch_dim=False)
def a_bias_that_is_looked_up_and_added(draw, B):
    def loss(p, example):
        h = jnp.tanh(example["x"] @ p["W"] + p["b"])
        return score(h + p["b"][example["tokens"]][:, None])

    return loss, {"W": draw(3, 11), "b": draw(11)}, {"x": draw(B, 4, 3), "tokens": draw.integers(B, 4, below=11)}


@program(keep_batch_dim=False)
def a_lookup_with_dropout_made_anew(draw, B):
    @jax.checkpoint
    def embed(table, tokens, key):
        rows = table[tokens]
        return jnp.where(jax.random.bernoulli(key, 0.7, rows.shape), rows / 0.7, 0.0)

    def loss(p, example):
        return score(jnp.tanh(embed(p["E"], example["tokens"], example["key"]) @ p["W"]))

    return loss, {"E": draw(6, 3), "W": draw(3, 4)}, {"tokens": draw.integers(B, 5, below=6), "key": draw.keys(B)}
