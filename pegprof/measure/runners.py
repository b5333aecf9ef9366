"""Running methods, each in its worker.

The workers wait while others run. Arguments are made once, by the first of them, and go to the others through a file
without a name.

Nothing runs that does not fit: a run is compared with what is free at that moment, when everything that waits has its
memory already; and whoever takes more than was foreseen is stopped before the machine swaps.
"""

import os
import time
from collections.abc import Mapping
from typing import Any

from pegprof.errors import PegprofError
from pegprof.measure import protocol
from pegprof.measure.process import ChildFailure, Worker
from pegprof.measure.protocol import A, Arguments, ExamplesChecked, Request, Times
from pegprof.measure.workers import Program, Seat, Workers
from pegprof.targets import selection
from pegprof.targets.selection import Target
from pegprof.units import format_bytes

PARKING_SHARE = 1 / 8  # of the free memory that workers may hold as arguments while they wait


class NoRoom(Exception):
    """A run that would not fit: what it needs, and what there is."""


class Runners:
    """Runs methods, each in the process that is meant for it.

    Args:
      programs: what each method was compiled to for the batch asked for.
      workers: the processes.
      host: the target that they work for.
      full_batch: as many examples are made; any batch is the first of them.
      argument_bytes: what they and the parameters take.
      deadline_s: on the monotonic clock; whoever works longer is stopped.
      capacity_bytes: what a program may need; None sets no limit.
    """

    def __init__(
        self,
        programs: Mapping[str, Program],
        *,
        workers: Workers,
        host: Target,
        full_batch: int,
        argument_bytes: int,
        deadline_s: float,
        capacity_bytes: int | None,
    ):
        self.methods = list(programs)
        self.programs: dict[str, Program] = {}
        self._known = {(method, program.batch): program for method, program in programs.items()}
        self._workers, self._host = workers, host
        self._full_batch, self._argument_bytes = full_batch, argument_bytes
        self._deadline_s, self._capacity_bytes = deadline_s, capacity_bytes
        self._subject, self._file = workers.subject(host), workers.file
        self._arguments = Arguments(params=(), batch=())
        self._arguments_end = 0
        self.on_host = host.is_host
        self.shared = workers.shares(host)
        self._forget_loaded()  # arguments of another batch, if any

    @property
    def _waiting(self) -> int:
        return len(self.methods) - 1

    def left_s(self) -> float:
        return max(0.0, self._deadline_s - time.monotonic())

    def close(self) -> None:
        """Gives back the room that arguments take in the file. The workers may have other batches to run."""
        os.ftruncate(self._workers.file, 0)

    def drop(self, method: str) -> None:
        """A method that is out of the race needs no process any more."""
        self.methods.remove(method)
        self._workers.release(self._host, method)

    # Arguments and programs.

    def set_up(self, batch: int) -> dict[str, Exception]:
        """Makes the arguments, and compiles all methods for a batch; returns what went wrong, by method.

        Raises:
          ChildFailure, PegprofError, NoRoom: there are no arguments.
        """
        self._require(2 * self._argument_bytes)  # what they are made from may take as much again
        self._workers.begin(self._making(self._workers.settings.seed), self._host, method=self.methods[0])
        self._begin_compiling(batch)
        self._make_arguments(self._workers.settings.seed)
        return self.prepare(batch)

    def prepare(self, batch: int) -> dict[str, Exception]:
        """Compiles all methods for a batch, side by side if they have processes of their own."""
        self._begin_compiling(batch)
        self.programs = {}
        failures: dict[str, Exception] = {}
        for method in list(self.methods):
            try:
                if not self._is_compiled(method, batch):
                    self._compile(method, batch)
                self.programs[method] = self._known[method, batch]
            except (ChildFailure, PegprofError) as failure:
                failures[method] = failure
        return failures

    def _begin_compiling(self, batch: int) -> None:
        for method in self.methods:
            if not self._is_compiled(method, batch):
                self._workers.begin(self._compilation(method, batch), self._host, method=method)

    def _is_compiled(self, method: str, batch: int) -> bool:
        seat = self._workers.find(self._host, method)
        is_there = seat is not None and seat.worker.alive and (method, batch) in seat.compiled
        return is_there and (method, batch) in self._known

    def _compile(self, method: str, batch: int) -> None:
        request = self._compilation(method, batch)
        compiled = self._workers.ask(request, self._host, method=method, limit_s=self.left_s())
        self._workers.seat(self._host, method).compiled.add((method, batch))
        self._known[method, batch] = Program.of(compiled, batch)

    def _compilation(self, method: str, batch: int) -> protocol.Compile:
        return protocol.Compile(subject=self._subject, method=method, batch=batch, capacity_bytes=self._capacity_bytes)

    def _making(self, seed: int) -> protocol.MakeArguments:
        return self._workers.making_arguments(self._host, self._full_batch, seed)

    def _make_arguments(self, seed: int) -> None:
        self._arguments = self._workers.ask(
            self._making(seed), self._host, method=self.methods[0], limit_s=self.left_s()
        )
        self._arguments_end = os.fstat(self._workers.file).st_size

    def draw_again(self, seed: int) -> None:
        """Other parameters and data, for all that runs from now on."""
        self._make_arguments(seed)
        self._forget_loaded()

    def _forget_loaded(self) -> None:
        for method in self.methods:
            if seat := self._workers.find(self._host, method):
                seat.loaded = None

    def _seat(self, method: str) -> Seat:
        return self._workers.seat(self._host, method)

    # Runs.

    def run(self, method: str, *, limit_s: float | None = None, **how: Any) -> Times:
        """Runs a method, at the batch that it is compiled for; ``how`` are fields of ``protocol.Run``.

        Raises:
          NoRoom: it would not fit.
          ChildFailure: it went wrong; OutOfTime: it took longer than the limit.
        """
        seat, program = self._seat(method), self.programs[method]
        if (method, program.batch) not in seat.compiled:  # its process is gone, maybe by another method's fault
            self._compile(method, program.batch)
        self.require_room(method, program.peak_bytes)
        arguments = program.batch, method if self._workers.settings.step else None
        if seat.loaded != arguments:
            self._ask(seat, self._loading(method, program.batch))
            seat.loaded = arguments
        times = self._ask(seat, protocol.Run(method=method, file=self._file, **how), limit_s=limit_s)
        if self._parks(program):
            self._ask(seat, protocol.Unload())
            seat.loaded = None
        return times

    def _loading(self, method: str, batch: int) -> protocol.Load:
        return protocol.Load(
            subject=self._subject, method=method, batch=batch, arguments=self._arguments, file=self._file
        )

    def run_afresh(self, method: str) -> Times:
        """Runs a method once in a process that has run nothing else, for its peak of memory."""
        batch = self.programs[method].batch
        self.make_way()
        self.require_room(method, self.programs[method].peak_bytes)
        seat = Seat(worker=self._workers.start(self._host))
        try:
            self._ask(seat, self._compilation(method, batch))
            self._ask(seat, self._loading(method, batch))
            return self._ask(seat, protocol.Run(method=method, file=self._file, measure_peak=True))
        finally:
            seat.worker.close()

    def check_examples(self, examples: int) -> ExamplesChecked:
        """Checks so many examples, in a process of its own. It takes about as much as the methods do."""
        self.make_way()
        self._require(max(program.peak_bytes for program in self.programs.values()))
        seat = Seat(worker=self._workers.start(self._host))
        try:
            request = protocol.CheckExamples(
                subject=self._subject, arguments=self._arguments, examples=examples, file=self._file
            )
            return self._ask(seat, request)
        finally:
            seat.worker.close()

    def make_way(self) -> None:
        """Leaves a device that can have but one process to others."""
        self._workers.make_way(self._host)

    def forget_statistics(self) -> None:
        """Gives back the room in the file that statistics took which are compared now."""
        os.ftruncate(self._workers.file, self._arguments_end)

    def _parks(self, program: Program) -> bool:
        """Whether to give arguments up while others run."""
        if self.shared:
            return False
        return self._waiting * program.argument_bytes > PARKING_SHARE * selection.available_host_bytes()

    def require_room(self, method: str, peak_bytes: int) -> None:
        """Raises NoRoom if a program of that size would not fit now, its arguments included, which may be there."""
        seat = self._workers.find(self._host, method)
        self._require(peak_bytes, there=self.programs[method].argument_bytes if seat and seat.loaded else 0)

    def _require(self, need_bytes: int, *, there: int = 0) -> None:
        bounds = [] if self._capacity_bytes is None else [self._capacity_bytes]
        if self.on_host:
            bounds.append(selection.spendable_host_bytes() + there)
        room_bytes = min(bounds, default=need_bytes)
        if need_bytes > room_bytes:
            raise NoRoom(f"needs {format_bytes(need_bytes)}, {format_bytes(room_bytes)} available")

    # Talking to workers.

    def _ask(self, seat: Seat, request: Request[A], *, limit_s: float | None = None) -> A:
        protocol.send(seat.worker, request)
        return self._receive(seat.worker, request.answer(), limit_s)

    def _receive(self, worker: Worker, answer: type[A], limit_s: float | None = None) -> A:
        left_s = self.left_s()
        allowed_s = left_s if limit_s is None else min(limit_s, left_s)
        return protocol.receive(worker, answer, limit_s=allowed_s, watch=selection.short_of_memory)

    def renew(self) -> dict[str, Exception]:
        """Ends all workers and starts others with the same programs; returns what went wrong, by method.

        A program is read back from the folder of those that are compiled, where there is one.
        """
        self._workers.release_all(self._host)
        batches = {program.batch for method, program in self.programs.items() if method in self.methods}
        return self.prepare(batches.pop()) if batches else {}
