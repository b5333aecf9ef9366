"""The processes in which methods run, and what they share.

Each method has a process of its own, which waits while the others run. Where a device can have one process only, or
memory is too short for several, all methods share one. Arguments are made once, by a process for the purpose, and go to
the others through a file without a name.

Nothing runs that does not fit: a run is compared with what is free at that moment, when everything that waits has its
memory already; and whoever takes more than was foreseen is stopped before the machine swaps.
"""

import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pegprof.errors import PegprofError
from pegprof.profiling import targets
from pegprof.profiling.process import ChildFailure, Worker
from pegprof.profiling.units import format_bytes

WAITING_SHARE = 1 / 4  # of the free memory that processes may hold by being there
PARKING_SHARE = 1 / 8  # of the free memory that they may hold as arguments while they wait

Start = Callable[[int], Worker]
"""Starts a worker that has an open file too, by its descriptor."""


class NoRoom(Exception):
    """A run that would not fit: what it needs, and what there is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A method compiled for a batch; bytes are XLA's figures."""

    batch: int
    compile_s: float
    peak_bytes: int
    argument_bytes: int


@dataclasses.dataclass(kw_only=True, eq=False)
class Seat:
    """A worker, and what it has: methods compiled for which batch, arguments for which.

    The arguments of a step are one method's own: it goes on from where its last step led.
    """

    worker: Worker
    compiled: dict[str, int] = dataclasses.field(default_factory=dict)
    loaded: tuple[int, str | None] | None = None


