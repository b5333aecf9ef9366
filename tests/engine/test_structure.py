"""What surgery must not do: hold B gradients, or undo a rematerialisation. Read off the programs, most compiled."""

import math
import re

import jax
import jax.numpy as jnp
import pytest

from pegprof import grad_stats, make_plan
from pegprof.engine.jaxpr import barrier_p
from pegprof.engine.rules import find_strategy
from pegprof.models.problem import load_problem

B = 6


def _compiled(function, problem):
    return jax.jit(function).lower(problem.abstract_params(), problem.abstract_batch(B)).compile()


def _temp_bytes(function, problem):
    return _compiled(function, problem).memory_analysis().temp_size_in_bytes


def _vmapped(problem):
    def mean_of_squares(params, batch):
        per_example = jax.vmap(jax.grad(problem.loss), in_axes=(None, 0))(params, batch)
        return jax.tree.map(lambda g: (g.mean(0), (g**2).mean(0)), per_example)

    return mean_of_squares


def _buffer_sizes(compiled) -> set[int]:
    """The number of elements of every floating-point array in the optimized program."""
    shapes = re.findall(r"\bf(?:32|64|16)\[([\d,]*)\]", compiled.as_text())
    return {math.prod(int(n) for n in shape.split(",") if n) for shape in shapes}


def _sizes_of_stacked_gradients(problem) -> set[int]:
    """B×V×D, B×D×E: of every parameter whose gradient is not itself the size of an activation."""
    shapes = {row.parameter: row.shape for row in _plan(problem).rows if row.strategy != "direct"}
    assert len(shapes) > 6
    return {B * math.prod(shape) for shape in shapes.values()}


def _plan(problem):
    return make_plan(problem.loss, problem.abstract_params(), problem.abstract_batch(B))


@pytest.fixture(scope="module")
def tied_transformer():
    # No product of these sizes with B is that of an activation: T = 10, D = 28, F = 4·28, V = 256.
    return load_problem("transformer-tiny", {"seq_len": "10", "width": "28", "layers": "2"})


def test_no_buffer_holds_the_gradients_of_all_examples(tied_transformer):
    held = _buffer_sizes(_compiled(grad_stats(tied_transformer.loss), tied_transformer))
    assert not held & _sizes_of_stacked_gradients(tied_transformer)


def test_the_test_above_would_see_such_a_buffer(tied_transformer):
    held = _buffer_sizes(_compiled(_vmapped(tied_transformer), tied_transformer))
    assert held & _sizes_of_stacked_gradients(tied_transformer)


@pytest.mark.full_compile
def test_a_hurry_changes_nothing_of_what_these_tests_read():
    problem, compiled = load_problem("mlp", {"width": "8"}), []
    for hurry in (False, True):
        jax.config.update("jax_disable_most_optimizations", hurry)
        compiled.append(_compiled(grad_stats(problem.loss), problem))
    slow, quick = compiled
    assert quick.as_text() == slow.as_text()
    assert quick.memory_analysis().temp_size_in_bytes == slow.memory_analysis().temp_size_in_bytes


@pytest.fixture(scope="module", params=[{"scan_layers": "true", "remat": "true"}, {"remat": "true"}], ids="+".join)
def rematerialised(request):
    """A model, and what its plain gradient needs."""
    problem = load_problem("transformer-tiny", {"layers": "3", "width": "32", "seq_len": "64", **request.param})
    return problem, _temp_bytes(jax.grad(problem.loss), problem)


@pytest.mark.parametrize("stats", [("mean", "second_moment"), ("mean", "variance", "sign_mean", "norm")])
def test_a_rematerialised_model_needs_little_more_than_its_plain_gradient(rematerialised, stats):
    problem, plain_bytes = rematerialised
    assert _temp_bytes(grad_stats(problem.loss, stats), problem) < 1.5 * plain_bytes


def _recurrent(params, x_BxTxD):
    def step(h, x):
        h = jnp.tanh(jnp.concatenate([x, h], axis=-1) @ params)
        return h, h

    h = jnp.zeros((x_BxTxD.shape[0], params.shape[1]))
    return jnp.mean(jnp.square(jax.lax.scan(step, h, jnp.moveaxis(x_BxTxD, 1, 0))[1]))


def test_on_a_cpu_factors_stacked_over_time_take_no_more_memory_than_the_plain_gradient():
    arguments = jnp.ones((64 + 256, 256)), jnp.ones((32, 50, 64))
    on_cpu = make_plan(_recurrent, *arguments, backend="cpu")
    assert on_cpu.microbatch_size < 32
    assert make_plan(_recurrent, *arguments, backend="tpu").microbatch_size == 32

    def temp_bytes(fn):
        return jax.jit(fn).lower(*arguments).compile().memory_analysis().temp_size_in_bytes

    planned = temp_bytes(grad_stats(_recurrent, backend="cpu"))
    all_at_once = temp_bytes(grad_stats(_recurrent, backend="cpu", microbatch_size=32))
    assert planned <= 1.1 * temp_bytes(jax.grad(_recurrent)) < all_at_once


def test_what_follows_a_tail_waits_for_it():
    def loss(params, x):
        return jnp.mean(jnp.square(jnp.tanh(x @ params["in"]) @ params["out"]))

    params, x = {"in": jnp.ones((90, 80)), "out": jnp.ones((80, 70))}, jnp.ones((4, 5, 90))
    plan = make_plan(loss, params, x, backend="cpu", microbatch_size=4)
    assert all(find_strategy(row.strategy).recomputes for row in plan.rows)
    program = jax.make_jaxpr(grad_stats(loss, backend="cpu", microbatch_size=4))(params, x)
    assert len([eqn for eqn in program.jaxpr.eqns if eqn.primitive is barrier_p]) == 2
