"""``pegprof experiment``: one of the paper's experiments again."""

from pathlib import Path
from typing import Annotated

import typer

from pegprof.cli import completion
from pegprof.cli.help import HOW_LONG, OUTPUT
from pegprof.cli.options import Debug, Quiet
from pegprof.cli.printing import say
from pegprof.experiments import EXPERIMENTS


def experiment(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help=f"{', '.join(EXPERIMENTS)}.", autocompletion=completion.complete_experiments
        ),
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="A short version, in under five minutes.", rich_help_panel=HOW_LONG)
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Output folder. [default: reports/NAME or reports/NAME-quick]", rich_help_panel=OUTPUT
        ),
    ] = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Repeat one of the paper's experiments.

    Writes tables, figures and a page that compares them with the paper. An interrupted experiment continues where it
    stopped.
    """
    from pegprof.experiments import load_experiment
    from pegprof.experiments.runner import run_experiment
    from pegprof.measure import progress
    from pegprof.report import output

    chosen = load_experiment(name)
    folder = out or Path("reports") / (f"{name}-quick" if quick else name)
    output.make_folder(folder, "--out")
    with progress.listen(quiet=quiet) as talk:
        outcome = run_experiment(chosen, folder, quick=quick, talk=talk)
    for finding in outcome.findings:
        print(f"{finding.verdict}: {finding.claim}\n    {finding.measured}")
    say(f"{outcome.done} of {outcome.planned} runs; wrote {outcome.page}")
    outcome.require_all()
