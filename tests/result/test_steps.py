"""Whole training steps: every optimizer by every method against formulas, what they need, and what is said of them."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pegprof
from pegprof.engine.statistics import resolve
from pegprof.errors import PegprofError
from pegprof.measure.progress import Silence
from pegprof.measure.session import measure
from pegprof.measure.worker import methods, programs
from pegprof.optimizers import OPTIMIZERS, needed_statistics
from pegprof.report.explain import explain_affordability
from pegprof.report.terminal import headline
from pegprof.result.result import Result
from pegprof.result.settings import METHODS, Settings
from pegprof.result.steps import STEPS, choose_stats
from pegprof.targets.devices import GIB
from tests.compilers import needs_compilers
from tests.optimizers.formulas import Adam, Signs, mean_squared, second_moment, variance
from tests.result.results import make_row

MODELS = str(Path(__file__).parents[1] / "measure" / "models.py")
B = 6

FORMULAS = {
    "adam": lambda: Adam(lambda g: g.mean(axis=0) ** 2),
    "micro_adam": lambda: Adam(second_moment),
    "micro_adam_var": lambda: Adam(variance),
    "micro_adam_msq": lambda: Adam(mean_squared, eps=0.0, eps_root=1e-8),
    "adam_mix": lambda: Adam(lambda g: mean_squared(g) + variance(g)),
    "micro_sign_sgd": lambda: Signs(lambda g: np.sign(g).mean(axis=0), lambda m: m),
    "sign_sgd": lambda: Signs(lambda g: np.sign(g.mean(axis=0)), lambda m: m),
    "sign_ema": lambda: Signs(lambda g: g.mean(axis=0), np.sign),
}


def make_problem():
    """Small enough to be compiled in no time, and known to no other process."""
    return pegprof.Problem(
        name="here",
        init=lambda key: {"w": jax.random.normal(key, (8, 4)), "b": jnp.zeros(4)},
        loss=lambda p, x: jnp.mean(jnp.sum(jnp.tanh(x @ p["w"] + p["b"]) ** 2, axis=-1)),
        batch=lambda key, B: jax.random.normal(key, (B, 8)),
    )


def make_program(method, step, problem):
    options = methods.Options(stats=resolve(STEPS[step].stats), microbatch_size=2, backend="cpu", step=step)
    return programs.make_program(methods.METHODS[method], problem, options)


# The table.


def test_every_optimizer_is_in_the_table_with_the_statistics_that_it_looks_up():
    assert set(STEPS) == {"adam", *OPTIMIZERS}
    for name, step in STEPS.items():
        assert needed_statistics(programs.make_optimizer(name), jnp.zeros(2)) == step.stats


@pytest.mark.parametrize("name", STEPS)
def test_the_plain_counterpart_takes_the_mean_alone_and_is_its_own(name):
    plain = STEPS[STEPS[name].plain]
    assert (plain.stats, plain.plain) == (("mean",), plain.optimizer)
    assert (STEPS[name].stats == ("mean",)) == (plain.optimizer == name)


def test_the_statistics_are_those_that_the_step_takes_and_no_others_can_be_asked_for():
    assert choose_stats(None, None) == ("mean", "second_moment")
    assert choose_stats(["norm"], None) == ("norm",)
    assert choose_stats(["second_moment", "mean"], "micro_adam") == ("mean", "second_moment")
    with pytest.raises(PegprofError, match="a step of micro_adam takes mean, second_moment, and norm was asked for"):
        choose_stats(["norm"], "micro_adam")
    with pytest.raises(PegprofError, match="did you mean 'micro_adam'"):
        choose_stats(None, "micro_adma")


# The programs.


def gradients_by_a_loop(problem, params, batch):
    """{name: g_BxP}, in float64, one example after another."""
    grads = [jax.grad(problem.loss)(params, batch[i : i + 1]) for i in range(len(batch))]
    return {name: np.stack([np.asarray(g[name]) for g in grads]) for name in params}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("step", STEPS)
def test_two_steps_by_a_methods_own_program_equal_the_formula(x64, step, method):
    problem = make_problem()
    params, batch = problem.init(jax.random.key(0)), problem.batch(jax.random.key(1), B)
    program = make_program(method, step, problem)
    compiled = program.jit().lower(*program.abstract_arguments(problem, B)).compile()
    runs = FORMULAS[STEPS[step].plain if method == "grad" else step]
    expected, formulas = {name: np.array(p) for name, p in params.items()}, {name: runs() for name in params}
    held = program.start(jax.tree.map(jnp.copy, params))
    for _ in range(2):
        for name, g_BxP in gradients_by_a_loop(problem, expected, batch).items():
            expected[name] = expected[name] - programs.LEARNING_RATE * formulas[name].step(g_BxP)
        held = program.held_after(held, compiled(*held, batch))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), held[0], expected)


@pytest.mark.parametrize("step", [name for name in STEPS if STEPS[name].averages])
def test_after_the_first_step_the_state_tells_the_statistics_by_which_methods_are_compared(step):
    problem = make_problem()
    params, batch = problem.init(jax.random.key(0)), problem.batch(jax.random.key(1), B)
    stats = jax.jit(pegprof.grad_stats(problem.loss, STEPS[step].stats))(params, batch)
    program = make_program("vmap", step, problem)
    found = program.statistics(jax.jit(program.fn)(*program.start(params), batch))
    assert set(found) == set(STEPS[step].averages.values())
    for name in found.keys() & stats.keys():
        decay = 0.9 if name == "mean" else 0.999
        jax.tree.map(
            lambda a, b, d=decay: np.testing.assert_allclose(a, (1 - d) * b, rtol=1e-3, atol=1e-9),
            found[name],
            stats[name],
        )


def test_the_new_parameters_and_state_take_the_memory_of_the_old():
    problem = make_problem()
    program = make_program("surgery", "micro_adam", problem)
    held = program.start(problem.init(jax.random.key(0)))
    program.jit()(*held, problem.batch(jax.random.key(1), B))
    assert all(x.is_deleted() for x in jax.tree.leaves(held))


def test_without_a_step_a_program_is_the_statistics_and_nothing_is_donated():
    problem = make_problem()
    options = methods.Options(stats=resolve(["mean"]), microbatch_size=1, backend="cpu")
    program = programs.make_program(methods.METHODS["grad"], problem, options)
    held = program.start(problem.init(jax.random.key(0)))
    result = program.jit()(*held, problem.batch(jax.random.key(1), B))
    assert program.held_after(held, result) is held
    assert list(program.statistics(result)) == ["mean"]
    assert not any(x.is_deleted() for x in jax.tree.leaves(held))


# What is measured.


def test_the_arguments_of_a_step_contain_the_state_and_all_of_them_but_the_batch_are_aliased():
    steps, plain = (
        {row.method: row for row in pegprof.profile(make_problem(), batch=4, step=step, time=False).rows}
        for step in ("micro_adam", None)
    )
    state_bytes = 4 + 2 * 4 * (8 * 4 + 4)
    for method, row in steps.items():
        assert (row.step, row.optimizer_state_bytes, row.stats) == ("micro_adam", state_bytes, "mean,second_moment")
        assert row.argument_bytes == plain[method].argument_bytes + state_bytes
        assert row.alias_bytes == row.parameter_bytes + state_bytes
        assert row.peak_bytes == row.argument_bytes + row.output_bytes + row.temp_bytes - row.alias_bytes
        assert plain[method].step is plain[method].optimizer_state_bytes is None


@pytest.mark.parametrize("step", ["micro_adam", "micro_sign_sgd"])
def test_steps_are_timed_one_after_another_and_compared_by_what_their_states_average(step):
    result = pegprof.profile(make_problem(), batch=4, step=step, runs=3)
    rows = {row.method: row for row in result.rows}
    assert {(row.status, row.evidence, row.runs) for row in result.rows} == {("ok", "measured", 3)}
    if step == "micro_sign_sgd":  # there is nothing but signs, and rounding decides some of them
        assert {row.max_rel_error for row in result.rows} == {None}
        assert rows["grad"].reason.startswith("a step of sign_sgd, which takes the mean alone; ")
    else:
        assert all(0 <= rows[method].max_rel_error < 1e-5 for method in ("vmap", "surgery", "grad"))
        assert rows["grad"].reason.startswith("a step of adam, which takes the mean alone; ")
    assert Result.from_json(result.to_json()) == result


@pytest.mark.slow
def test_steps_are_timed_each_in_a_process_of_its_own_too():
    result = pegprof.profile(f"{MODELS}:fine", batch=4, step="micro_adam", methods=("grad", "microbatch"), runs=3)
    assert [(row.status, row.runs, row.time_batch) for row in result.rows] == [("ok", 3, 4)] * 2
    assert result.rows[0].max_rel_error < 1e-5
    assert all(row.host_peak_bytes for row in result.rows)


def test_examples_that_interact_show_in_a_step_as_well():
    def loss(w, x):
        return jnp.mean((x @ w - jnp.mean(x @ w, axis=0, keepdims=True)) ** 2)

    problem = dataclasses.replace(make_problem(), init=lambda key: jax.random.normal(key, (8, 4)), loss=loss)
    grad, _ = pegprof.profile(problem, batch=4, step="adam", methods=("grad", "vmap"), runs=1).rows
    assert grad.status == "failed"
    assert "is not the gradient of the batch: the examples interact" in grad.reason


def test_statistics_that_the_step_does_not_take_are_refused_whoever_made_the_settings():
    settings = Settings(model="here", batches=(4,), step="micro_adam_var", time=False)
    with pytest.raises(PegprofError, match="a step of micro_adam_var takes mean, variance"):
        measure(settings, talk=Silence(), problem=make_problem())


@needs_compilers
@pytest.mark.slow
def test_a_step_is_compiled_for_devices_that_are_not_here(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = pegprof.profile(
        f"{MODELS}:fine", batch=4, step="micro_adam", methods=("surgery",), targets=("tpu-v5e", "h100")
    )
    for row in result.rows:
        assert (row.status, row.evidence) == ("ok", "compiled")
        assert row.alias_bytes >= row.parameter_bytes + row.optimizer_state_bytes


# What is said.


def test_the_headline_names_the_step_and_what_its_optimizer_keeps():
    row = make_row("grad", step="micro_adam", optimizer_state_bytes=int(1.4 * GIB))
    assert headline(row) == (
        "transformer-151m: 184.4 M parameters, seq_len 512, float32, batch 64, one step of micro_adam, "
        "optimizer state 1.4 GiB"
    )


def test_what_is_affordable_is_the_step_and_grad_is_one_if_the_mean_is_all_that_it_takes():
    fields = {"peak_bytes": GIB, "peak_ratio": 1.0, "time_ratio": 1.0}
    rows = [make_row("grad", step="micro_adam", **fields), make_row("surgery", step="micro_adam", **fields)]
    (sentence,) = explain_affordability(rows)
    assert sentence == (
        "A step of micro_adam, which takes mean and second_moment, is affordable here: surgery takes 1.00 × the time "
        "of grad, and 1.0 GiB of 20.0 GiB available, 1.00 × grad."
    )
    rows = [dataclasses.replace(row, step="adam", stats="mean") for row in rows]
    (sentence,) = explain_affordability(rows)
    assert sentence.startswith("A step of adam is affordable here: grad takes 1.00 × the time")
