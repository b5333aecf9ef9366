"""Child processes: starting them, asking them for things, and leaving none behind.

Requests and answers are JSON on a socket of their own, never on stdout: a user's model may print. An answer comes in
parts as the work goes on, so that a child that is killed leaves what it had. When the parent goes away the socket ends,
and so does the child; whatever was printed is in a file that has no name. So nothing is left, however either ends.

No wait is without end. A child that dies is noticed within ``POLL_S``, even if a process of its own holds the socket
open; one that stops in the middle of a message is given up after ``STALLED_S``.
"""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from typing import Any, Protocol

import pegprof
from pegprof.errors import ExitCode, PegprofError
from pegprof.measure.progress import Talk

POLL_S = 0.2
LAST_BREATH_S = 10.0  # for a child that has closed its socket
BURIAL_S = 60.0  # for the kernel to end a child that was killed; a driver that hangs can keep it for ever
STALLED_S = 120  # without a byte in the middle of a message
EXHAUSTED = "RESOURCE_EXHAUSTED"  # the status by which XLA says that memory could not be had

Watch = Callable[[], str | None]
"""Is asked again and again while a child works; what it returns is why the child must be stopped."""


class ChildFailure(Exception):
    """A child that crashed, was killed or had to be stopped, with what it had answered until then.

    Args:
      reason: why, in words.
      answer: the fields that it had reported.
      output: what it had printed.
    """

    def __init__(self, reason: str, *, answer: dict[str, Any], output: str):
        super().__init__(reason)
        self.reason, self.answer, self.output = reason, answer, output


class OutOfTime(ChildFailure):
    """A child that took too long."""


class Stopped(ChildFailure):
    """A child that was ended because the machine ran short of memory, or nobody needed it any more."""


class OutOfMemory(ChildFailure):
    """A child whose device had too little memory left, whatever XLA had foreseen. It lives on."""


def failure_of(reason: str, *, answer: dict[str, Any], output: str) -> ChildFailure:
    """What to raise for a job that raised something, by its first line."""
    kind = OutOfMemory if EXHAUSTED in reason else ChildFailure
    return kind(reason, answer=answer, output=output)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tree:
    """Another copy of the user's code, such as an older revision. pegprof itself stays the one that runs here.

    Args:
      folder: where children work.
      paths: what comes first on their ``sys.path``.
    """

    folder: Path
    paths: tuple[Path, ...]

    def command(self, module: str, *arguments: str) -> list[str]:
        """Runs a module as ``python -m`` does, with the tree's code at hand."""
        home = Path(pegprof.__file__).parents[1]
        return [sys.executable, "-P", "-c", _IN_TREE, *arguments, module, str(home), *map(str, self.paths)]


_IN_TREE = """
import runpy, sys
module, home, *paths = sys.argv[2:]
sys.path.insert(0, home)
import pegprof
sys.path[:0] = paths
runpy.run_module(module, run_name="__main__")
"""


class Worker(Protocol):
    """Whoever does jobs: a child, or this very process."""

    @property
    def alive(self) -> bool: ...

    def send(self, job: str, request: Mapping[str, Any]) -> None: ...

    def receive(self, *, limit_s: float, watch: Watch | None = None) -> dict[str, Any]: ...

    def close(self) -> None: ...


