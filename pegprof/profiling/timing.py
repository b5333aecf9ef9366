"""What one child does with the clock: all methods, at one common batch, interleaved round by round.

    compile and run each once at a small batch ──> compare the statistics ──> estimate ──> the largest batch that fits
    ──> compile there, warm up ──> rounds: each method once, again and again

What is drifting (other work, heat) so hits all methods alike. A method that does not fit or disagrees is left out, with
the reason. The first run decides: it is dearer than later ones, so the estimate errs on the side of the limit.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax

from pegprof.profiling import agreement, jobs, methods
from pegprof.profiling.child import Reporter, describe_exception
from pegprof.profiling.result import MIN_RUNS
from pegprof.profiling.units import format_bytes, format_seconds

MAX_RUNS = 50
ENOUGH_S = 20.0  # of rounds, when the number of runs was not asked for

# A vmap of JAX's own is the plainest; grad has the mean only.
_REFERENCES = ("vmap", "microbatch", "surgery", "grad")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A method compiled for one batch size."""

    method: str
    run: Callable[[], Any]
    peak_bytes: int
    output_bytes: int
    compile_s: float


def time_methods(request: jobs.Request, reporter: Reporter) -> None:
    """Reports ``time_batch`` and, by method, ``samples_s``, ``max_rel_error`` and what was left out and why."""
    Timing(request, reporter).run()


