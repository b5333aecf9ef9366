"""Asking children about a model, each in a fresh process with the environment of its target."""

import dataclasses
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from pegprof.errors import ExitCode, PegprofError
from pegprof.problem import Problem
from pegprof.profiling import here, targets
from pegprof.profiling.process import Child, ChildFailure, Worker, run_child
from pegprof.profiling.progress import Talk
from pegprof.profiling.result import Settings
from pegprof.profiling.targets import Target

LIMIT_S = 600.0  # for one answer
DEVICE_LIMIT_S = 120.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """One method compiled at one batch for one target, or why it could not be; the fields are those of an answer."""

    failure: str | None = None
    note: str = ""
    microbatch_size: int | None = None
    materialised_parameters: int | None = None
    plan: dict[str, Any] | None = None  # surgery's, as JSON
    compile_s: float | None = None
    flops: int | None = None
    peak_bytes: int | None = None
    argument_bytes: int | None = None
    output_bytes: int | None = None
    temp_bytes: int | None = None
    alias_bytes: int | None = None
    refused: bool = False  # by the compiler, which says that peak_bytes are needed and available_bytes there
    available_bytes: int | None = None
    second_try: bool = False  # the compiler failed, and did not without something
    from_cache: bool = False
    collectives: Sequence[Mapping[str, Any]] = ()  # on a mesh

    @property
    def assigned_bytes(self) -> int | None:
        """The peak, if it is that of a program. What a refused one would need, after all that the compiler did to make
        it fit, is not to be compared with it."""
        return None if self.refused else self.peak_bytes

    def fits(self, capacity_bytes: int | None) -> bool:
        """Whether it was compiled, and needs no more than that."""
        if self.failure or self.refused or self.peak_bytes is None:
            return False
        return capacity_bytes is None or self.peak_bytes <= capacity_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asker:
    """Whoever asks: for what settings, telling whom. A ``problem`` that only this process knows is asked about here.

    A program that a child has compiled for the device that is here is not compiled again by the one that runs it: they
    share a folder, which is empty at first, so that the time of the first compile is that of a compile.
    """

    settings: Settings
    talk: Talk
    debug: bool = False
    problem: Problem | None = None
    stop: threading.Event = dataclasses.field(default_factory=threading.Event)  # ends all that children are doing
    _ready: dict[str, Worker] = dataclasses.field(default_factory=dict, init=False)  # by target
    _programs: "tempfile.TemporaryDirectory[str]" = dataclasses.field(
        default_factory=lambda: tempfile.TemporaryDirectory(prefix="pegprof-", ignore_cleanup_errors=True), init=False
    )

    def start(self, target: Target, *files: int) -> Worker:
        """Somebody who does jobs, and has some open files too."""
        if self.problem:
            return here.Here(self.problem, talk=self.talk)
        shared = targets.sharing(self._programs.name) if target.runs else {}
        return Child({**target.environment, **shared}, talk=self.talk, files=files, debug=self.debug)

    def ask(
        self, job: str, target: Target, *, limit_s: float = LIMIT_S, then: Target | None = None, **fields: Any
    ) -> dict[str, Any]:
        """One job, in a process of its own.

        Args:
          job: by name.
          target: what for.
          limit_s: for all of it.
          then: whom the next question goes to, if that is known: so that somebody gets ready for it meanwhile.
          **fields: further ones of the request.
        """
        ready = self._ready.pop(target.name, None)
        worker = ready or self.start(target)
        try:
            if ready:
                ready.receive(limit_s=limit_s, watch=self._watch)
            worker.send(job, {**dataclasses.asdict(self.settings), **target.request, **fields})
            if then:
                self._get_ready(then)
            return worker.receive(limit_s=limit_s, watch=self._watch)
        finally:
            worker.close()

    def _watch(self) -> str | None:
        return "stopped" if self.stop.is_set() else targets.short_of_memory()

    def _get_ready(self, target: Target) -> None:
        """Starts the process of the next question to a target, which then imports jax while another one works."""
        if not self.problem and target.name not in self._ready:
            self._ready[target.name] = self.start(target)
            self._ready[target.name].send("get_ready", {})

    def close(self) -> None:
        """Ends those who are ready, and were not asked."""
        while self._ready:
            self._ready.popitem()[1].close()
        self._programs.cleanup()

    def compile(
        self,
        target: Target,
        batch: int,
        method: str,
        *,
        capacity_bytes: int | None,
        surgery_size: int | None = None,
        limit_s: float = LIMIT_S,
        then: Target | None = None,
    ) -> tuple[Compiled, str]:
        """One method at one batch size, and what a child that failed had printed. It never raises for a method's sake.

        Args:
          target: what for.
          batch: how many examples.
          method: by name.
          capacity_bytes: what surgery's planner may use.
          surgery_size: how many examples surgery takes at a time, where that is not the planner's choice.
          limit_s: for all of it.
          then: as for ``ask``.

        Raises:
          PegprofError: the compiler itself is of no use.
        """
        request = {"batch": batch, "method": method, "capacity_bytes": capacity_bytes, "surgery_size": surgery_size}
        try:
            answer = self.ask("compile", target, limit_s=limit_s, then=then, **request)
        except ChildFailure as failure:
            return _read(failure.answer, failure=failure.reason), failure.output
        except PegprofError as error:
            if error.exit_code != ExitCode.USAGE:
                raise
            return Compiled(failure=error.what), ""
        return _read(answer), ""


def ask_kind(host: Target, talk: Talk) -> str | None:
    """What JAX calls the device that is here; None if it does not answer."""
    talk.doing("asking JAX for its devices")
    try:
        answer = run_child("devices", {}, environment=host.environment, limit_s=DEVICE_LIMIT_S, talk=talk)
    except (ChildFailure, PegprofError):
        return None  # whoever goes on to use it will be told why
    kinds: list[str] = answer["devices"]
    return kinds[0] if kinds else None


def find_host(talk: Talk) -> Target:
    """The device of this machine, by the name that the table of devices has for it."""
    return targets.find_host(lambda host: ask_kind(host, talk))


def _read(answer: dict[str, Any], **more: Any) -> Compiled:
    known = {field.name for field in dataclasses.fields(Compiled)}
    return Compiled(**{key: value for key, value in {**answer, **more}.items() if key in known})
