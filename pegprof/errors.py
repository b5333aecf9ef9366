"""The one exception that pegprof raises on purpose, and the exit codes that it carries.

An error says what is wrong, where (the user's own file and line, when known) and what to do about it.
Only ``cli.py`` prints it; in Python it reads as an ordinary exception.
"""

import difflib
import enum
from collections.abc import Iterable


class ExitCode(enum.IntEnum):
    """What a command's exit status means; the same for every command."""

    OK = 0
    NO = 1  # the answer is no: a regression, or it does not fit
    USAGE = 2  # wrong usage, or a user's file that is wrong
    UNMEASURED = 3  # nothing measured, a method or pegprof itself crashed, methods disagree, a compiler is missing
    INCOMPARABLE = 4
    TIME_LIMIT = 124
    INTERRUPTED = 130


class PegprofError(Exception):
    """Something the user can act on.

    Args:
      what: one sentence that says what is wrong.
      where: the place that the user knows it by: ``file.py:12``, a batch leaf, a parameter.
      hint: what to do about it.
      exit_code: the status a command ends with.
    """

    def __init__(self, what: str, *, where: str = "", hint: str = "", exit_code: ExitCode = ExitCode.USAGE):
        self.what, self.where, self.hint, self.exit_code = what, where, hint, exit_code
        lines = [f"{where}: {what}" if where else what]
        super().__init__("\n".join([*lines, f"hint: {hint}"] if hint else lines))


def first_line(error: BaseException) -> str:
    """The type of an exception and its first line: XLA's and JAX's messages go on for pages.

    >>> first_line(ValueError("no such axis\\nThe stack trace below ..."))
    'ValueError: no such axis'
    """
    lines = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *lines[:1]])[:300]


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint that names the known word closest to a mistyped one, or all of them."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
