"""The file that ``pegprof new`` writes: ``templates/my_model.py``, under the name that it gets."""

import importlib.resources
from pathlib import Path

from pegprof.errors import PegprofError

FUNCTION = "model"
"""The name in the file that ``pegprof run`` takes."""


def write_starting_file(path: Path, *, force: bool = False) -> None:
    """Writes a commented model that runs as it is; with ``force`` also over a file that is there."""
    if path.suffix != ".py":
        raise PegprofError(f"{path} is not the name of a Python file", hint="write it like my_model.py")
    if not path.parent.is_dir():
        raise PegprofError(f"there is no folder {path.parent}", hint="make it first")
    template = importlib.resources.files("pegprof") / "models" / "templates" / "my_model.py"
    text = template.read_text(encoding="utf-8").replace("my_model", path.stem)
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise PegprofError(
            f"{path} is there already", hint="choose another name, or overwrite it with --force"
        ) from error
    except OSError as error:
        raise PegprofError(f"cannot write {path}: {error.strerror or error}") from error
