"""What an experiment is: runs, what one of them measures, and what all of them show."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

Rows = list[dict[str, Any]]  # of plain numbers and text, as JSON has them
Tables = dict[str, Rows]
Verdict = Literal["agrees", "disagrees", "does not show"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One training, or whatever else is measured at once. Equal settings make an equal run.

    Args:
      name: what tells it from the others, fit for the name of a file.
      settings: all that its result depends on, as JSON has it.
    """

    name: str
    settings: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """A sentence of the paper beside what was measured."""

    claim: str
    measured: str
    verdict: Verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """One experiment.

    Args:
      name: as on the command line.
      title: of its page.
      about: paragraphs for the page: what is compared, on what, and what our sources leave open.
      packages: what it imports beside pegprof's own needs, by the names of the modules.
      make_runs: ``make_runs(quick, tables)``, all runs that are wanted, the most needed first; ``quick`` asks for what
        five minutes allow. It is asked again when all of them are done, with the tables that they gave: so a learning
        rate can be tuned by the first ones and used by the next.
      measure: the tables of one run.
      draw: from all tables to figures by name.
      judge: from all tables to findings.
      side_by_side: whether several runs may be measured at once, each on a core of its own.
    """

    name: str
    title: str
    about: Sequence[str]
    packages: Sequence[str]
    make_runs: Callable[[bool, Tables], Sequence[Run]]
    measure: Callable[[Run], Tables]
    draw: Callable[[Tables], Mapping[str, Any]]
    judge: Callable[[Tables], Sequence[Finding]]
    side_by_side: bool = True
