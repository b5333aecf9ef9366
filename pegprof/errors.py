"""The one exception that pegprof raises on purpose, and the exit codes that it carries.

An error says what is wrong, where (the user's own file and line, when known) and what to do about it.
Only ``cli`` prints it; in Python it reads as an ordinary exception.
"""

import difflib
import enum
import re
from collections.abc import Iterable, Iterator


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


LONGEST = 300  # of what is quoted of an exception


def first_line(error: BaseException) -> str:
    """The type of an exception and the first line of its message, to the end of its sentence.

    XLA's and JAX's messages go on for pages. A line that ends with a colon or a comma, or that the next one continues
    in small letters, is not the end of a sentence. What is too long ends with its last whole sentence, or with "...".

    >>> first_line(ValueError("no such axis\\nThe stack trace below ..."))
    'ValueError: no such axis'
    >>> first_line(TypeError("The trees differ, at:\\n    * a, which is a list\\n    * b"))
    'TypeError: The trees differ, at: a, which is a list'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    words = " ".join(_first_sentences(lines))
    return _shorten(f"{type(error).__name__}: {words}" if words else type(error).__name__)


def _first_sentences(lines: list[str]) -> Iterator[str]:
    before = ""
    for line in lines:
        goes_on = before.endswith((":", ",")) or (line[0].islower() and not before.endswith((".", "!", "?")))
        if before and not goes_on:
            return
        yield line.removeprefix("* ") if before else line
        before = line


def _shorten(text: str) -> str:
    """
    >>> _shorten("One. " + "Two " * 100), _shorten("one " * 100)[-12:]
    ('One.', ' one one ...')
    """
    if len(text) <= LONGEST:
        return text
    sentences = list(re.finditer(r"[.!?](?=\s)", text[: LONGEST + 1]))
    if sentences:
        return text[: sentences[-1].end()]
    cut = text[: LONGEST - 4]
    words = cut.rpartition(" ")[0]
    return f"{words if len(words) > LONGEST // 2 else cut} ..."


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint that names the known word closest to a mistyped one, or all of them."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
