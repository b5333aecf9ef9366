"""Does it fit, and up to which batch? Settings and a target in, Fit out. Everything is compiled, nothing is run.

Microbatch sizes are held fixed while the batch grows: ``microbatch`` takes as many examples at a time as it was told,
surgery as many as the planner chose for the first batch that was tried. What is compiled is saved at once, so that
whoever has waited long enough keeps it.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Sequence
from concurrent import futures

from pegprof.errors import ExitCode, PegprofError
from pegprof.measure.batch_search import Edge, Try, find_edge
from pegprof.measure.progress import Talk
from pegprof.measure.session import Save, Session
from pegprof.measure.workers import LIMIT_S
from pegprof.result.findings import Compiled
from pegprof.result.result import Result
from pegprof.result.settings import Settings
from pegprof.targets.meshes import shares_of
from pegprof.targets.selection import Target

AT_ONCE = 2
"""Searches side by side. A compiler mostly keeps one core busy, and takes a GiB or two."""

LOOK_S = 0.2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What was found of one method.

    Args:
      method: by name.
      edge: between the largest batch that fits and the smallest that does not.
      step: what batches were multiples of.
      microbatch_size: how many examples it takes at a time, None for all.
      failure: why there is no answer.
    """

    method: str
    edge: Edge | None = None
    step: int = 1
    microbatch_size: int | None = None
    failure: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """Answers, and the rows that they stand on: one for each batch that was compiled for a method.

    Args:
      result: the rows, as ``pegprof run`` has them.
      answers: one for each method; none where one batch was asked about.
      batch: that one.
      most: the largest batch of interest.
    """

    result: Result
    answers: tuple[Answer, ...] = ()
    batch: int | None = None
    most: int | None = None

    @property
    def exit_code(self) -> ExitCode:
        """Whether surgery fits, if one batch was asked about; without surgery, whether everything does."""
        if any(row.status == "failed" for row in self.result.rows) or any(a.failure for a in self.answers):
            return ExitCode.UNMEASURED
        if self.batch is not None:
            return self._judge_batch()
        exact = all(answer.edge and answer.edge.is_exact for answer in self.answers)
        return ExitCode.OK if exact else ExitCode.TIME_LIMIT

    def _judge_batch(self) -> ExitCode:
        asked = self.result.settings.methods
        decisive = ("surgery",) if "surgery" in asked else asked
        if any(row.status != "ok" for row in self.result.rows if row.method in decisive):
            return ExitCode.NO
        return ExitCode.TIME_LIMIT if set(decisive) & set(self.uncompiled) else ExitCode.OK

    @property
    def uncompiled(self) -> list[str]:
        """The methods that the time limit came before."""
        compiled = {row.method for row in self.result.rows}
        return [method for method in self.result.settings.methods if method not in compiled]


def find_fit(
    settings: Settings, target: Target, *, batch: int | None, most: int, talk: Talk, save: Save, debug: bool = False
) -> Fit:
    """Whether a batch fits, or without one the largest up to ``most`` that does."""
    if batch:
        return check_fit(settings, target, talk=talk, save=save, debug=debug)
    begun, up_to = start_at_multiple(settings, target, most=most)
    return find_largest(begun, target, most=up_to, talk=talk, save=save, debug=debug)


