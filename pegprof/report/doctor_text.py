"""Findings of the doctor -> text for a person."""

from collections.abc import Sequence

import pegprof
from pegprof.measure.doctor import Finding
from pegprof.report.tables import WIDTH, make_console, text_of

_STYLES = {"ok": "green", "note": "dim", "problem": "red"}


def render(findings: Sequence[Finding], *, width: int = WIDTH, color: bool = False) -> str:
    """One line for each finding, and one for the whole."""
    from rich.table import Table
    from rich.text import Text

    console = make_console(width, color)
    console.print(f"pegprof {pegprof.__version__}", style="bold")
    table = Table.grid(padding=(0, 2, 0, 0))
    for finding in findings:
        words = f"{finding.detail}; {finding.hint}" if finding.hint else finding.detail
        table.add_row(Text(finding.status, style=_STYLES[finding.status]), Text(finding.subject), Text(words))
    console.print(table)
    problems = [finding for finding in findings if finding.status == "problem"]
    console.print("Ready to measure." if not problems else f"Not ready to measure: {_count(problems)} above.")
    return text_of(console)


def _count(problems: Sequence[Finding]) -> str:
    return f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
