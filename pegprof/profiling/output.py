"""Where a report goes: the default path, a check before minutes of measuring, and writing that is all or nothing."""

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pegprof.errors import PegprofError
from pegprof.profiling.result import Settings


def default_csv_path(settings: Settings, target: str) -> Path:
    """
    >>> str(default_csv_path(Settings(model="my/file.py:net", batches=(8, 16)), "cpu"))
    'reports/my-file.py-net-b8-16-cpu.csv'
    """
    model = re.sub(r"[^\w.-]+", "-", settings.model).strip("-.")
    return Path("reports", f"{model}-b{'-'.join(map(str, settings.batches))}-{target}.csv")


def check_writable(path: Path) -> None:
    """Raises in words, before anything is measured, if the file cannot be written later."""
    with _in_words(path):
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass


def write(path: Path, text: str) -> None:
    """Replaces the file in one step: a reader sees the old text or the new, never half of one."""
    with _in_words(path):
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8", newline=""
        ) as draft:
            draft.write(text)
        Path(draft.name).chmod(0o666 & ~_umask())  # temporary files are private, reports are not
        Path(draft.name).replace(path)


@contextlib.contextmanager
def _in_words(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"cannot write {path}: {error.strerror or error}"
        raise PegprofError(what, hint="name another file with --export-csv, or leave it out with --no-csv") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
