"""Where reports go, and what happens when they cannot."""

from pathlib import Path

import pytest

from pegprof.errors import PegprofError
from pegprof.report.output import Exports, Saver, choose_exports, write
from tests.result.results import RESULT

DEFAULT = Path("reports/m-b64-cpu.csv")


def exports(no_csv=False, **asked):
    return choose_exports({"csv": None, "json": None, "markdown": None, **asked}, no_csv=no_csv, default_csv=DEFAULT)


@pytest.mark.parametrize(
    ("asked", "files", "stdout"),
    [
        ({}, {"csv": DEFAULT}, None),
        ({"no_csv": True}, {}, None),
        ({"csv": "my.csv"}, {"csv": Path("my.csv")}, None),
        ({"csv": "-"}, {}, "csv"),
        ({"json": "-"}, {"csv": DEFAULT}, "json"),
        ({"json": "a.json", "markdown": "-", "no_csv": True}, {"json": Path("a.json")}, "markdown"),
    ],
)
def test_the_options_say_what_goes_where(asked, files, stdout):
    assert exports(**asked) == Exports(files=files, stdout=stdout)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"csv": "-", "json": "-"}, "--export-csv and --export-json cannot both go to stdout"),
        ({"csv": "x", "no_csv": True}, "--export-csv and --no-csv contradict each other"),
        ({"csv": "x", "json": "./x"}, "two exports go to the same file"),
        ({"json": str(DEFAULT)}, "two exports go to the same file"),
    ],
)
def test_what_cannot_be_is_refused(asked, words):
    with pytest.raises(PegprofError, match=words) as caught:
        exports(**asked)
    assert caught.value.hint


def test_without_a_default_only_what_is_asked_for_is_written():
    assert choose_exports({"junit": "j.xml", "json": "-"}) == Exports(files={"junit": Path("j.xml")}, stdout="json")
    with pytest.raises(PegprofError, match="--export-junit and --export-json cannot both go to stdout"):
        choose_exports({"junit": "-", "json": "-"})


def test_a_file_that_is_read_is_not_written_over(tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "b.json")
    for name in ("b.json", "link.json"):
        with pytest.raises(PegprofError, match="is both read and written\nhint: name another file with --export-junit"):
            Exports(files={"junit": tmp_path / name}).check_apart_from([tmp_path / "x" / ".." / "b.json"])
    Exports(files={"junit": tmp_path / "j.xml"}).check_apart_from([tmp_path / "b.json"])


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(PegprofError, match=r"cannot write .*: it is a folder"):
        Exports(files={"json": tmp_path}).check_writable()


def test_missing_folders_are_made(tmp_path):
    made = Exports(files={"json": tmp_path / "a" / "b.json"})
    made.check_writable()
    made.write_files(RESULT)
    assert (tmp_path / "a" / "b.json").read_text().startswith('{\n "schema": 3')


def test_a_report_has_the_permissions_of_any_file(tmp_path):
    write(tmp_path / "report", "text", "csv")
    (tmp_path / "file").write_text("text")
    assert (tmp_path / "report").stat().st_mode == (tmp_path / "file").stat().st_mode


def test_a_write_that_fails_leaves_the_old_file_and_no_draft(tmp_path, monkeypatch):
    (tmp_path / "x.csv").write_text("old")

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full_disk)
    with pytest.raises(PegprofError, match="No space left on device"):
        write(tmp_path / "x.csv", "new", "csv")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("x.csv", "old")]


def test_a_file_that_can_no_longer_be_written_does_not_stop_a_measurement(tmp_path):
    saver = Saver(Exports(files={"csv": tmp_path / "gone" / "x.csv"}))
    saver(RESULT)
    assert saver.latest is RESULT
    assert "cannot write" in str(saver.failure)
    (tmp_path / "gone").mkdir()
    saver(RESULT)
    assert saver.failure is None
