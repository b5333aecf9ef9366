"""Where a user's folder stands on Python's search path: behind the standard library, before installed packages.

``python file.py`` puts the folder first. A ``queue.py`` or ``types.py`` beside a model would then take the place of the
standard library's for jax and for pegprof too. Nothing is imported here that such a file could replace.
"""

import os
import sys


def add_folder(folder: str) -> None:
    """Puts a folder on the search path, unless it is there already."""
    if os.path.realpath(folder) not in map(os.path.realpath, filter(None, sys.path)):
        sys.path.insert(_end_of_standard_library(), os.path.realpath(folder))


def move_first_folder() -> None:
    """Takes back the first place that ``python -m`` gave to the current folder."""
    if not sys.flags.safe_path:
        first = sys.path.pop(0)
        sys.path.insert(_end_of_standard_library(), first)


def _end_of_standard_library() -> int:
    home = os.path.dirname(os.__file__)
    places = (home, os.path.join(home, "lib-dynload"))
    found = [i for i, entry in enumerate(sys.path) if entry in places or os.path.basename(entry) == _ZIP]
    return max(found, default=-1) + 1


_ZIP = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