class Crew:
    """Runs methods, each in the process that is meant for it.

    Args:
      methods: which.
      request: what every job has to know of the settings.
      full_batch: as many examples are made; any batch is the first of them.
      argument_bytes: what they and the parameters take.
      start: starts a worker.
      deadline_s: on the monotonic clock; whoever works longer is stopped.
      capacity_bytes: what a program may need; None sets no limit.
      on_host: the memory is this machine's; else a device's, which can have but one process at a time.
      one_process: there shall be no more than one in any case.
    """

    def __init__(
        self,
        methods: Iterable[str],
        *,
        request: Mapping[str, Any],
        full_batch: int,
        argument_bytes: int,
        start: Start,
        deadline_s: float,
        capacity_bytes: int | None,
        on_host: bool,
        one_process: bool,
    ):
        self.methods = list(methods)
        self.programs: dict[str, Program] = {}
        self._request, self._full_batch, self._start = request, full_batch, start
        self._argument_bytes = argument_bytes
        self._deadline_s, self._capacity_bytes, self.on_host = deadline_s, capacity_bytes, on_host
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close)
        self._arguments: dict[str, Any] = {}
        self._arguments_end = 0
        self._seats: dict[str, Seat] = {}
        waiting_bytes = self._waiting * targets.PROCESS_BYTES
        crowded = on_host and waiting_bytes > WAITING_SHARE * targets.available_host_bytes()
        self.shared = one_process or crowded or not on_host

    @property
    def _waiting(self) -> int:
        return len(self.methods) - 1

    def left_s(self) -> float:
        return max(0.0, self._deadline_s - time.monotonic())

    def close(self) -> None:
        for seat in set(self._seats.values()):
            seat.worker.close()
        self._file.close()

    def drop(self, method: str) -> None:
        """A method that is out of the race needs no process any more."""
        self.methods.remove(method)
        seat = self._seats.pop(method, None)
        if seat and seat not in self._seats.values():
            seat.worker.close()

    # Arguments and programs.

    def set_up(self, batch: int) -> dict[str, Exception]:
        """Makes the arguments, and compiles all methods for a batch; returns what went wrong, by method.

        Raises:
          ChildFailure, PegprofError, NoRoom: there are no arguments.
        """
        self._require(2 * self._argument_bytes)  # what they are made from may take as much again
        if self.shared:
            self._receive_arguments(self._ask_for_arguments())
            return self.prepare(batch)
        maker = self._ask_for_arguments()  # while the others compile
        try:
            failures = self.prepare(batch)
        except BaseException:
            maker.close()
            raise
        self._receive_arguments(maker)
        return failures

    def prepare(self, batch: int) -> dict[str, Exception]:
        """Compiles all methods for a batch, side by side if they have processes of their own."""
        self.programs = {}
        seats = {method: self._seat(method) for method in self.methods}
        if not self.shared:
            for method, seat in seats.items():
                seat.worker.send("prepare", {**self._request, "method": method, "batch": batch})
        failures: dict[str, Exception] = {}
        for method in seats:
            try:
                if self.shared:
                    self._seat(method).worker.send("prepare", {**self._request, "method": method, "batch": batch})
                self._receive_program(method, batch)
            except (ChildFailure, PegprofError) as failure:
                failures[method] = failure
        return failures

    def _receive_program(self, method: str, batch: int) -> None:
        seat = self._seats[method]
        answer = self._receive(seat.worker)
        seat.compiled[method] = batch
        self.programs[method] = Program(
            batch=batch,
            compile_s=answer["compile_s"],
            peak_bytes=answer["peak_bytes"],
            argument_bytes=answer["argument_bytes"],
        )

    def _ask_for_arguments(self) -> Worker:
        maker = self._start(self._file.fileno())
        maker.send("arguments", {**self._request, "batch": self._full_batch, "file": self._file.fileno()})
        return maker

    def _receive_arguments(self, maker: Worker) -> None:
        try:
            self._arguments = self._receive(maker)
            self._arguments_end = os.fstat(self._file.fileno()).st_size
        finally:
            maker.close()

    def _seat(self, method: str) -> Seat:
        """Where a method runs: a new process if there was none, or if it is gone."""
        seat = self._seats.get(method)
        if seat is None or not seat.worker.alive:
            if seat:
                seat.worker.close()
            seat = Seat(worker=self._start(self._file.fileno()))
            self._seats |= dict.fromkeys(self.methods if self.shared else [method], seat)
        return seat

    # Runs.

    def run(self, method: str, *, limit_s: float | None = None, **how: Any) -> dict[str, Any]:
        """Runs a method once, at the batch that it is compiled for: as ``Bench.run``.

        Raises:
          NoRoom: it would not fit.
          ChildFailure: it went wrong; OutOfTime: it took longer than the limit.
        """
        seat, program = self._seat(method), self.programs[method]
        if seat.compiled.get(method) != program.batch:  # another method took the shared process down
            seat.worker.send("prepare", {**self._request, "method": method, "batch": program.batch})
            self._receive_program(method, program.batch)
        self.require_room(method, program.peak_bytes)
        arguments = program.batch, method if self._request.get("step") else None
        if seat.loaded != arguments:
            self._ask(seat, "load", arguments=self._arguments, method=method, batch=program.batch)
            seat.loaded = arguments
        answer = self._ask(seat, "run", limit_s=limit_s, method=method, **how)
        if self._parks(program):
            self._ask(seat, "unload")
            seat.loaded = None
        return answer

    def run_afresh(self, method: str) -> dict[str, Any]:
        """Runs a method once in a process that has run nothing else, for its peak of memory."""
        batch = self.programs[method].batch
        self._make_way()
        self.require_room(method, self.programs[method].peak_bytes)
        seat = Seat(worker=self._start(self._file.fileno()))
        try:
            self._ask(seat, "prepare", method=method, batch=batch)
            self._ask(seat, "load", arguments=self._arguments, method=method, batch=batch)
            return self._ask(seat, "run", method=method, measure_peak=True)
        finally:
            seat.worker.close()

    def check_examples(self, examples: int) -> dict[str, Any]:
        """As ``bench.check_examples``, in a process of its own. It takes about as much as the methods do."""
        self._make_way()
        self._require(max(program.peak_bytes for program in self.programs.values()))
        seat = Seat(worker=self._start(self._file.fileno()))
        try:
            return self._ask(seat, "check", arguments=self._arguments, examples=examples)
        finally:
            seat.worker.close()

    def _make_way(self) -> None:
        """Ends the worker of a device that can have but one process. It will start again when it is needed."""
        if not self.on_host:
            for seat in set(self._seats.values()):
                seat.worker.close()
            self._seats = {}

    def forget_statistics(self) -> None:
        """Gives back the room in the file that statistics took which are compared now."""
        os.ftruncate(self._file.fileno(), self._arguments_end)

    def _parks(self, program: Program) -> bool:
        """Whether to give arguments up while others run."""
        if self.shared:
            return False
        return self._waiting * program.argument_bytes > PARKING_SHARE * targets.available_host_bytes()

    def require_room(self, method: str, peak_bytes: int) -> None:
        """Raises NoRoom if a program of that size would not fit now, its arguments included, which may be there."""
        seat = self._seats.get(method)
        self._require(peak_bytes, there=self.programs[method].argument_bytes if seat and seat.loaded else 0)

    def _require(self, need_bytes: int, *, there: int = 0) -> None:
        bounds = [] if self._capacity_bytes is None else [self._capacity_bytes]
        if self.on_host:
            bounds.append(targets.spendable_host_bytes() + there)
        room_bytes = min(bounds, default=need_bytes)
        if need_bytes > room_bytes:
            raise NoRoom(f"needs {format_bytes(need_bytes)}, {format_bytes(room_bytes)} available")

    # Talking to workers.

    def _ask(self, seat: Seat, job: str, *, limit_s: float | None = None, **fields: Any) -> dict[str, Any]:
        seat.worker.send(job, {**self._request, **fields, "file": self._file.fileno()})
        return self._receive(seat.worker, limit_s)

    def _receive(self, worker: Worker, limit_s: float | None = None) -> dict[str, Any]:
        left_s = self.left_s()
        return worker.receive(
            limit_s=left_s if limit_s is None else min(limit_s, left_s), watch=targets.short_of_memory
        )
