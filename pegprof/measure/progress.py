"""Progress: what is being done, and how long it should take. It goes to stderr, and nothing depends on it.

Three ways to listen: ``Silence``; ``Lines`` for a file or a pipe, one line for each step; ``Display`` for a terminal,
one bar with the steps under way. How much time is left is what the same command took last time (``durations.py``). The
first time there are only estimates for single steps: the caller's, or what earlier steps of the kind took.
"""

import contextlib
import dataclasses
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol, TextIO

from pegprof.measure import durations
from pegprof.measure.durations import Durations
from pegprof.units import format_duration

if TYPE_CHECKING:
    from rich.console import Console


class Talk(Protocol):
    """Whoever is told how a measurement goes on, by any thread."""

    def __call__(self, text: str) -> None:
        """Something worth keeping on the screen."""

    def doing(self, text: str, *, expected_s: float | None = None, kind: str = "") -> None:
        """A step of this thread begins, and the one before it is over."""

    def done(self) -> None:
        """This thread's step is over, and no other begins."""


class Silence:
    """Tells nobody."""

    def __call__(self, text: str) -> None:
        pass

    def doing(self, text: str, *, expected_s: float | None = None, kind: str = "") -> None:
        pass

    def done(self) -> None:
        pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A step under way.

    Args:
      start_s: on the clock of ``Steps``, which begins at 0.
      expected_s: what it should take.
      left_s: what the whole command should still take when the step begins.
    """

    text: str
    kind: str
    start_s: float
    expected_s: float | None
    left_s: float | None


class Steps:
    """The steps under way, one for each thread, and what is known of how long they take.

    Args:
      before: what the same command took last time.
      now_s: the clock.
    """

    def __init__(self, before: Durations | None = None, now_s: Callable[[], float] = time.monotonic):
        self._before, self._now_s, self._begin_s = before, now_s, now_s()
        self._under_way: dict[int, Step] = {}  # by thread
        self._last: Step | None = None
        self._starts_s: list[tuple[str, float]] = []
        self._took_s: dict[str, list[float]] = {}
        self._lock = threading.Lock()

    @property
    def elapsed_s(self) -> float:
        return self._now_s() - self._begin_s

    def begin(self, text: str, *, kind: str = "", expected_s: float | None = None) -> Step:
        """Ends this thread's step, and begins another."""
        with self._lock:
            now_s = self.elapsed_s
            self._end(now_s)
            if expected_s is None and kind in self._took_s:
                expected_s = statistics.fmean(self._took_s[kind])
            left_s = self._find_left_s(text, now_s)
            step = Step(text=text, kind=kind, start_s=now_s, expected_s=expected_s, left_s=left_s)
            self._starts_s.append((text, now_s))
            self._under_way[threading.get_ident()] = self._last = step
            return step

    def end(self) -> None:
        """Ends this thread's step."""
        with self._lock:
            self._end(self.elapsed_s)

    def _end(self, now_s: float) -> None:
        step = self._under_way.pop(threading.get_ident(), None)
        if step and step.kind:
            self._took_s.setdefault(step.kind, []).append(now_s - step.start_s)

    def _find_left_s(self, text: str, now_s: float) -> float | None:
        """From where the step stood last time; else what was left at the step before, less the time since."""
        if self._before is None:
            return None
        number = sum(text == each for each, _ in self._starts_s)
        left_s = self._before.left_s(text, number)
        if left_s is None and self._last and self._last.left_s is not None:
            left_s = max(0.0, self._last.left_s - (now_s - self._last.start_s))
        return self._before.total_s if left_s is None and not self._starts_s else left_s

    def describe(self) -> str:
        """All steps under way, in words."""
        with self._lock:
            return "; ".join(step.text for step in self._under_way.values())

    def durations(self) -> Durations:
        """What this command took, now that it is over."""
        return Durations(total_s=self.elapsed_s, starts_s=tuple(self._starts_s))


class Lines:
    """One line for each step and remark."""

    def __init__(self, file: TextIO, steps: Steps | None = None):
        self._file, self._steps = file, steps or Steps()

    def __call__(self, text: str) -> None:
        self._file.write(f"{text}\n")
        self._file.flush()

    def doing(self, text: str, *, expected_s: float | None = None, kind: str = "") -> None:
        step = self._steps.begin(text, kind=kind, expected_s=expected_s)
        if step.left_s is not None:
            text = f"{text}, about {format_duration(step.left_s)} left"
        elif step.expected_s is not None:
            text = f"{text}, about {format_duration(step.expected_s)}"
        self(f"{text} ...")

    def done(self) -> None:
        self._steps.end()


class Display:
    """Remarks stay; below them is one bar with the steps under way, the time that has passed and that it should take.

    Where nothing is known of the whole command, the bar is of the last step that began.
    """

    def __init__(self, console: "Console", known: Steps | None = None):
        from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
        from rich.progress_bar import ProgressBar
        from rich.text import Text

        self._steps = steps = known or Steps()

        class Bar(ProgressColumn):
            def render(self, task: Task) -> ProgressBar | Text:
                start_s, expected_s = task.fields["start_s"], task.fields["expected_s"]
                if expected_s is None:
                    return Text()
                return ProgressBar(total=expected_s, completed=min(steps.elapsed_s - start_s, expected_s), width=20)

        class Clock(ProgressColumn):
            def render(self, task: Task) -> Text:
                start_s, expected_s = task.fields["start_s"], task.fields["expected_s"]
                of = "" if expected_s is None else f" of about {format_duration(expected_s)}"
                return Text(f"{format_duration(steps.elapsed_s - start_s)}{of}", style="dim")

        text = TextColumn("{task.description}", markup=False)
        self.progress = Progress(SpinnerColumn(), text, Bar(), Clock(), console=console, transient=True)
        self._task = self.progress.add_task("", total=None, start_s=0.0, expected_s=None, visible=False)
        self._from_ansi = Text.from_ansi

    def __call__(self, text: str) -> None:
        self.progress.console.print(self._from_ansi(text), soft_wrap=True)

    def doing(self, text: str, *, expected_s: float | None = None, kind: str = "") -> None:
        step = self._steps.begin(text, kind=kind, expected_s=expected_s)
        start_s, expected_s = step.start_s, step.expected_s
        if step.left_s is not None:
            start_s, expected_s = 0.0, step.start_s + step.left_s
        self.progress.update(
            self._task, description=self._steps.describe(), start_s=start_s, expected_s=expected_s, visible=True
        )

    def done(self) -> None:
        self._steps.end()
        self.progress.update(self._task, description=self._steps.describe())


@contextlib.contextmanager
def listen(*, quiet: bool = False, command: object = None) -> Iterator[Talk]:
    """The way to listen that fits this process's stderr, for as long as something is measured.

    Args:
      quiet: says nothing.
      command: what is done, with all that decides how long it takes; None remembers nothing.
    """
    from rich.console import Console

    if quiet:
        yield Silence()
        return
    console, record = Console(stderr=True), durations.find(command) if command is not None else None
    steps = Steps(record.read() if record else None)
    if sys.stderr.isatty() and not console.is_dumb_terminal:
        display = Display(console, steps)
        with display.progress:
            yield display
    else:
        yield Lines(sys.stderr, steps)
    if record:
        record.write(steps.durations())
