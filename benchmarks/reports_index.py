"""The index of ``reports``, from what is there: which files, what they show, and the command that wrote them.

Commands and circumstances are in ``reports/sources.toml``; what a program shows is its first line. An
experiment is a folder with a page of its own.
"""

import re
import tomllib
from pathlib import Path
from typing import Annotated, get_args

import typer

from benchmarks.command import run_command, say
from pegprof.errors import PegprofError
from pegprof.experiments.base import Verdict

VERDICTS = get_args(Verdict)
ROOT = Path(__file__).parent.parent
BY_USE = ("*-b[0-9]*-*.csv", "*-fit-*.csv", "*-quick")
"""What the commands leave in a folder of this name when they are used: of record only if ``sources.toml`` says so."""
HEAD = """# Reports

Results of record: what a program in this repository wrote. `pegprof run` also writes its CSV to a folder of this name,
below wherever it is started. This index is made by `python benchmarks/reports_index.py`.
"""


def main(
    folder: Annotated[Path, typer.Option(help="Where the reports are.")] = ROOT / "reports",
) -> None:
    """Write README.md of the reports."""
    (folder / "README.md").write_text(render_index(folder), encoding="utf-8")
    say(f"wrote {folder / 'README.md'}")


def render_index(folder: Path) -> str:
    """The text of the index. A report whose source is not known is an error, and a source without a report too."""
    sources = tomllib.loads((folder / "sources.toml").read_text(encoding="utf-8"))
    by_stem: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        is_index = path.name in ("README.md", "sources.toml")
        if path.is_file() and not is_index and (path.stem in sources or not _is_by_use(path)):
            by_stem.setdefault(path.stem, []).append(path)
    if nameless := by_stem.keys() - sources.keys():
        raise PegprofError(f"nobody knows what made {', '.join(sorted(nameless))}", hint="say so in sources.toml")
    if lost := sources.keys() - by_stem.keys():
        raise PegprofError(f"sources.toml has {', '.join(sorted(lost))}, which are not there")
    pages = [page for page in sorted(folder.glob("*/README.md")) if not _is_by_use(page.parent)]
    return "\n".join(
        [
            HEAD,
            "## Experiments",
            "",
            *(_render_experiment(page) for page in pages),
            *(["None yet."] if not pages else []),
            "",
            "## Measurements",
            "",
            *(
                line
                for stem, source in sources.items()
                for line in _render_report([path.name for path in by_stem[stem]], source)
            ),
            "",
        ]
    )


def _is_by_use(path: Path) -> bool:
    return any(path.match(pattern) for pattern in BY_USE)


def _render_experiment(page: Path) -> str:
    """Its title, and how its findings stand."""
    text = page.read_text(encoding="utf-8")
    verdicts = re.findall(rf"\| ({'|'.join(VERDICTS)}) \|$", text, re.MULTILINE)
    counts = ", ".join(f"{verdicts.count(each)} × {each}" for each in VERDICTS if each in verdicts)
    title = text.splitlines()[0].removeprefix("# ")
    return f"- [{title}]({page.parent.name}/README.md), `pegprof experiment {page.parent.name}`: {counts}"


def _render_report(files: list[str], source: dict[str, str]) -> list[str]:
    links = ", ".join(f"[{name}]({name})" for name in files)
    shown = source.get("shows") or _first_line(source["command"])
    return [f"- {links}: {shown}", f"  `{source['command']}`; {source['note']}."]


def _first_line(command: str) -> str:
    """Of the text of the program that a command runs: what it is for."""
    program = next(word for word in command.split() if word.endswith(".py"))
    return (ROOT / program).read_text(encoding="utf-8").splitlines()[0].removeprefix('"""').removesuffix('"""')


if __name__ == "__main__":
    run_command(main)
