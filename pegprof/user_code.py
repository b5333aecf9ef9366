"""The user's own code: where a function of it is defined, which line of it an error came from, and running it.

A place reads ``file.py:12``, with the file relative to the current folder where it lies below it. The user's own is
what belongs neither to Python nor to pegprof nor to an installed package.
"""

import contextlib
import functools
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

from pegprof.errors import PegprofError, first_line


def home_of(fn: Callable[..., Any]) -> str:
    """Where a function is defined, also one under jit, partial or functools.wraps, a method or an object's call."""
    code = _code_of(fn)
    return place(code.co_filename, code.co_firstlineno) if code and not code.co_filename.startswith("<") else ""


def line_of(error: BaseException, home: str = "") -> str:
    """The innermost line of the user's own code that an error passed through.

    Where there is none, as for a model of an installed package, that of the file of ``home``, or else ``home`` itself.
    """
    frames = traceback.extract_tb(error.__traceback__)
    file = Path(re.sub(r":\d+$", "", home)).resolve()
    found = _users_own(frames) or [frame for frame in frames if Path(frame.filename).resolve() == file]
    return place(found[-1].filename, found[-1].lineno) if found else home


def calling_line() -> str:
    """The line of the user's own code that called pegprof."""
    found = _users_own(traceback.extract_stack())
    return place(found[-1].filename, found[-1].lineno) if found else ""


def place(file: str, line: int | None = None) -> str:
    """
    >>> place(str(Path.cwd() / "models" / "mine.py"), 3)
    'models/mine.py:3'
    """
    path = Path(file)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{line}" if line else str(shown)


@contextlib.contextmanager
def users_code(home: str, role: str = "") -> Iterator[None]:
    """Runs a user's code: what it prints goes to stderr, what it raises names its own file and line."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for data
            yield
    except PegprofError:
        raise
    except SyntaxError as error:
        where = place(error.filename or home, error.lineno)
        raise PegprofError(f"syntax error: {error.msg}", where=where) from error
    except (Exception, SystemExit) as error:
        what = f"{role} raised {first_line(error)}" if role else first_line(error)
        raise PegprofError(what, where=line_of(error, home)) from error


def _code_of(fn: Any) -> CodeType | None:
    fn = inspect.unwrap(fn)
    if isinstance(fn, functools.partial):
        return _code_of(fn.func)
    if inspect.ismethod(fn):
        return _code_of(fn.__func__)
    if not inspect.isfunction(fn):
        fn = fn.__init__ if isinstance(fn, type) else type(fn).__call__  # type: ignore[misc]
    code: CodeType | None = getattr(fn, "__code__", None)
    return code


def is_users_own(file: str) -> bool:
    """Whether a file of code is the user's own."""
    return not file.startswith(("<", *_others_folders()))


def _users_own(frames: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    return [frame for frame in frames if is_users_own(frame.filename)]


def _others_folders() -> tuple[str, ...]:
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders.add(str(Path(__file__).parent))
    if jax := sys.modules.get("jax"):  # its developers have it elsewhere
        folders.add(str(Path(jax.__file__ or "").parent))
    return tuple(folder + os.sep for folder in folders)
