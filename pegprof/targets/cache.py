"""What compilers once answered, kept in the user's cache folder: a program's text and a device in, bytes out.

An answer depends on the program, the device as it was described to the compiler, the versions of all that compiles and
the flags: all of these are in the name of its file. A cache that cannot be read or written is as good as none.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import platformdirs

from pegprof.errors import PegprofError
from pegprof.targets.devices import Device
from pegprof.versions import version_of

FORMAT = 2  # grows when the answers change their meaning
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
NUMBERS = {"flops", "peak_bytes", "argument_bytes", "output_bytes", "temp_bytes", "alias_bytes", "available_bytes"}
TRUTHS = {"refused", "second_try"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """The place of one answer."""

    path: Path

    @classmethod
    def of(cls, program: str, device: Device) -> "Entry":
        """The entry of a program, given as the text that goes into the compiler."""
        key = {
            "format": FORMAT,
            "program": hashlib.sha256(program.encode()).hexdigest(),
            "device": device.name,
            "topology": dict(device.topology),
            "versions": {"jax": version_of("jax"), "jaxlib": version_of("jaxlib"), **device.compiler.versions()},
            "flags": {flag: os.environ.get(flag, "") for flag in FLAGS},
        }
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return cls(path=folder() / f"{name}.json")

    def read(self) -> dict[str, Any] | None:
        """The answer, if there is one that makes sense."""
        try:
            answer = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return answer if _makes_sense(answer) else None

    def write(self, answer: dict[str, Any]) -> None:
        """Keeps an answer, all of it or nothing."""
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, suffix=".draft", delete=False) as draft:
                json.dump(answer, draft)
            Path(draft.name).replace(self.path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contents:
    """How many answers there are, and the bytes that they take."""

    folder: Path
    answers: int
    total_bytes: int


def folder() -> Path:
    """Where answers are kept: in the user's cache folder, which on Linux is XDG_CACHE_HOME or ~/.cache."""
    return platformdirs.user_cache_path("pegprof", appauthor=False) / "compiled"


def survey() -> Contents:
    """What is kept now."""
    sizes = [path.stat().st_size for path in _files() if path.suffix == ".json"]
    return Contents(folder=folder(), answers=len(sizes), total_bytes=sum(sizes))


def clear() -> Contents:
    """Removes every answer, and returns what was there. Other files that somebody put there stay.

    Raises:
      PegprofError: a file cannot be removed.
    """
    before = survey()
    try:
        for path in _files():
            path.unlink(missing_ok=True)  # another process may clear it too
    except OSError as error:
        raise PegprofError(f"cannot remove {path}: {error.strerror or error}") from error
    return before


def _files() -> list[Path]:
    """The answers, and the drafts of those that were never finished."""
    return [path for suffix in ("json", "draft") for path in folder().glob(f"*.{suffix}")]


def _makes_sense(answer: Any) -> bool:
    """Files can be cut short, or be somebody else's."""
    return (
        isinstance(answer, dict)
        and isinstance(answer.get("peak_bytes"), int)
        and isinstance(answer.get("compile_s"), float)
        and all(isinstance(answer.get(name, False), bool) for name in TRUTHS)
        and all(isinstance(value, int) for name, value in answer.items() if name in NUMBERS)
        and all(isinstance(each, dict) for each in answer.get("collectives", ()))
        and answer.keys() <= NUMBERS | TRUTHS | {"compile_s", "collectives"}
    )
