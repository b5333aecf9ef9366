"""Runners of scripts instead of processes, and a clock that only runs move."""

from pegprof.measure import rounds
from pegprof.measure.lanes import Terms
from pegprof.measure.process import ChildFailure, OutOfTime
from pegprof.measure.progress import Silence
from pegprof.measure.protocol import ExamplesChecked, Times
from pegprof.measure.runners import NoRoom, Program
from pegprof.measure.timing import Timing
from pegprof.result import events
from pegprof.result.log import Log
from pegprof.result.settings import Settings


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def monotonic(self):
        return self.now_s


class Runners:
    """Methods that take so many seconds, and one byte, an example.

    ``dies`` is the number of the run that kills a method; ``errors`` are those of its statistics, and ``kinks`` those
    that are there for the first parameters only.
    """

    on_host, shared = True, False

    def __init__(
        self,
        clock,
        example_s,
        *,
        limit_s=1e9,
        room_bytes=1e9,
        dies=None,
        errors=None,
        check=None,
        nonfinite=None,
        kinks=None,
        start_s=0.0,
        death=ChildFailure,
    ):
        self.methods, self.programs, self.log = list(example_s), {}, []
        self.clock, self.example_s, self.limit_s, self.room_bytes = clock, example_s, limit_s, room_bytes
        self.dies, self.errors, self.check = dies or {}, errors or {}, check or ExamplesChecked(ok=True)
        self.nonfinite, self.kinks = nonfinite or {}, kinks or {}
        self.start_s, self.death, self.processes = start_s, death, 1
        self.runs = dict.fromkeys(example_s, 0)

    def left_s(self):
        return max(0.0, self.limit_s - self.clock.now_s)

    def set_up(self, batch):
        return self.prepare(batch)

    def prepare(self, batch):
        self.log.append(f"prepare {batch}")
        self.programs = {
            m: Program(batch=batch, compile_s=0.0, peak_bytes=batch, argument_bytes=0) for m in self.methods
        }
        return {}

    def renew(self):
        self.log.append("renew")
        self.processes += 1
        self.clock.now_s += self.start_s
        return {}

    def require_room(self, method, peak_bytes):
        if peak_bytes > self.room_bytes:
            raise NoRoom(f"needs {peak_bytes} B, {self.room_bytes} B available")

    def run(self, method, *, limit_s=None, **how):
        self.require_room(method, self.programs[method].peak_bytes)
        self.runs[method] += 1
        self.log.append(method)
        if self.dies.get(method) == self.runs[method]:
            raise self.death("killed", answer={}, output="")
        time_s = self.example_s[method] * self.programs[method].batch
        times = how.get("times", 1)
        runs = times + how.get("rewarm", False)
        allowed_s = min(self.left_s(), self.left_s() if limit_s is None else limit_s)
        self.clock.now_s += min(runs * time_s, allowed_s)
        if runs * time_s > allowed_s:
            raise OutOfTime("stopped", answer={}, output="")
        compared = how.get("compare_with") is not None
        return Times(
            times_s=times * (time_s,),
            kept={"mean": ()} if how.get("keep") else None,
            max_rel_error=self.errors.get(method, self.kinks.get(method, 0.0)) if compared else None,
            nonfinite=self.nonfinite.get(method, "") if how.get("find_nonfinite") else "",
            host_bytes=self.programs[method].peak_bytes if how.get("measure_peak") else None,
        )

    def check_examples(self, examples):
        self.log.append(f"check {examples}")
        return self.check

    def drop(self, method):
        self.methods.remove(method)

    def draw_again(self, seed):
        self.log.append(f"draw {seed}")
        self.kinks = {}

    def forget_statistics(self):
        self.log.append("forget")

    def close(self):
        self.log.append("close")


def make_timing(
    runners, *, batches=(64, 32, 16, 8, 4, 2, 1), warmup=1, runs=3, tolerance=1e-3, talk=None, processes=1, until_s=None
):
    log = Log()
    settings = Settings(model="scripted", batches=batches[:1], warmup=warmup, runs=runs, processes=processes)
    log.add(events.Begun(settings=settings, places=(), timestamp="", pegprof="", xla_flags=None))
    terms = Terms(
        batch=batches[0],
        batches=batches,
        peak_bytes=dict.fromkeys(runners.methods, batches[0]),
        example_s=None,
        tolerance=tolerance,
        check_examples=True,
        measure_peaks=True,
        processes=processes,
        processes_until_s=until_s,
    )
    return Timing(terms, log=log, runners=runners, talk=talk or Silence()), log


def race(runners, *, enough=lambda: False, **how):
    methods = list(runners.methods)
    made, log = make_timing(runners, **how)
    rounds.run_together([made], talk=Silence(), enough=enough)
    assert runners.log[-1] == "close"
    return timed_by(log, methods)


def timed_by(log, methods):
    """What came of it, by method."""
    return {method: log.history.timed(log.history.asked.batches[0], method) for method in methods}


def words_of(timed):
    """The remarks on a method, in words."""
    return tuple(map(str, timed.remarks))


def times_s(timed):
    return tuple(sample.time_s for sample in timed.samples)


ALL = {"grad": 0.1, "vmap": 0.2, "microbatch": 0.1, "surgery": 0.1}
