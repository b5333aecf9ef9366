"""Settings in, Result out: what each method needs and how long it takes, each measured in fresh processes.

    describe the model ──> compile each method ──> verdict ──> what fits ──> run what fits, at one common batch

The parent never imports the model and never starts a JAX backend. A child that crashes costs its own row only.
``save`` is called with the Result so far whenever there is something new, so that nothing measured is ever lost.
"""

import dataclasses
import datetime
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import pegprof
from pegprof.engine.plan import Plan
from pegprof.errors import ExitCode, PegprofError
from pegprof.problem import Problem
from pegprof.profiling import budget, here, records, targets
from pegprof.profiling.crew import Crew
from pegprof.profiling.environment import Environment
from pegprof.profiling.layers import Layer, find_layers
from pegprof.profiling.process import Child, ChildFailure, Worker
from pegprof.profiling.progress import Talk
from pegprof.profiling.race import Peak, Terms, Timed
from pegprof.profiling.result import Result, Row, Settings, Status
from pegprof.profiling.timing import Timing, last_lines
from pegprof.profiling.units import format_bytes, format_seconds
from pegprof.profiling.verdict import Verdict, slope

COMPILE_LIMIT_S = 600.0
UNSTEADY = 0.1  # an interquartile range above this share of the median is worth a remark

Save = Callable[[Result], None]


