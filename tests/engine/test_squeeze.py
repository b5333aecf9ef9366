"""Programs without axes of size one compute what they did, and hold no such axis where a rule knows how."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pegprof.engine.facts import facts_of
from pegprof.engine.jaxpr import primitives, shape_of
from pegprof.engine.options import Options
from pegprof.engine.passes.flatten import flatten
from pegprof.engine.passes.squeeze import squeeze
from pegprof.engine.trace import trace_example
from pegprof.models.problem import load_problem
from tests.engine.cases import case, compute
from tests.programs import PROGRAMS

pytestmark = pytest.mark.usefixtures("x64")


def _gradient(name):
    """The flat gradient of one example as a batch of one, before anything is squeezed, and its inputs."""
    loss, params, batch = case(name, 2)
    example = jax.tree.map(lambda x: x[:1] if PROGRAMS[name].keep_batch_dim else x[0], batch)
    leaves, tree = jax.tree.flatten((params, example))
    fun = lambda *flat: jax.tree.leaves(jax.grad(loss)(*jax.tree.unflatten(tree, flat)))
    return flatten(jax.make_jaxpr(fun)(*leaves)), leaves


@pytest.mark.parametrize("name", [*list(PROGRAMS)[::7], "tied_embedding", "mixture_of_experts_top_k_gathered"])
def test_a_squeezed_program_computes_what_it_did_before(name):
    closed, inputs = _gradient(name)
    for before, after in zip(compute(closed, inputs), compute(squeeze(closed), inputs), strict=True):
        assert before.shape == after.shape
        tolerance = 1e-12 if before.dtype == jnp.float64 else 1e-2
        np.testing.assert_allclose(
            np.asarray(before, np.float64), np.asarray(after, np.float64), rtol=tolerance, atol=tolerance
        )


def test_an_example_is_traced_to_the_same_program_bare_or_as_a_batch_of_one():
    problem = load_problem("transformer-tiny", {"layers": "1", "seq_len": "16"})
    args = problem.abstract_params(), problem.abstract_batch(4)

    def primitives_of(keep_batch_dim):
        trace = trace_example(problem.loss, args, Options(keep_batch_dim=keep_batch_dim))
        at_the_door = (primitives.squeeze_p, primitives.reshape_p)  # an input may lose its axis of size one
        return [eqn.primitive.name for eqn in trace.closed.jaxpr.eqns if eqn.primitive not in at_the_door]

    assert primitives_of(True) == primitives_of(False)


def test_no_elementwise_value_of_a_transformer_has_an_axis_of_size_one():
    problem = load_problem("transformer-tiny", {"layers": "1", "seq_len": "16"})
    trace = trace_example(problem.loss, (problem.abstract_params(), problem.abstract_batch(4)), Options())
    shapes = [shape_of(v) for eqn in trace.closed.jaxpr.eqns if facts_of(eqn).elementwise for v in eqn.outvars]
    assert len(shapes) > 50
    assert not [shape for shape in shapes if 1 in shape]