def start_at_multiple(settings: Settings, target: Target, *, most: int) -> tuple[Settings, int]:
    """Settings whose batch, where the search begins, is one that a mesh divides; and the largest such of interest."""
    shares = shares_of(target.mesh)
    start = max(settings.batches[0] // shares, 1) * shares
    return dataclasses.replace(settings, batches=(start,)), max(most // shares, 1) * shares


def check_fit(settings: Settings, target: Target, *, talk: Talk, save: Save, debug: bool = False) -> Fit:
    """Whether the methods fit at the one batch size of the settings."""
    session = _start(settings, target, talk=talk, save=save, debug=debug)
    (batch,) = settings.batches
    with contextlib.closing(session.workers):
        for method in settings.methods:
            _compile_in_time(session, batch, method, target)
    return Fit(result=_finish(session), batch=batch)


def find_largest(
    settings: Settings,
    target: Target,
    *,
    most: int,
    talk: Talk,
    save: Save,
    debug: bool = False,
    also: int | None = None,
) -> Fit:
    """The largest batch that fits, by each method; the batch of the settings is where the search begins.

    ``also`` is a batch that is compiled in any case.
    """
    session = _start(settings, target, talk=talk, save=save, debug=debug)
    searches = [_Search(session, target, method, most=most) for method in settings.methods]
    at_once = 1 if session.workers.shares(target) else AT_ONCE  # who shares a process asks it one thing at a time
    with contextlib.closing(session.workers), futures.ThreadPoolExecutor(at_once) as pool:
        try:
            answers = _wait_for([pool.submit(search.run) for search in searches])
            for method in settings.methods:
                if also and (also, method, target.name) not in session.history.compiled:
                    _compile_in_time(session, also, method, target)
        except BaseException:  # Ctrl-C: the children shall not be waited for
            session.workers.stop.set()
            raise
    return Fit(result=_finish(session), answers=tuple(answers), most=most)


def _wait_for(searches: Sequence[futures.Future[Answer]]) -> list[Answer]:
    """Their answers. A wait without end can sleep through Ctrl-C where there are other threads: so it is many short
    ones."""
    while True:
        done, others = futures.wait(searches, timeout=LOOK_S, return_when=futures.FIRST_EXCEPTION)
        answers = [search.result() for search in searches if search in done]
        if not others:
            return answers


def _start(settings: Settings, target: Target, *, talk: Talk, save: Save, debug: bool) -> Session:
    session = Session(settings, (target,), talk=talk, save=save, debug=debug)
    try:
        session.describe()
        if session.history.capacity_bytes[target.name] is None:
            what = f"nobody knows how much memory {target.name} has"
            raise PegprofError(what, hint="say so with --memory-limit", exit_code=ExitCode.UNMEASURED)
    except BaseException:  # a search over meshes may go on with the next
        session.workers.close()
        raise
    return session


def _finish(session: Session) -> Result:
    if not session.history.compiled:
        what = "the time limit came before anything was compiled"
        raise PegprofError(what, hint="give it a longer --time-limit", exit_code=ExitCode.TIME_LIMIT)
    session.finish()
    return session.result()


class _NoAnswer(Exception):
    """A compile that failed."""


class _Search:
    """The search for one method.

    Args:
      session: that of all searches.
      target: what for.
      method: by name.
      most: the largest batch of interest.
    """

    def __init__(self, session: Session, target: Target, method: str, *, most: int):
        self.session, self.target, self.method, self.most = session, target, method, most
        self.shares = shares_of(target.mesh)
        self.start = min(session.settings.batches[0], most)
        self.capacity_bytes = session.history.capacity_bytes[target.name] or 0

    def run(self) -> Answer:
        size, first = None, None
        try:
            if self.method == "surgery":  # the planner chooses, once
                first = self._compile(self.start)
                size = first.microbatch_size if first else None
            elif self.method == "microbatch":
                size = self.session.settings.microbatch_size
            edge = find_edge(
                lambda batch: self._try(batch, size, first),
                capacity_bytes=self.capacity_bytes,
                # With a size that is fixed needs hardly grow: then the largest batch of interest is as good as any.
                starts=(self.start,) if size is None else (self.start, self.most) if first else (self.most,),
                step=self._step(size),
                least=max(self.session.facts.smallest_batch, self.shares),
                most=self.most,
            )
        except _NoAnswer as failure:
            return Answer(method=self.method, failure=str(failure))
        finally:
            self.session.talk.done()
        return Answer(method=self.method, edge=edge, step=self._step(size), microbatch_size=size)

    def _step(self, size: int | None) -> int:
        """What batches are multiples of. On a mesh surgery takes so many at a time on each device."""
        if self.method == "surgery":
            return self.shares * (size or 1)
        return math.lcm(self.shares, size or 1)

    def _try(self, batch: int, size: int | None, first: Compiled | None) -> Try | None:
        known = first if batch == self.start else None
        compiled = known or self._compile(batch, size if self.method == "surgery" else None)
        if compiled is None:
            return None
        return Try(fits=compiled.fits(self.capacity_bytes), needs_bytes=compiled.peak_bytes)

    def _compile(self, batch: int, surgery_size: int | None = None) -> Compiled | None:
        compiled = _compile_in_time(self.session, batch, self.method, self.target, surgery_size=surgery_size)
        if compiled and compiled.failure:
            raise _NoAnswer(f"batch {batch}: {compiled.failure}")
        return compiled


def _compile_in_time(
    session: Session,
    batch: int,
    method: str,
    target: Target,
    *,
    surgery_size: int | None = None,
) -> Compiled | None:
    """Compiles and saves. None if there is no time left, or nobody waits any more: that says nothing of the method."""
    deadline_s = session.start_s + session.settings.time_limit_s
    limit_s = min(deadline_s - time.monotonic(), LIMIT_S)
    if limit_s <= 0 or session.workers.stop.is_set():
        return None
    compiled = session.try_compile(batch, method, target, surgery_size=surgery_size, limit_s=limit_s)
    if compiled.failure and (time.monotonic() >= deadline_s or session.workers.stop.is_set()):
        return None
    session.keep_compiled(batch, method, target, compiled)
    return compiled
