"""A child process: JSON requests in, JSON answers out, on the socket whose descriptor it is started with.

Never on stdout: a user's model may print. An answer is sent in parts, as the work goes on, so that what a killed child
had found is not lost. When the parent goes away, the socket ends, and so do we, whatever we are doing.
"""

import contextlib
import gc
import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from pegprof import search_path
from pegprof.errors import PegprofError, first_line
from pegprof.result import records


class Reporter:
    """Takes the parts of an answer; ``update`` may be called any number of times."""

    def __init__(self, parent: Connection):
        self._parent = parent
        self.answer: dict[str, Any] = {}

    def update(self, **fields: Any) -> None:
        self.answer |= fields
        self._parent.send_bytes(json.dumps(records.encode(fields)).encode())


Job = Callable[[dict[str, Any], Reporter], None]


def main() -> None:
    search_path.add_folder(str(Path.cwd()))
    serve(Jobs().find)


def serve(find: Callable[[str], Job]) -> NoReturn:
    """Does the jobs that the parent asks for, one after the other, until it goes away.

    Args:
      find: the function that does a job, by its name; what it raises is told like what a job raises.
    """
    parent = Connection(int(sys.argv[1]))
    os.set_inheritable(parent.fileno(), False)  # a program that a job starts shall not keep the socket open
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(parent, requests), daemon=True).start()
    _volunteer_when_memory_runs_out()
    while True:
        request, reporter = requests.get(), Reporter(parent)
        try:
            find(request["job"])(request["request"], reporter)
        except PegprofError as error:
            traceback.print_exc()  # for --debug
            reporter.update(
                error={"what": error.what, "where": error.where, "hint": error.hint, "code": error.exit_code}
            )
        except Exception as error:
            traceback.print_exc()
            reporter.update(failure=first_line(error))
        sys.stdout.flush()
        reporter.update(done=True)


class Jobs:
    """The table of jobs by the names of their requests, with one bench for those that run programs."""

    def __init__(self) -> None:
        self._table: dict[str, tuple[Any, Callable[[Any, Reporter], None]]] = {}

    def find(self, name: str) -> Job:
        """The function that does a job, from the fields of its request."""
        from pegprof.measure.protocol import Survey

        if name == Survey.__name__:
            gc.disable()  # a few seconds of tracing, a third of which would go to looking for garbage, and then it ends
            from pegprof.measure.worker import model_facts

            return _typed(Survey, model_facts.survey)
        self._table = self._table or _make_table()
        return _typed(*self._table[name])


def _typed(kind: Any, job: Callable[[Any, Reporter], None]) -> Job:
    """A job that takes the fields of its request; one that its type does not have is refused."""
    return lambda request, reporter: job(records.decode(kind, request), reporter)


def _make_table() -> dict[str, tuple[Any, Callable[[Any, Reporter], None]]]:
    # jax comes with these: after the first request, so that what goes wrong has a place to be told. What is imported
    # stays, so looking for garbage in it would be time lost, a fifteenth of a second each time.
    gc.disable()
    from pegprof.measure import protocol
    from pegprof.measure.worker import compiling, memory, running

    gc.freeze()
    gc.enable()
    memory.keep_freed()
    programs = running.Bench()
    jobs: dict[Any, Callable[[Any, Reporter], None]] = {
        protocol.GetReady: _do_nothing,  # whoever can do that has imported all that the others need
        protocol.Describe: compiling.describe,
        protocol.MakePlan: compiling.plan_model,
        protocol.Inspect: compiling.inspect,
        protocol.Weigh: compiling.measure_activations,
        protocol.ListDevices: compiling.list_devices,
        protocol.MakeArguments: running.make_arguments,
        protocol.Compile: programs.compile,
        protocol.Load: programs.load,
        protocol.Unload: programs.unload,
        protocol.Run: programs.run,
        protocol.CheckExamples: running.check_examples,
    }
    return {kind.__name__: (kind, job) for kind, job in jobs.items()}


def _do_nothing(request: Any, reporter: Reporter) -> None:
    pass


def _listen(parent: Connection, requests: "queue.SimpleQueue[dict[str, Any]]") -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            requests.put(json.loads(parent.recv_bytes()))
    os._exit(1)


def _volunteer_when_memory_runs_out() -> None:
    """The kernel shall take us, and neither the parent nor anything else of the user's."""
    with contextlib.suppress(OSError):  # not on Linux
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    main()
