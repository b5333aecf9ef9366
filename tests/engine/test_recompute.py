"""What a tail recomputes: elementwise functions of one value that is kept anyway, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pegprof.engine.accumulators import MEAN, SQUARE
from pegprof.engine.options import Options
from pegprof.engine.planner import find_sites
from pegprof.engine.trace import trace_example
from tests.engine.cases import case, tolerance
from tests.fuzz.check import tails_of
from tests.oracles import quick_jit
from tests.programs import PROGRAMS


def _site_of(loss, params, x, parameter):
    trace = trace_example(loss, (params, x), Options())
    (site,) = [site for site in find_sites(trace, (MEAN, SQUARE)).sites() if parameter in site.names]
    return site


def _params():
    return {"in": jnp.ones((8, 12)), "out": jnp.ones((12, 3)), "scale": jnp.ones(8)}


X = jnp.ones((4, 6, 8))


def test_an_activation_function_is_recomputed_from_its_argument():
    site = _site_of(lambda p, x: jnp.mean(jnp.tanh(jax.nn.gelu(x @ p["in"]) @ p["out"])), _params(), X, "out")
    names = {eqn.primitive.name for eqn in site.recomputing.prelude}
    assert "tanh" in names
    assert not names & {"dot_general"}


def test_a_normalised_value_is_recomputed_from_what_was_normalised():
    def loss(p, x):
        h = jnp.tanh(x) + x  # two large values: to be kept, not recomputed
        h = h * jax.lax.rsqrt(jnp.mean(jnp.square(h), axis=-1, keepdims=True)) * p["scale"]
        return jnp.mean(jnp.tanh(h @ p["in"]) @ p["out"])

    site = _site_of(loss, _params(), X, "in")
    names = {eqn.primitive.name for eqn in site.recomputing.prelude}
    assert "mul" in names
    assert not names & {"rsqrt", "reduce_sum"}  # a number for each position is stored without regret


def test_an_operand_that_is_the_batch_itself_is_taken_as_it_is():
    site = _site_of(lambda p, x: jnp.mean(jnp.tanh(x @ p["in"]) @ p["out"]), _params(), X, "in")
    assert not [eqn for eqn in site.recomputing.prelude if eqn.primitive.name == "tanh"]


def test_the_recomputing_tail_gives_the_same_gradients():
    loss = lambda p, x: jnp.mean(jnp.tanh(jax.nn.gelu(x @ p["in"]) @ p["out"]))
    site = _site_of(loss, _params(), X, "out")
    assert site.recomputing.equations == site.tail.equations
    assert site.recomputing.outputs == site.tail.outputs
    assert len(site.recomputing.inputs) <= len(site.tail.inputs) + 2


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", list(PROGRAMS)[5::16])
def test_a_tail_gives_the_programs_gradients_as_it_is_recomputed_and_by_its_structures(name):
    loss, params, batch = case(name, 3)
    trace = trace_example(loss, (params, batch), Options(keep_batch_dim=PROGRAMS[name].keep_batch_dim))
    cut = find_sites(trace, [MEAN])
    inputs = zip(trace.inputs((params, batch)), trace.depends, strict=True)
    first = [x[0] if own else x for x, own in inputs]
    labels = []

    @quick_jit
    def run(*first):
        found = list(tails_of(cut, first))
        labels[:] = [label for label, _, _ in found]
        return [(before, after) for _, before, after in found]

    results = run(*first)
    for label, (before, after) in zip(labels, results, strict=True):
        for a, b in zip(before, after, strict=True):
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            largest = np.max(np.abs(a), initial=0.0)
            np.testing.assert_allclose(a, b, atol=tolerance(PROGRAMS[name]) * largest, err_msg=str(label))
