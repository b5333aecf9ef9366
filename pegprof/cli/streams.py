"""The command's own stdout and stderr, so that whatever is at their other end costs neither a measurement nor an exit
code: a reader that had enough, a full disk, nobody at all, a terminal that knows no ×.
"""

import io
import os
import sys
from pathlib import Path
from typing import Any, TextIO


def open_streams() -> None:
    """Puts streams in the place of Python's own that raise only what the command should say."""
    sys.stdout = _open(sys.stdout, 1, forgives=BrokenPipeError)
    sys.stderr = _open(sys.stderr, 2, forgives=OSError)  # nothing depends on it


class _Stream(io.FileIO):
    """Raises once at most: what is left is written again when Python ends, which would end with 120 for it.

    A reader that had enough, as ``head`` has, is no error at all: the exit code stays what the command makes it.
    """

    def __init__(self, descriptor: int, *, forgives: type[OSError]):
        super().__init__(descriptor, "w", closefd=False)
        self._forgives, self._is_broken = forgives, False

    def write(self, data: Any) -> int:
        if not self._is_broken:
            try:
                return super().write(data)
            except OSError as error:
                self._is_broken = True
                if not isinstance(error, self._forgives):
                    raise
        return len(data)


def _open(stream: TextIO | None, descriptor: int, *, forgives: type[OSError]) -> TextIO:
    if stream is None:  # closed by the shell: this takes its number, which nothing else that is opened must get
        return Path(os.devnull).open("w")
    raw = io.BufferedWriter(_Stream(descriptor, forgives=forgives))
    return io.TextIOWrapper(raw, encoding=stream.encoding, errors="replace", line_buffering=True)
