"""Flax modules as Problems: parameters and losses are the module's own; what cannot be is refused in words."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import pegprof
from pegprof.errors import PegprofError
from pegprof.models.check_problem import check_problem
from pegprof.user_code import home_of
from tests.waiting import LIMIT_S

B = 4
EXAMPLE = {"x": np.zeros(3, np.float32), "label": 4}


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def loss(model, batch):
    return cross_entropy(model(batch["x"]), batch["label"])


class MLP(nn.Module):
    """With whatever beside the layers a test asks for."""

    batch_norm: bool = False
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dense(6)(x)
        if self.batch_norm:
            x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.Dropout(self.dropout, deterministic=not train)(nn.relu(x))
        return nn.Dense(5)(x)


class NnxMLP(nnx.Module):
    def __init__(self, *, batch_norm=False, dropout=0.0, rngs):
        self.layers = nnx.List([nnx.Linear(3, 6, rngs=rngs), nnx.Linear(6, 5, rngs=rngs)])
        self.norm = nnx.BatchNorm(6, rngs=rngs) if batch_norm else None
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x):
        x = self.layers[0](x)
        x = self.norm(x) if self.norm else x
        return self.layers[1](self.dropout(nnx.relu(x)))


def values(problem):
    return problem.init(jax.random.key(1)), problem.batch(jax.random.key(2), B)


def assert_examples_are_independent(problem):
    assert pegprof.check_examples(problem.loss, *values(problem)).ok


# linen


def test_a_linen_problem_is_the_module():
    problem = pegprof.from_flax(MLP(), loss, EXAMPLE)
    params, batch = values(problem)
    own_params = MLP().init(jax.random.key(1), batch["x"])["params"]
    assert problem.name == "MLP"
    assert jax.tree.structure(params) == jax.tree.structure(own_params)
    assert all(map(np.array_equal, jax.tree.leaves(params), jax.tree.leaves(own_params)))
    expected = cross_entropy(MLP().apply({"params": params}, batch["x"]), batch["label"])
    np.testing.assert_allclose(problem.loss(params, batch), expected, rtol=1e-6)
    assert_examples_are_independent(problem)
    check_problem(problem, B)


def test_a_problem_from_flax_needs_no_device_to_be_described():
    code = """
import jax, jax.numpy as jnp, numpy as np, pegprof
from flax import linen as nn, nnx
def loss(model, batch): return jnp.mean(model(batch))
example = jax.ShapeDtypeStruct((3,), jnp.float32)
for problem in (
    pegprof.from_flax(nn.Dense(2), loss, example),
    pegprof.from_nnx(lambda rngs: nnx.Linear(3, 2, rngs=rngs), loss, example),
):
    assert problem.abstract_params()["kernel"].shape == (3, 2)
    assert jax.eval_shape(problem.loss, problem.abstract_params(), problem.abstract_batch(4)).shape == ()
