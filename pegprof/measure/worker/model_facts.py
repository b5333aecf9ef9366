"""What a child finds out about models from their traces, compiling nothing: sizes, what the backward pass keeps."""

import re
from pathlib import Path
from typing import Any

import jax

from pegprof.engine.trace import parameter_names
from pegprof.errors import PegprofError
from pegprof.measure.protocol import Survey
from pegprof.measure.worker.main import Reporter
from pegprof.measure.worker.residuals import trace_residuals
from pegprof.models.problem import Problem, load_problem, zoo_names
from pegprof.result.verdict import TRACED_BATCH, dominate
from pegprof.user_code import home_of, users_code

_NAMES_OF_EMBEDDINGS = re.compile(r"embed|(^|_)pos(ition)?s?(_|$)")


def survey(request: Survey, reporter: Reporter) -> None:
    """Reports the facts of those models that no other child has claimed, or why they have none.

    ``running`` is the model being looked at, should it take the child down.
    """
    facts: dict[str, Any] = {}
    failures: dict[str, str] = {}
    for number, name in enumerate(request.models):
        if not _claim(Path(request.claims, str(number))):
            continue
        reporter.update(running=name)
        try:
            facts[name] = describe(load_problem(name), traced=_quick_form(name))
        except PegprofError as error:
            failures[name] = str(error)
        reporter.update(facts=facts, failures=failures)


def _claim(path: Path) -> bool:
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _quick_form(name: str) -> Problem | None:
    """A model of the zoo as a loop over its layers, if it can be one: of the same sizes, and one layer to trace."""
    if name in zoo_names() and "scan_layers" in load_problem(name).options:
        return load_problem(name, {"scan_layers": True})
    return None


def describe(problem: Problem, *, traced: Problem | None = None) -> dict[str, Any]:
    """A model's sizes, by the names of the fields of ``catalog.Entry``.

    Args:
      traced: another form of the same model that is quicker to trace.
    """
    traced = traced or problem
    with users_code(home_of(traced.loss)):
        params = traced.abstract_params()
        kept = trace_residuals(traced.loss, params, traced.abstract_batch(TRACED_BATCH))
    leaves = dict(zip(parameter_names(params), jax.tree.leaves(params), strict=True))
    parameter_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves.values())
    return {
        "description": problem.description,
        "parameters": sum(leaf.size for leaf in leaves.values()),
        "parameters_outside_embeddings": sum(
            leaf.size for name, leaf in leaves.items() if not _is_embedding(name, kept.looked_up)
        ),
        "parameter_bytes": parameter_bytes,
        "activation_bytes_per_example": kept.bytes_per_example,
        "activations_dominate": dominate(kept.bytes_per_example, parameter_bytes),
        "seq_len": problem.options.get("seq_len"),
        "options": {key: _plain(value) for key, value in problem.options.items()},
    }


def _is_embedding(name: str, looked_up: tuple[str, ...]) -> bool:
    """A parameter that an example's integers look up, or one that calls itself an embedding or a position.

    Positions are often added, not looked up: only their name tells. The name is its own, the last part of its path: the
    kernel of a patch embedding is a kernel.
    """
    return name in looked_up or bool(_NAMES_OF_EMBEDDINGS.search(name.rpartition("/")[2]))


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
