"""Waiting for other processes: for what they do, never for a time.

A test that starts processes shares its cores with other tests, and the machine may be slow besides. So no test asserts
how long something takes by the clock: work is counted in processor time, and limits are there only to end what hangs.
"""

import contextlib
import resource
import subprocess
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import psutil

LIMIT_S = 900.0
"""For what takes a minute at most on an idle core: enough for a machine ten times slower. Only a hang reaches it.

The limits of a whole test, in ``pyproject.toml``, are longer: who waits in vain here can still say for what.
"""

LOOK_S = 0.02

T = TypeVar("T")


def wait_for(condition: Callable[[], T], *, limit_s: float = LIMIT_S) -> T:
    """Looks again and again, until what is returned counts as true."""
    deadline_s = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s, f"waited in vain for {limit_s:.0f} s"
        time.sleep(LOOK_S)
    return found


def finish(process: subprocess.Popen[Any], *, limit_s: float = LIMIT_S) -> tuple[Any, Any]:
    """What a process has written when it has ended. One that hangs is killed: else leaving its ``with`` hangs too."""
    try:
        return process.communicate(timeout=limit_s)
    finally:
        process.kill()


def living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended; one that waits to be buried has."""
    alive = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive


def children_cpu_s() -> float:
    """The processor time of all children that have ended so far, and of theirs: two readings tell what one took."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
