"""Where those who look after CI find the outcome of gates: the files they ask for, and GitHub's own places."""

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from pegprof.compare.gate import Gate, Refusal
from pegprof.errors import PegprofError
from pegprof.report import gate_report
from pegprof.report.output import Exports, write


def publish(
    gates: Sequence[Gate],
    refusals: Sequence[Refusal] = (),
    *,
    exports: Exports,
    environment: Mapping[str, str] = os.environ,
) -> list[PegprofError]:
    """Writes the files, and on GitHub the summary of the job; returns what went wrong, which hides no regression."""
    writes = [
        functools.partial(write, path, gate_report.FORMATS[name](gates, refusals), name)
        for name, path in exports.files.items()
    ]
    if summary := environment.get("GITHUB_STEP_SUMMARY"):
        writes.append(functools.partial(_append, Path(summary), gate_report.render_markdown(gates, refusals)))
    errors = []
    for write_one in writes:
        try:
            write_one()
        except PegprofError as error:
            errors.append(error)
    return errors


def annotate(
    gates: Sequence[Gate], refusals: Sequence[Refusal] = (), *, environment: Mapping[str, str] = os.environ
) -> str:
    """What is to be printed for GitHub, if anything."""
    return gate_report.render_annotations(gates, refusals) if environment.get("GITHUB_ACTIONS") == "true" else ""


def _append(path: Path, text: str) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise PegprofError(f"cannot write the job's summary: {error.strerror}", where=str(path)) from error
