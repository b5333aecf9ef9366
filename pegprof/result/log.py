"""The log of a measurement: events in order, each a line of JSON that is written as it happens.

A log that was cut short, at whatever byte, reads back to its last whole event: a line counts when its end is there.
"""

import fcntl
import json
import threading
import time
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from pegprof.errors import PegprofError
from pegprof.result import records
from pegprof.result.events import Begun, Event
from pegprof.result.history import History
from pegprof.result.result import Result

KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in typing.get_args(Event)}
_FIRST = b'{"event": "Begun"'  # how every log begins

Listener = Callable[[Event], None]


class Log:
    """The events so far, and what they say: ``history``. Several threads may add to it.

    Args:
      path: a file that every event is appended to; None keeps them in memory alone.
      heard: is told of each event when it is in the log.
    """

    def __init__(self, path: Path | None = None, *, heard: Listener = lambda event: None):
        self.history = History()
        self._heard, self._lock, self._start_s = heard, threading.RLock(), time.monotonic()
        self._file: BinaryIO | None = None
        if path:
            self._file = _open(path)
            try:
                self._resume(path)
            except PegprofError:
                self.close()
                raise

    def _resume(self, path: Path) -> None:
        """Takes up what the file holds. What was cut short behind the last whole event goes."""
        assert self._file is not None
        whole = _whole_lines(self._file.read())
        for event in _events(whole, str(path)):
            self.history.apply(event)
        self._file.truncate(len(whole))

    def add(self, event: Event) -> None:
        """Something happened."""
        with self._lock:
            self.history.apply(event)
            if self._file:
                self._file.write(_line(event, time.monotonic() - self._start_s))
                self._file.flush()
            self._heard(event)

    def close(self) -> None:
        if self._file:
            self._file.close()


def _open(path: Path) -> BinaryIO:
    """For this process alone.

    Raises:
      PegprofError: it cannot be written, or another run writes to it.
    """
    try:
        file = path.open("a+b")
    except OSError as error:
        what = f"cannot write {path}: {error.strerror or error}"
        raise PegprofError(what, hint="name another file with --log") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise PegprofError(f"another run writes to {path}", hint="name another file with --log") from error
    file.seek(0)
    return file


def is_log(data: bytes) -> bool:
    """Whether a file begins as a log does."""
    return data.startswith(_FIRST)


def read_result(data: bytes, where: str = "") -> Result:
    """The Result that the events of a log amount to.

    Raises:
      PegprofError: a line is no event, or the log ends before there is anything to report.
    """
    history = History(_events(_whole_lines(data), where))
    if history.facts is None:
        raise PegprofError("the log ends before the model was loaded", where=where, hint="measure again")
    return history.result()


def _line(event: Event, at_s: float) -> bytes:
    data = {"event": type(event).__name__, "at_s": round(at_s, 3), **records.encode(event)}
    return json.dumps(data, ensure_ascii=False).encode() + b"\n"


def _whole_lines(data: bytes) -> bytes:
    return data[: data.rfind(b"\n") + 1]


def _events(lines: bytes, where: str) -> Iterator[Event]:
    for number, line in enumerate(lines.splitlines(), 1):
        try:
            data = json.loads(line)
            kind, _ = KINDS[data.pop("event")], data.pop("at_s")
            event = records.decode(kind, data)
        except (ValueError, KeyError, AttributeError, TypeError, records.Unreadable) as error:
            hint = "it is a log of another version of pegprof, or no log: measure again into another file"
            raise PegprofError(f"no event of a measurement: {error}", where=f"{where}:{number}", hint=hint) from error
        if (number == 1) != isinstance(event, Begun):
            raise PegprofError("a log has one beginning", where=f"{where}:{number}", hint="measure into another file")
        yield event
