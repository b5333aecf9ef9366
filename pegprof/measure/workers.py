"""The processes of a measurement, and asking them: a target, a method and a job in, an answer out.

The parent never imports the model. A worker that crashes costs its own row only; another one then takes its seat.
"""

import contextlib
import dataclasses
import functools
import tempfile
import threading
from typing import Any

from pegprof.errors import ExitCode, PegprofError
from pegprof.measure import in_process, protocol
from pegprof.measure.process import Child, ChildFailure, OutOfMemory, OutOfTime, Stopped, Tree, Worker
from pegprof.measure.progress import Talk
from pegprof.measure.protocol import A, ListDevices, Request, Subject
from pegprof.models.problem import Problem
from pegprof.result.findings import Compiled
from pegprof.result.settings import Settings
from pegprof.targets import selection
from pegprof.targets.selection import Target

LIMIT_S = 1800.0  # for one answer: a model of a billion parameters on a slice has taken ten minutes
DEVICE_LIMIT_S = 120.0
WAITING_SHARE = 1 / 4  # of the free memory that workers may hold by being there


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A method compiled for a batch; bytes are XLA's figures."""

    batch: int
    compile_s: float
    peak_bytes: int
    argument_bytes: int

    @classmethod
    def of(cls, compiled: Compiled, batch: int) -> "Program":
        """What was compiled, for those who run it."""
        return cls(
            batch=batch,
            compile_s=compiled.compile_s or 0.0,
            peak_bytes=compiled.peak_bytes or 0,
            argument_bytes=compiled.argument_bytes or 0,
        )


