"""The fuzzer itself: it draws what it says, finds what is broken, and a failure can be replayed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tests.fuzz.session as session_module
from pegprof.engine import sites
from pegprof.engine.facts import FACTS
from pegprof.engine.jaxpr import primitives
from pegprof.engine.rules import SCHEDULES, strategies
from tests.fuzz.__main__ import main
from tests.fuzz.check import Case, check, draw_case
from tests.fuzz.grammar import BLOCKS, FORMS, MOST_EXAMPLES, WEIGHTS, Misfit, Program, draw_program
from tests.fuzz.session import Session

pytestmark = pytest.mark.usefixtures("x64")

TRIES = 40


def _with_block(name: str) -> Program:
    """The first program that has a block in the middle."""
    for seed in range(TRIES):
        try:
            return draw_program(seed, only=name)
        except Misfit:
            continue
    raise AssertionError(f"no program of {TRIES} could take the block {name}")


@pytest.mark.parametrize("name", BLOCKS)
def test_every_block_gives_a_program_that_jax_differentiates(name):
    program = _with_block(name)
    example = jax.tree.map(lambda x: x[:1] if program.keep_batch_dim else x[0], program.batch)
    gradients = jax.eval_shape(jax.grad(program.loss), program.params, example)
    assert {k: g.shape for k, g in gradients.items()} == {k: p.shape for k, p in program.params.items()}
    assert program.used[name] >= 1


def test_a_seed_gives_the_same_program_twice_and_another_seed_another():
    first, again, other = draw_program(5), draw_program(5), draw_program(6)
    assert str(first) == str(again)
    jax.tree.map(np.testing.assert_array_equal, first.params, again.params)
    assert draw_case(first) == draw_case(again)
    assert str(first) != str(other)


def test_all_forms_and_all_ways_to_call_are_drawn():
    programs = [draw_program(seed) for seed in range(60)]
    cases = [draw_case(program) for program in programs]
    assert {program.form for program in programs} == set(FORMS)
    assert {case.backend for case in cases} == {"cpu", "gpu", "tpu"}
    assert {case.B for case in cases} == set(range(1, MOST_EXAMPLES + 1))
    assert {case.outer_vmap for case in cases} == {"", "params", "batch", "both"}
    for option in ("forced", "has_aux", "passes"):
        assert {getattr(case, option) for case in cases} == {False, True}


@pytest.mark.parametrize("seed", [3, 17, 202, 210])
def test_some_programs_are_right(seed):
    program = draw_program(seed)
    assert check(program, draw_case(program)).wrong == {}


def test_a_program_keeps_two_products_so_that_the_gradient_of_a_value_is_formed():
    for seed in range(20):
        program = draw_program(seed)
        assert len(program.params) >= 2
        assert len(program.positions) >= 2


def _first_failure(session: Session):
    """Programs until one is wrong."""
    for number in range(TRIES):
        session.run_one(number)
        if session.failures:
            return session.failures[0]
    raise AssertionError(f"{TRIES} programs are right")


def test_a_broken_pass_is_found_shrunk_and_replayed(monkeypatch, capsys):
    right = FACTS[primitives.mul_p]
    wrong = lambda *args: [x * (1 + 1e-6) for x in right.squeeze(*args)]
    monkeypatch.setitem(FACTS, primitives.mul_p, dataclasses.replace(right, squeeze=wrong))
    session = Session(seed=0)
    failure = _first_failure(session)
    assert "statistics" in failure.wrong
    assert len(failure.program.positions) <= 2
    options = _options_of(failure.shrunk_command)
    capsys.readouterr()
    assert main(options) == 1
    assert str(failure.program) in capsys.readouterr().out
    monkeypatch.undo()
    assert main(options) == 0


def _options_of(command: str) -> list[str]:
    start = ["python", "-m", "tests.fuzz"]
    assert command.split()[:3] == start
    return command.split()[3:]


def test_a_broken_strategy_is_found(monkeypatch):
    right = SCHEDULES["direct"]

    def run(*args):
        return jax.tree.map(lambda x: x * (1 + 1e-6), right.run(*args))

    monkeypatch.setitem(SCHEDULES, "direct", dataclasses.replace(right, run=run))
    session = Session(seed=0, shrink=False)
    failure = _first_failure(session)
    assert "passes" not in failure.wrong
    assert session.strategies["direct"]


def test_a_broken_recomputation_is_found(monkeypatch):
    right, tanh = sites.with_prelude, primitives.tanh_p

    def wrong(tail, ancestry):
        tail = right(tail, ancestry)
        prelude = [eqn.replace(primitive=primitives.cos_p) if eqn.primitive is tanh else eqn for eqn in tail.prelude]
        return dataclasses.replace(tail, prelude=tuple(prelude))

    monkeypatch.setattr(sites, "with_prelude", wrong)
    program = draw_program(0)
    loss = lambda params, batch: jnp.mean(jnp.sin(jax.nn.gelu(batch["x"] @ params["w"]) @ params["v"]))
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(3, 4)), "v": rng.normal(size=(4, 2))}
    program = dataclasses.replace(
        program, form="batch", loss=loss, params=params, batch={"x": rng.normal(size=(7, 5, 3))}, tags=frozenset()
    )
    assert "recompute changes the gradient of v" in check(program, Case()).wrong["passes"]


def test_what_the_loop_cannot_do_is_discarded_and_counted(monkeypatch):
    endless = lambda *_: (lambda _, h: jnp.exp(1e6 * h * h), (2,))
    monkeypatch.setattr(session_module, "draw_program", lambda seed: _of_one_block(seed, endless))
    session = Session(seed=0)
    session.run_one(0)
    assert sum(session.discarded.values()) == 1
    assert "not finite" in session.summary()


def _of_one_block(seed, block):
    apply, _ = block()
    program = draw_program(seed)
    loss = lambda params, batch: jnp.mean(apply(None, batch["x"] * params["w"]))
    batch = {"x": np.ones((7, 2))}
    return dataclasses.replace(program, form="batch", loss=loss, params={"w": np.ones(2)}, batch=batch)


def test_the_summary_names_every_block_weight_and_strategy():
    text = Session(seed=7).summary()
    assert all(name in text for name in (*BLOCKS, *WEIGHTS, *strategies()))
    assert "seed 7" in text


def test_a_fresh_seed_is_printed(capsys):
    assert main(["--seconds", "0"]) == 0
    assert capsys.readouterr().out.startswith("seed ")
