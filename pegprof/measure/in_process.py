"""Jobs done in this process, for a model that no other could import: the Problem of a notebook.

What a fresh process would give is lost: a crash is everybody's, JAX may have been configured otherwise, and the peak of
the process's memory says nothing about one method. Each row says "in this process".
"""

import collections
import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from pegprof.errors import PegprofError, first_line
from pegprof.measure.process import OutOfTime, Watch, failure_of
from pegprof.measure.progress import Talk
from pegprof.measure.worker.main import Jobs, Reporter
from pegprof.models.problem import Problem, provided
from pegprof.result import records
from pegprof.targets.selection import Target


class Here:
    """As a ``Child``, for a problem of this process. A job that has begun cannot be stopped."""

    alive = True

    def __init__(self, problem: Problem, *, talk: Talk):
        self._problem, self._talk = problem, talk
        self._jobs = Jobs()
        self._requests: collections.deque[tuple[str, Mapping[str, Any]]] = collections.deque()

    def send(self, job: str, request: Mapping[str, Any]) -> None:
        self._requests.append((job, request))

    def receive(self, *, limit_s: float, watch: Watch | None = None) -> dict[str, Any]:
        job, request = self._requests.popleft()
        reporter = _Teller(self._talk)
        if limit_s <= 0:
            raise OutOfTime("there was no time left", answer={}, output="")
        try:
            with _without_compilation_cache(), provided(self._problem):
                self._jobs.find(job)(dict(request), reporter)
        except PegprofError:
            raise
        except Exception as error:
            raise failure_of(first_line(error), answer=reporter.answer, output="") from error
        return reporter.answer

    def close(self) -> None:
        self._jobs = Jobs()  # the programs of the old ones go


def this_process() -> Target:
    """The device that JAX uses in this process. Starts its backend."""
    import jax

    return Target(name=jax.default_backend(), backend=jax.default_backend(), environment={}, runs=True)


class _Teller(Reporter):
    """Keeps the answer, and tells of the progress at once."""

    def __init__(self, talk: Talk):
        self.answer = {}
        self._talk = talk

    def update(self, **fields: Any) -> None:
        progress, expected_s = fields.pop("progress", None), fields.pop("expected_s", None)
        self.answer |= records.encode(fields)
        if progress:
            self._talk.doing(progress, expected_s=expected_s)


@contextlib.contextmanager
def _without_compilation_cache() -> Iterator[None]:
    """As in the children: it would make ``compile_s`` a matter of luck."""
    import jax

    before = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
