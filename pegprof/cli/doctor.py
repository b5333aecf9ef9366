"""``pegprof doctor``: what is missing, and how to get it."""

import sys

import typer

from pegprof.cli.options import Quiet, Tracebacks
from pegprof.cli.printing import shape_of


def see_doctor(quiet: Quiet = False, debug: Tracebacks = False) -> None:
    """Check versions, devices, memory and optional packages.

    Each problem comes with its remedy. The exit code is 3 if nothing could be measured here.
    """
    from pegprof.measure import doctor, progress
    from pegprof.report import doctor_text

    with progress.listen(quiet=quiet) as talk:
        findings = doctor.diagnose(doctor.examine(talk))
    print(doctor_text.render(findings, **shape_of(sys.stdout)))
    raise typer.Exit(doctor.exit_code(findings))
