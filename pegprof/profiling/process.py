"""Starting child processes, waiting for their answers, and leaving none behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pegprof.errors import ExitCode, PegprofError

POLL_S = 0.2

Talk = Callable[[str], None]


class ChildFailure(Exception):
    """A child that crashed, was killed or took too long, with what it had answered until then.

    Args:
      reason: why, in words.
      answer: the fields that it had reported.
      output: what it had printed.
    """

    def __init__(self, reason: str, *, answer: dict[str, Any], output: str):
        super().__init__(reason)
        self.reason, self.answer, self.output = reason, answer, output


def run_child(
    job: str,
    request: Mapping[str, Any],
    *,
    environment: Mapping[str, str],
    limit_s: float,
    talk: Talk,
    debug: bool = False,
) -> dict[str, Any]:
    """Runs one job of ``child.py`` in a fresh process and returns its answer.

    Args:
      job: a name of its table.
      request: what the job reads.
      environment: variables on top of this process's own.
      limit_s: after this it is stopped.
      talk: is told of the child's progress, and with ``debug`` all that it printed.

    Raises:
      PegprofError: the child found the user's request wrong.
      ChildFailure: the child did not end well.
    """
    with tempfile.TemporaryDirectory(prefix="pegprof-") as folder:
        answer_path, output_path = Path(folder, "answer.json"), Path(folder, "output.txt")
        line = json.dumps({**request, "job": job, "answer": str(answer_path)}) + "\n"
        with output_path.open("wb") as output_file:
            child = subprocess.Popen(
                [sys.executable, "-m", "pegprof.profiling.child"],
                stdin=subprocess.PIPE,
                stdout=output_file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,  # a group of its own: Ctrl-C reaches only the parent, which then ends the group
            )
        try:
            timed_out = _wait(child, line, answer_path, limit_s=limit_s, talk=talk)
        finally:
            _end(child)
        answer, output = _read(answer_path), output_path.read_text(errors="replace").strip()
    if debug and output:
        talk(output)
    if error := answer.get("error"):
        raise PegprofError(error["what"], where=error["where"], hint=error["hint"], exit_code=ExitCode(error["code"]))
    if timed_out:
        raise ChildFailure(f"stopped after {limit_s:.0f} s", answer=answer, output=output)
    if child.returncode != 0:
        raise ChildFailure(_cause_of_death(child.returncode), answer=answer, output=output)
    if failure := answer.get("failure"):
        raise ChildFailure(failure, answer=answer, output=output)
    return answer


def _wait(child: "subprocess.Popen[bytes]", line: str, answer_path: Path, *, limit_s: float, talk: Talk) -> bool:
    """Hands the request over and waits; True if the time ran out. stdin stays open: its end tells the child to end."""
    assert child.stdin is not None
    deadline = time.monotonic() + limit_s
    with contextlib.suppress(BrokenPipeError):  # it died at birth: its exit status tells more
        child.stdin.write(line.encode())
        child.stdin.flush()
    said = None
    while time.monotonic() < deadline:
        try:
            child.wait(timeout=POLL_S)
            return False
        except subprocess.TimeoutExpired:
            progress = _read(answer_path).get("progress")
            if progress and progress != said:
                talk(progress)
                said = progress
    return True


def _end(child: "subprocess.Popen[bytes]") -> None:
    """Ends the child's whole group, which may outlive the child itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    if child.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()


def _read(answer_path: Path) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = json.loads(answer_path.read_text())
    except FileNotFoundError:
        return {}
    return answer


def _cause_of_death(returncode: int) -> str:
    if returncode == -signal.SIGKILL:
        return "killed by SIGKILL, as the system does when memory runs out"
    if returncode < 0:
        return f"killed by {signal.Signals(-returncode).name}"
    return f"the process ended with status {returncode}"
