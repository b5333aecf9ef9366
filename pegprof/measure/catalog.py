"""The catalogue of models: every model that a bare name finds, with its sizes. ``pegprof list`` is this as text.

The facts of the zoo's models are on record. What is not, children load and trace, side by side: what a model prints
stays with its child, and a model that is broken is a warning and costs no other.
"""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Mapping
from typing import Any

from pegprof.measure import protocol, recorded_facts
from pegprof.measure.process import Child, ChildFailure
from pegprof.measure.progress import Talk
from pegprof.measure.protocol import Surveyed
from pegprof.models.own_models import offered, package_of
from pegprof.models.problem import zoo_names
from pegprof.result.settings import DEFAULT_BATCH

OWN_PACKAGE = "pegprof"
MOST_CHILDREN = 4
LIMIT_S = 120.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A model at its defaults; its fields are those of ``pegprof list --export-json``.

    Args:
      name: what to type.
      package: what it comes with; ``pegprof`` for the zoo's.
      description: one line for a person.
      parameters: how many numbers are trained.
      parameters_outside_embeddings: without those that an example's integers look up, and without those whose own name
        says embedding or position.
      batch: how many examples ``pegprof run`` takes, if not told otherwise.
      seq_len: the length of a sequence, for models that have one.
      parameter_bytes: what the parameters take.
      activation_bytes_per_example: what the backward pass keeps of one example, by the trace.
      activations_dominate: whether that is at least what the parameters take.
      options: what ``--set`` changes, with the values in effect.
    """

    name: str
    package: str
    description: str
    parameters: int
    parameters_outside_embeddings: int
    batch: int = DEFAULT_BATCH
    seq_len: int | None
    parameter_bytes: int
    activation_bytes_per_example: int
    activations_dominate: bool
    options: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Catalog:
    """The models that could be looked at, and what there is to say about the others."""

    entries: tuple[Entry, ...]
    warnings: tuple[str, ...]


def make_catalog(*, talk: Talk, debug: bool = False) -> Catalog:
    """Looks at every model of the zoo and of installed packages.

    Args:
      talk: with ``debug``, is told all that the models print.
    """
    zoo, offers = zoo_names(), offered()
    packages = dict.fromkeys(zoo, OWN_PACKAGE)
    packages |= {name: package_of(entries[0]) for name, entries in offers.items() if name not in packages}
    warnings = [
        f"{package_of(offer)} offers a model {name!r} too: that name is the zoo's; write {offer.value}"
        for name in zoo
        for offer in offers.get(name, ())
    ]
    facts = {name: recorded for name, recorded in recorded_facts.read().items() if name in zoo}
    traced, failures = survey_models([name for name in packages if name not in facts], talk=talk, debug=debug)
    facts |= traced
    if versions := recorded_facts.other_versions():
        warnings.append(f"activations were counted with {versions}; other versions may keep a little more or less")
    warnings += [f"{name} of {packages[name]} cannot be used: {why}" for name, why in failures.items()]
    entries = [Entry(name=name, package=package, **facts[name]) for name, package in packages.items() if name in facts]
    return Catalog(entries=tuple(entries), warnings=tuple(warnings))


def survey_models(names: list[str], *, talk: Talk, debug: bool = False) -> tuple[dict[str, Any], dict[str, str]]:
    """The facts of some models, and why others have none; one that takes its child down is left out the next time."""
    facts: dict[str, Any] = {}
    failures: dict[str, str] = {}
    while left := [name for name in names if name not in facts and name not in failures]:
        for answer in _run_children(left, talk=talk, debug=debug):
            facts |= answer.facts
            failures |= answer.failures
    return facts, failures


def _run_children(names: list[str], *, talk: Talk, debug: bool) -> list[Surveyed]:
    """Each child takes the next model that no other has claimed."""
    # Nothing is computed, but a model may make an array when it is imported: not on a device that others may need.
    environment = {"JAX_PLATFORMS": "cpu"}
    with contextlib.ExitStack() as stack:  # which ends the children, Ctrl-C or not
        claims = stack.enter_context(tempfile.TemporaryDirectory(prefix="pegprof-"))
        children = [
            stack.enter_context(contextlib.closing(Child(environment, talk=talk, debug=debug)))
            for _ in range(min(MOST_CHILDREN, os.cpu_count() or 1, len(names)))
        ]
        for child in children:
            protocol.send(child, protocol.Survey(models=tuple(names), claims=claims))
        return [_receive(child, suspect=name) for child, name in zip(children, names, strict=False)]


def _receive(child: Child, *, suspect: str) -> Surveyed:
    """A child's answer; one that dies before it named the model it was at, is said to have died of the suspect."""
    try:
        return protocol.receive(child, Surveyed, limit_s=LIMIT_S)
    except ChildFailure as failure:
        answer = protocol.read(Surveyed, {k: v for k, v in failure.answer.items() if k != "failure"})
        culprit = answer.running or suspect
        return dataclasses.replace(answer, failures={**answer.failures, culprit: failure.reason})
