"""What came of gates, for a person and for those who look after CI: a terminal, Markdown, GitHub, JUnit, JSON."""

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence

from pegprof.compare.comparison import Change, Outcome
from pegprof.compare.gate import Gate, Refusal
from pegprof.report.markdown import escape, table
from pegprof.report.tables import WIDTH, Column, make_console, print_words, text_of
from pegprof.result import records
from pegprof.result.result import GATE_KIND

SCHEMA = 1
_LABELS: dict[Outcome, str] = {
    "worse": "FAIL",
    "lost": "FAIL",
    "unresolved": "unresolved",
    "better": "better",
    "same": "ok",
}
_STYLES: dict[Outcome, str] = {"worse": "red", "lost": "red", "unresolved": "yellow", "better": "green", "same": ""}


def summary(gate: Gate) -> str:
    """One line: what came of it."""
    counts = {
        "failed": len(gate.failures),
        "unresolved": len(gate.unresolved),
        "better": len(gate.improvements),
    }
    found = [f"{count} {word}" for word, count in counts.items() if count]
    kinds = "bytes, flops and plans" + (" and times" if gate.time else "")
    return f"{gate.model} against {gate.baseline}: {', '.join(found) or 'nothing changed'}; {_same(gate)} ({kinds})"


def _same(gate: Gate) -> str:
    return f"{sum(change.outcome == 'same' for change in gate.changes)} within the limits"


def place(change: Change) -> str:
    return f"{change.method} at batch {change.batch} on {change.target}"


def _notable(gate: Gate) -> list[Change]:
    """Failures first, then what is not settled, then what became better."""
    return [*gate.failures, *gate.unresolved, *gate.improvements]


def render_gates(gates: Sequence[Gate], *, width: int = WIDTH, color: bool = False) -> str:
    """For a terminal."""
    console = make_console(width, color)
    for gate in gates:
        print_words(console, summary(gate), style="bold")
        for change in _notable(gate):
            words = f"  {_LABELS[change.outcome]}: {place(change)}: {change.words}"
            print_words(console, words, style=_STYLES[change.outcome])
        if gate.improvements and not gate.failures and not gate.interleaved:
            print_words(console, "  what is better now can be lost unseen: consider a new baseline")
    return text_of(console)


_COLUMNS = (
    Column(header="", cell=lambda change: _LABELS[change.outcome], right=False),
    Column(header="method", cell=lambda change: change.method, right=False),
    Column(header="batch", cell=lambda change: str(change.batch)),
    Column(header="target", cell=lambda change: change.target, right=False),
    Column(header="what", cell=lambda change: change.words, right=False),
)


def render_markdown(gates: Sequence[Gate], refusals: Sequence[Refusal] = ()) -> str:
    """For a job's summary, or a pull request."""
    lines = []
    for gate in gates:
        mark = "❌" if gate.failures else "⚠️" if gate.unresolved else "✅"
        lines += [f"### {mark} pegprof gate: {escape(summary(gate))}", ""]
        if notable := _notable(gate):
            lines += [*table(_COLUMNS, notable), ""]
    for refusal in refusals:
        lines += [f"### ❌ pegprof gate: {escape(refusal.baseline)} was not compared", ""]
        lines += [line for text in _explain(refusal) for line in (escape(text), "")]
    return "\n".join(lines).rstrip("\n") + "\n"


def _explain(refusal: Refusal) -> list[str]:
    hint = refusal.error.hint
    return [refusal.words, *([f"hint: {hint}"] if hint else [])]


def render_annotations(gates: Sequence[Gate], refusals: Sequence[Refusal] = ()) -> str:
    """Commands that GitHub turns into annotations, one for each model that there is something to say of."""
    notes = [_annotate(gate) for gate in gates if gate.failures or gate.unresolved]
    notes += [_annotation("error", refusal.baseline, _explain(refusal)) for refusal in refusals]
    return "".join(notes)


def _annotate(gate: Gate) -> str:
    lines = [f"{place(change)}: {change.words}" for change in gate.failures or gate.unresolved]
    return _annotation("error" if gate.failures else "warning", gate.model, lines)


def _annotation(level: str, subject: str, lines: Sequence[str]) -> str:
    title, text = _escape_property(f"pegprof gate: {subject}"), _escape_command("\n".join(lines))
    return f"::{level} title={title}::{text}\n"


def _escape_command(text: str) -> str:
    """
    >>> _escape_command("1% more\\nand more")
    '1%25 more%0Aand more'
    """
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape_command(text).replace(":", "%3A").replace(",", "%2C")


def render_junit(gates: Sequence[Gate], refusals: Sequence[Refusal] = ()) -> str:
    """A suite for each model, a case for each number; what is unresolved is a skipped case.

    A baseline that could not be compared is a suite of one case, an error.
    """
    root = ET.Element("testsuites", name="pegprof gate")
    for gate in gates:
        suite = _add_suite(
            root, gate.model, tests=len(gate.changes), failures=len(gate.failures), skipped=len(gate.unresolved)
        )
        for change in gate.changes:
            case = ET.SubElement(suite, "testcase", classname=f"{gate.model}.{place(change)}", name=change.metric)
            if change.is_failure:
                ET.SubElement(case, "failure", message=_printable(change.words), type=change.outcome)
            elif change.outcome == "unresolved":
                ET.SubElement(case, "skipped", message=_printable(change.words))
    for refusal in refusals:
        name, kind = _printable(refusal.baseline), refusal.error.exit_code.name.lower()
        case = ET.SubElement(_add_suite(root, name, tests=1, errors=1), "testcase", classname=name, name="baseline")
        error = ET.SubElement(case, "error", message=_printable(refusal.words), type=kind)
        error.text = _printable("\n".join(_explain(refusal)))
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _add_suite(
    root: ET.Element, name: str, *, tests: int, failures: int = 0, skipped: int = 0, errors: int = 0
) -> ET.Element:
    counts = {"tests": tests, "failures": failures, "skipped": skipped, "errors": errors}
    return ET.SubElement(root, "testsuite", {"name": name, **{key: str(count) for key, count in counts.items()}})


def _printable(text: str) -> str:
    """XML has no place for control characters, which a crash's message may hold."""
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)


def render_json(gates: Sequence[Gate], refusals: Sequence[Refusal] = ()) -> str:
    """Every number that was compared, and what could not be."""
    data = [
        {
            "model": gate.model,
            "baseline": gate.baseline,
            "passed": not gate.failures,
            "time": gate.time,
            "changes": records.encode(gate.changes),
        }
        for gate in gates
    ]
    errors = [
        {
            "baseline": refusal.baseline,
            "exit_code": int(refusal.error.exit_code),
            "what": refusal.words,
            "hint": refusal.error.hint,
        }
        for refusal in refusals
    ]
    outcome = {"schema": SCHEMA, "kind": GATE_KIND, "gates": data, "errors": errors}
    return json.dumps(outcome, indent=1, ensure_ascii=False) + "\n"


FORMATS: dict[str, Callable[[Sequence[Gate], Sequence[Refusal]], str]] = {
    "junit": render_junit,
    "json": render_json,
    "markdown": render_markdown,
}
