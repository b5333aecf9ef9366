"""Parameters with logical axis names lie on a mesh as the names say, and losses are what they are without."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import pegprof
from pegprof.errors import PegprofError
from pegprof.measure.worker.shardings import abstract_mesh, parameter_specs
from pegprof.models.logical_axes import TABLE, spec_of
from pegprof.models.problem import Problem
from pegprof.targets.meshes import AXES

INIT = nn.initializers.lecun_normal()
SIZES = {"data": 2, "fsdp": 2, "model": 2}
MESH = abstract_mesh(SIZES)
EXAMPLE = {"x": np.zeros(8, np.float32)}


def loss(model, batch):
    return jnp.mean(model(batch["x"]) ** 2)


def plain(init, names):
    return init


def mesh_axes(init, names):
    return nn.with_partitioning(init, tuple({"embed": "fsdp", "mlp": "model"}[name] for name in names))


class Linen(nn.Module):
    named: object

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16, kernel_init=self.named(INIT, ("embed", "mlp")))(x)
        return nn.Dense(8, kernel_init=self.named(INIT, ("mlp", "embed")), use_bias=False)(jnp.tanh(x))


class Nnx(nnx.Module):
    def __init__(self, rngs, *, up=None, **metadata):
        self.up = nnx.Linear(8, 16, kernel_init=up or INIT, rngs=rngs)
        self.down = nnx.Param(INIT(rngs.params(), (16, 8)), **metadata)

    def __call__(self, x):
        return jnp.tanh(self.up(x)) @ self.down


def named_nnx(rngs):
    return Nnx(rngs, up=nnx.with_partitioning(INIT, ("embed", "mlp")), out_sharding=("mlp", "embed"))


SPECS = [jax.P(), jax.P("fsdp", "model"), jax.P("model", "fsdp")]


@pytest.mark.parametrize("named", [nn.with_logical_partitioning, mesh_axes])
def test_a_linen_module_with_names_is_the_module_without_and_lies_as_they_say(named):
    problem, other = (pegprof.from_flax(Linen(each), loss, EXAMPLE) for each in (named, plain))
    params, batch = problem.init(jax.random.key(1)), problem.batch(jax.random.key(2), 4)
    assert jax.tree.structure(params) == jax.tree.structure(other.init(jax.random.key(1)))
    np.testing.assert_allclose(problem.loss(params, batch), other.loss(params, batch))
    assert parameter_specs(problem, SIZES) == SPECS


def test_an_nnx_module_with_names_is_the_module_without_and_lies_as_they_say():
    problem, other = (pegprof.from_nnx(each, loss, EXAMPLE) for each in (named_nnx, Nnx))
    params, batch = problem.init(jax.random.key(1)), problem.batch(jax.random.key(2), 4)
    assert jax.tree.structure(params) == jax.tree.structure(other.init(jax.random.key(1)))
    np.testing.assert_allclose(problem.loss(params, batch), other.loss(params, batch))
    assert parameter_specs(problem, SIZES) == [SPECS[2], *SPECS[:2]]


def test_a_module_without_names_follows_the_rule():
    for problem in (pegprof.from_flax(Linen(plain), loss, EXAMPLE), pegprof.from_nnx(Nnx, loss, EXAMPLE)):
        assert set(parameter_specs(problem, {"data": 4, "fsdp": 2})) >= {jax.P("fsdp"), jax.P("fsdp", None)}


@pytest.mark.parametrize(
    ("names", "shape", "spec"),
    [
        (("embed", "heads", "kv"), (64, 8, 16), ("fsdp", "model", None)),
        (("embed", "heads", "kv"), (64, 3, 16), ("fsdp", None, "model")),
        (("vocab", "embed"), (101, 64), (None, "fsdp")),
        (("layers", "mlp", "embed"), (12, 64, 32), (None, "model", "fsdp")),
        (("model", "fsdp"), (4, 4), ("model", "fsdp")),
        ((None, "mlp"), (4, 4), (None, "model")),
        (("norm",), (64,), (None,)),
        ((), (64,), ()),
        (None, (64,), ()),
    ],
)
def test_names_become_axes_that_are_free_and_divide(names, shape, spec):
    assert spec_of(names, shape, MESH) == jax.P(*spec)


def test_the_table_has_axes_of_the_mesh_alone():
    assert set(TABLE.values()) == set(AXES)


def boxed(named):
    module = Linen(named)
    return Problem(
        name="boxed",
        init=lambda key: module.init(key, jnp.zeros((1, 8)))["params"],
        loss=lambda params, x: jnp.mean(module.apply({"params": params}, x) ** 2),
        batch=lambda key, B: jax.random.normal(key, (B, 8)),
    )


def test_a_problem_made_by_hand_may_have_logical_boxes():
    problem = boxed(nn.with_logical_partitioning)
    assert parameter_specs(problem, SIZES) == SPECS
    params, batch = problem.init(jax.random.key(1)), problem.batch(jax.random.key(2), 4)
    found = pegprof.grad_stats(problem.loss)(params, batch)["mean"]["Dense_0"]["kernel"]
    np.testing.assert_allclose(found.value, jax.grad(problem.loss)(params, batch)["Dense_0"]["kernel"].value, rtol=1e-5)


def test_boxes_that_constrain_to_a_mesh_are_refused_in_words():
    problem = boxed(mesh_axes)
    with pytest.raises(PegprofError, match="init returns parameters in the boxes") as caught:
        parameter_specs(problem, SIZES)
    assert "pegprof.from_flax" in caught.value.hint
    assert caught.value.where.startswith("tests/models/test_logical_axes.py:")


def test_names_that_occur_twice_are_told_at_the_users_loss():
    module = nn.Dense(8, kernel_init=nn.with_logical_partitioning(INIT, ("embed", "embed")))
    with pytest.raises(PegprofError, match="occur more than once") as caught:
        parameter_specs(pegprof.from_flax(module, loss, EXAMPLE), SIZES)
    assert caught.value.where.startswith("tests/models/test_logical_axes.py:")
