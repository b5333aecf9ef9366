"""Runs that do what they are told, for tests of the processes that they are measured in. Imports no jax."""

import os
import signal
import time
from pathlib import Path

from pegprof.errors import ExitCode, PegprofError
from pegprof.experiments.base import Run
from tests.waiting import wait_for


def measure(run):
    """Its settings name what it does, and what with."""
    (does, what) = next(iter(run.settings.items()))
    ACTIONS[does](what)
    return {"training": [{"rate": 1.0, "loss": 2.0, "pid": os.getpid()}]}


def make_run(name, **settings):
    return Run(name=name, settings=settings or {"finish": None})


def _die(number):
    os.kill(os.getpid(), number)
    time.sleep(600)


def _die_unless(path):
    if not Path(path).exists():
        _die(signal.SIGKILL)


def _die_behind_a_process(path):
    """That one has the socket too, so that it does not end with us."""
    if os.fork() == 0:
        Path(path).write_text(str(os.getpid()))
        time.sleep(600)
        os._exit(0)
    wait_for(lambda: Path(path).exists() and Path(path).read_text())
    _die(signal.SIGKILL)


def _refuse(what):
    raise PegprofError(what, where="file.py:3", hint="another file", exit_code=ExitCode.USAGE)


def _raise(what):
    raise ValueError(what)


ACTIONS = {
    "finish": lambda _: None,
    "die": _die,
    "die_unless": _die_unless,
    "die_behind_a_process": _die_behind_a_process,
    "exit": os._exit,
    "fail": _raise,
    "refuse": _refuse,
    "sleep": time.sleep,
    "wait_for_file": lambda path: wait_for(Path(path).exists),
}