"""
    environment = {"JAX_PLATFORMS": "no_such_platform", "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT_S, env=environment)


def test_a_loss_may_call_several_methods_and_each_creates_its_parameters():
    class Autoencoder(nn.Module):
        def setup(self):
            self.inner, self.outer = nn.Dense(2), nn.Dense(3)

        def encode(self, x):
            return self.inner(x)

        def decode(self, h):
            return self.outer(h)

    def distance(model, x):
        return jnp.mean((model(model(x, method="encode"), method="decode") - x) ** 2)

    problem = pegprof.from_flax(Autoencoder(), distance, np.zeros(3, np.float32))
    assert sorted(problem.abstract_params()) == ["inner", "outer"]
    assert_examples_are_independent(problem)


def test_running_averages_are_constants():
    problem = pegprof.from_flax(MLP(batch_norm=True), loss, EXAMPLE)
    assert "BatchNorm_0" in problem.abstract_params()
    assert_examples_are_independent(problem)


def test_dropout_with_a_seed_for_each_example_is_that_examples_own():
    def logits(model, x, seed):
        return model(x, train=True, rngs={"dropout": jax.random.key(seed)})

    def noisy_loss(model, batch):
        return cross_entropy(jax.vmap(functools.partial(logits, model))(batch["x"], batch["seed"]), batch["label"])

    problem = pegprof.from_flax(MLP(dropout=0.5), noisy_loss, {**EXAMPLE, "seed": 2**30})
    assert_examples_are_independent(problem)


def test_a_loss_that_asks_for_changed_collections_gets_them_when_parameters_are_created_too():
    def loss_of_one(model, batch):
        outputs, changed = model(batch["x"], mutable=["intermediates"])
        assert not changed
        return cross_entropy(outputs, batch["label"])

    assert_examples_are_independent(pegprof.from_flax(MLP(), loss_of_one, EXAMPLE))


def train_loss(model, batch):
    return cross_entropy(model(batch["x"], train=True), batch["label"])


@pytest.mark.parametrize(
    ("module", "what", "hint"),
    [
        (
            MLP(batch_norm=True),
            "the examples of a batch would depend on each other: ModifyScopeVariableError: Cannot update variable",
            "use its stored statistics (use_running_average=True for BatchNorm), or a norm over features",
        ),
        (
            MLP(dropout=0.5),
            'the module draws noise: InvalidRngError: Dropout_0 needs PRNG for "dropout"',
            "turn the noise off, or give each example a key: see pegprof.from_flax",
        ),
    ],
    ids=["BatchNorm", "dropout"],
)
def test_a_linen_module_whose_examples_would_interact_is_refused_where_it_is_called(module, what, hint):
    with pytest.raises(PegprofError) as caught:
        check_problem(pegprof.from_flax(module, train_loss, EXAMPLE), B)
    assert caught.value.what.startswith(what)
    assert caught.value.hint == hint
    file, line = home_of(train_loss).split(":")
    assert caught.value.where == f"{file}:{int(line) + 1}"


# nnx


def test_an_nnx_problem_is_the_module():
    problem = pegprof.from_nnx(lambda rngs: NnxMLP(rngs=rngs), loss, EXAMPLE)
    params, batch = values(problem)
    own = NnxMLP(rngs=nnx.Rngs(jax.random.key(1)))
    assert problem.name == "NnxMLP"
    assert sorted(params["layers"]) == [0, 1]
    assert np.array_equal(params["layers"][0]["kernel"], own.layers[0].kernel[...])
    np.testing.assert_allclose(problem.loss(params, batch), loss(own, batch), rtol=1e-6)
    assert_examples_are_independent(problem)
    check_problem(problem, B)


def test_the_parameters_of_an_nnx_module_in_hand_are_taken_as_they_are():
    module = NnxMLP(batch_norm=True, rngs=nnx.Rngs(3))
    module.eval()
    problem = pegprof.from_nnx(module, loss, EXAMPLE)
    params, batch = values(problem)
    assert np.array_equal(params["layers"][1]["kernel"], module.layers[1].kernel[...])
    np.testing.assert_allclose(problem.loss(params, batch), loss(module, batch), rtol=1e-6)
    with jax.checking_leaks():
        jax.jit(jax.grad(problem.loss))(params, batch)
    assert_examples_are_independent(problem)


def test_running_averages_of_nnx_are_constants():
    def evaluate(model, batch):
        model.eval()
        return loss(model, batch)

    problem = pegprof.from_nnx(lambda rngs: NnxMLP(batch_norm=True, dropout=0.5, rngs=rngs), evaluate, EXAMPLE)
    assert_examples_are_independent(problem)


@pytest.mark.parametrize(
    ("options", "changed"),
    [({"batch_norm": True}, "norm/mean, norm/var"), ({"dropout": 0.5}, "dropout/rngs/count")],
    ids=["BatchNorm", "dropout"],
)
@pytest.mark.parametrize("in_hand", [True, False])
def test_an_nnx_module_whose_examples_would_interact_is_refused_at_the_loss(options, changed, in_hand):
    module = NnxMLP(**options, rngs=nnx.Rngs(0)) if in_hand else lambda rngs: NnxMLP(**options, rngs=rngs)
    with pytest.raises(PegprofError) as caught:
        check_problem(pegprof.from_nnx(module, loss, EXAMPLE), B)
    what = f"the examples of a batch would depend on each other: the loss changes {changed}"
    assert (caught.value.what, caught.value.where) == (what, home_of(loss))
    assert "call model.eval() first" in caught.value.hint


# Batches.


def drawn_like(example, B=1000):
    return pegprof.from_flax(nn.Dense(1), loss, example).batch(jax.random.key(0), B)


@pytest.mark.parametrize(
    ("leaf", "dtype", "low", "high"),
    [
        (4, jnp.int32, 0, 4),
        (np.array([3, 1], np.int32), jnp.int32, 0, 3),
        (np.array(-2), jnp.int32, -2, 0),
        (np.full((2, 2), 255, np.uint8), jnp.uint8, 0, 255),
        (True, jnp.bool_, False, True),
    ],
)
def test_integers_run_from_zero_to_the_largest_in_the_example(leaf, dtype, low, high):
    drawn = drawn_like(leaf, 4000)
    assert (drawn.shape, drawn.dtype) == ((4000, *np.shape(leaf)), dtype)
    assert (drawn.min(), drawn.max()) == (low, high)


@pytest.mark.parametrize(
    ("leaf", "dtype"),
    [
        (0.0, jnp.float32),
        (jnp.ones((2, 3), jnp.bfloat16), jnp.bfloat16),
        (jax.ShapeDtypeStruct((5,), jnp.float16), jnp.float16),
    ],
)
def test_floats_are_normal(leaf, dtype):
    drawn = drawn_like(leaf)
    assert (drawn.shape, drawn.dtype) == ((1000, *np.shape(leaf)), dtype)
    assert np.std(np.asarray(drawn, np.float32)) == pytest.approx(1, abs=0.1)


def test_the_leaves_of_an_example_are_drawn_apart():
    drawn = drawn_like({"a": 0.0, "b": [0.0, jax.random.key(0)]})
    assert not np.array_equal(drawn["a"], drawn["b"][0])
    assert len(np.unique(jax.random.key_data(drawn["b"][1]), axis=0)) == 1000


def test_a_batch_function_takes_the_place_of_an_example():
    problem = pegprof.from_flax(
        nn.Dense(5), loss, batch=lambda key, B: {"x": jnp.ones((B, 3)), "label": jnp.zeros(B, int)}
    )
    assert_examples_are_independent(problem)


@pytest.mark.parametrize(
    ("make", "what", "hint"),
    [
        (
            lambda: pegprof.from_flax(nn.Dense(1), loss, {"token": jax.ShapeDtypeStruct((8,), jnp.int32)}),
            "example['token'] does not say how large its integers get",
            "give an array that holds it, such as numpy.full((8,), vocabulary - 1)",
        ),
        (
            lambda: pegprof.from_flax(nn.Dense(1), loss),
            "either an example or a batch function is needed",
            "example=..., or batch=lambda key, B: ...",
        ),
        (
            lambda: pegprof.from_flax(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), loss, 0.0),
            "from_flax takes a linen module, not a Linear",
            "for nnx there is from_nnx",
        ),
        (
            lambda: pegprof.from_nnx(nn.Dense(1), loss, 0.0),
            "from_nnx takes an nnx module or a function that makes one, not a Dense",
            "for linen there is from_flax",
        ),
    ],
)
def test_what_cannot_be_made_a_problem_is_told_at_the_users_line(make, what, hint):
    with pytest.raises(PegprofError) as caught:
        make()
    assert (caught.value.what, caught.value.hint, caught.value.where) == (what, hint, home_of(make))
