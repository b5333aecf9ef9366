"""What a shell offers on Tab: models, targets, statistics, methods and the like. None of it imports jax."""

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from pegprof.errors import PegprofError
from pegprof.result.settings import FORMULAS, METHODS

Offers = list[tuple[str, str]]
"""What may be typed, each with a word of explanation."""


def complete_models(incomplete: str) -> Offers:
    """The names that ``pegprof list`` shows; behind the name of a file, the names in it."""
    from pegprof.models.own_models import names_in, offered
    from pegprof.models.problem import zoo_names

    file = incomplete.partition(":")[0]
    if file.endswith(".py"):
        with contextlib.suppress(PegprofError):
            return [(f"{file}:{name}", "") for name in names_in(Path(file))]
    return [(name, "") for name in (*zoo_names(), *offered())]


def complete_targets(incomplete: str) -> Offers:
    from pegprof.targets.devices import DEVICES

    return _complete_list(incomplete, {"cpu": "this machine", **{d.name: d.title for d in DEVICES.values()}})


def complete_target(incomplete: str) -> Offers:
    return [] if "," in incomplete else complete_targets(incomplete)


def complete_stats(incomplete: str) -> Offers:
    return _complete_list(incomplete, FORMULAS)


def complete_methods(incomplete: str) -> Offers:
    return _complete_list(incomplete, dict.fromkeys(METHODS, ""))


def complete_steps(incomplete: str) -> Offers:
    from pegprof.result.steps import STEPS

    return [(name, f"takes {', '.join(step.stats)}") for name, step in STEPS.items()]


def complete_dtypes(incomplete: str) -> Offers:
    return [("float32", ""), ("bfloat16", "")]


def complete_experiments(incomplete: str) -> Offers:
    from pegprof.experiments import EXPERIMENTS

    return [(name, "") for name in EXPERIMENTS]


def complete_options(incomplete: str) -> Offers:
    """The options of the model that is already on the line, if its facts are on record.

    The line is read from the shell's variables: the parser gives up at an option that has no value yet.
    """
    from pegprof.measure import recorded_facts

    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")
    facts = recorded_facts.read()
    model = next((word for word in line.split() if word in facts), None)
    options = facts[model]["options"] if model else {}
    return [(f"{name}=", f"default: {value}") for name, value in options.items()]


def _complete_list(incomplete: str, choices: Mapping[str, str]) -> Offers:
    """The choices for the last of several names; one that stands before it is not offered again.

    >>> _complete_list("grad,v", {"grad": "", "vmap": ""})
    [('grad,vmap', '')]
    """
    before, comma, _ = incomplete.rpartition(",")
    taken: Iterable[str] = before.split(",")
    return [(f"{before}{comma}{name}", words) for name, words in choices.items() if name not in taken]
