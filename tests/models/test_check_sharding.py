"""What is said of a sharding that parameters cannot have, word for word; and what comes of one that they can."""

import jax
import jax.numpy as jnp
import pytest

from pegprof.errors import ExitCode, PegprofError
from pegprof.measure.worker.shardings import abstract_mesh
from pegprof.models.check_sharding import HINT_OF_TREE, check_sharding
from pegprof.user_code import home_of

PARAMS = {
    "embed": jax.ShapeDtypeStruct((12, 8), jnp.float32),
    "layer": {"bias": jax.ShapeDtypeStruct((8,), jnp.float32), "kernel": jax.ShapeDtypeStruct((8, 6), jnp.float32)},
}
SIZES = {"data": 2, "fsdp": 4}
MESH = abstract_mesh({**SIZES, "model": 1})


def specs(sharding):
    return check_sharding(sharding, PARAMS, mesh=MESH, sizes=SIZES)


def test_each_parameter_has_the_spec_of_its_place():
    found = specs(lambda params, mesh: {"embed": jax.P("fsdp"), "layer": {"bias": None, "kernel": jax.P("fsdp", None)}})
    assert found == [jax.P("fsdp"), jax.P(), jax.P("fsdp", None)]


def test_a_subtree_can_have_one_spec():
    assert specs(lambda params, mesh: jax.P("fsdp")) == [jax.P("fsdp")] * 3
    assert specs(lambda params, mesh: {"embed": jax.P(), "layer": jax.P("fsdp")}) == [jax.P(), *[jax.P("fsdp")] * 2]


def test_a_named_sharding_of_the_mesh_is_as_good_as_a_spec():
    found = specs(lambda params, mesh: jax.tree.map(lambda x: jax.NamedSharding(mesh, jax.P("fsdp")), params))
    assert found == [jax.P("fsdp")] * 3


def test_axes_that_the_command_line_leaves_out_have_one_device_and_shard_nothing():
    assert specs(lambda params, mesh: {"embed": jax.P(("fsdp", "model")), "layer": jax.P("model")}) == [
        jax.P("fsdp"),
        jax.P(None),
        jax.P(None),
    ]


def test_several_axes_can_share_one_of_a_parameter():
    assert specs(lambda params, mesh: {"embed": jax.P(None, ("fsdp", "data")), "layer": None})[0] == jax.P(
        None, ("fsdp", "data")
    )


def no_fsdp(params, mesh):
    return {"embed": mesh.shape["tensor"], "layer": None}


@pytest.mark.parametrize(
    ("sharding", "what", "hint"),
    [
        (lambda params, mesh: {"embed": jax.P()}, "sharding says nothing of the parameter layer/bias", HINT_OF_TREE),
        (lambda params, mesh: [jax.P()], "sharding says nothing of the parameter embed", HINT_OF_TREE),
        (
            lambda params, mesh: {"embed": jax.P(), "layer": jax.P(), "layers": jax.P()},
            "sharding has layers, which is no parameter",
            HINT_OF_TREE,
        ),
        (
            lambda params, mesh: {"embed": "fsdp", "layer": jax.P()},
            "sharding has a str for the parameter embed",
            HINT_OF_TREE,
        ),
        (
            lambda params, mesh: {"embed": jax.NamedSharding(abstract_mesh({"x": 8}), jax.P("x")), "layer": None},
            "sharding puts the parameter embed on another mesh: x=8",
            "use the mesh that it is given, data=2,fsdp=4,model=1, or return jax.P(...)",
        ),
        (
            lambda params, mesh: {"embed": jax.P("fdsp"), "layer": None},
            "the parameter embed of shape (12, 8) cannot be sharded over 'fdsp': the mesh has data, fsdp, model",
            "did you mean 'fsdp'?",
        ),
        (
            lambda params, mesh: {"embed": jax.P("fsdp", "fsdp"), "layer": None},
            "the parameter embed of shape (12, 8) cannot be sharded over fsdp twice: P('fsdp', 'fsdp')",
            "name each axis of the mesh once",
        ),
        (
            lambda params, mesh: {"embed": None, "layer": jax.P(None, "fsdp")},
            "the parameter layer/bias of shape (8,) cannot be sharded as P(None, 'fsdp')",
            "its rank is 1, and the spec has 2 entries",
        ),
        (
            lambda params, mesh: {"embed": None, "layer": {"bias": None, "kernel": jax.P(None, "fsdp")}},
            "the parameter layer/kernel of shape (8, 6) cannot be cut into 4 parts along its axis 1, for fsdp",
            "leave an axis that is not divisible unsharded: None in its place",
        ),
    ],
)
def test_what_parameters_cannot_have_is_refused_in_words_at_the_users_line(sharding, what, hint):
    with pytest.raises(PegprofError) as caught:
        specs(sharding)
    assert (caught.value.what, caught.value.hint) == (what, hint)
    assert caught.value.where == home_of(sharding)
    assert caught.value.exit_code == ExitCode.USAGE


def test_what_the_function_raises_is_told_with_its_line():
    with pytest.raises(PegprofError, match="sharding raised KeyError: 'tensor'") as caught:
        specs(no_fsdp)
    assert caught.value.where == f"tests/models/test_check_sharding.py:{no_fsdp.__code__.co_firstlineno + 1}"


def test_a_tree_is_no_function():
    with pytest.raises(PegprofError, match="sharding is a dict, not a function") as caught:
        specs({"embed": jax.P()})
    assert "sharding=lambda params, mesh" in caught.value.hint
