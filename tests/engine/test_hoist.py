"""The Jaxpr-to-Jaxpr passes: what a program computes stays the same, and nothing is moved twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pegprof import grad_stats, make_plan
from pegprof.engine.hoist import hoist
from pegprof.engine.jaxpr import barrier_p, primitives
from pegprof.engine.strategies import STRATEGIES
from pegprof.engine.tails import find_tails
from pegprof.engine.trace import Roles, trace_example
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
    "cond_with_a_predicate_that_differs",
    "weights_chosen_by_the_time_step",
]


def _trace(name):
    loss, params, batch = case(name, 3)
    roles = Roles(keep_batch_dim=PROGRAMS[name].keep_batch_dim)
    trace = trace_example(loss, (params, batch), roles)
    example = [x[0] if own else x for x, own in zip(trace.inputs((params, batch)), trace.depends, strict=True)]
    return trace, example


def _hoist(closed, trace):
    return hoist(closed, gradients=trace.gradient_names, depends=trace.depends)


@pytest.mark.parametrize("name", LOOPS)
def test_a_hoisted_program_computes_what_it_did_before(name):
    trace, example = _trace(name)
    before, after = compute(trace.closed, example), compute(_hoist(trace.closed, trace), example)
    for a, b in zip(before, after, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", LOOPS)
def test_hoisting_twice_is_hoisting_once(name):
    trace, _ = _trace(name)
    once = _hoist(trace.closed, trace)
    assert str(_hoist(once, trace)) == str(once)


def test_a_program_with_nothing_to_hoist_stays_as_it_is():
    trace, _ = _trace("mlp_regression")
    assert str(_hoist(trace.closed, trace)) == str(trace.closed)


def test_a_weight_shared_over_time_is_contracted_after_the_loop_over_time_as_well():
    trace, _ = _trace("rnn_by_scan")
    hoisted = _hoist(trace.closed, trace)
    tails = find_tails(hoisted.jaxpr, trace.gradient_names, trace.depends)
    steps = case("rnn_by_scan", 3)[2].shape[1]
    contracted = [eqn for tail in tails for eqn in tail.starts if eqn.primitive is primitives.dot_general_p]
    assert contracted
    assert all(eqn.invars[0].aval.shape[0] == steps for eqn in contracted)


def test_the_loop_that_remains_no_longer_carries_the_gradient():
    trace, _ = _trace("rnn_by_scan")
    shapes = {name: trace.shape_of(name) for name in trace.names}
    hoisted = _hoist(trace.closed, trace)
    carried = [
        v.aval.shape
        for eqn in hoisted.jaxpr.eqns
        if eqn.primitive is primitives.scan_p
        for v in eqn.outvars[: eqn.params["num_carry"]]
    ]
    matrices = [shape for shape in shapes.values() if len(shape) == 2]
    assert matrices
    assert not set(carried) & set(matrices)


def test_flattening_leaves_no_call_behind():
    trace, _ = _trace("scanned_layers_rematerialised")
    names = {eqn.primitive.name for eqn in trace.closed.jaxpr.eqns}
    assert not names & {"jit", "pjit", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call"}
    assert jax.tree.leaves(names)


def test_a_rematerialised_program_keeps_the_barrier_that_makes_it_one():
    def loss(w, x):
        return jnp.mean(jnp.square(jax.checkpoint(lambda h: jnp.tanh(jnp.tanh(h @ w) @ w))(x)))

    w, x = jnp.ones((3, 3)), jnp.ones((4, 5, 3))
    trace = trace_example(loss, (w, x), Roles())
    hoisted = hoist(trace.closed, gradients=trace.gradient_names, depends=trace.depends)
    for closed in (trace.closed, hoisted):
        assert [eqn for eqn in closed.jaxpr.eqns if eqn.primitive is barrier_p]


def test_what_follows_a_tail_waits_for_it():
    def loss(params, x):
        return jnp.mean(jnp.square(jnp.tanh(x @ params["in"]) @ params["out"]))

    params, x = {"in": jnp.ones((90, 80)), "out": jnp.ones((80, 70))}, jnp.ones((4, 5, 90))
    plan = make_plan(loss, params, x, backend="cpu", microbatch_size=4)
    assert all(STRATEGIES[row.strategy].recomputes for row in plan.rows)
    program = jax.make_jaxpr(grad_stats(loss, backend="cpu", microbatch_size=4))(params, x)
    assert len([eqn for eqn in program.jaxpr.eqns if eqn.primitive is barrier_p]) == 2
