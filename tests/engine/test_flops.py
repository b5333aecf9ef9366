"""Flops counted on the Jaxpr, against counts done by hand and against XLA's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pegprof.engine.flops import count_flops


def flops_of(fn, *args):
    return count_flops(jax.make_jaxpr(fn)(*args))


def test_a_batched_matmul_counts_two_for_each_product():
    assert (
        flops_of(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), jnp.ones((5, 2, 3)), jnp.ones((5, 3, 4)))
        == 2 * 5 * 2 * 3 * 4
    )


def test_elementwise_counts_results_and_reductions_count_operands():
    assert flops_of(jnp.exp, jnp.ones((3, 4))) == 12
    assert flops_of(lambda x: lax.reduce_sum_p.bind(x, axes=(0, 1), out_sharding=None), jnp.ones((3, 4))) == 12


def test_moving_data_is_free():
    assert flops_of(lambda x: x.T.reshape(2, 6)[:, ::-1].astype(jnp.bfloat16), jnp.ones((3, 4))) == 0


def test_a_scan_counts_its_body_once_for_each_step():
    step = lambda c, x: (c @ x, None)
    assert flops_of(lambda c, xs: lax.scan(step, c, xs)[0], jnp.ones((2, 2)), jnp.ones((7, 2, 2))) == 7 * 16


def test_a_cond_counts_its_dearest_branch():
    fn = lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x, x)
    assert 16 <= flops_of(fn, jnp.ones((2, 2))) <= 16 + 3  # and the comparison that chooses


def test_a_while_loop_counts_its_body_once():
    fn = lambda x: lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ x, x)
    assert 16 <= flops_of(fn, jnp.ones((2, 2))) <= 16 + 3


def test_what_is_inside_jit_and_remat_and_custom_rules_counts():
    square = jax.custom_vjp(lambda x: x @ x)
    square.defvjp(lambda x: (x @ x, x), lambda x, ct: (2 * ct @ x,))
    assert flops_of(jax.jit(jax.checkpoint(square)), jnp.ones((2, 2))) == 16


CONVOLUTIONS = {
    "same": dict(window_strides=(1, 1), padding="SAME"),
    "strided": dict(window_strides=(2, 3), padding="VALID"),
    "input dilated, as in the gradient of a strided one": dict(
        window_strides=(1, 1), padding=((2, 1), (0, 3)), lhs_dilation=(2, 2)
    ),
    "kernel dilated": dict(window_strides=(1, 1), padding="SAME", rhs_dilation=(2, 1)),
}


@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_counts_what_a_dense_matrix_of_it_has(options, groups):
    x, w = jnp.ones((2, 4, 8, 9)), jnp.ones((6, 4 // groups, 3, 3))
    conv = lambda x: lax.conv_general_dilated(x, w, feature_group_count=groups, **options)
    matrix = jax.jacobian(conv)(x)  # ones in, so that an entry counts the taps that put an input into an output
    assert flops_of(conv, x) == 2 * int(np.sum(matrix))
