"""The zoo's models: their sizes to the parameter, and what every zoo loss promises."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model_zoo.transformer import Config, Transformer
from pegprof.problem import Problem, load_problem, zoo_names

pytestmark = pytest.mark.usefixtures("no_rank_promotion", "quick_compile")

B = 3


def shrunken(name: str, **options: object) -> Problem:
    """A model of the zoo with no axis longer than 16, and two layers: any model, also one added tomorrow."""
    sizes = {key: min(value, 16) for key, value in load_problem(name).options.items() if type(value) is int}
    return load_problem(name, {**sizes, "layers": 2, **options})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A problem with values: compiled, since op by op the small arrays of a test take longer than their program."""

    problem: Problem
    params: Any
    batch: Any
    loss: Callable[..., jax.Array]
    value_and_grad: Callable[..., Any]


def make(problem: Problem) -> Model:
    return Model(
        problem=problem,
        params=jax.jit(problem.init)(jax.random.key(0)),
        batch=problem.batch(jax.random.key(1), B),
        loss=jax.jit(problem.loss),
        value_and_grad=jax.jit(jax.value_and_grad(problem.loss)),
    )


@pytest.fixture(params=zoo_names(), scope="module")
def model(request, quick_compile) -> Model:
    return make(shrunken(request.param))


def example(batch, i):
    return jax.tree.map(lambda leaf: leaf[i], batch)


def sizes_by_name(params) -> dict[str, int]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path): math.prod(leaf.shape) for path, leaf in leaves}


# Sizes.


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mlp", (784 + 1) * 1024 + (1024 + 1) * 1024 + (1024 + 1) * 10),
        ("cnn", (9 * 3 + 1) * 32 + (9 * 32 + 1) * 64 + (9 * 64 + 1) * 128 + (4 * 4 * 128 + 1) * 10),
        ("transformer-tiny", 12 * 2 * 64**2 + (256 + 128) * 64 + (2 * 2 + 1) * 64),
        ("transformer-151m", 12 * 12 * 1024**2 + (32100 + 512) * 1024 + (2 * 12 + 1) * 1024),
    ],
)
def test_a_model_has_the_parameters_of_its_architecture(name, expected):
    assert sum(sizes_by_name(load_problem(name).abstract_params()).values()) == expected


def test_transformer_151m_has_the_papers_parameters_outside_embeddings_and_norms():
    sizes = sizes_by_name(load_problem("transformer-151m").abstract_params())
    assert sum(size for name, size in sizes.items() if "kernel" in name) == 150_994_944


def test_scanned_layers_have_the_same_parameters():
    plain, scanned = (load_problem("transformer-151m", {"scan_layers": scan}) for scan in (False, True))
    count = [sum(sizes_by_name(problem.abstract_params()).values()) for problem in (plain, scanned)]
    assert count[0] == count[1]


def test_the_tiny_transformer_is_one_where_activations_dominate():
    options = load_problem("transformer-tiny").options
    assert options["seq_len"] >= options["width"]


def test_a_transformer_processes_all_its_positions():
    model = make(shrunken("transformer-tiny", seq_len=7))
    _, grads = model.value_and_grad(model.params, model.batch)
    assert grads["positions"].shape == (7, 16)
    assert jnp.all(jnp.any(grads["positions"] != 0, axis=1))


# What every zoo model promises.


@pytest.mark.parametrize("name", zoo_names())
def test_parameters_are_float32_and_batches_are_float32_or_integers(name):
    problem = load_problem(name)
    assert {leaf.dtype for leaf in jax.tree.leaves(problem.abstract_params())} == {jnp.dtype("float32")}
    assert {leaf.dtype for leaf in jax.tree.leaves(problem.abstract_batch(B))} <= {
        jnp.dtype("float32"),
        jnp.dtype("int32"),
    }


@pytest.mark.parametrize("name", zoo_names())
def test_a_batch_has_B_examples(name):
    assert {leaf.shape[0] for leaf in jax.tree.leaves(load_problem(name).abstract_batch(5))} == {5}


