"""Progress: what is being done, and how long it should take. It goes to stderr, and nothing depends on it.

Three ways to listen: ``Silence``; ``Lines`` for a file or a pipe, one line for each step; ``Display`` for a terminal,
where the step under way moves. How long a step should take is what the caller estimates or, for steps of a kind, what
those before it took.
"""

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol, TextIO

from pegprof.units import format_duration

if TYPE_CHECKING:
    from rich.console import Console


class Talk(Protocol):
    """Whoever is told how a measurement goes on."""

    def __call__(self, text: str) -> None:
        """Something worth keeping on the screen."""

    def doing(self, text: str, *, expected_s: float | None = None, kind: str = "") -> None:
        """A step begins, and the one before it is over."""


class Silence:
    """Tells nobody."""

    def __call__(self, text: str) -> None:
        pass

    def doing(self, text: str, *, expected_s: float | None = None, kind: str = "") -> None:
        pass


class StepClock:
    """How long steps of a kind have taken so far: what the next of that kind should take."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic):
        self._now_s = now_s
        self._took_s: dict[str, list[float]] = {}
        self._kind, self._start_s = "", now_s()

    def begin(self, kind: str) -> float | None:
        """Ends the step under way, begins one of this kind, and returns what it should take, if that is known."""
        now_s = self._now_s()
        if self._kind:
            self._took_s.setdefault(self._kind, []).append(now_s - self._start_s)
        self._kind, self._start_s = kind, now_s
        before = self._took_s.get(kind)
        return statistics.fmean(before) if before else None


class Lines:
    """One line for each step and remark."""

    def __init__(self, file: TextIO):
        self._file, self._clock = file, StepClock()

    def __call__(self, text: str) -> None:
        self._file.write(f"{text}\n")
        self._file.flush()

    def doing(self, text: str, *, expected_s: float | None = None, kind: str = "") -> None:
        learnt_s = self._clock.begin(kind)
        expected_s = learnt_s if expected_s is None else expected_s
        self(f"{text} ..." if expected_s is None else f"{text}, about {format_duration(expected_s)} ...")


class Display:
    """Remarks stay; below them the step under way moves, with the time that it has taken and should take."""

    def __init__(self, console: "Console"):
        from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
        from rich.progress_bar import ProgressBar
        from rich.text import Text

        class Bar(ProgressColumn):
            def render(self, task: Task) -> ProgressBar | Text:
                expected_s = task.fields["expected_s"]
                if expected_s is None:
                    return Text()
                return ProgressBar(total=expected_s, completed=min(task.elapsed or 0, expected_s), width=20)

        class Clock(ProgressColumn):
            def render(self, task: Task) -> Text:
                elapsed, expected_s = format_duration(task.elapsed or 0), task.fields["expected_s"]
                known = expected_s is not None
                return Text(f"{elapsed} of about {format_duration(expected_s)}" if known else elapsed, style="dim")

        text = TextColumn("{task.description}", markup=False)
        self.progress = Progress(SpinnerColumn(), text, Bar(), Clock(), console=console, transient=True)
        self._clock, self._from_ansi = StepClock(), Text.from_ansi

    def __call__(self, text: str) -> None:
        self.progress.console.print(self._from_ansi(text), soft_wrap=True)

    def doing(self, text: str, *, expected_s: float | None = None, kind: str = "") -> None:
        learnt_s = self._clock.begin(kind)
        for task in self.progress.task_ids:
            self.progress.remove_task(task)
        self.progress.add_task(text, total=None, expected_s=learnt_s if expected_s is None else expected_s)


@contextlib.contextmanager
def listen(*, quiet: bool = False) -> Iterator[Talk]:
    """The way to listen that fits this process's stderr, for as long as something is measured."""
    from rich.console import Console

    console = Console(stderr=True)
    if quiet:
        yield Silence()
    elif sys.stderr.isatty() and not console.is_dumb_terminal:
        display = Display(console)
        with display.progress:
            yield display
    else:
        yield Lines(sys.stderr)
