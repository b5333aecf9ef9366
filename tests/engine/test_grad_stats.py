"""grad_stats against a Python loop over the examples, for every program and every way to call it."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas

from pegprof import Statistic, grad_stats, make_plan, value_and_grad_stats
from tests.engine.cases import (
    ALL_STATISTICS,
    assert_program_is_worth_testing,
    case,
    defined_for,
    tolerance,
    truth,
)
from tests.oracles import assert_stats_agree, loop_stats, quick_jit
from tests.programs import PROGRAMS

NAMES = list(PROGRAMS)
ALONE = ("mean", "second_moment")  # as one asks for them: what other statistics rule out for a site has its chance then
MICROBATCHES = (1, 2, 3, 5)  # of 7 examples: only 1 divides

pytestmark = pytest.mark.usefixtures("x64")


def _run(name: str, B: int, stats=None, **options):
    loss, params, batch = case(name, B)
    fn = grad_stats(loss, stats or defined_for(B), keep_batch_dim=PROGRAMS[name].keep_batch_dim, **options)
    return quick_jit(fn)(params, batch)


@pytest.mark.parametrize("name", NAMES)
def test_every_statistic_of_every_program_is_that_of_a_loop_over_the_examples(name):
    expected = truth(name, 5)
    assert_program_is_worth_testing(PROGRAMS[name], expected.gradients)
    assert_stats_agree(_run(name, 5), expected, tolerance(PROGRAMS[name]))
    assert_stats_agree(_run(name, 5, ALONE), truth(name, 5, ALONE), tolerance(PROGRAMS[name]))


@pytest.mark.parametrize("name", NAMES[1::4])
def test_as_planned_for_an_accelerator_they_are_so_too(name):
    found = _run(name, 5, ALONE, backend="tpu")
    assert_stats_agree(found, truth(name, 5, ALONE), tolerance(PROGRAMS[name]))


@pytest.mark.parametrize(("name", "size"), [(name, MICROBATCHES[i % 4]) for i, name in enumerate(NAMES[::5])])
def test_microbatches_that_do_not_divide_the_batch_change_nothing(name, size):
    assert_stats_agree(_run(name, 7, microbatch_size=size), truth(name, 7), tolerance(PROGRAMS[name]))


@pytest.mark.parametrize("name", NAMES[2::6])
def test_a_batch_of_seven_is_as_right_as_a_batch_of_five(name):
    assert_stats_agree(_run(name, 7), truth(name, 7), tolerance(PROGRAMS[name]))


@pytest.mark.parametrize("name", NAMES[3::6])
def test_a_batch_of_one_example_has_the_statistics_that_one_example_allows(name):
    assert_stats_agree(_run(name, 1), truth(name, 1), tolerance(PROGRAMS[name]))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("name", ["scanned_layers_with_a_weight_shared_by_all", "cond_with_a_predicate_that_differs"])
def test_every_microbatch_size_gives_the_same_statistics(name, size):
    assert_stats_agree(_run(name, 7, microbatch_size=size), truth(name, 7))


def test_at_least_sixty_programs_are_tested():
    assert len(NAMES) >= 60


# ---- the ways to call it ------------------------------------------------------------------------------------------


def _arrays(*shapes: tuple[int, ...], seed: int = 0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape)) for shape in shapes]


def _regression(params, x, y):
    return jnp.mean(jnp.sum(jnp.square(jnp.tanh(x @ params["W"] + params["b"]) - y), axis=-1))


def _regression_case():
    W, b, x, y = _arrays((3, 4), (4,), (5, 3), (5, 4))
    return {"W": W, "b": b}, x, y


def test_several_batch_arguments():
    params, x, y = _regression_case()
    options = {"batch_argnums": (1, 2)}
    actual = grad_stats(_regression, ALL_STATISTICS, **options)(params, x, y)
    assert_stats_agree(actual, loop_stats(_regression, ALL_STATISTICS, params, x, y, **options))


def test_several_parameter_arguments():
    params, x, y = _regression_case()

    def loss(W, batch, b):
        return _regression({"W": W, "b": b}, *batch)

    options = {"argnums": (0, 2), "batch_argnums": 1}
    args = (params["W"], (x, y), params["b"])
    actual = grad_stats(loss, ALL_STATISTICS, **options)(*args)
    assert isinstance(actual["mean"], tuple)
    assert_stats_agree(actual, loop_stats(loss, ALL_STATISTICS, *args, **options))


def test_parameter_arguments_in_the_order_of_argnums():
    params, x, y = _regression_case()

    def loss(W, b, batch):
        return _regression({"W": W, "b": b}, *batch)

    actual = grad_stats(loss, argnums=(1, 0), batch_argnums=2)(params["W"], params["b"], (x, y))
    assert [leaf.shape for leaf in actual["mean"]] == [(4,), (3, 4)]


def test_a_batch_that_comes_before_the_parameters():
    params, x, y = _regression_case()

    def loss(batch, params):
        return _regression(params, *batch)

    options = {"argnums": 1, "batch_argnums": 0}
    actual = grad_stats(loss, ALL_STATISTICS, **options)((x, y), params)
    assert_stats_agree(actual, loop_stats(loss, ALL_STATISTICS, (x, y), params, **options))


@pytest.mark.parametrize(
    "options",
    [
        {"batch_argnums": -2, "prng_argnum": -1},
        {"argnums": -3, "batch_argnums": (-2,), "prng_argnum": 2},
        {"argnums": (-3,), "batch_argnums": 1, "prng_argnum": -1, "microbatch_size": 2},
    ],
)
def test_negative_numbers_of_arguments_count_from_the_end(options):
    params, *batch = _regression_case()
    args = (params, batch, jax.random.key(3))
    argnums = (0,) if isinstance(options.get("argnums"), tuple) else 0
    expected = loop_stats(_dropout, ALL_STATISTICS, *args, argnums=argnums, prng_argnum=2)
    assert_stats_agree(quick_jit(grad_stats(_dropout, ALL_STATISTICS, **options))(*args), expected)


def test_arguments_that_are_neither_parameters_nor_batch_are_the_same_for_every_example():
    params, x, y = _regression_case()

    def loss(params, batch, scale, frozen):
        return _regression(params, batch[0] * scale, batch[1] + frozen["shift"])

    args = (params, (x, y), 1.7, {"shift": jnp.arange(4.0), "count": jnp.arange(3)})
    assert_stats_agree(grad_stats(loss, ALL_STATISTICS)(*args), loop_stats(loss, ALL_STATISTICS, *args))


def _dropout(params, batch, key):
    x, y = batch
    kept = jax.random.bernoulli(key, 0.7, (1, 3))  # one mask for each call: for each example, or shared by all
    return _regression(params, jnp.where(kept, x, 0.0), y)


@pytest.mark.parametrize("key", [jax.random.key(3), jax.random.PRNGKey(3)], ids=["typed", "raw"])
def test_prng_argnum_splits_the_key_by_example(key):
    params, *batch = _regression_case()
    expected = loop_stats(_dropout, ALL_STATISTICS, params, batch, key, prng_argnum=2)
    assert_stats_agree(grad_stats(_dropout, ALL_STATISTICS, prng_argnum=2)(params, batch, key), expected)
    microbatched = grad_stats(_dropout, ALL_STATISTICS, prng_argnum=2, microbatch_size=2)
    assert_stats_agree(quick_jit(microbatched)(params, batch, key), expected)


def test_a_key_that_is_not_split_is_the_same_for_every_example():
    params, *batch = _regression_case()
    key = jax.random.key(3)
    expected = loop_stats(_dropout, ALL_STATISTICS, params, batch, key)
    assert_stats_agree(grad_stats(_dropout, ALL_STATISTICS)(params, batch, key), expected)


def _with_aux(params, batch):
    prediction = jnp.tanh(batch[0] @ params["W"] + params["b"])
    loss = jnp.mean(jnp.sum(jnp.square(prediction - batch[1]), axis=-1))
    return loss, {"prediction": prediction, "largest": jnp.argmax(prediction), "nothing": None}


@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_the_value_is_the_mean_loss_and_aux_has_the_examples_first(microbatch_size):
    params, *batch = _regression_case()
    expected = loop_stats(_with_aux, ALL_STATISTICS, params, batch, has_aux=True)
    fn = value_and_grad_stats(_with_aux, ALL_STATISTICS, has_aux=True, microbatch_size=microbatch_size)
    (value, aux), stats = quick_jit(fn)(params, batch)
    np.testing.assert_allclose(value, expected.value, rtol=1e-12)
    np.testing.assert_allclose(value, _with_aux(params, batch)[0], rtol=1e-12)
    assert aux["prediction"].shape == (5, 1, 4)
    assert jax.tree.structure(aux) == jax.tree.structure(expected.aux)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-12), aux, expected.aux)
    assert_stats_agree(stats, expected)


def test_the_value_without_aux_is_the_mean_loss():
    name = "rnn_by_scan"
    loss, params, batch = case(name, 5)
    value, stats = value_and_grad_stats(loss, ALL_STATISTICS)(params, batch)
    assert value.shape == ()
    np.testing.assert_allclose(value, loss(params, batch), rtol=1e-12)
    assert_stats_agree(stats, truth(name, 5))


def test_a_single_statistic_may_be_named_alone():
    params, *batch = _regression_case()
    loss = lambda params, batch: _regression(params, *batch)
    assert list(grad_stats(loss, "variance")(params, batch)) == ["variance"]


def test_the_default_statistics_are_the_mean_and_the_second_moment():
    params, *batch = _regression_case()
    loss = lambda params, batch: _regression(params, *batch)
    assert_stats_agree(grad_stats(loss)(params, batch), loop_stats(loss, ("mean", "second_moment"), params, batch))


@pytest.mark.parametrize(
    "name", ["mlp_regression", "tied_embedding", "scanned_layers_rematerialised", "convolution_2d"]
)
@pytest.mark.parametrize("stats", [("second_moment",), ("norm",), ("variance", "norm_by_param"), ("sign_mean",)])
def test_a_few_statistics_alone_are_what_they_are_among_all(name, stats):
    loss, params, batch = case(name, 5)
    assert_stats_agree(quick_jit(grad_stats(loss, stats))(params, batch), truth(name, 5, stats))


def test_numpy_arrays_are_as_good_as_jax_arrays():
    params, *batch = jax.tree.map(np.asarray, _regression_case())
    loss = lambda params, batch: _regression(params, *batch)
    assert_stats_agree(grad_stats(loss, ALL_STATISTICS)(params, batch), loop_stats(loss, ALL_STATISTICS, params, batch))


def test_it_works_without_jit_as_under_jit():
    loss, params, batch = case("gru_with_a_learned_initial_state", 5)
    assert_stats_agree(grad_stats(loss, ALL_STATISTICS)(params, batch), truth("gru_with_a_learned_initial_state", 5))


def test_it_runs_again_on_another_batch_size():
    fn = quick_jit(grad_stats(case("tied_embedding", 5)[0], ALL_STATISTICS))
    for B in (5, 7):
        _, params, batch = case("tied_embedding", B)
        assert_stats_agree(fn(params, batch), truth("tied_embedding", B))


def test_shapes_alone_give_the_shapes_of_the_statistics():
    loss, params, batch = case("tied_embedding", 5)
    fn = grad_stats(loss, ALL_STATISTICS)
    shapes = jax.eval_shape(fn, *jax.eval_shape(lambda *args: args, params, batch))
    assert jax.tree.map(lambda s: s.shape, shapes) == jax.tree.map(lambda s: s.shape, dict(truth("tied_embedding", 5)))


def test_inside_a_training_scan():
    params, x, y = _regression_case()
    loss = lambda params, batch: _regression(params, *batch)
    batches = (jnp.stack([x, x[::-1] + 1, 2 * x]), jnp.stack([y, y - 1, y[::-1]]))

    def step(params, batch):
        stats = grad_stats(loss, ("mean", "second_moment", "norm"))(params, batch)
        scaled = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + 1e-3), stats["mean"], stats["second_moment"])
        return jax.tree.map(lambda p, u: p - 0.1 * u, params, scaled), stats["norm"]

    trained, norms = quick_jit(lambda params, batches: jax.lax.scan(step, params, batches))(params, batches)

    by_hand, expected_norms = params, []
    for i in range(3):
        stats = loop_stats(loss, ("mean", "second_moment", "norm"), by_hand, (batches[0][i], batches[1][i]))
        expected_norms.append(stats["norm"])
        scaled = jax.tree.map(lambda m, v: m / (np.sqrt(v) + 1e-3), stats["mean"], stats["second_moment"])
        by_hand = jax.tree.map(lambda p, u: p - 0.1 * u, by_hand, scaled)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-9), trained, by_hand)
    np.testing.assert_allclose(norms, np.stack(expected_norms), rtol=1e-9)


def test_inside_a_training_scan_over_scanned_layers_with_microbatches():
    loss, params, batch = case("scanned_layers_with_a_weight_shared_by_all", 5)

    def step(params, batch):
        stats = grad_stats(loss, ("mean", "variance"), microbatch_size=2)(params, batch)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, stats["mean"]), stats

    _, stats = jax.lax.scan(step, params, jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), batch))
    first = jax.tree.map(lambda leaf: leaf[0], stats)
    assert_stats_agree(first, truth("scanned_layers_with_a_weight_shared_by_all", 5, ("mean", "variance")))


def test_under_jit_with_donated_arguments():
    params, *batch = _regression_case()
    loss = lambda params, batch: _regression(params, *batch)
    expected = loop_stats(loss, ("mean", "second_moment"), params, batch)

    def step(params, batch):
        stats = grad_stats(loss)(params, batch)
        return jax.tree.map(lambda p, m: p - m, params, stats["mean"]), stats

    donated = jax.tree.map(jnp.copy, params)
    updated, stats = jax.jit(step, donate_argnums=0)(donated, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(donated))
    jax.tree.map(lambda u, p, m: np.testing.assert_allclose(u, p - m, rtol=1e-9), updated, params, expected["mean"])
    assert_stats_agree(stats, expected)


@pytest.mark.parametrize("name", ["mlp_regression", "tied_embedding", "rnn_by_scan", "scanned_layers_rematerialised"])
def test_under_an_outer_vmap_over_the_parameters(name):
    loss, params, batch = case(name, 5)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, 0.5 * leaf]), params)
    actual = quick_jit(jax.vmap(grad_stats(loss, ALL_STATISTICS), in_axes=(0, None)))(stacked, batch)
    for i in range(2):
        these = jax.tree.map(lambda leaf, i=i: leaf[i], stacked)
        expected = loop_stats(loss, ALL_STATISTICS, these, batch)
        assert_stats_agree(jax.tree.map(lambda leaf, i=i: leaf[i], actual), expected)


def test_under_an_outer_vmap_over_batches():
    loss, params, batch = case("tied_embedding", 5)
    batches = jnp.stack([batch, batch[::-1] * 0 + 1])
    actual = jax.vmap(grad_stats(loss, ALL_STATISTICS), in_axes=(None, 0))(params, batches)
    for i in range(2):
        expected = loop_stats(loss, ALL_STATISTICS, params, batches[i])
        assert_stats_agree(jax.tree.map(lambda leaf, i=i: leaf[i], actual), expected)


def test_a_loss_may_close_over_a_tracer():
    params, *batch = _regression_case()

    def loss_of(scale):
        return lambda params, batch: _regression(params, batch[0] * scale, batch[1])

    def outer(scale, params, batch):
        return grad_stats(loss_of(scale), ALL_STATISTICS)(params, batch)

    for scale in (0.5, 2.0):
        expected = loop_stats(loss_of(scale), ALL_STATISTICS, params, batch)
        assert_stats_agree(quick_jit(outer)(scale, params, batch), expected)
        stacked = jax.vmap(outer, in_axes=(0, None, None))(jnp.array([scale, 1.0]), params, batch)
        assert_stats_agree(jax.tree.map(lambda leaf: leaf[0], stacked), expected)


def test_a_callback_that_cannot_be_batched_runs_one_example_at_a_time():
    name = "callback_that_cannot_be_batched"
    loss, params, batch = case(name, 5)
    with pytest.raises(NotImplementedError):
        jax.vmap(jax.grad(loss), in_axes=(None, 0))(params, batch[:, None])
    for options in ({}, {"microbatch_size": 2}):
        assert_stats_agree(grad_stats(loss, ALL_STATISTICS, **options)(params, batch), truth(name, 5))


@pytest.mark.parametrize("own_sizes", [True, False], ids=["sizes of each example", "sizes for all"])
def test_a_ragged_product_that_jax_does_not_batch_runs_one_example_at_a_time(own_sizes):
    rng = np.random.default_rng(0)
    params, x = jnp.asarray(rng.normal(size=(3, 4, 2))), jnp.asarray(rng.normal(size=(4, 6, 4)))
    sizes = jnp.asarray([[1, 2, 3], [0, 6, 0], [2, 2, 2], [0, 1, 5]], jnp.int32)

    def loss(p, example):
        x, sizes_of_it = example
        return jnp.sum(jnp.sin(jax.lax.ragged_dot(x, p, sizes_of_it if own_sizes else sizes[0])))

    expected = loop_stats(loss, ALL_STATISTICS, params, (x, sizes), keep_batch_dim=False)
    assert "ragged_dot" in make_plan(loss, params, (x, sizes), keep_batch_dim=False).one_at_a_time
    found = quick_jit(grad_stats(loss, ALL_STATISTICS, keep_batch_dim=False))(params, (x, sizes))
    assert_stats_agree(found, expected)


def test_a_plan_made_on_shapes_gives_the_same_statistics():
    loss, params, batch = case("transformer_block", 5)
    plan = make_plan(loss, *jax.eval_shape(lambda *args: args, params, batch), stats=ALL_STATISTICS)
    actual = quick_jit(grad_stats(loss, ALL_STATISTICS, plan=plan))(params, batch)
    assert_stats_agree(actual, truth("transformer_block", 5))


@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_without_parameters_every_norm_is_zero(microbatch_size):
    loss = lambda params, x: jnp.mean(x)
    value, stats = value_and_grad_stats(loss, ("mean", "norm"), microbatch_size=microbatch_size)({}, jnp.arange(5.0))
    assert value == 2.0
    assert stats["mean"] == {}
    assert stats["norm"].tolist() == [0.0] * 5


# ---- what JAX leaves in a program ---------------------------------------------------------------------------------


def test_a_kernel_whose_result_nobody_needs_forms_no_gradient():
    """JAX does not remove a dead ``pallas_call``: here the kernel of a cotangent of the data."""

    def product(x, y):
        def kernel(x_ref, y_ref, out_ref):
            out_ref[...] = x_ref[...] @ y_ref[...]

        shape = jax.ShapeDtypeStruct((x.shape[0], y.shape[1]), x.dtype)
        return pallas.pallas_call(kernel, out_shape=shape, interpret=True)(x, y)

    @jax.custom_vjp
    def layer(x, w):
        return product(x, w)

    layer.defvjp(
        lambda x, w: (product(x, w), (x, w)),
        lambda saved, g: (product(g, saved[1].T), product(saved[0].T, g)),
    )
    w, x = _arrays((3, 2), (4, 5, 3))
    loss = lambda w, x: jnp.mean(jax.vmap(lambda example: jnp.mean(jnp.sin(layer(example, w))))(x))
    for backend in ("cpu", "tpu"):
        found = quick_jit(grad_stats(loss, ALL_STATISTICS, backend=backend))(w, x)
        assert_stats_agree(found, loop_stats(loss, ALL_STATISTICS, w, x))


def test_statistics_can_be_exported_for_a_batch_of_known_size():
    params, x, y = _regression_case()
    fn = jax.jit(grad_stats(lambda params, batch: _regression(params, *batch)))
    exported = jax.export.export(fn)(params, (x, y))
    jax.tree.map(np.testing.assert_array_equal, exported.call(params, (x, y)), fn(params, (x, y)))


# ---- precision ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "expected"), [("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")]
)
def test_statistics_come_back_in_float32_at_least(dtype, expected):
    params, *batch = jax.tree.map(lambda leaf: leaf.astype(dtype), _regression_case())
    loss = lambda params, batch: _regression(params, *batch).astype(jnp.float32)
    stats = grad_stats(loss, ALL_STATISTICS)(params, batch)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(stats)} == {expected}


COUNTS = (
    Statistic.elementwise(lambda g: g > 0, name="positive"),
    Statistic.elementwise(lambda g: g != 0, name="not_zero", factor=lambda x: x != 0),
    Statistic.elementwise(lambda g: jnp.floor(40 * g).astype(jnp.int32), name="whole"),
)


@pytest.mark.parametrize("stats", [COUNTS, COUNTS[1:2]], ids=["all", "one with a factor"])
@pytest.mark.parametrize("backend", ["cpu", "tpu"])
@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_truth_values_and_whole_numbers_have_means_like_any_others(stats, backend, microbatch_size):
    rng = np.random.default_rng(0)
    shapes = {"looked_up": (23, 3), "tied": (23, 3), "many": (3, 4), "one": (4, 2), "constant": (3,)}
    params = {name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()}
    ids = jnp.asarray(rng.integers(0, 23, (5, 4)), jnp.int32)

    def loss(p, ids):
        h = jnp.tanh(p["looked_up"][ids] + p["tied"][ids]) @ p["many"]
        tied = jnp.sum(jnp.sin(h[..., :3] @ p["tied"].T), axis=(1, 2))
        return jnp.mean(jnp.sum(jnp.sum(h, axis=1) @ p["one"], axis=1) + tied) + jnp.sum(p["constant"])

    found = quick_jit(grad_stats(loss, stats, backend=backend, microbatch_size=microbatch_size))(params, ids)
    assert_stats_agree(found, loop_stats(loss, stats, params, ids))


@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_the_variance_does_not_cancel_where_the_gradients_are_at_hand(microbatch_size):
    rng = np.random.default_rng(
        0
    )  # gradients near 3000 that vary by about 3: squares in float32 would lose the variance
    params = {"W": jnp.ones((3, 4), jnp.float32), "b": jnp.ones(4, jnp.float32)}
    batch = [jnp.asarray(m + rng.normal(size=shape), jnp.float32) for m, shape in ((1e3, (7, 3, 4)), (0, (7, 3, 4)))]

    def loss(p, batch):  # the gradient of W adds up three positions, so that no factorised form is exact
        weight, noise = batch
        x = 1 + 1e-3 * noise[..., :3]
        return jnp.mean(jnp.sum((x @ p["W"] + p["b"]) * weight, axis=(1, 2)))

    actual = quick_jit(grad_stats(loss, "variance", microbatch_size=microbatch_size))(params, batch)
    in_64_bits = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), (params, batch))
    assert_stats_agree(actual, loop_stats(loss, "variance", *in_64_bits), rtol=2e-3)


@pytest.mark.parametrize("microbatch_size", [None, 2])
@pytest.mark.parametrize("spread", [1e-2, 1e-3, 1e-4])
def test_the_variance_of_outer_products_is_as_exact_as_by_vmap(spread, microbatch_size):
    """In float32 a difference of moments is off by 13% at a spread of 1e-3, and has zeros at 1e-4."""
    rng = np.random.default_rng(0)
    means = rng.normal(size=4), rng.normal(size=3)
    batch = [jnp.asarray(m * (1 + spread * rng.normal(size=(8, m.size))), jnp.float32) for m in means]
    w = jnp.zeros((4, 3), jnp.float32)
    loss = lambda w, batch: jnp.mean(jnp.sum((batch[0] @ w) * batch[1], axis=1))
    assert make_plan(loss, w, batch, stats="variance", backend="cpu").row("params").strategy == "factored"
    found = quick_jit(grad_stats(loss, ("variance", "snr"), microbatch_size=microbatch_size, backend="cpu"))(w, batch)
    in_64_bits = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), (w, batch))
    expected = loop_stats(loss, ("variance", "snr"), *in_64_bits)
    gradients = jax.vmap(lambda x, r: jnp.outer(x, r))(*batch)
    by_vmap = np.max(np.abs(jnp.var(gradients, axis=0, ddof=1) / expected["variance"] - 1))
    assert np.max(np.abs(found["variance"] / expected["variance"] - 1)) <= max(4 * by_vmap, 1e-6)
    np.testing.assert_allclose(found["snr"], expected["snr"], rtol=max(5 * by_vmap, 2e-6))


def test_gradients_of_a_program_that_cannot_be_batched_are_added_up_in_float32():
    """A callback that cannot be batched makes the examples run one at a time; bfloat16 must not round their sums."""
    rng = np.random.default_rng(0)
    w, x, r = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((3, 2), (4, 50, 3), (4, 50, 2)))

    def loss(w, batch):
        x, r = batch
        x = jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return jnp.mean(jnp.sum((x @ w).astype(jnp.float32) * r.astype(jnp.float32), axis=(1, 2)))

    assert make_plan(loss, w, (x, r)).one_at_a_time
    gradients = np.einsum("bti,bto->bio", np.asarray(x, np.float64), np.asarray(r, np.float64))
    found = grad_stats(loss, ("mean", "second_moment"))(w, (x, r))
    np.testing.assert_allclose(found["mean"], gradients.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(found["second_moment"], np.square(gradients).mean(axis=0), rtol=1e-5)


# ---- infinities ---------------------------------------------------------------------------------------------------

LOG = Statistic.elementwise(lambda g: jnp.log(jnp.abs(g)), name="log")


def _assert_as_infinite_as_in_a_loop(loss, stats, params, batch, **options):
    with np.errstate(divide="ignore", invalid="ignore"):
        expected = loop_stats(loss, stats, params, batch)
    value, found = quick_jit(value_and_grad_stats(loss, stats, **options))(params, batch)
    np.testing.assert_allclose(value, expected.value, rtol=1e-8)
    for name in expected:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8), found[name], expected[name])
    return expected


@pytest.mark.parametrize("positions", [(), (4,)], ids=["one position", "some positions"])
@pytest.mark.parametrize("microbatch_size", [None, 1, 2, 3])
def test_a_function_that_is_infinite_for_some_examples_has_an_infinite_mean(microbatch_size, positions):
    rng = np.random.default_rng(0)
    params, x = jnp.asarray(rng.normal(size=(6, 2))), jnp.asarray(rng.normal(size=(5, *positions, 6)))
    for entry, example in enumerate((slice(None), 0, 1, 2, 4)):  # the last entry is zero for no example
        x = x.at[example, ..., entry].set(0.0)
    loss = lambda p, x: jnp.mean(jnp.sum(jnp.tanh(x @ p), axis=-1))
    expected = _assert_as_infinite_as_in_a_loop(loss, (LOG, "mean"), params, x, microbatch_size=microbatch_size)
    assert np.all(np.isneginf(expected["log"][:5]))
    assert np.all(np.isfinite(expected["log"][5]))


@pytest.mark.parametrize("stats", [("mean", "second_moment"), ("mean", "variance")], ids=" and ".join)
@pytest.mark.parametrize("positions", [(), (4,)], ids=["one position", "some positions"])
@pytest.mark.parametrize("microbatch_size", [None, 1, 2])
def test_infinite_losses_and_gradients_have_infinite_means(microbatch_size, positions, stats):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, *positions, 3)))
    x = x.at[..., 0].set(jnp.inf).at[3, ..., 1].set(-jnp.inf)
    loss = lambda p, x: jnp.mean(jnp.sum((x @ p)[..., 0], axis=tuple(range(1, x.ndim - 1))))
    expected = _assert_as_infinite_as_in_a_loop(
        loss, stats, jnp.asarray([[1.0], [-1.0], [1.0]]), x, microbatch_size=microbatch_size
    )
    assert np.isposinf(expected.value)
    assert np.ravel(expected["mean"])[:2].tolist() == [np.inf, -np.inf]