class Timing:
    """One timing of some methods; the state is what is still in the race."""

    def __init__(self, request: jobs.Request, reporter: Reporter):
        self.request, self.reporter = request, reporter
        self.deadline_s = time.monotonic() + request["timing_limit_s"]
        self.problem, self.options = jobs.load(request), jobs.method_options(request)
        self.racing: list[str] = list(request["methods"])
        self.failures: dict[str, str] = {}  # wrong or crashed
        self.left_out: dict[str, str] = {}  # did not fit
        self.errors: dict[str, float] = {}
        params_key, self.batch_key = jax.random.split(jax.random.key(request["seed"]))
        self.params = jax.jit(self.problem.init)(params_key)

    def run(self) -> None:
        batches = candidate_batches(self.request["batch"], self.options)
        small = min((b for b in batches if b > 1), default=batches[-1])
        programs = self._compile_all(small)
        first_s = self._run_and_compare(programs, small)
        batch = self._choose_batch(batches, small, programs, first_s)
        warmup = self.request["warmup"]
        if batch == small:
            warmup -= 1
        else:
            programs = self._compile_all(batch)
        self._report(time_batch=batch)
        round_s = sum(first_s[method] for method in self.racing) * batch / small
        if not self._run_rounds(programs, batch, warmup, round_s):
            # The first runs were slower than warm ones would be, but they are measured, and that is said.
            self._report(time_batch=small, cold=True, samples_s={method: [first_s[method]] for method in self.racing})

    def _remaining_s(self) -> float:
        return self.deadline_s - time.monotonic()

    def _report(self, **fields: Any) -> None:
        self.reporter.update(failures=self.failures, left_out=self.left_out, max_rel_error=self.errors, **fields)

    def _drop(self, method: str, reasons: dict[str, str], reason: str) -> None:
        self.racing.remove(method)
        reasons[method] = reason
        self._report()

    def _compile_all(self, batch: int) -> dict[str, Program]:
        data = jax.jit(self.problem.batch, static_argnums=1)(self.batch_key, batch)
        programs = {}
        self._report(progress=f"compiling for runs at batch {batch}")
        for method in list(self.racing):
            self._report(running=method)
            try:
                program = self._compile(method, batch, data)
            except Exception as error:
                self._drop(method, self.failures, describe_exception(error))
                continue
            if self._fits(method, batch, program.peak_bytes):
                programs[method] = program
        return programs

    def _compile(self, method: str, batch: int, data: Any) -> Program:
        start_s = time.monotonic()
        fn = jax.jit(methods.METHODS[method].make(self.problem, self.options))
        compiled = fn.lower(self.params, data).compile()
        sizes = jobs.memory_bytes(compiled)
        return Program(
            method=method,
            run=lambda: jax.block_until_ready(compiled(self.params, data)),
            peak_bytes=sizes["peak_bytes"],
            output_bytes=sizes["output_bytes"],
            compile_s=time.monotonic() - start_s,
        )

    def _has_room(self, need_bytes: float) -> bool:
        capacity = self.request["capacity_bytes"]
        return capacity is None or need_bytes <= capacity

    def _fits(self, method: str, batch: int, need_bytes: int) -> bool:
        """Whether a method may run; if not, it is left out."""
        if not self._has_room(need_bytes):
            self._drop(method, self.left_out, f"not timed: batch {batch} needs {format_bytes(need_bytes)}")
            return False
        return True

    def _run_and_compare(self, programs: dict[str, Program], batch: int) -> dict[str, float]:
        """Each method's first run, its statistics compared with the reference's. Returns the times."""
        self._report(progress=f"comparing the methods' statistics at batch {batch}")
        first_s: dict[str, float] = {}
        reference: tuple[str, Any] | None = None
        for method in sorted(self.racing, key=_REFERENCES.index):
            held_bytes = programs[reference[0]].output_bytes if reference else 0
            if not self._fits(method, batch, programs[method].peak_bytes + held_bytes):
                continue
            self._report(running=method)
            start_s = time.perf_counter()
            try:
                stats = programs[method].run()
            except Exception as error:
                self._drop(method, self.failures, describe_exception(error))
                continue
            first_s[method] = time.perf_counter() - start_s
            if reference is None:
                reference = method, stats
            else:
                self._compare(method, stats, *reference)
        return first_s

    def _compare(self, method: str, stats: Any, reference: str, reference_stats: Any) -> None:
        error = agreement.max_rel_error(stats, reference_stats)
        self.errors[method] = error
        if error <= agreement.TOLERANCES.get(self.request["dtype"], agreement.TOLERANCES["float32"]):
            return
        reason = f"its statistics differ from those of {reference} by {error:.1e} of their scale"
        if method == "grad":
            reason += ": the examples of a batch interact (batch normalisation, a batch-wide divisor?)"
        self._drop(method, self.failures, reason)

    def _choose_batch(
        self, batches: list[int], small: int, programs: dict[str, Program], first_s: dict[str, float]
    ) -> int:
        """The largest batch whose estimated time and memory fit; both grow linearly with the batch at most.

        The small batch is compiled and warm already. It is kept if but one more round of it fits: what lies below it is
        a batch of one, and one example has no statistics to speak of.
        """
        full, full_peaks = self.request["batch"], self.request["peak_bytes"]
        for batch in batches:
            round_s = sum(first_s[method] for method in self.racing) * batch / small
            runs = self.request["warmup"] + min(self.request["runs"] or MIN_RUNS, MIN_RUNS)
            compile_s = sum(programs[method].compile_s for method in self.racing)
            total_s = round_s if batch == small else round_s * runs + compile_s
            share = (batch - small) / max(full - small, 1)
            peaks = (programs[m].peak_bytes + share * (full_peaks[m] - programs[m].peak_bytes) for m in self.racing)
            if total_s <= self._remaining_s() and all(map(self._has_room, peaks)):
                return batch
        return small

    def _run_rounds(self, programs: dict[str, Program], batch: int, warmup: int, round_s: float) -> int:
        """Rounds until there are enough, or until the next would pass the limit; every sample is kept.

        ``round_s`` is what a round should take. Returns how many rounds there were.
        """
        rounds = warmup + (self.request["runs"] or MIN_RUNS)
        self._report(progress=f"timing at batch {batch}: about {format_seconds(round_s * rounds)}")
        for _ in range(warmup):
            if round_s < self._remaining_s():
                self._warm_up(programs)
        self._report(running=None)
        samples_s: dict[str, list[float]] = {method: [] for method in self.racing}
        start_s, done = time.monotonic(), 0
        while self.racing and not self._enough(done, time.monotonic() - start_s) and round_s < self._remaining_s():
            times_s = self._run_round(programs)
            for method, time_s in times_s.items():
                samples_s[method].append(time_s)
            done, round_s = done + 1, sum(times_s.values())
            self._report(samples_s=samples_s)
        return done

    def _warm_up(self, programs: dict[str, Program]) -> None:
        """A round that may go wrong: the first at this batch."""
        for method in list(self.racing):
            self._report(running=method)
            try:
                programs[method].run()
            except Exception as error:
                self._drop(method, self.failures, describe_exception(error))

    def _enough(self, rounds: int, spent_s: float) -> bool:
        if runs := self.request["runs"]:
            return rounds >= runs
        return rounds >= MAX_RUNS or (rounds >= MIN_RUNS and spent_s >= ENOUGH_S)

    def _run_round(self, programs: dict[str, Program]) -> dict[str, float]:
        times_s = {}
        for method in self.racing:
            start_s = time.perf_counter()
            programs[method].run()
            times_s[method] = time.perf_counter() - start_s
        return times_s


def candidate_batches(batch: int, options: methods.Options) -> list[int]:
    """The batch asked for and its halvings, as far down as the statistics are defined and the microbatches whole."""
    halvings = [batch]
    while halvings[-1] > 1:
        halvings.append(halvings[-1] // 2)
    minimum = max(stat.minimum_batch for stat in options.stats)
    usable = [b for b in halvings if b >= minimum and b % options.microbatch_size == 0]
    return usable or [batch]
