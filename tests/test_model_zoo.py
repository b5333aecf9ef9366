"""The zoo's models: their sizes to the parameter, what every zoo loss promises, and their statistics."""

import dataclasses
import functools
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from model_zoo import llama, lstm, moe, ssm
from pegprof import grad_stats
from pegprof.errors import PegprofError
from pegprof.models.problem import Problem, load_problem, zoo_names
from tests.engine.cases import ALL_STATISTICS
from tests.oracles import Truth, assert_stats_agree, loop_stats, quick_jit
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.usefixtures("no_rank_promotion")

B = 3
SWITCHES = ("remat", "scan_layers")  # options that change the program and not what it computes


def shrunken(name: str, **options: object) -> Problem:
    """A model of the zoo with about the square root of each size, and two layers: any model, also one added tomorrow.

    Sizes are rounded up to powers of two. Of these the smaller always divides the larger, so that heads, groups and
    patches still fit.
    """
    sizes = {key: value for key, value in load_problem(name).options.items() if type(value) is int}
    roots = {key: 2 ** math.ceil(math.log2(value) / 2) for key, value in sizes.items()}
    layers = {"layers": 2} if "layers" in sizes else {}
    return load_problem(name, {**roots, **layers, **options})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A problem with values: compiled, since op by op the small arrays of a test take longer than their program."""

    problem: Problem
    init: Callable[..., Any]
    sample: Callable[..., Any]  # a batch of B examples
    loss: Callable[..., jax.Array]
    value_and_grad: Callable[..., Any]

    @functools.cached_property
    def params(self) -> Any:
        return self.init(jax.random.key(0))

    @functools.cached_property
    def batch(self) -> Any:
        return self.sample(jax.random.key(1))


@pytest.fixture(params=zoo_names(), scope="module")
def model(request) -> Model:
    return make(shrunken(request.param))


def make(problem: Problem) -> Model:
    return Model(
        problem=problem,
        init=quick_jit(problem.init),
        sample=quick_jit(lambda key: problem.batch(key, B)),
        loss=quick_jit(problem.loss),
        value_and_grad=quick_jit(jax.value_and_grad(problem.loss)),
    )


def random_params(problem: Problem) -> Any:
    """Parameters from NumPy, none of them zero or one: quicker than to compile an initialisation."""
    rng = np.random.default_rng(0)

    def values(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        fan_in = math.prod(leaf.shape[:-1])
        return jnp.asarray(rng.normal(size=leaf.shape) / fan_in**0.5)

    return jax.tree.map(values, problem.abstract_params())


def example(batch, i):
    return jax.tree.map(lambda leaf: leaf[i], batch)


@functools.cache
def abstract_params(name: str) -> Any:
    return load_problem(name).abstract_params()


def by_name(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def count(params: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


# Sizes.


def gpt(N: int, D: int, T: int, V: int) -> int:
    """A transformer without biases: 12·D² and two norms a layer, the embedding, positions and a norm at the end."""
    return N * (12 * D**2 + 2 * D) + (V + T) * D + D


def blocks_with_biases(N: int, D: int) -> int:
    """12·D², as many biases as the products have outputs, 9·D, and two norms with scale and bias."""
    return N * (12 * D**2 + 9 * D + 4 * D)


def llama_blocks(N: int, D: int, KV: int, F: int) -> int:
    """Queries and outputs, keys and values, gate, up and down, and two norms."""
    return N * (2 * D**2 + 2 * D * KV + 3 * D * F + 2 * D)


def stage(C: int, D: int) -> int:
    """Two blocks of two 3×3 convolutions; where the width changes, a 1×1 convolution too; each with a norm."""
    return 9 * C * D + 3 * 9 * D * D + 4 * 2 * D + (C * D + 2 * D if C != D else 0)


def separable(C: int, D: int) -> int:
    """A 3×3 filter for each channel and a 1×1 convolution, each with a norm."""
    return 9 * C + 2 * C + C * D + 2 * D


MOBILENET = [
    32,
    64,
    128,
    128,
    256,
    256,
    512,
    512,
    512,
    512,
    512,
    512,
    1024,
    1024,
]  # channels, from table 1 of the paper


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mlp", (784 + 1) * 1024 + (1024 + 1) * 1024 + (1024 + 1) * 10),
        ("cnn", (9 * 3 + 1) * 32 + (9 * 32 + 1) * 64 + (9 * 64 + 1) * 128 + (4 * 4 * 128 + 1) * 10),
        (
            "mobilenet",
            9 * 3 * 32 + 2 * 32 + sum(itertools.starmap(separable, itertools.pairwise(MOBILENET))) + 1025 * 1000,
        ),
        (
            "resnet18-gn",
            9 * 3 * 64 + 2 * 64 + stage(64, 64) + stage(64, 128) + stage(128, 256) + stage(256, 512) + 513 * 10,
        ),
        (
            "vit-s16",
            (16 * 16 * 3 + 1) * 384 + (1 + 1 + 14**2) * 384 + blocks_with_biases(12, 384) + 2 * 384 + 385 * 1000,
        ),
        ("lstm", 10000 * 650 + 2 * (650 + 650 + 1) * 4 * 650 + (650 + 1) * 10000),
        ("transformer-tiny", gpt(2, 64, 128, 256)),
        ("transformer-19m", gpt(6, 512, 512, 32100)),
        ("transformer-151m", gpt(12, 1024, 512, 32100)),
        ("transformer-1.2b", gpt(24, 2048, 512, 32100)),
        ("gpt2-124m", (50257 + 1024) * 768 + blocks_with_biases(12, 768) + 2 * 768),
        ("llama-1b", 128256 * 2048 + llama_blocks(16, 2048, 8 * 64, 8192) + 2048),
        ("moe-tiny", gpt(2, 64, 128, 256) + 2 * (7 * 8 * 64**2 + 64 * 8)),
        ("ssm-tiny", 256 * 64 + 2 * (64 + 3 * 64 * 128 + 128**2 + 128 + 3 * 128 * 16 + 128) + 64),
    ],
)
def test_a_model_has_the_parameters_of_its_architecture(name, expected):
    assert count(abstract_params(name)) == expected


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("gpt2-124m", 124_439_808),  # OpenAI's smallest GPT-2, as released
        ("llama-1b", 1_235_814_400),  # Llama-3.2-1B's model card: 1.23B
        ("vit-s16", 22_050_664),  # ViT-S/16 with a head of 1000 classes, as in timm and DeiT: 22M
        ("resnet18-gn", 11_173_962),  # ResNet-18 for CIFAR-10; a GroupNorm has as many parameters as a BatchNorm
        ("mobilenet", 4_231_976),  # MobileNet-V1's trainable ones, as in Keras; the paper says 4.2M
    ],
)
def test_a_published_architecture_has_the_published_parameters(name, published):
    assert count(abstract_params(name)) == published


@pytest.mark.parametrize(
    ("name", "expected"),
    [("transformer-19m", 18_874_368), ("transformer-151m", 150_994_944), ("transformer-1.2b", 1_207_959_552)],
)
def test_a_transformer_is_called_by_its_parameters_outside_embeddings_and_norms(name, expected):
    params = by_name(abstract_params(name))
    assert sum(leaf.size for name, leaf in params.items() if "kernel" in name) == expected


@pytest.mark.parametrize("name", [name for name in zoo_names() if "scan_layers" in load_problem(name).options])
def test_scanned_layers_have_the_same_parameters(name):
    scanned = load_problem(name, {"scan_layers": True}).abstract_params()
    assert count(scanned) == count(abstract_params(name))


def test_the_tiny_transformer_is_one_where_activations_dominate():
    options = load_problem("transformer-tiny").options
    assert options["seq_len"] >= options["width"]


def test_the_whole_zoo_can_be_inspected_without_a_device():
    code = """if True:
        import jax
        from pegprof.models.problem import load_problem, zoo_names
        for name in zoo_names():
            problem = load_problem(name)
            if "scan_layers" in problem.options:  # the same code, traced once for all layers
                problem = load_problem(name, {"scan_layers": True})
            jax.eval_shape(problem.loss, problem.abstract_params(), problem.abstract_batch(64))
    """
    root = Path(__file__).parent.parent
    environment = {**os.environ, "JAX_PLATFORMS": "no_such_platform"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT_S, cwd=root, env=environment)


# What every zoo model promises.


@pytest.mark.parametrize("name", zoo_names())
def test_parameters_are_float32_and_batches_are_float32_or_integers(name):
    assert {leaf.dtype for leaf in jax.tree.leaves(abstract_params(name))} == {jnp.dtype("float32")}
    assert {leaf.dtype for leaf in jax.tree.leaves(load_problem(name).abstract_batch(B))} <= {
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


def test_the_same_key_gives_the_same_values_and_another_key_others(model):
    again, key = make(shrunken(model.problem.name)), jax.random.key(2)
    for one, other in ((model.init, again.init), (model.sample, again.sample)):
        assert one.lower(key).as_text() == other.lower(key).as_text()
    assert_trees_differ(model.init(key), model.params)
    assert_trees_differ(model.sample(key), model.batch)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_narrow_compute_dtype_keeps_parameters_and_loss_in_float32(model, dtype):
    narrow = shrunken(model.problem.name, dtype=dtype)
    loss = quick_jit(narrow.loss)(model.params, model.batch)
    assert {leaf.dtype for leaf in jax.tree.leaves((narrow.abstract_params(), loss))} == {jnp.dtype("float32")}
    np.testing.assert_allclose(loss, model.loss(model.params, model.batch), rtol=0.05)


@pytest.mark.parametrize("name", zoo_names())
@pytest.mark.usefixtures("x64")
def test_float64_is_computed_in_float64(name):
    problem = shrunken(name, dtype="float64")
    loss = jax.eval_shape(problem.loss, problem.abstract_params(), problem.abstract_batch(B))
    assert loss.dtype == jnp.float64


def assert_trees_differ(left, right):
    assert any(jnp.any(a != b) for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True))


@pytest.mark.parametrize("name", [name for name in zoo_names() if "seq_len" in load_problem(name).options])
def test_a_prediction_depends_on_the_whole_past_and_on_nothing_else(name, monkeypatch):
    no_penalty = {"balance": 0.0} if "balance" in load_problem(name).options else {}
    problem = shrunken(name, seq_len=8, **no_penalty)
    family = sys.modules[problem.loss.__module__]
    monkeypatch.setattr(family, "mean_cross_entropy", lambda logits, labels: logits)  # a loss returns what it is of
    params = random_params(problem)
    token_T1 = problem.batch(jax.random.key(1), 1)[0]
    logits = quick_jit(problem.loss)
    changed_logits_TxV = logits(params, token_T1.at[5].set((token_T1[5] + 1) % problem.options["vocab"]))
    same_T = jnp.all(changed_logits_TxV == logits(params, token_T1), axis=1)
    np.testing.assert_array_equal(same_T, jnp.arange(8) < 5)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(PegprofError, match="heads 32 does not divide into 5 kv_heads"):
        load_problem("llama-1b", {"kv_heads": 5})
    with pytest.raises(PegprofError, match="width 64 does not divide into 48 groups"):
        load_problem("resnet18-gn", {"groups": 48})


# The statistics of every model.


def forms() -> Iterator[Any]:
    """Every model of the zoo, and one model of each family with all its switches on; of the transformer, with each."""
    families = set()
    for name in zoo_names():
        problem = load_problem(name)
        yield form(name)
        switches = [switch for switch in SWITCHES if switch in problem.options]
        if switches and problem.loss.__module__ not in families:
            families.add(problem.loss.__module__)
            yield form(name, *switches)
    yield from (form("transformer-tiny", switch) for switch in SWITCHES)


def form(name: str, *on: str) -> Any:
    return pytest.param(name, dict.fromkeys(on, True), id="-".join([name, *on]))


@pytest.mark.parametrize(("name", "form"), list(forms()))
@pytest.mark.usefixtures("x64")
def test_every_statistic_of_every_model_is_that_of_a_loop_over_the_examples(name, form):
    problem = shrunken(name, dtype="float64", **form)
    params, batch = random_params(problem), problem.batch(jax.random.key(1), B)
    expected = loop_stats(problem.loss, ALL_STATISTICS, params, batch, keep_batch_dim=False)
    assert all(np.any(g) for g in jax.tree.leaves(expected.gradients))
    actual = quick_jit(grad_stats(problem.loss, ALL_STATISTICS, keep_batch_dim=False))(params, batch)
    assert_stats_agree(*without_vanishing(actual, expected))


def without_vanishing(actual: dict[str, Any], expected: Truth) -> tuple[dict[str, Any], Truth]:
    """Both without the parameters whose gradient is zero but for rounding, which has no statistics to agree on.

    Such is the bias of attention's keys: it adds the same to all scores of a query, and the softmax takes that away.
    """
    largest = {name: np.max(np.abs(g)) for name, g in by_name(expected.gradients).items()}
    rounding = 1e-13 * max(largest.values())
    vanishing = {name for name in largest if largest[name] < rounding}
    assert all(name.endswith("['key']['bias']") for name in vanishing)
    assert all(np.max(by_name(actual["abs_mean"])[name]) < rounding for name in vanishing)

    def kept(tree: Any) -> dict[str, Any]:
        return {name: leaf for name, leaf in by_name(tree).items() if name not in vanishing}

    truth = Truth({stat: kept(tree) for stat, tree in expected.items()})
    truth.gradients = kept(expected.gradients)
    return {stat: kept(tree) for stat, tree in actual.items()}, truth


# The forms and the parts of some models.


@pytest.mark.parametrize(("scan_layers", "remat"), [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("model", ["transformer-tiny"], indirect=True)
def test_scanned_and_rematerialised_forms_have_the_same_loss_and_gradients(model, scan_layers, remat):
    other = shrunken("transformer-tiny", scan_layers=scan_layers, remat=remat)
    expected, expected_grads = model.value_and_grad(model.params, model.batch)
    as_other = stack_blocks if scan_layers else lambda tree: tree
    actual, actual_grads = quick_jit(jax.value_and_grad(other.loss))(as_other(model.params), model.batch)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6), actual_grads, as_other(expected_grads)
    )


def stack_blocks(tree):
    """The parameters of separate blocks as those of one scanned block."""
    blocks = [tree[f"block_{n}"] for n in range(2)]
    rest = {key: value for key, value in tree.items() if not key.startswith("block_")}
    return {**rest, "blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)}


def test_a_transformer_processes_all_its_positions():
    problem = shrunken("transformer-tiny", seq_len=7)
    params = random_params(problem)
    grads = quick_jit(jax.grad(problem.loss))(params, problem.batch(jax.random.key(1), B))
    assert grads["positions"].shape[0] == 7
    assert jnp.all(jnp.any(grads["positions"] != 0, axis=1))


def test_rotated_queries_and_keys_know_how_far_apart_they_are_and_nothing_else():
    q_K, k_K = np.random.default_rng(0).normal(size=(2, 8))
    q_TxK, k_TxK = (np.asarray(llama.rotate(jnp.tile(jnp.float32(x), (10, 1, 1))))[:, 0] for x in (q_K, k_K))
    score_TxT = q_TxK @ k_TxK.T
    for distance in range(10):
        np.testing.assert_allclose(np.diagonal(score_TxT, distance), score_TxT[0, distance], rtol=1e-4)
    assert len(set(np.round(score_TxT[0], 4))) == 10


def test_llamas_slow_frequencies_are_slowed_and_its_fast_ones_are_not():
    plain = 500000.0 ** -(np.arange(0, 64, 2) / 64)
    ratio = llama.rotary_frequencies(64) / plain
    assert np.all(np.diff(ratio) <= 0)
    np.testing.assert_array_equal(ratio[plain * 8192 > 4 * 2 * np.pi], 1)
    np.testing.assert_allclose(ratio[plain * 8192 < 2 * np.pi], 1 / 32)


@pytest.mark.usefixtures("x64")
def test_the_lstm_is_that_of_flax():
    layer = lstm.LSTM(lstm.Config(width=4, dtype="float64"))
    their_layer = nn.RNN(nn.OptimizedLSTMCell(4, param_dtype=jnp.float64))
    x_BxTxD = jnp.asarray(np.random.default_rng(0).normal(size=(B, 5, 4)))
    their_params = quick_jit(their_layer.init)(jax.random.key(1), x_BxTxD)["params"]
    input_gates, recurrent_gates = ([their_params["cell"][side + gate] for gate in "ifgo"] for side in "ih")
    params = {
        "input": {
            "kernel": jnp.concatenate([gate["kernel"] for gate in input_gates], axis=1),
            "bias": jnp.concatenate([gate["bias"] for gate in recurrent_gates]),
        },
        "recurrent": jnp.concatenate([gate["kernel"] for gate in recurrent_gates], axis=1),
    }
    expected_BxTxD = quick_jit(their_layer.apply)({"params": their_params}, x_BxTxD)
    np.testing.assert_allclose(quick_jit(layer.apply)({"params": params}, x_BxTxD), expected_BxTxD, rtol=1e-12)


@pytest.mark.parametrize("capacity", [0.5, 4.0])
def test_a_token_gets_the_weighted_outputs_of_its_best_experts_while_they_have_slots(capacity):
    T, D, E = 8, 4, 4
    config = moe.Config(seq_len=T, layers=1, width=D, heads=1, vocab=4, experts=E, chosen=2, capacity=capacity)
    model, rng = moe.Experts(config), np.random.default_rng(0)
    x_TxD, router_DxE = 1 + rng.normal(size=(T, D)), rng.normal(size=(D, E))
    up_ExDxF, down_ExFxD = rng.normal(size=(E, D, 4 * D)), rng.normal(size=(E, 4 * D, D))
    params = {"router": {"kernel": router_DxE}, "up": up_ExDxF, "down": down_ExFxD}
    actual_TxD, uneven = quick_jit(model.apply)(jax.tree.map(jnp.float32, {"params": params}), jnp.float32(x_TxD))

    h_TxExF = np.asarray(nn.gelu(np.einsum("td,edf->tef", x_TxD, up_ExDxF)))
    y_TxExD = np.einsum("tef,efd->ted", h_TxExF, down_ExFxD)
    odds_TxE = np.exp(x_TxD @ router_DxE)
    expected_TxD, taken_E = np.zeros((T, D)), np.zeros(E)
    for t in range(T):
        best = np.argsort(-odds_TxE[t])[:2]
        for expert in best[taken_E[best] < math.ceil(capacity * 2 * T / E)]:
            expected_TxD[t] += odds_TxE[t, expert] / np.sum(odds_TxE[t, best]) * y_TxExD[t, expert]
        taken_E[best] += 1
    np.testing.assert_allclose(actual_TxD, expected_TxD, rtol=1e-3, atol=1e-3)
    assert np.max(taken_E) > 2 * T / E  # or the capacity would not matter
    probability_E = np.mean(odds_TxE / np.sum(odds_TxE, axis=1, keepdims=True), axis=0)
    np.testing.assert_allclose(uneven, E * np.sum(taken_E / (2 * T) * probability_E), rtol=1e-5)


def test_more_experts_than_there_are_cannot_be_chosen():
    with pytest.raises(PegprofError, match="a token cannot choose 9 of 8 experts"):
        load_problem("moe-tiny", {"chosen": 9})


@pytest.mark.usefixtures("x64")
def test_the_associative_scan_is_a_loop_over_the_positions():
    T, E, S, rng = 6, 4, 3, np.random.default_rng(0)
    shapes = {"step": (E, E), "step_bias": (E,), "write": (E, S), "read": (E, S), "log_decay": (E, S), "skip": (E,)}
    params, u_TxE = {name: rng.normal(size=shape) for name, shape in shapes.items()}, rng.normal(size=(T, E))
    h_ExS, expected_TxE = np.zeros((E, S)), np.zeros((T, E))
    for t, u_E in enumerate(u_TxE):
        step_E = np.logaddexp(0, u_E @ params["step"] + params["step_bias"])  # softplus
        h_ExS = np.exp(-step_E[:, None] * np.exp(params["log_decay"])) * h_ExS
        h_ExS += np.outer(step_E * u_E, u_E @ params["write"])
        expected_TxE[t] = h_ExS @ (u_E @ params["read"]) + params["skip"] * u_E
    np.testing.assert_allclose(quick_jit(ssm.selective_scan)(params, u_TxE), expected_TxE, rtol=1e-12)
