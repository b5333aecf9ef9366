"""Runs of an experiment side by side, each in a process with one core: a small program would not use more.

Across processes only names and settings travel; what one has compiled, the others find in a folder that they share.
A process that dies costs the run that it had, and nothing else: its death is noticed like an answer, and the next run
gets a fresh process.
"""

import contextlib
import dataclasses
import importlib
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any

from pegprof.errors import ExitCode, PegprofError
from pegprof.experiments.base import Run, Tables
from pegprof.measure.process import Child, ChildFailure, OutOfTime, wait_for_any
from pegprof.measure.progress import Silence
from pegprof.measure.worker.main import Job, Reporter, serve
from pegprof.targets import selection

RUN_LIMIT_S = 85 * 60.0  # for one run, which takes minutes; only one that hangs reaches it
MOST_LOST = 3  # runs in a row without one that is finished: it is not the runs then
HINT = "is there enough memory? the runs that are finished are on file: the same command goes on with the others"

Measure = Callable[[Run], Tables]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lost:
    """A run that is not measured, because its process died or hung."""

    reason: str


def measure_side_by_side(
    measure: Measure,
    runs: Sequence[Run],
    *,
    workers: int,
    may_begin: Callable[[Run], bool],
    run_limit_s: float = RUN_LIMIT_S,
) -> Generator[tuple[Run, Tables | Lost]]:
    """The tables of each run, as they come, or why there are none. When the iteration ends, so do all processes.

    Args:
      measure: a function of a module: a process finds it by its name.
      runs: which.
      workers: how many are measured at once.
      may_begin: is asked before each run; once it has said no, no more begin.
      run_limit_s: after this a run counts as hung, and its process is ended.

    Raises:
      PegprofError: too many runs are lost in a row; or ``measure`` raised it.
      RuntimeError: ``measure`` raised something else.
    """
    waiting = deque(runs)
    idle: list[Child] = []
    busy: dict[Child, tuple[Run, float]] = {}  # with the time of its deadline
    lost_in_a_row = 0
    with (
        tempfile.TemporaryDirectory(prefix="pegprof-", ignore_cleanup_errors=True) as compiled,
        contextlib.ExitStack() as stack,  # ends the processes, whatever happens
    ):
        while True:
            while waiting and len(busy) < workers and may_begin(waiting[0]):
                run = waiting.popleft()
                idle = [child for child in idle if child.alive]
                child = idle.pop() if idle else stack.enter_context(contextlib.closing(_start(compiled)))
                child.send("measure", {"measure": _name(measure), "name": run.name, "settings": dict(run.settings)})
                busy[child] = run, time.monotonic() + run_limit_s
            if not busy:
                return
            ready = wait_for_any(busy)
            late = [child for child, (_, deadline_s) in busy.items() if time.monotonic() > deadline_s]
            for child in dict.fromkeys((*ready, *late)):
                run, _ = busy.pop(child)
                found = _receive(child, run, limit_s=run_limit_s if child in ready else 0.0)
                if isinstance(found, Lost):
                    child.close()
                    lost_in_a_row += 1
                else:
                    idle.append(child)
                    lost_in_a_row = 0
                yield run, found
                if isinstance(found, Lost) and lost_in_a_row >= MOST_LOST:
                    what = f"{lost_in_a_row} runs in a row were lost, the last one {run.name}: {found.reason}"
                    raise PegprofError(what, hint=HINT, exit_code=ExitCode.UNMEASURED)


def _start(compiled: str) -> Child:
    one_core = {"JAX_PLATFORMS": "cpu", "NPROC": "1"}  # XLA's number of cores
    return Child({**selection.sharing(compiled), **one_core}, talk=Silence(), module=__name__)


def _receive(child: Child, run: Run, *, limit_s: float) -> Tables | Lost:
    try:
        tables: Tables = child.receive(limit_s=limit_s)["tables"]
    except OutOfTime:
        return Lost(reason="it took too long and was stopped")
    except ChildFailure as failure:
        if "failure" in failure.answer:
            raise RuntimeError(f"{failure.reason}, in the run {run.name}\n\n{failure.output}") from None
        return Lost(reason=failure.reason)
    return tables


def _name(measure: Measure) -> str:
    return f"{measure.__module__}:{measure.__qualname__}"


# ---- in the process of a run --------------------------------------------------------------------------------------


def find_job(name: str) -> Job:
    return {"measure": _measure}[name]


def _measure(request: dict[str, Any], reporter: Reporter) -> None:
    module, _, function = request["measure"].partition(":")
    measure: Measure = getattr(importlib.import_module(module), function)
    reporter.update(tables=measure(Run(name=request["name"], settings=request["settings"])))


if __name__ == "__main__":
    serve(find_job)
