"""Where reports go: to files, checked before minutes of measuring and written all or nothing; one format to stdout."""

import contextlib
import dataclasses
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from pegprof.errors import PegprofError
from pegprof.report.formats import FORMATS
from pegprof.result.result import Result
from pegprof.result.settings import Settings

STDOUT = "-"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exports:
    """What a user wants to have written: files by format, and at most one format on stdout."""

    files: Mapping[str, Path]
    stdout: str | None = None

    def write_files(self, result: Result) -> None:
        for name, path in self.files.items():
            write(path, FORMATS[name](result), name)

    def check_writable(self) -> None:
        """Raises in words, before anything is measured, if a file cannot be written later."""
        for name, path in self.files.items():
            with _in_words(path, _hint(_flag(name))):
                if path.is_dir():
                    raise IsADirectoryError("it is a folder")
                _try_folder(path.parent)

    def check_apart_from(self, read: Iterable[Path]) -> None:
        """Raises if a file would be written over one that is read."""
        inputs = {path.resolve() for path in read}
        for name, path in self.files.items():
            if path.resolve() in inputs:
                hint = f"name another file with {_flag(name)}"
                raise PegprofError(f"{path} is both read and written", hint=hint)


class Saver:
    """Writes the files whenever there is something new, and keeps the latest result.

    A file that cannot be written any more does not stop a measurement: ``failure`` is for its end.
    """

    def __init__(self, exports: Exports):
        self._exports = exports
        self.latest: Result | None = None
        self.failure: PegprofError | None = None

    def __call__(self, result: Result) -> None:
        self.latest, self.failure = result, None
        try:
            self._exports.write_files(result)
        except PegprofError as error:
            self.failure = error


def choose_exports(
    asked: Mapping[str, str | None], *, no_csv: bool = False, default_csv: Path | None = None
) -> Exports:
    """What the options ``--export-FORMAT`` ask for, and the CSV, if any, that is written unless they say otherwise.

    >>> choose_exports({"csv": None, "json": "-"}, no_csv=True, default_csv=Path("x.csv"))
    Exports(files={}, stdout='json')
    """
    if no_csv and asked.get("csv"):
        raise PegprofError("--export-csv and --no-csv contradict each other", hint="leave one of them out")
    to_stdout = [name for name, path in asked.items() if path == STDOUT]
    if len(to_stdout) > 1:
        what = f"{' and '.join(map(_flag, to_stdout))} cannot both go to stdout"
        raise PegprofError(what, hint="name a file for all but one of them")
    files = {name: Path(path) for name, path in asked.items() if path and path != STDOUT}
    if default_csv and not (no_csv or asked.get("csv")):
        files = {"csv": default_csv, **files}
    if len({path.resolve() for path in files.values()}) < len(files):
        raise PegprofError("two exports go to the same file", hint="name another file for one of them")
    return Exports(files=files, stdout=to_stdout[0] if to_stdout else None)


def default_csv_path(settings: Settings, targets: Sequence[str]) -> Path:
    """
    >>> str(default_csv_path(Settings(model="my/file.py:net", batches=(8, 16)), ["cpu", "h100"]))
    'reports/my-file.py-net-b8-16-cpu-h100.csv'
    """
    batches = "-".join(map(str, settings.batches))
    return Path("reports", f"{_subject(settings)}-b{batches}-{'-'.join(map(_file_name, targets))}{_mesh(settings)}.csv")


def fit_csv_path(settings: Settings, target: str, *, all_meshes: bool = False) -> Path:
    """
    >>> str(fit_csv_path(Settings(model="mlp", step="adam", mesh={"data": 2, "fsdp": 2}), "tpu-v5e:2x2"))
    'reports/mlp-adam-fit-tpu-v5e-2x2-data2-fsdp2.csv'
    """
    mesh = "-auto" if all_meshes else _mesh(settings)
    return Path("reports", f"{_subject(settings)}-fit-{_file_name(target)}{mesh}.csv")


def _mesh(settings: Settings) -> str:
    return "".join(f"-{axis}{size}" for axis, size in settings.mesh.items())


def _subject(settings: Settings) -> str:
    """A step's results do not overwrite those of the statistics alone."""
    return "-".join([_file_name(settings.model), *([settings.step] if settings.step else [])])


def _file_name(name: str) -> str:
    """A model or a target as part of a file's name, which has no colons on every system."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-.")


def _flag(name: str) -> str:
    return f"--export-{name}"


def write(path: Path, text: str, name: str) -> None:
    """Replaces the file in one step: a reader sees the old text or the new, never half of one.

    Args:
      name: of the format.
    """
    with _in_words(path, _hint(_flag(name))):
        draft = tempfile.NamedTemporaryFile(  # noqa: SIM115  (it becomes the file, or goes)
            "w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8", newline=""
        )
        try:
            with draft:
                draft.write(text)
            Path(draft.name).chmod(0o666 & ~_umask())  # temporary files are private, reports are not
            Path(draft.name).replace(path)
        except BaseException:  # a full disk, Ctrl-C: leave no draft behind
            Path(draft.name).unlink(missing_ok=True)
            raise


def make_folder(folder: Path, flag: str) -> None:
    """Raises in words, before anything is measured, if nothing can be written there; ``flag`` is what names it."""
    with _in_words(folder, f"name another folder with {flag}"):
        _try_folder(folder)


def _try_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


@contextlib.contextmanager
def _in_words(path: Path, hint: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PegprofError(f"cannot write {path}: {error.strerror or error}", hint=hint) from error


def _hint(flag: str) -> str:
    return f"name another file with {flag}" + (", or leave it out with --no-csv" if flag == _flag("csv") else "")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
