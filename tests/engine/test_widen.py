"""Widening a tail: the same gradients, with nothing rounded below float32 where a rule says how."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pegprof.engine.jaxpr import Literal, dtype_of, primitives, start
from pegprof.engine.passes.flatten import flatten
from pegprof.engine.passes.widen import bind_wide, widen
from pegprof.engine.tails import find_tails

BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)


def _tail_and_frontier(fun, *args):
    """The one tail of a function whose results are gradients of one example, and the values of its inputs."""
    closed = flatten(jax.make_jaxpr(fun)(*args))
    (tail,) = find_tails(closed.jaxpr, range(len(closed.jaxpr.outvars)), [True] * len(args))
    env = start(closed, args)
    env.run(closed.jaxpr.eqns)
    return tail, env.read(tail.inputs)


def _tail(fun, *args):
    return _tail_and_frontier(fun, *args)[0]


def _operands(*dtypes):
    return [jnp.linspace(-1.0, 2.0, 15).reshape(5, 3).astype(dtype) for dtype in dtypes]


def _product(s, r):
    return 0.1 * (s.T @ r).T


def _scatter_add(indices, updates):
    return jnp.zeros((7, 3), updates.dtype).at[indices].add(updates)


def _sorted(s, r):
    return 2 * jnp.sort(s.T @ r)


def _mixed(s, r):
    return (s.T @ r).astype(jnp.float32) + jnp.einsum("ti,tj->ij", s, r, preferred_element_type=jnp.float32)


def _dtypes(tail):
    return [dtype_of(v) for eqn in tail.equations for v in eqn.outvars]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("fun", [_product, _sorted, _mixed])
@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32])
def test_a_tail_with_nothing_narrow_stays_as_it_is(fun, dtype):
    tail = _tail(fun, *_operands(dtype, dtype))
    assert widen(tail) is tail


@pytest.mark.parametrize("fun", [_product, _sorted, _mixed])
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (jnp.float16, jnp.float16), (BF16, F32)])
def test_widening_twice_is_widening_once(fun, dtypes):
    wide = widen(_tail(fun, *_operands(*dtypes)))
    assert widen(wide) is wide


@pytest.mark.parametrize("fun", [_product, _mixed])
def test_a_narrow_tail_gives_float32_from_narrow_operands(fun):
    s, r = _operands(BF16, BF16)
    tail, frontier = _tail_and_frontier(fun, s, r)
    wide = widen(tail)
    assert BF16 in _dtypes(tail)
    assert BF16 not in _dtypes(wide)
    for product in wide.starts:
        assert [dtype_of(v) for v in product.invars] == [BF16, BF16]
    (found,), (narrow,) = wide.run(*frontier), tail.run(*frontier)
    assert found.dtype == F32
    scale = jnp.bfloat16(0.1) / jnp.float32(0.1) if fun is _product else 1.0  # a constant is what it was traced as
    exact = scale * fun(s.astype(F32), r.astype(F32))
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-6)
    assert np.max(np.abs(np.asarray(narrow, np.float32) - exact)) > 100 * np.max(np.abs(found - exact))


def test_the_new_starts_are_equations_of_the_new_tail():
    tail = _tail(lambda s, r: (s.T @ r + (s * 2).T @ r) * 2, *_operands(BF16, BF16))
    wide = widen(tail)
    assert len(wide.starts) == len(tail.starts) == 2
    for product in wide.starts:
        assert product.primitive is primitives.dot_general_p
        assert any(product is eqn for eqn in wide.equations)


def test_a_convert_that_narrows_is_dropped():
    def product(s, r):
        return jnp.einsum("ti,tj->ij", s, r, preferred_element_type=F32).astype(BF16)

    wide = widen(_tail(product, *_operands(BF16, BF16)))
    assert wide.equations == wide.starts
    assert wide.outputs == tuple(wide.starts[0].outvars)


def test_what_a_tail_takes_in_stays_as_it_is():
    tail = _tail(_product, *_operands(BF16, BF16))
    wide = widen(tail)
    assert (wide.inputs, wide.depends) == (tail.inputs, tail.depends)
    assert [dtype_of(v) for v in wide.outputs] == [F32]
    made = {v for eqn in wide.equations for v in eqn.outvars}
    taken = {v for eqn in wide.equations for v in eqn.invars if not hasattr(v, "val")}
    assert taken - made <= {*tail.inputs}


def test_a_narrow_scatter_add_adds_up_in_float32():
    indices, updates = jnp.asarray([1, 3, 1, 1, 6]), jnp.asarray([256, 1, 1, 1, 1], BF16)[:, None] * jnp.ones(3, BF16)
    tail, frontier = _tail_and_frontier(_scatter_add, indices, updates)
    wide = widen(tail)
    assert [eqn.primitive for eqn in wide.starts] == [primitives.scatter_add_p]
    assert wide.zeros == tail.zeros
    (narrow,), (found,) = tail.run(*frontier), wide.run(*frontier)
    assert (narrow[1, 0], found[1, 0]) == (256, 258)
    assert (narrow.dtype, found.dtype) == (BF16, F32)
    assert widen(wide) is wide


def test_operands_of_different_dtypes_are_brought_to_the_wider():
    def sum_of_two(s, r):
        narrow = jnp.einsum("ti,tj->ij", s, r.astype(BF16))
        return narrow.astype(F32) + jnp.einsum("ti,tj->ij", s.astype(F32), r)

    s, r = _operands(BF16, F32)
    tail, frontier = _tail_and_frontier(sum_of_two, s, r)
    (found,) = widen(tail).run(*frontier)
    exact = s.astype(F32).T @ r.astype(BF16).astype(F32) + s.astype(F32).T @ r
    np.testing.assert_allclose(found, exact, rtol=1e-5)


def test_an_equation_without_a_rule_keeps_its_dtype():
    tail, frontier = _tail_and_frontier(_sorted, *_operands(BF16, BF16))
    wide = widen(tail)
    (sort,) = (eqn for eqn in wide.equations if eqn.primitive is primitives.sort_p)
    assert [dtype_of(v) for v in (*sort.invars, *sort.outvars)] == [BF16, BF16]
    (found,), (narrow,) = wide.run(*frontier), tail.run(*frontier)
    assert found.dtype == F32
    np.testing.assert_array_equal(found, np.asarray(narrow, np.float32))


def test_a_tail_that_ends_without_a_rule_ends_as_it_was_traced():
    tail = _tail(lambda s, r: jnp.sort(s.T @ r), *_operands(BF16, BF16))
    wide = widen(tail)
    assert [dtype_of(v) for v in wide.outputs] == [BF16]
    assert widen(wide) is wide


def test_the_prelude_runs_as_it_was_traced():
    s, r = _operands(BF16, BF16)
    closed = flatten(jax.make_jaxpr(lambda s, r: jnp.einsum("ti,tj->ij", jnp.tanh(s), r))(s, r))
    (tail,) = find_tails(closed.jaxpr, [0], [True, True])
    (tanh,) = (eqn for eqn in closed.jaxpr.eqns if eqn.primitive is primitives.tanh_p)
    wide = widen(dataclasses.replace(tail, prelude=(tanh,), inputs=tuple(closed.jaxpr.invars)))
    assert wide.prelude == (tanh,)
    np.testing.assert_array_equal(wide.run(s, r)[0], jnp.tanh(s).astype(F32).T @ r.astype(F32))


def test_gradients_of_one_tail_stay_in_order():
    def gradients(s, r):
        g = s.T @ r
        return 2 * g, g, g.T

    tail, frontier = _tail_and_frontier(gradients, *_operands(BF16, BF16))
    for found, narrow in zip(widen(tail).run(*frontier), tail.run(*frontier), strict=True):
        np.testing.assert_allclose(found, np.asarray(narrow, np.float32), rtol=2**-7)


def test_the_constants_of_a_tail_are_not_lost():
    mask = jnp.linspace(0.0, 1.0, 9).astype(BF16).reshape(3, 3)
    tail, frontier = _tail_and_frontier(lambda s, r: (s.T @ r) * mask, *_operands(BF16, BF16))
    product, scaled = tail.equations
    (unused,) = (v for v in scaled.invars if v in tail.inputs)
    inside = scaled.replace(invars=[Literal(mask, v.aval) if v is unused else v for v in scaled.invars])
    wide = widen(dataclasses.replace(tail, equations=(product, inside)))
    np.testing.assert_array_equal(wide.run(*frontier)[0], widen(tail).run(*frontier)[0])


@pytest.mark.parametrize("values", [[jnp.ones(2), 2.0], [jnp.ones(2, BF16), np.float32(2)], [1.0, jnp.ones(2, BF16)]])
def test_an_equation_takes_numbers_of_python_and_wider_arrays(values):
    (eqn,) = jax.make_jaxpr(jax.lax.mul)(jnp.ones(2, BF16), jnp.ones(2, BF16)).eqns
    (found,) = bind_wide(eqn, [jnp.broadcast_to(x, 2) if hasattr(x, "dtype") else x for x in values])
    assert found.dtype == F32


def test_an_equation_without_floats_is_applied_as_it_stands():
    (eqn,) = jax.make_jaxpr(jax.lax.add)(jnp.ones(2, int), jnp.ones(2, int)).eqns
    (found,) = bind_wide(eqn, [jnp.ones(2, int), jnp.ones(2, int)])
    assert found.dtype == jnp.ones(2, int).dtype
