"""A child process: one JSON request as the first line of stdin, one JSON answer in the file that it names.

Never on stdout: a user's model may print. The answer is rewritten as the work goes on, so that a child that is killed
leaves what it had, and the parent can tell what it was doing. When the parent goes away, stdin ends, and so do we.
"""

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pegprof.errors import PegprofError

Answer = dict[str, Any]


class Reporter:
    """Writes the answer; ``update`` may be called any number of times."""

    def __init__(self, path: Path):
        self._path = path
        self._answer: Answer = {}

    def update(self, **fields: Any) -> None:
        self._answer |= fields
        draft = self._path.with_suffix(".draft")
        draft.write_text(json.dumps(self._answer))
        draft.replace(self._path)  # the parent never reads half an answer


def main() -> None:
    request = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    reporter = Reporter(Path(request["answer"]))
    try:
        _job(request["job"])(request, reporter)
    except PegprofError as error:
        reporter.update(error={"what": error.what, "where": error.where, "hint": error.hint, "code": error.exit_code})
    except Exception as error:
        traceback.print_exc()
        reporter.update(failure=describe_exception(error))
    sys.stdout.flush()
    os._exit(0)  # the answer is written: spare the teardown of backends


def describe_exception(error: Exception) -> str:
    """The type and the first line: XLA's and JAX's messages go on for pages."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def _job(name: str) -> Callable[[dict[str, Any], Reporter], None]:
    from pegprof.profiling import jobs, timing  # jax comes with these: after the request, so that errors have a place

    return {
        "describe": jobs.describe,
        "compile": jobs.compile_method,
        "activations": jobs.measure_activations,
        "time": timing.time_methods,
    }[name]


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    main()
