"""What a tail recomputes: elementwise functions of one value that is kept anyway, and nothing else."""

import jax
import jax.numpy as jnp
import pytest

from pegprof.engine.accumulators import MEAN, SQUARE
from pegprof.engine.options import Options
from pegprof.engine.planner import find_sites
from pegprof.engine.trace import trace_example

pytestmark = pytest.mark.smoke


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