def test_a_bare_example_has_the_loss_of_a_batch_of_one(model):
    assert not model.problem.keep_batch_dim
    bare = model.loss(model.params, example(model.batch, 1))
    np.testing.assert_allclose(bare, model.loss(model.params, example(model.batch, slice(1, 2))), rtol=1e-6)


def test_the_loss_of_a_batch_is_the_mean_of_those_of_its_examples(model):
    losses = [model.loss(model.params, example(model.batch, i)) for i in range(B)]
    np.testing.assert_allclose(model.loss(model.params, model.batch), np.mean(losses), rtol=1e-6)
    assert len({float(loss) for loss in losses}) == B


def test_every_parameter_gets_a_gradient(model):
    _, grads = model.value_and_grad(model.params, model.batch)
    assert all(jnp.any(grad != 0) for grad in jax.tree.leaves(grads))


def test_the_same_key_gives_the_same_values_and_another_key_others(model):
    again = make(shrunken(model.problem.name))
    assert_trees_equal((again.params, again.batch), (model.params, model.batch))
    assert_trees_differ(jax.jit(again.problem.init)(jax.random.key(2)), model.params)
    assert_trees_differ(again.problem.batch(jax.random.key(2), B), model.batch)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_narrow_compute_dtype_keeps_parameters_and_loss_in_float32(model, dtype):
    narrow = make(shrunken(model.problem.name, dtype=dtype))
    loss = narrow.loss(model.params, model.batch)
    assert {leaf.dtype for leaf in jax.tree.leaves((narrow.params, loss))} == {jnp.dtype("float32")}
    np.testing.assert_allclose(loss, model.loss(model.params, model.batch), rtol=0.05)


@pytest.mark.parametrize("name", zoo_names())
@pytest.mark.usefixtures("x64")
def test_float64_is_computed_in_float64(name):
    problem = shrunken(name, dtype="float64")
    loss = jax.eval_shape(problem.loss, problem.abstract_params(), problem.abstract_batch(B))
    assert loss.dtype == jnp.float64


def assert_trees_equal(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


def assert_trees_differ(left, right):
    assert any(jnp.any(a != b) for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True))


# The forms of the transformer.


@pytest.mark.parametrize(("scan_layers", "remat"), [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("model", ["transformer-tiny"], indirect=True)
def test_scanned_and_rematerialised_forms_have_the_same_loss_and_gradients(model, scan_layers, remat):
    other = shrunken("transformer-tiny", scan_layers=scan_layers, remat=remat)
    expected, expected_grads = model.value_and_grad(model.params, model.batch)
    as_other = stack_blocks if scan_layers else lambda tree: tree
    actual, actual_grads = jax.jit(jax.value_and_grad(other.loss))(as_other(model.params), model.batch)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6), actual_grads, as_other(expected_grads)
    )


def stack_blocks(tree):
    """The parameters of separate blocks as those of one scanned block."""
    blocks = [tree[f"block_{n}"] for n in range(2)]
    rest = {key: value for key, value in tree.items() if not key.startswith("block_")}
    return {**rest, "blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)}


def test_a_position_sees_only_the_past():
    problem = shrunken("transformer-tiny", seq_len=8)
    transformer = Transformer(Config(**problem.options))
    params, token_T = jax.jit(problem.init)(jax.random.key(0)), problem.batch(jax.random.key(1), 1)[0, :-1]
    changed_T = token_T.at[5].set((token_T[5] + 1) % 16)
    apply = jax.jit(transformer.apply)
    logits_TxV, changed_logits_TxV = (apply({"params": params}, tokens) for tokens in (token_T, changed_T))
    np.testing.assert_array_equal(logits_TxV[:5], changed_logits_TxV[:5])
    assert jnp.all(jnp.any(logits_TxV[5:] != changed_logits_TxV[5:], axis=1))
