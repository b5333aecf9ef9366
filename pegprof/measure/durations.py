"""How long commands took on this machine, kept in the user's cache folder: what is done in, seconds out.

A file that cannot be read or written is as good as none.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
from pathlib import Path

import platformdirs

from pegprof.result import records

KEPT = 200  # files


@dataclasses.dataclass(frozen=True, kw_only=True)
class Durations:
    """What a command took in all, and when each of its steps began."""

    total_s: float
    starts_s: tuple[tuple[str, float], ...]

    def left_s(self, text: str, number: int) -> float | None:
        """What was left when a step of that text began that had so many of the same text before it."""
        same = [start_s for each, start_s in self.starts_s if each == text]
        return self.total_s - same[number] if number < len(same) else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """The file of one command."""

    path: Path

    def read(self) -> Durations | None:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            found = json.loads(self.path.read_text(encoding="utf-8"))
            starts_s = tuple((str(text), float(start_s)) for text, start_s in found["starts_s"])
            return Durations(total_s=float(found["total_s"]), starts_s=starts_s)
        return None

    def write(self, durations: Durations) -> None:
        """All of it or nothing; the files that were written longest ago make room."""
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            draft = self.path.with_suffix(f".{os.getpid()}.draft")
            draft.write_text(json.dumps(dataclasses.asdict(durations)), encoding="utf-8")
            draft.replace(self.path)
            files = sorted(self.path.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)
            for path in files[:-KEPT]:
                path.unlink(missing_ok=True)


def find(command: object) -> Record:
    """The file of a command on this machine: ``command`` is data with all that decides how long it takes."""
    key = [platform.node(), os.cpu_count(), records.encode(command)]
    name = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:32]
    return Record(path=platformdirs.user_cache_path("pegprof", appauthor=False) / "durations" / f"{name}.json")
