"""The passes over loops and branches: each computes what it was given, and nothing is moved twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pegprof.engine.jaxpr import barrier_p, primitives, sub_jaxprs
from pegprof.engine.options import Options
from pegprof.engine.passes import loops
from pegprof.engine.passes.flatten import flatten
from pegprof.engine.passes.loops import hoist, split_branches
from pegprof.engine.tails import find_tails
from pegprof.engine.trace import trace_example
from tests.engine.cases import case, compute
from tests.programs import PROGRAMS

pytestmark = pytest.mark.usefixtures("x64")

LOOPS = [
    "rnn_by_scan",
    "lstm_with_an_embedding_inside_the_loop",
    "rnn_with_weights_transformed_outside_the_loop",
    "rnn_weight_used_in_the_loop_and_outside",
    "scanned_layers_rematerialised",
    "scanned_layers_with_a_weight_shared_by_all",
    "scanned_layers_normalised_outside",
    "cond_with_a_predicate_that_differs",
    "weights_chosen_by_the_time_step",
    "the_square_of_a_product_summed_over_time",
    "layers_inside_time",
    "penalty_alone_on_a_parameter_of_scanned_layers",
    "penalty_on_a_weight_shared_by_scanned_layers",
    "neural_ode_by_runge_kutta",
]

PASSES = {  # in the order of ``hoist``
    "drop_constant_carries": lambda closed, *, gradients, depends: loops.drop_constant_carries(closed),
    "split_branches": split_branches,
    "stack_sums": loops.stack_sums,
    "hoist_bodies": loops.hoist_bodies,
    "move_tails_out": loops.move_tails_out,
    "sum_in_loop": loops.sum_in_loop,
}


def _trace(name):
    loss, params, batch = case(name, 3)
    trace = trace_example(loss, (params, batch), Options(keep_batch_dim=PROGRAMS[name].keep_batch_dim))
    example = [x[0] if own else x for x, own in zip(trace.inputs((params, batch)), trace.depends, strict=True)]
    return trace, example


def _trace_bare(loss, params, example):
    """A loss of one bare example, traced."""
    batch = jax.tree.map(lambda x: x[None], example)
    return trace_example(loss, (params, batch), Options(keep_batch_dim=False)), [*jax.tree.leaves((params, example))]


def _apply(each, closed, trace):
    return each(closed, gradients=trace.gradient_names, depends=trace.depends)


def _hoist(trace):
    return _apply(hoist, trace.closed, trace)


def _find(closed, primitive):
    return [eqn for eqn in closed.jaxpr.eqns if eqn.primitive is primitive]


def _carried(eqn):
    return [v.aval.shape for v in eqn.outvars[: eqn.params["num_carry"]]]


def _stacked(eqn):
    return [v.aval.shape[1:] for v in eqn.outvars[eqn.params["num_carry"] :]]


def _assert_same(before, after, example, rtol=1e-12):
    for a, b in zip(compute(before, example), compute(after, example), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-14)


# ---- every program --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOOPS)
def test_each_pass_computes_what_it_was_given(name):
    trace, example = _trace(name)
    closed = trace.closed
    for each in PASSES.values():
        before, closed = closed, _apply(each, closed, trace)
        if closed is not before:
            _assert_same(before, closed, example)


@pytest.mark.parametrize("name", LOOPS)
def test_hoisting_twice_is_hoisting_once(name):
    trace, _ = _trace(name)
    once = _hoist(trace)
    assert str(_apply(hoist, once, trace)) == str(once)


def test_every_pass_changes_some_program():
    changed = set()
    for name in LOOPS:
        trace, _ = _trace(name)
        closed = trace.closed
        for each, run in PASSES.items():
            before, closed = closed, _apply(run, closed, trace)
            changed |= {each} if str(before) != str(closed) else set()
    assert changed == PASSES.keys() - {"split_branches"}  # which has a test of its own


def test_a_program_with_nothing_to_hoist_stays_as_it_is():
    trace, _ = _trace("mlp_regression")
    assert _hoist(trace) is trace.closed


# ---- sums over time -------------------------------------------------------------------------------------------------


def test_a_weight_shared_over_time_is_contracted_after_the_loop_over_time_as_well():
    trace, _ = _trace("rnn_by_scan")
    tails = find_tails(_hoist(trace).jaxpr, trace.gradient_names, trace.depends)
    steps = case("rnn_by_scan", 3)[2].shape[1]
    contracted = [eqn for tail in tails for eqn in tail.starts if eqn.primitive is primitives.dot_general_p]
    assert contracted
    assert all(eqn.invars[0].aval.shape[0] == steps for eqn in contracted)


def test_the_loop_that_remains_no_longer_carries_the_gradient():
    trace, _ = _trace("rnn_by_scan")
    carried = [shape for eqn in _find(_hoist(trace), primitives.scan_p) for shape in _carried(eqn)]
    matrices = [shape for shape in map(trace.shape_of, trace.names) if len(shape) == 2]
    assert matrices
    assert not set(carried) & set(matrices)


@pytest.mark.parametrize("from_zero", [True, False])
def test_a_sum_of_several_terms_keeps_one_carry_for_what_no_tail_forms(from_zero):
    def gradient(x):
        def step(total, row):
            rows = jnp.broadcast_to(row, (3, 3))
            return total + jnp.sin(rows) + jnp.outer(row, row) + jnp.cos(rows), None

        return jax.lax.scan(step, jnp.zeros((3, 3)) if from_zero else jnp.arange(9.0).reshape(3, 3) * x[0], x)[0]

    x, roles = jnp.arange(12.0).reshape(4, 3), {"gradients": {0}, "depends": [True]}
    closed = flatten(jax.make_jaxpr(gradient)(x))
    stacked, hoisted = loops.stack_sums(closed, **roles), hoist(closed, **roles)
    assert [(_carried(eqn), _stacked(eqn)) for eqn in _find(stacked, primitives.scan_p)] == [([], [(3, 3)] * 3)]
    assert len(_find(stacked, primitives.add_p)) == (2 if from_zero else 3)
    (scan,) = _find(hoisted, primitives.scan_p)
    assert _carried(scan) == [(3, 3)]
    assert (3, 3) not in _stacked(scan)
    assert len(_find(hoisted, primitives.add_p)) == (1 if from_zero else 2)
    assert str(hoist(hoisted, **roles)) == str(hoisted)
    for after in (stacked, hoisted):
        _assert_same(closed, after, [x])


@pytest.mark.parametrize("terms", [lambda row: [row[:, None]], lambda row: [row[:, None], 1.0, row[None]]])
def test_a_step_may_broadcast_what_it_adds(terms):
    def gradient(x):
        return jax.lax.scan(lambda total, row: (sum(terms(row), total), None), jnp.zeros((3, 3)), x)[0]

    x, roles = jnp.arange(12.0).reshape(4, 3), {"gradients": {0}, "depends": [True]}
    closed = flatten(jax.make_jaxpr(gradient)(x))
    stacked, hoisted = loops.stack_sums(closed, **roles), hoist(closed, **roles)
    assert not _carried(_find(stacked, primitives.scan_p)[0])
    assert str(hoist(hoisted, **roles)) == str(hoisted)
    for after in (stacked, hoisted):
        assert after.out_avals[0].shape == (3, 3)
        _assert_same(closed, after, [x])


def _diagonal(n, steps=5):
    """A loss whose gradient no tail forms: r_t * h_t, for a weight as large as the state; used twice in a step."""

    def loss(w, x):
        step = lambda h, row: (jnp.tanh(w * jnp.sin(w * h + row)), None)
        return jnp.sum(jax.lax.scan(step, jnp.zeros(n), x)[0] ** 2)

    return _trace_bare(loss, jnp.linspace(0.5, 1.5, n), jnp.arange(steps * n, dtype=float).reshape(steps, n))


def test_what_no_tail_forms_is_added_up_in_one_carry():
    trace, example = _diagonal(7)
    stacked = _apply(loops.stack_sums, trace.closed, trace)
    hoisted = _apply(loops.sum_in_loop, stacked, trace)
    before, opened, after = (_find(closed, primitives.scan_p)[-1] for closed in (trace.closed, stacked, hoisted))
    assert len(_carried(opened)) == len(_carried(before)) - 1
    assert len(_stacked(opened)) > len(_stacked(before))
    assert (_carried(after), _stacked(after)) == (_carried(before), _stacked(before))
    sums = [len(_find(closed, primitives.reduce_sum_p)) for closed in (trace.closed, stacked, hoisted)]
    assert sums[0] == sums[2] < sums[1]
    assert str(_hoist(trace)) == str(hoisted)
    _assert_same(trace.closed, hoisted, example)


def test_a_sum_that_a_value_depends_on_stays_as_it_is():
    def loss(w, x):
        total, _ = jax.lax.scan(lambda c, row: (c + row * w, None), jnp.zeros(3), x)
        return jnp.sum(jnp.sin(jnp.sum(jax.lax.scan(lambda c, row: (c, row * w), 0.0, x)[1], axis=0)) * total)

    trace, _ = _trace_bare(loss, jnp.arange(3.0), jnp.ones((4, 3)))
    forward = _find(_hoist(trace), primitives.scan_p)
    assert any(_carried(eqn) for eqn in forward)
    assert any(_stacked(eqn) for eqn in forward)


def test_the_sum_of_a_broadcast_weights_gradients_is_contracted_over_the_layers():
    def loss(w, x):
        layers = jnp.broadcast_to(w, (3, 4, 4))
        return jnp.sum(jax.lax.scan(lambda h, own: (jnp.tanh(h @ own), None), x, layers)[0] ** 2)

    trace, example = _trace_bare(loss, jnp.eye(4) + 0.1, jnp.arange(20.0).reshape(5, 4) / 10)
    hoisted = _hoist(trace)
    (tail,) = find_tails(hoisted.jaxpr, trace.gradient_names, trace.depends)
    (product,) = tail.starts
    assert product.outvars[0].aval.shape == (4, 4)
    _assert_same(trace.closed, hoisted, example)


def _squares(dtype, steps=400):
    """The gradient is Σ_t (x_tᵀ x_t)²: not linear in the product, so the steps are added up one at a time."""

    @jax.custom_vjp
    def term(w, x):
        return jnp.sum(w[0, 0] * x[0])

    term.defvjp(lambda w, x: (term(w, x), x), lambda x, r: (jnp.square(jnp.outer(x, x * r)), jnp.zeros_like(x)))

    def loss(w, x):
        return jax.lax.scan(lambda total, row: (total + term(w, row), None), jnp.zeros((), x.dtype), x)[0]

    return _trace_bare(loss, jnp.ones((3, 3), dtype), jnp.full((steps, 3), 0.3, dtype))


def test_steps_that_do_not_commute_with_the_sum_are_added_up_in_one_equation():
    trace, example = _squares(jnp.float64)
    hoisted = _hoist(trace)
    (jit,) = _find(hoisted, primitives.jit_p)
    assert [v.aval.dtype for v in jit.outvars] == [jnp.float64]
    assert [v.aval.shape for v in jit.outvars] == [(3, 3)]
    _assert_same(trace.closed, hoisted, example)


def test_steps_of_a_narrow_dtype_are_added_up_in_float32():
    trace, example = _squares(jnp.bfloat16)
    hoisted = _hoist(trace)
    (jit,) = _find(hoisted, primitives.jit_p)
    assert [v.aval.dtype for v in jit.outvars] == [jnp.float32]
    carried = {v.aval.dtype for sub in sub_jaxprs(jit) for eqn in sub.eqns for v in eqn.outvars}
    assert carried == {jnp.dtype(jnp.float32)}
    (gradient,) = (hoisted.out_avals[i] for i in trace.gradient_names)
    assert gradient.dtype == jnp.bfloat16
    exact = 400 * float(jnp.square(jnp.square(jnp.bfloat16(0.3)).astype(float)))
    (found,) = (compute(hoisted, example)[i] for i in trace.gradient_names)
    np.testing.assert_allclose(np.asarray(found, float), exact, rtol=2**-7)


# ---- carries that no step changes, remat and branches ---------------------------------------------------------------


def test_a_carry_that_no_step_changes_becomes_a_constant():
    trace, example = _trace("penalty_alone_on_a_parameter_of_scanned_layers")
    after = loops.drop_constant_carries(trace.closed)
    before, after_scan = (_find(closed, primitives.scan_p)[-1] for closed in (trace.closed, after))
    assert after_scan.params["num_carry"] == before.params["num_carry"] - 1
    assert after_scan.params["num_consts"] == before.params["num_consts"] + 1
    assert loops.drop_constant_carries(after) is after
    _assert_same(trace.closed, after, example)


def test_flattening_leaves_no_call_behind():
    trace, _ = _trace("scanned_layers_rematerialised")
    names = {eqn.primitive.name for eqn in trace.closed.jaxpr.eqns}
    assert not names & {"jit", "pjit", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call"}
    assert names


def test_a_rematerialised_program_keeps_the_barrier_that_makes_it_one():
    def loss(w, x):
        return jnp.mean(jnp.square(jax.checkpoint(lambda h: jnp.tanh(jnp.tanh(h @ w) @ w))(x)))

    trace = trace_example(loss, (jnp.ones((3, 3)), jnp.ones((4, 5, 3))), Options())
    for closed in (trace.closed, _hoist(trace)):
        assert _find(closed, barrier_p)


def test_a_cond_that_gives_gradients_beside_other_values_becomes_two():
    def backward(s, r):
        yes, no = lambda: (jnp.outer(s, r), r - 1), lambda: (jnp.outer(r, s), r * s)
        gradient, value = jax.lax.cond(jnp.sum(s) > 0, yes, no)
        return gradient.T, value

    example = [jnp.arange(4.0), jnp.arange(4.0) + 1]
    closed = flatten(jax.make_jaxpr(backward)(*example))
    after = split_branches(closed, gradients={0}, depends=[True, True])
    assert [len(eqn.outvars) for eqn in _find(closed, primitives.cond_p)] == [2]
    assert [len(eqn.outvars) for eqn in _find(after, primitives.cond_p)] == [1, 1]
    assert split_branches(after, gradients={0}, depends=[True, True]) is after
    assert [tail.starts[0].primitive for tail in find_tails(after.jaxpr, {0}, [True, True])] == [primitives.cond_p]
    _assert_same(closed, after, example)


def test_a_cond_stays_whole_where_its_gradients_are_no_larger_than_what_they_are_made_from():
    def backward(s, r):
        return jax.lax.cond(jnp.sum(s) > 0, lambda: (s * r, r - 1), lambda: (r, s))

    closed = flatten(jax.make_jaxpr(backward)(jnp.arange(4.0), jnp.arange(4.0)))
    assert split_branches(closed, gradients={0}, depends=[True, True]) is closed
