"""How parameters lie on a mesh, and that all that mirrors them lies as they do."""

import jax
import jax.numpy as jnp
import optax
import pytest

from pegprof.measure.worker.programs import make_optimizer
from pegprof.measure.worker.shardings import Shardings, abstract_mesh, parameter_specs
from pegprof.models.problem import Problem
from pegprof.result.steps import STEPS

SIZES = {"data": 2, "fsdp": 4}
MESH = abstract_mesh(SIZES)


def twins(sharding=None):
    """Two matrices of the same shape, and a parameter with the name of a statistic."""
    return Problem(
        name="twins",
        init=lambda key: {"down": jnp.zeros((8, 8)), "mean": {"down": jnp.zeros((8, 8))}, "up": jnp.zeros((8, 8))},
        loss=lambda params, x: jnp.mean(x @ params["up"] @ params["down"] + params["mean"]["down"][0]),
        batch=lambda key, B: jnp.ones((B, 8)),
        sharding=sharding,
    )


def own_way(params, mesh):
    return {"down": jax.P("fsdp", None), "mean": jax.P(), "up": jax.P(None, "fsdp")}


SPECS = {"down": jax.P("fsdp", None), "mean": {"down": jax.P()}, "up": jax.P(None, "fsdp")}


def specs_of(tree):
    return jax.tree.map(lambda sharding: sharding.spec, tree)


def test_without_a_function_each_parameter_follows_the_rule():
    assert parameter_specs(twins(), SIZES) == [jax.P("fsdp", None)] * 3


def test_two_parameters_of_one_shape_can_lie_in_two_ways():
    problem = twins(own_way)
    found = Shardings.of(problem, MESH).mirrored(problem.abstract_params())
    assert specs_of(found) == SPECS


def test_statistics_lie_as_their_parameters_and_what_has_another_shape_is_left_open():
    problem = twins(own_way)
    params = problem.abstract_params()
    by_example = jax.tree.map(lambda x: jax.ShapeDtypeStruct((16,), x.dtype), params)
    stats = {"mean": params, "norm": by_example, "norms": jax.ShapeDtypeStruct((16,), jnp.float32), "variance": params}
    found = Shardings.of(problem, MESH).mirrored(stats)
    assert specs_of(found["mean"]) == specs_of(found["variance"]) == SPECS
    assert jax.tree.leaves((found["norm"], found["norms"])) == []


@pytest.mark.parametrize("name", STEPS)
def test_moments_of_an_optimizer_lie_as_their_parameters(name):
    problem = twins(own_way)
    params = problem.abstract_params()
    state = jax.eval_shape(make_optimizer(STEPS[name].optimizer).init, params)
    found = Shardings.of(problem, MESH).mirrored((params, state))
    assert specs_of(found[0]) == SPECS
    for shape, sharding in zip(jax.tree.leaves(state), jax.tree.structure(state).flatten_up_to(found[1]), strict=True):
        assert (sharding is not None) == (shape.shape == (8, 8))
    moments = [tree for tree in jax.tree.leaves(found[1], is_leaf=lambda x: isinstance(x, dict)) if tree]
    assert moments
    assert all(specs_of(tree) == SPECS for tree in moments)


def test_a_lone_array_mirrors_itself():
    problem = Problem(
        name="lone",
        init=lambda key: jnp.zeros((8, 3)),
        loss=lambda w, x: jnp.mean(x @ w),
        batch=lambda key, B: jnp.ones((B, 8)),
        sharding=lambda w, mesh: jax.P("fsdp"),
    )
    w = problem.abstract_params()
    state = jax.eval_shape(optax.adam(0.1).init, w)
    found = Shardings.of(problem, MESH).mirrored((w, state))
    assert [sharding.spec for sharding in jax.tree.leaves(found)] == [jax.P("fsdp")] * 3


class Static:
    """A static field that is equal to no other."""


def test_trees_are_told_by_their_paths_where_classes_made_anew_differ():
    @jax.tree_util.register_pytree_with_keys_class
    class Layer:
        def __init__(self, kernel, static=None):
            self.kernel, self.static = kernel, static or Static()

        def tree_flatten_with_keys(self):
            return [(jax.tree_util.GetAttrKey("kernel"), self.kernel)], self.static

        @classmethod
        def tree_unflatten(cls, static, children):
            return cls(*children, static)

    problem = Problem(
        name="layer",
        init=lambda key: Layer(jnp.zeros((8, 3))),
        loss=lambda layer, x: jnp.mean(x @ layer.kernel),
        batch=lambda key, B: jnp.ones((B, 8)),
        sharding=lambda layer, mesh: jax.tree.map(lambda x: jax.P("fsdp"), layer),
    )
    found = Shardings.of(problem, MESH).mirrored({"mean": problem.abstract_params()})
    assert found["mean"].kernel.spec == jax.P("fsdp")