def _ignore(result: Result) -> None:
    pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What a child found out about the model and the device; the fields are those of its answer."""

    model: str
    model_options: Mapping[str, object]
    environment: dict[str, Any]
    parameters: int
    parameter_bytes: int
    seq_len: int | None
    dtype: str
    device: str
    device_bytes: int | None
    jax: str
    jaxlib: str
    tolerance: float  # of two right statistics
    smallest_batch: int  # that the statistics are defined for
    batch_divisor: int  # of all batches that the methods can take
    flops_per_s: float | None  # that the device can do


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """One method compiled at one batch, or why it could not be."""

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


def measure(
    settings: Settings,
    *,
    talk: Talk,
    save: Save = _ignore,
    preview: Save = _ignore,
    debug: bool = False,
    problem: Problem | None = None,
) -> Result:
    """Measures everything that was asked for.

    Args:
      settings: what to measure.
      talk: is told in words what is going on.
      save: is given the result so far after each stage.
      preview: is given the result once, when the memory is known and the timing, which takes longest, is to begin.
      debug: talk also passes on what children print.
      problem: a model that only this process knows. Everything then happens here, and the rows say so.
    """
    return Session(settings, talk=talk, save=save, preview=preview, debug=debug, problem=problem).run()


class Session:
    """One measurement; the state is what has been found so far."""

    def __init__(
        self, settings: Settings, *, talk: Talk, save: Save, preview: Save, debug: bool, problem: Problem | None
    ):
        self.settings, self.talk, self.debug, self.problem = settings, talk, debug, problem
        self.save, self.preview = save, preview
        self.target = here.this_process() if problem else targets.host_target()
        self.compiled: dict[tuple[int, str], Compiled] = {}
        self.timed: dict[tuple[int, str], Timed] = {}
        self.verdict: Verdict | None = None
        self.complete = False
        self.start_s = time.monotonic()
        self.timestamp = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")

    def run(self) -> Result:
        try:
            self._run_stages()
        except KeyboardInterrupt:
            if self.compiled:
                self.save(self._result())
            raise
        self.complete = True
        self.save(self._result())
        return self._result()

    def _run_stages(self) -> None:
        self.facts = self._describe()
        self.capacity_bytes = self._find_capacity()
        for batch in self.settings.batches:
            for method in self.settings.methods:
                self.compiled[batch, method] = self._compile(batch, method)
                self._say_need(batch, method)
                self.save(self._result())
        self.verdict = self._find_verdict()
        self.save(self._result())
        if self.settings.time:
            self.preview(self._result())
            for batch in self.settings.batches:
                self._time(batch)

    def _start(self, *files: int) -> Worker:
        """Somebody who does jobs, and has some open files too."""
        if self.problem:
            return here.Here(self.problem, talk=self.talk)
        return Child(self.target.environment, talk=self.talk, files=files, debug=self.debug)

    def _run(self, job: str, **fields: Any) -> dict[str, Any]:
        """One job, in a process of its own."""
        worker = self._start()
        try:
            worker.send(job, {**dataclasses.asdict(self.settings), **fields})
            return worker.receive(limit_s=COMPILE_LIMIT_S, watch=targets.short_of_memory)
        finally:
            worker.close()

    def _describe(self) -> Facts:
        self.talk.doing(f"loading {self.settings.model}")
        try:
            return Facts(**self._run("describe", measure_rate=self.settings.time))
        except ChildFailure as failure:
            what = f"the model {self.settings.model} could not be loaded: {failure.reason}"
            raise PegprofError(what, hint=last_lines(failure.output), exit_code=ExitCode.UNMEASURED) from failure

    def _find_capacity(self) -> int | None:
        free = targets.free_host_bytes() if self.target.name == "cpu" else self.facts.device_bytes
        bounds = [bound for bound in (free, self.settings.memory_limit_bytes) if bound is not None]
        return min(bounds, default=None)

    def _compile(self, batch: int, method: str) -> Compiled:
        count = f"{len(self.compiled) + 1} of {len(self.settings.batches) * len(self.settings.methods)}"
        self.talk.doing(f"compiling {method} at batch {batch} ({count})", kind="compile")
        try:
            return Compiled(**self._run("compile", batch=batch, method=method, capacity_bytes=self.capacity_bytes))
        except ChildFailure as failure:
            self._say_failure(method, failure)
            return Compiled(**{**failure.answer, "failure": failure.reason})
        except PegprofError as error:
            return Compiled(failure=error.what)

    def _say_need(self, batch: int, method: str) -> None:
        compiled = self.compiled[batch, method]
        if compiled.failure:
            self.talk(f"{method} at batch {batch} failed: {compiled.failure}")
        else:
            need, took = format_bytes(compiled.peak_bytes), format_seconds(compiled.compile_s)
            self.talk(f"{method} at batch {batch} needs {need} (compiled in {took})")

    def _say_failure(self, who: str, failure: ChildFailure) -> None:
        if failure.output and not self.debug:
            self.talk(f"{who} said:\n{last_lines(failure.output)}")

    def _find_verdict(self) -> Verdict | None:
        self.talk.doing("compiling grad at two batch sizes, for what one example's activations take")
        try:
            answer = self._run("activations")
        except (ChildFailure, PegprofError) as failure:
            self.talk(f"no verdict: {failure}")
            return None
        first, second = answer["temp_bytes"]
        return Verdict(
            target=self.target.name,
            activation_bytes_per_example=slope((first, second)),
            parameter_bytes=self.facts.parameter_bytes,
            traced_bytes_per_example=answer["traced_bytes_per_example"],
            layers=self._find_layers(),
        )

    def _find_layers(self) -> tuple[Layer, ...]:
        """From surgery's plan, whichever batch it is for, or from one made for the purpose."""
        plan = next(iter(self._plans().values()), None)
        if plan:
            return find_layers(plan)
        try:
            answer = self._run("plan", batch=self.settings.batches[0], capacity_bytes=self.capacity_bytes)
        except (ChildFailure, PegprofError) as failure:
            self.talk(f"no layers: {failure}")
            return ()
        return find_layers(records.decode(Plan, answer["plan"]))

    def _plans(self) -> dict[int, Plan]:
        found = {batch: compiled.plan for (batch, _), compiled in self.compiled.items() if compiled.plan}
        return {batch: records.decode(Plan, plan) for batch, plan in found.items()}

    def _time(self, batch: int) -> None:
        """Runs all methods that could be compiled."""
        compiled = {m: c for m in self.settings.methods if not (c := self.compiled[batch, m]).failure}
        if not compiled:
            return
        rate = self.facts.flops_per_s
        batches_to_come = len(self.settings.batches) - self.settings.batches.index(batch)
        left_s = self.start_s + self.settings.time_limit_s - time.monotonic()
        crew = Crew(
            compiled,
            request={**dataclasses.asdict(self.settings), "capacity_bytes": self.capacity_bytes},
            full_batch=batch,
            argument_bytes=max(c.argument_bytes or 0 for c in compiled.values()),
            start=self._start,
            deadline_s=time.monotonic() + left_s / batches_to_come,
            capacity_bytes=self.capacity_bytes,
            on_host=self.target.is_host,
            one_process=self.problem is not None,
        )
        terms = Terms(
            batches=budget.candidate_batches(
                batch, minimum=self.facts.smallest_batch, multiple_of=self.facts.batch_divisor
            ),
            peak_bytes={method: c.peak_bytes or 0 for method, c in compiled.items()},
            example_s=sum(c.flops or 0 for c in compiled.values()) / batch / rate if rate else None,
            warmup=self.settings.warmup,
            runs=self.settings.runs,
            tolerance=self.facts.tolerance if self.settings.check else None,
            check_examples=batch == self.settings.batches[0],
            measure_peaks=self.problem is None,
        )
        timing = Timing(terms, crew=crew, talk=self.talk, changed=lambda: self._keep(batch, timing))
        try:
            timing.run()
        finally:
            self._keep(batch, timing)

    def _keep(self, batch: int, timing: Timing) -> None:
        self.timed |= {(batch, method): timed for method, timed in timing.timed().items()}
        self.save(self._result())

    def _result(self) -> Result:
        return Result(
            settings=self.settings,
            rows=tuple(self._row(batch, method) for batch, method in self.compiled),
            verdict=self.verdict,
            samples_s={key: self.timed[key].samples_s for key in self.compiled if self._is_timed(key)},
            plans=self._plans(),
            environment=records.decode(Environment, self.facts.environment),
            options=self.facts.model_options,
            complete=self.complete,
        )

    def _is_timed(self, key: tuple[int, str]) -> bool:
        return key in self.timed and bool(self.timed[key].samples_s)

    def _row(self, batch: int, method: str) -> Row:
        compiled, timed = self.compiled[batch, method], self.timed.get((batch, method), Timed())
        grad_compiled, grad_timed = (
            self.compiled.get((batch, "grad"), Compiled()),
            self.timed.get((batch, "grad"), Timed()),
        )
        status, reason = self._judge(batch, compiled, timed)
        verdict = self.verdict
        return Row(
            model=self.facts.model,
            parameters=self.facts.parameters,
            batch=batch,
            seq_len=self.facts.seq_len,
            dtype=self.facts.dtype,
            stats=",".join(self.settings.stats),
            method=method,
            microbatch_size=compiled.microbatch_size,
            target=self.target.name,
            device=targets.cpu_name() if self.target.name == "cpu" else self.facts.device,
            evidence="measured" if timed.samples_s else "compiled",
            status=status,
            reason=reason,
            time_s=timed.time_s,
            time_iqr_s=timed.iqr_s,
            time_batch=timed.batch,
            runs=len(timed.samples_s) or None,
            time_ratio=_ratio(timed.time_s, grad_timed.time_s if timed.batch == grad_timed.batch else None),
            compile_s=compiled.compile_s,
            peak_bytes=compiled.peak_bytes,
            argument_bytes=compiled.argument_bytes,
            output_bytes=compiled.output_bytes,
            temp_bytes=compiled.temp_bytes,
            alias_bytes=compiled.alias_bytes,
            host_peak_bytes=timed.peak.host_bytes if timed.peak else None,
            peak_ratio=_ratio(compiled.peak_bytes, grad_compiled.peak_bytes),
            capacity_bytes=self.capacity_bytes,
            flops=compiled.flops,
            activation_bytes_per_example=verdict.activation_bytes_per_example if verdict else None,
            parameter_bytes=self.facts.parameter_bytes,
            activations_dominate=verdict.activations_dominate if verdict else None,
            max_rel_error=timed.max_rel_error,
            materialised_parameters=compiled.materialised_parameters,
            seed=self.settings.seed,
            pegprof=pegprof.__version__,
            jax=self.facts.jax,
            jaxlib=self.facts.jaxlib,
            xla_flags=os.environ.get("XLA_FLAGS") or None,
            timestamp=self.timestamp,
            device_peak_bytes=timed.peak.device_bytes if timed.peak else None,
            measured_batch=timed.peak.batch if timed.peak else None,
            measured_batch_peak_bytes=timed.peak.xla_bytes if timed.peak else None,
        )

    def _judge(self, batch: int, compiled: Compiled, timed: Timed) -> tuple[Status, str]:
        """A row's status, and all that there is to say about it."""
        remarks = [compiled.note, "in this process" if self.problem else ""]
        ended = timed.samples_s or timed.failure or timed.refused or timed.skipped or compiled.failure
        if self.settings.time and not (self.complete or ended):
            remarks.append("not timed yet")
        if timed.batch not in (None, batch):
            remarks.append(f"timed at batch {timed.batch}")
        remarks += [*timed.remarks, self._remark_on_spread(timed), _remark_on_peak(timed.peak)]
        if failure := compiled.failure or timed.failure:
            return "failed", _join(failure, *remarks)
        need, capacity = compiled.peak_bytes, self.capacity_bytes
        if need is not None and capacity is not None and need > capacity:
            too_much = f"needs {format_bytes(need)}, {format_bytes(capacity)} available"
            return "refused", _join(too_much, *remarks, timed.refused or timed.skipped or "")
        if timed.refused:
            return "refused", _join(timed.refused, *remarks)
        if timed.skipped:
            return "skipped", _join(timed.skipped, *remarks)
        return "ok", _join(*remarks)

    def _remark_on_spread(self, timed: Timed) -> str:
        """The advice is what has not been asked for yet."""
        if not (timed.time_s and timed.iqr_s and timed.iqr_s > UNSTEADY * timed.time_s):
            return ""
        advice = "close other programs"
        if timed.remarks:  # the time limit was short
            advice += ", or give it a longer --time-limit"
        else:
            advice += f", or ask for more than --runs {len(timed.samples_s)}"
        return f"the times spread by {timed.iqr_s / timed.time_s:.0%}: {advice}"


def _remark_on_peak(peak: Peak | None) -> str:
    if not (peak and peak.measured_bytes and peak.is_far_from_xla):
        return ""
    apart = peak.measured_bytes / peak.xla_bytes - 1
    measured, planned = format_bytes(peak.measured_bytes), format_bytes(peak.xla_bytes)
    return (
        f"measured peak {measured} at batch {peak.batch}, {abs(apart):.0%} {'above' if apart > 0 else 'below'} "
        f"XLA's {planned}"
    )


def _ratio(value: float | None, unit: float | None) -> float | None:
    return value / unit if value is not None and unit else None


def _join(*remarks: str) -> str:
    return "; ".join(remark for remark in remarks if remark)
