"""Two revisions of a model in, two Results out, timed in the same rounds.

    describe both ──> comparable? ──> compile both ──> rounds: every method of both, again and again ──> two Results

Whatever the machine does meanwhile, it does to both.
"""

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable

from pegprof.errors import PegprofError
from pegprof.measure.progress import Talk
from pegprof.measure.revisions import Revision
from pegprof.measure.rounds import run_together
from pegprof.measure.session import Session, find_targets
from pegprof.result.result import Result
from pegprof.result.settings import Settings
from pegprof.targets import selection
from pegprof.targets.selection import Target


def measure_pair(
    revision: Revision,
    settings: Settings,
    check: Callable[[Result, Result], None],
    enough: Callable[[Result, Result, int], bool],
    *,
    talk: Talk,
    debug: bool = False,
) -> tuple[Result, Result]:
    """Measures a revision, and the code as it is.

    Args:
      revision: the older one.
      settings: what to measure.
      check: is given both results before anything is compiled, and may raise.
      enough: is given both results and the batch that is timed, after each process.
      talk: is told in words what is going on.
      debug: talk also passes on what children print.

    Returns:
      What came of the revision, and of the code as it is.
    """
    targets = find_targets(settings, talk=talk)
    if settings.planned_bytes is None:  # both plan for the same memory, whatever is free when
        settings = dataclasses.replace(settings, planned_bytes=selection.free_host_bytes())
    with contextlib.ExitStack() as stack:
        # What both have in common is compiled once, for both: then it is the same machine code.
        folder = tempfile.TemporaryDirectory(prefix="pegprof-", ignore_cleanup_errors=True)
        programs = stack.enter_context(folder)
        older = Session(
            dataclasses.replace(settings, model=revision.model),
            targets,
            talk=_Named(talk, revision.name),
            debug=debug,
            tree=revision.tree,
            programs=programs,
        )
        stack.callback(older.close)
        newer = Session(settings, targets, talk=talk, debug=debug, programs=programs)
        stack.callback(newer.close)
        pair = _Pair(older=older, newer=newer)
        _describe(older, revision)
        older.make_way()
        newer.describe()
        check(*pair.outlines())
        newer.compile_all()
        newer.make_way()
        older.compile_all()
        if settings.time and newer.host:
            for batch in settings.batches:
                pair.time(batch, newer.host, talk=talk, enough=enough)
        older.finish()
        newer.finish()
    return pair.results()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pair:
    older: Session
    newer: Session

    def outlines(self) -> tuple[Result, Result]:
        return self._as_older(self.older.history.outline()), self.newer.history.outline()

    def results(self) -> tuple[Result, Result]:
        return self._as_older(self.older.result()), self.newer.result()

    def _as_older(self, result: Result) -> Result:
        """By the name that the user knows the model by, not by where it was checked out."""
        return dataclasses.replace(result, settings=self.newer.history.settings)

    def time(self, batch: int, host: Target, *, talk: Talk, enough: Callable[[Result, Result, int], bool]) -> None:
        timings = [session.make_timing(batch, host) for session in (self.older, self.newer)]
        run_together(
            [timing for timing in timings if timing],
            talk=talk,
            enough=lambda: enough(*self.results(), batch),
            take_turns=host.has_one_owner,
        )


def _describe(session: Session, revision: Revision) -> None:
    try:
        session.describe()
    except PegprofError as error:
        raise PegprofError(
            f"in {revision.name}: {error.what}", where=error.where, hint=error.hint, exit_code=error.exit_code
        ) from error


class _Named:
    """Tells the same, with a name before it."""

    def __init__(self, talk: Talk, name: str):
        self._talk, self._name = talk, name

    def __call__(self, text: str) -> None:
        self._talk(f"{self._name}: {text}")

    def doing(self, text: str, *, expected_s: float | None = None, kind: str = "") -> None:
        self._talk.doing(f"{self._name}: {text}", expected_s=expected_s, kind=kind)

    def done(self) -> None:
        self._talk.done()
