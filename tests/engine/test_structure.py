"""What surgery must not do: hold B gradients, or undo a rematerialisation. Read off the compiled programs."""

import math
import re

import jax
import pytest

from pegprof import grad_stats, make_plan
from pegprof.problem import load_problem

pytestmark = pytest.mark.full_compile

B = 6


def _compiled(function, problem):
    return jax.jit(function).lower(problem.abstract_params(), problem.abstract_batch(B)).compile()


def _vmapped(problem):
    def mean_of_squares(params, batch):
        per_example = jax.vmap(jax.grad(problem.loss), in_axes=(None, 0))(params, batch)
        return jax.tree.map(lambda g: (g.mean(0), (g**2).mean(0)), per_example)

    return mean_of_squares


def _buffer_sizes(compiled) -> set[int]:
    """The number of elements of every floating-point array in the optimized program."""
    shapes = re.findall(r"\bf(?:32|64|16)\[([\d,]*)\]", compiled.as_text())
    return {math.prod(int(n) for n in shape.split(",") if n) for shape in shapes}


def _sizes_of_stacked_gradients(problem) -> set[int]:
    """B×V×D, B×D×E: of every parameter whose gradient is not itself the size of an activation."""
    shapes = {row.parameter: row.shape for row in _plan(problem).rows if row.strategy != "direct"}
    assert len(shapes) > 6
    return {B * math.prod(shape) for shape in shapes.values()}


def _plan(problem):
    return make_plan(problem.loss, problem.abstract_params(), problem.abstract_batch(B))


@pytest.fixture(scope="module")
def tied_transformer():
    # No product of these sizes with B is that of an activation: T = 10, D = 28, F = 4·28, V = 256.
    return load_problem("transformer-tiny", {"seq_len": "10", "width": "28", "layers": "2"})


def test_no_buffer_holds_the_gradients_of_all_examples(tied_transformer):
    held = _buffer_sizes(_compiled(grad_stats(tied_transformer.loss), tied_transformer))
    assert not held & _sizes_of_stacked_gradients(tied_transformer)


def test_the_test_above_would_see_such_a_buffer(tied_transformer):
    held = _buffer_sizes(_compiled(_vmapped(tied_transformer), tied_transformer))
    assert held & _sizes_of_stacked_gradients(tied_transformer)


@pytest.mark.parametrize("stats", [("mean", "second_moment"), ("mean", "variance", "sign_mean", "norm")])
@pytest.mark.parametrize("options", [{"scan_layers": "true", "remat": "true"}, {"remat": "true"}])
def test_a_rematerialised_model_needs_little_more_than_its_plain_gradient(options, stats):
    problem = load_problem("transformer-tiny", {"layers": "3", "width": "32", "seq_len": "64", **options})
    plain = _compiled(jax.grad(problem.loss), problem).memory_analysis().temp_size_in_bytes
    surgery = _compiled(grad_stats(problem.loss, stats), problem).memory_analysis().temp_size_in_bytes
    assert surgery < 1.5 * plain
