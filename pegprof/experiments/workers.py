"""Runs of an experiment side by side, each in a process with one core: a small program would not use more.

Across processes only names and settings travel; what one has compiled, the others find in a folder that they share.
"""

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures

from pegprof.errors import ExitCode, PegprofError
from pegprof.experiments.base import Run, Tables
from pegprof.profiling import targets


def measure_side_by_side(
    name: str, runs: Sequence[Run], *, workers: int, may_begin: Callable[[Run], bool]
) -> Iterator[tuple[Run, Tables]]:
    """The tables of each run, as they come; no more runs begin once ``may_begin`` has said no."""
    waiting = list(reversed(runs))
    running: dict[futures.Future[Tables], Run] = {}
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="pegprof-") as compiled,
        futures.ProcessPoolExecutor(
            workers, mp_context=context, initializer=_prepare_worker, initargs=(compiled,)
        ) as pool,
    ):
        try:
            while True:
                while waiting and len(running) < workers and may_begin(waiting[-1]):
                    run = waiting.pop()
                    running[pool.submit(_measure, name, run)] = run
                if not running:
                    return
                done, _ = futures.wait(running, return_when=futures.FIRST_COMPLETED)
                for future in done:
                    yield running.pop(future), future.result()
        except futures.BrokenExecutor as error:
            what = "a process that measured a run was killed"
            raise PegprofError(what, hint="is there enough memory?", exit_code=ExitCode.UNMEASURED) from error
        except BaseException:  # Ctrl-C, or nobody wants the rest: what is half done is of no use
            for child in multiprocessing.active_children():
                child.kill()
            raise


def _measure(name: str, run: Run) -> Tables:
    from pegprof.experiments import load_experiment

    return load_experiment(name).measure(run)


def _prepare_worker(compiled: str) -> None:
    """Before JAX is imported: one thread, death by Ctrl-C without a word, and no talk of libraries among ours."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.environ |= {**targets.sharing(compiled), "JAX_PLATFORMS": "cpu", "NPROC": "1"}  # XLA's number of cores
