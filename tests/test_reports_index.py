"""The index of the reports knows where each of them comes from."""

import pytest

from benchmarks.reports_index import render_index
from pegprof.errors import PegprofError

SOURCES = """
[engine]
command = "python benchmarks/engine.py --csv reports/engine.csv"
note = "two cores"
"""
PAGE = "# A title\n\n| claim | measured | |\n|---|---|---|\n| a | b | agrees |\n| c | d | disagrees |\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sources.toml").write_text(SOURCES)
    (tmp_path / "engine.csv").write_text("")
    return tmp_path


def test_a_report_has_its_files_what_its_program_shows_and_its_command(folder):
    text = render_index(folder)
    assert "- [engine.csv](engine.csv): What statistics of per-example gradients cost" in text
    assert "`python benchmarks/engine.py --csv reports/engine.csv`; two cores." in text


def test_an_experiment_has_its_title_and_the_count_of_its_verdicts(folder):
    assert "None yet." in render_index(folder)
    (folder / "signs").mkdir()
    (folder / "signs" / "README.md").write_text(PAGE)
    assert "- [A title](signs/README.md), `pegprof experiment signs`: 1 × agrees, 1 × disagrees" in render_index(folder)


def test_a_report_without_a_source_is_an_error(folder):
    (folder / "stray.csv").write_text("")
    with pytest.raises(PegprofError, match="nobody knows what made stray"):
        render_index(folder)


def test_what_the_commands_leave_there_when_they_are_used_is_no_result_of_record(folder):
    before = render_index(folder)
    (folder / "mlp-b64-cpu.csv").write_text("")
    (folder / "mlp-fit-h100.csv").write_text("")
    (folder / "signs-quick").mkdir()
    (folder / "signs-quick" / "README.md").write_text(PAGE)
    assert render_index(folder) == before
    (folder / "sources.toml").write_text(SOURCES + SOURCES.replace("[engine]", "[mlp-b64-cpu]"))
    assert "[mlp-b64-cpu.csv](mlp-b64-cpu.csv)" in render_index(folder)


def test_a_source_without_a_report_is_an_error(folder):
    (folder / "engine.csv").unlink()
    with pytest.raises(PegprofError, match=r"sources\.toml has engine"):
        render_index(folder)
