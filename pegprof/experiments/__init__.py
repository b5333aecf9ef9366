"""The paper's experiments, one file each: what it says, what is measured here, and whether they agree.

    Experiment ──> runs ──> a file for each that is finished ──> tables ──> CSV, figures, a page of Markdown

An experiment is a record of functions (``base.py``); ``runner.py`` runs any of them, and goes on where it was stopped.
"""

import importlib
from collections.abc import Mapping

from pegprof.errors import PegprofError, nearest
from pegprof.experiments.base import Experiment

EXPERIMENTS: Mapping[str, str] = {
    "memory-baseline": "pegprof.experiments.memory_baseline",
    "sign-placement": "pegprof.experiments.sign_placement",
    "batch-scaling": "pegprof.experiments.batch_scaling",
    "adam-preconditioner": "pegprof.experiments.adam_preconditioner",
}  # each has EXPERIMENT


def load_experiment(name: str) -> Experiment:
    """The experiment of a name; only its own file is imported."""
    if name not in EXPERIMENTS:
        raise PegprofError(f"no experiment is called {name!r}", hint=nearest(name, EXPERIMENTS))
    experiment: Experiment = importlib.import_module(EXPERIMENTS[name]).EXPERIMENT
    return experiment