class Child:
    """A process that does jobs of ``child.py``, one after the other, until it is closed.

    Args:
      environment: variables on top of this process's own.
      talk: is told of the child's progress, and with ``debug`` all that it prints.
      files: descriptors of open files that the child shall have too, by the same numbers.
      module: what it runs, as a program: something that ends in ``child.serve``.
      tree: whose code it runs; None is the code that is here.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        *,
        talk: Talk,
        files: Sequence[int] = (),
        debug: bool = False,
        module: str = "pegprof.measure.worker.main",
        tree: Tree | None = None,
    ):
        self._talk, self._debug = talk, debug
        self._taken_bytes, self._ended = 0, False
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close)
        self._socket, theirs = Pipe()
        _limit_stalls(self._socket.fileno())
        with theirs:
            handle = str(theirs.fileno())
            self._process = subprocess.Popen(
                tree.command(module, handle) if tree else [sys.executable, "-P", "-m", module, handle],
                cwd=tree.folder if tree else None,
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": _where_we_are(), **environment},
                pass_fds=(theirs.fileno(), *files),
                start_new_session=True,  # a group of its own: Ctrl-C reaches only the parent, which then ends the group
            )

    @property
    def alive(self) -> bool:
        """Whether it can be asked again."""
        return self._process.poll() is None

    def send(self, job: str, request: Mapping[str, Any]) -> None:
        """Hands over a request. It is begun when those before it are done."""
        with contextlib.suppress(OSError):  # the child is gone: receive will tell why
            self._socket.send_bytes(json.dumps({"job": job, "request": request}).encode())

    def receive(self, *, limit_s: float, watch: Watch | None = None) -> dict[str, Any]:
        """The answer to the oldest request that has none yet.

        Args:
          limit_s: after this the child is ended.
          watch: may have it ended at any time.

        Raises:
          PegprofError: the child found the user's request wrong.
          ChildFailure: the child did not get to the end. It may live on: see ``alive``.
        """
        answer: dict[str, Any] = {}
        try:
            self._collect(answer, limit_s=limit_s, watch=watch)
        except ChildFailure:
            self.end()
            raise
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=LAST_BREATH_S)
            self.end()
            cause = _cause_of_death(self._process.returncode)
            raise ChildFailure(cause, answer=answer, output=self._take_output()) from None
        output = self._take_output()
        if error := answer.get("error"):
            raise PegprofError(
                error["what"], where=error["where"], hint=error["hint"], exit_code=ExitCode(error["code"])
            )
        if failure := answer.get("failure"):
            raise failure_of(failure, answer=answer, output=output)
        return answer

    def _collect(self, answer: dict[str, Any], *, limit_s: float, watch: Watch | None) -> None:
        """Adds what comes in to the answer, until it is complete."""
        deadline_s = time.monotonic() + limit_s
        while not answer.pop("done", False):
            left_s = deadline_s - time.monotonic()
            if self._socket.poll(max(0.0, min(POLL_S, left_s))):
                part = json.loads(self._socket.recv_bytes())
                progress, expected_s = part.pop("progress", None), part.pop("expected_s", None)
                answer |= part
                if progress:
                    self._talk.doing(progress, expected_s=expected_s)
            elif not self.alive and not self._socket.poll():
                raise EOFError  # which a process of the child's own can keep from us: it may have the socket too
            elif left_s <= 0:
                raise OutOfTime(f"stopped after {limit_s:.0f} s", answer=answer, output=self._take_output())
            elif watch and (reason := watch()):
                raise Stopped(reason, answer=answer, output=self._take_output())

    def _take_output(self) -> str:
        """What was printed since the last time."""
        size = os.fstat(self._printed.fileno()).st_size
        new = os.pread(self._printed.fileno(), size - self._taken_bytes, self._taken_bytes)  # moves no offset
        self._taken_bytes = size
        output = new.decode(errors="replace").strip()
        if output and self._debug:
            self._talk(output)
        return output

    def end(self) -> None:
        """Ends the child's whole group, which may outlive the child itself."""
        if not self._ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=BURIAL_S)
            self._ended = True  # from now on the number may be another's

    def close(self) -> None:
        self.end()
        self._socket.close()
        self._printed.close()


def wait_for_any(children: Collection[Child]) -> list[Child]:
    """Those who have begun to answer, or have died; none if that takes longer than ``POLL_S``."""
    talking = wait([child._socket for child in children], POLL_S)
    return [child for child in children if child._socket in talking or not child.alive]


def _where_we_are() -> str:
    """The PYTHONPATH by which a child finds the pegprof that this process runs, where that is not installed."""
    folder = str(Path(pegprof.__file__).parents[1])
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(filter(None, [*named, *({folder} - installed - set(named))]))


def _limit_stalls(descriptor: int) -> None:
    """No read or write of a socket shall wait longer than ``STALLED_S`` for the next byte; that is an OSError then."""
    with socket.socket(fileno=os.dup(descriptor)) as same:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            same.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", STALLED_S, 0))


def _cause_of_death(returncode: int | None) -> str:
    if returncode is None:
        return "killed, and the kernel does not let it go"
    if returncode == -signal.SIGKILL:
        return "killed by SIGKILL, as the system does when memory runs out"
    if returncode < 0:
        return f"killed by {signal.Signals(-returncode).name}"
    return f"the process ended with status {returncode}"