@dataclasses.dataclass(kw_only=True, eq=False)
class Seat:
    """A worker, and what it has: methods compiled for which batch, arguments for which, jobs that it has begun.

    The arguments of a step are one method's own: it goes on from where its last step led.
    """

    worker: Worker
    compiled: set[tuple[str, int]] = dataclasses.field(default_factory=set)
    loaded: tuple[int, str | None] | None = None
    begun: list[Request[Any]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workers:
    """The processes of one measurement: one for each method, which lives as long as it is needed.

    What a worker has compiled it can also run, so every program is traced and compiled once. Where a device can have
    one process only, or memory is too short for several, all methods share one.

    Args:
      settings: what is measured.
      talk: is told what is going on.
      debug: it is also told all that children print.
      problem: a model that only this process knows, and is measured here.
      tree: whose code children run, if not that of this folder.
      programs: the folder of what is compiled, if another measurement has it too.
      stop: ends all that children are doing.
    """

    settings: Settings
    talk: Talk
    debug: bool = False
    problem: Problem | None = None
    tree: Tree | None = None
    programs: str | None = None
    stop: threading.Event = dataclasses.field(default_factory=threading.Event)
    _seats: dict[tuple[str, str], Seat] = dataclasses.field(default_factory=dict, init=False)  # by target and method
    _programs: "tempfile.TemporaryDirectory[str]" = dataclasses.field(
        default_factory=lambda: tempfile.TemporaryDirectory(prefix="pegprof-", ignore_cleanup_errors=True), init=False
    )
    _file: Any = dataclasses.field(default_factory=tempfile.TemporaryFile, init=False)

    @property
    def file(self) -> int:
        """The descriptor of a file without a name that all workers have open: arrays go through it."""
        descriptor: int = self._file.fileno()
        return descriptor

    @functools.cached_property
    def _crowded(self) -> bool:
        waiting_bytes = (len(self.settings.methods) - 1) * selection.PROCESS_BYTES
        return waiting_bytes > WAITING_SHARE * selection.available_host_bytes()

    def shares(self, target: Target) -> bool:
        """Whether all methods have one process: a device that is here can have but one, and memory may be short."""
        if target.device:
            return False
        return self.problem is not None or target.has_one_owner or self._crowded

    def start(self, target: Target) -> Worker:
        """A new process. A program that another one has compiled for the device that is here is not compiled again:
        they share a folder, which is empty at first, so that the time of the first compile is that of a compile."""
        if self.problem:
            return in_process.Here(self.problem, talk=self.talk)
        shared = selection.sharing(self.programs or self._programs.name) if target.runs else {}
        environment = {**target.environment, **shared}
        return Child(environment, talk=self.talk, files=(self.file,), debug=self.debug, tree=self.tree)

    def seat(self, target: Target, method: str) -> Seat:
        """The worker of a method, with no job under way: a new process if there was none, or if it is gone."""
        seat = self._seat(target, method)
        while seat.begun:
            with contextlib.suppress(ChildFailure, PegprofError):  # nobody has asked for it
                self._receive(seat, seat.begun[0], limit_s=LIMIT_S)
        return self._seat(target, method)

    def _seat(self, target: Target, method: str) -> Seat:
        seat = self.find(target, method)
        if seat is None or not seat.worker.alive:
            if seat:
                seat.worker.close()
            seat = self._seats[self._key(target, method)] = Seat(worker=self.start(target))
        return seat

    def find(self, target: Target, method: str) -> Seat | None:
        """The worker of a method, dead or alive, if there is one."""
        return self._seats.get(self._key(target, method))

    def _key(self, target: Target, method: str) -> tuple[str, str]:
        return target.name, "" if self.shares(target) else method

    def release(self, target: Target, method: str) -> None:
        """Ends the worker of a method, if it is not everybody's."""
        if not self.shares(target) and (seat := self._seats.pop((target.name, method), None)):
            seat.worker.close()

    def release_all(self, target: Target) -> None:
        """Ends all workers of a target. They start again when they are needed."""
        for key in [key for key in self._seats if key[0] == target.name]:
            self._seats.pop(key).worker.close()

    def make_way(self, target: Target) -> None:
        """Ends the worker of a device that can have but one process. It starts again when it is needed."""
        if target.has_one_owner:
            self.release_all(target)

    def close(self) -> None:
        while self._seats:
            self._seats.popitem()[1].worker.close()
        self._programs.cleanup()
        self._file.close()

    def begin(self, request: Request[Any], target: Target, *, method: str | None = None) -> None:
        """Has a worker begin a job now; whoever asks for it later finds it under way, or done.

        Where all methods share a worker, it could only delay what is asked first, so nothing is begun there.
        """
        if not self.shares(target):
            seat = self._seat(target, method or self.settings.methods[0])
            if request not in seat.begun:
                seat.begun.append(request)
                protocol.send(seat.worker, request)

    def ask(self, request: Request[A], target: Target, *, method: str | None = None, limit_s: float = LIMIT_S) -> A:
        """One job.

        Args:
          request: what to do.
          target: what for.
          method: whose worker does it: that of the first method, if no other is named.
          limit_s: for all of it.
        """
        method = method or self.settings.methods[0]
        seat = self.find(target, method)
        if seat is None or request not in seat.begun:
            seat = self._seat(target, method)
            seat.begun.append(request)
            protocol.send(seat.worker, request)
        while seat.begun[0] != request:
            with contextlib.suppress(ChildFailure, PegprofError):  # nobody has asked for it
                self._receive(seat, seat.begun[0], limit_s=limit_s)
        return self._receive(seat, request, limit_s=limit_s)

    def _receive(self, seat: Seat, request: Request[A], *, limit_s: float) -> A:
        """The answer to the oldest job that a worker has begun."""
        seat.begun.pop(0)
        return protocol.receive(seat.worker, request.answer(), limit_s=limit_s, watch=self._watch)

    def subject(self, target: Target) -> Subject:
        """What a worker for a target works on."""
        return Subject.at(self.settings, target)

    def making_arguments(self, target: Target, batch: int, seed: int) -> protocol.MakeArguments:
        """The request for parameters and a batch, in the file."""
        return protocol.MakeArguments(subject=self.subject(target), batch=batch, seed=seed, file=self.file)

    def _watch(self) -> str | None:
        return "stopped" if self.stop.is_set() else selection.short_of_memory()

    def compile(self, request: protocol.Compile, target: Target, *, limit_s: float = LIMIT_S) -> tuple[Compiled, str]:
        """One method at one batch size, and what a child that failed had printed. It never raises for a method's sake.

        Raises:
          PegprofError: the compiler itself is of no use.
        """
        try:
            compiled = self.ask(request, target, method=request.method, limit_s=limit_s)
        except ChildFailure as failure:
            is_short = isinstance(failure, Stopped | OutOfMemory)
            lacked = "time" if isinstance(failure, OutOfTime) else "memory" if is_short else ""
            found = {**failure.answer, "failure": failure.reason, "lacked": lacked}
            return protocol.read(Compiled, found), failure.output
        except PegprofError as error:
            if error.exit_code != ExitCode.USAGE:
                raise
            return Compiled(failure=error.what), ""
        seat = self.find(target, request.method)
        if seat and request.surgery_size is None:
            seat.compiled.add((request.method, request.batch))
        return compiled, ""


def ask_kind(host: Target, talk: Talk) -> str | None:
    """What JAX calls the device that is here; None if it does not answer."""
    talk.doing("asking JAX for its devices")
    try:
        answer = protocol.run_child(ListDevices(), environment=host.environment, limit_s=DEVICE_LIMIT_S, talk=talk)
    except (ChildFailure, PegprofError):
        return None  # whoever goes on to use it will be told why
    return next(iter(answer.devices), None)


def find_host(talk: Talk) -> Target:
    """The device of this machine, by the name that the table of devices has for it."""
    return selection.find_host(lambda host: ask_kind(host, talk))
