"""Settings in, Result out: what each method needs and how long it takes, each measured in fresh processes.

    describe the model ──> compile each method ──> verdict ──> what fits ──> time what fits, at one common batch

The parent never imports the model and never starts a JAX backend. A child that crashes costs its own row only.
``save`` is called with the Result so far whenever a stage is done, so that nothing measured is ever lost.
"""

import dataclasses
import datetime
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import pegprof
from pegprof.errors import ExitCode, PegprofError
from pegprof.profiling import targets
from pegprof.profiling.process import ChildFailure, Talk, run_child
from pegprof.profiling.result import MIN_RUNS, Result, Row, Settings, Status
from pegprof.profiling.units import format_bytes, format_seconds
from pegprof.profiling.verdict import Verdict, slope

COMPILE_LIMIT_S = 600.0
GRACE_S = 60.0  # a run that has begun cannot be interrupted from within

Save = Callable[[Result], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What a child found out about the model and the device; the fields are those of its answer."""

    model: str
    parameters: int
    parameter_bytes: int
    seq_len: int | None
    dtype: str
    device: str
    device_bytes: int | None
    jax: str
    jaxlib: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """One method compiled at one batch, or why it could not be."""

    failure: str | None = None
    note: str = ""
    microbatch_size: int | None = None
    materialised_parameters: int | None = None
    compile_s: float | None = None
    flops: int | None = None
    peak_bytes: int | None = None
    argument_bytes: int | None = None
    output_bytes: int | None = None
    temp_bytes: int | None = None
    alias_bytes: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed:
    """The times of one method, or why there are none."""

    failure: str | None = None
    left_out: str | None = None
    batch: int | None = None
    samples_s: tuple[float, ...] = ()
    cold: bool = False  # the time of a first run
    max_rel_error: float | None = None

    @property
    def time_s(self) -> float | None:
        return statistics.median(self.samples_s) if self.samples_s else None

    @property
    def iqr_s(self) -> float | None:
        if len(self.samples_s) < 2:
            return None
        first, _, third = statistics.quantiles(self.samples_s, n=4, method="inclusive")
        return third - first


def measure(settings: Settings, *, talk: Talk, save: Save, debug: bool = False) -> Result:
    """Measures everything that was asked for.

    Args:
      settings: what to measure.
      talk: is told in words what is going on.
      save: is given the result so far after each stage.
      debug: talk also passes on what children print.
    """
    return Session(settings, talk=talk, save=save, debug=debug).run()


class Session:
    """One measurement; the state is what has been found so far."""

    def __init__(self, settings: Settings, *, talk: Talk, save: Save, debug: bool):
        self.settings, self.talk, self.save, self.debug = settings, talk, save, debug
        self.target = targets.host_target()
        self.compiled: dict[tuple[int, str], Compiled] = {}
        self.timed: dict[tuple[int, str], Timed] = {}
        self.verdict: Verdict | None = None
        self.timestamp = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")

    def run(self) -> Result:
        self.facts = self._describe()
        self.capacity_bytes = self._find_capacity()
        for batch in self.settings.batches:
            for method in self.settings.methods:
                self.compiled[batch, method] = self._compile(batch, method)
                self._say_need(batch, method)
        self.verdict = self._find_verdict()
        self.save(self._result())
        if self.settings.time:
            for batch in self.settings.batches:
                self._time(batch)
                self.save(self._result())
        return self._result()

    def _run(self, job: str, *, limit_s: float = COMPILE_LIMIT_S, **fields: Any) -> dict[str, Any]:
        request = {**dataclasses.asdict(self.settings), **fields}
        return run_child(
            job, request, environment=self.target.environment, limit_s=limit_s, talk=self.talk, debug=self.debug
        )

    def _describe(self) -> Facts:
        try:
            return Facts(**self._run("describe"))
        except ChildFailure as failure:
            what = f"the model {self.settings.model} could not be loaded: {failure.reason}"
            raise PegprofError(what, hint=_last_lines(failure.output), exit_code=ExitCode.UNMEASURED) from failure

    def _find_capacity(self) -> int | None:
        free = targets.free_host_bytes() if self.target.name == "cpu" else self.facts.device_bytes
        bounds = [bound for bound in (free, self.settings.memory_limit_bytes) if bound is not None]
        return min(bounds, default=None)

    def _compile(self, batch: int, method: str) -> Compiled:
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
            self.talk(f"{who} said:\n{_last_lines(failure.output)}")

    def _find_verdict(self) -> Verdict | None:
        try:
            answer = self._run("activations")
        except (ChildFailure, PegprofError) as failure:
            self.talk(f"no verdict: {failure}")
            return None
        first, second = answer["temp_bytes"]
        verdict = Verdict(
            target=self.target.name,
            activation_bytes_per_example=slope((first, second)),
            parameter_bytes=self.facts.parameter_bytes,
            traced_bytes_per_example=answer["traced_bytes_per_example"],
        )
        self.talk(str(verdict))
        return verdict

    def _time(self, batch: int) -> None:
        """Times all methods in one child; if one of them takes the child down, the others start again without it."""
        methods = [method for method in self.settings.methods if not self.compiled[batch, method].failure]
        deadline_s = time.monotonic() + self.settings.time_limit_s / len(self.settings.batches)
        while methods:
            timing_limit_s = max(deadline_s - time.monotonic(), 0.0)
            try:
                answer = self._run(
                    "time",
                    limit_s=timing_limit_s + GRACE_S,
                    timing_limit_s=timing_limit_s,
                    batch=batch,
                    methods=methods,
                    dtype=self.facts.dtype,
                    capacity_bytes=self.capacity_bytes,
                    peak_bytes={method: self.compiled[batch, method].peak_bytes for method in methods},
                )
            except ChildFailure as failure:
                culprit = failure.answer.get("running")
                self._say_failure(culprit or "timing", failure)
                self._keep_times(batch, methods, failure.answer, lost=failure.reason)
                if culprit is None:
                    return
                self.timed[batch, culprit] = Timed(failure=failure.reason)
                methods.remove(culprit)
            else:
                self._keep_times(batch, methods, answer, lost=None)
                return

    def _keep_times(self, batch: int, methods: list[str], answer: Mapping[str, Any], *, lost: str | None) -> None:
        for method in methods:
            samples_s = tuple(answer.get("samples_s", {}).get(method, ()))
            self.timed[batch, method] = Timed(
                failure=answer.get("failures", {}).get(method) or (None if samples_s else lost),
                left_out=answer.get("left_out", {}).get(method),
                batch=answer.get("time_batch") if samples_s else None,
                samples_s=samples_s,
                cold=answer.get("cold", False),
                max_rel_error=answer.get("max_rel_error", {}).get(method),
            )

    def _result(self) -> Result:
        return Result(
            settings=self.settings,
            rows=tuple(self._row(batch, method) for batch, method in self.compiled),
            verdict=self.verdict,
            samples_s={key: timed.samples_s for key, timed in self.timed.items() if timed.samples_s},
        )

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
            time_ratio=_ratio(timed.time_s, grad_timed.time_s),
            compile_s=compiled.compile_s,
            peak_bytes=compiled.peak_bytes,
            argument_bytes=compiled.argument_bytes,
            output_bytes=compiled.output_bytes,
            temp_bytes=compiled.temp_bytes,
            alias_bytes=compiled.alias_bytes,
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
        )

    def _judge(self, batch: int, compiled: Compiled, timed: Timed) -> tuple[Status, str]:
        """A row's status, and all that there is to say about it."""
        remarks = [compiled.note]
        if timed.left_out:
            remarks.append(timed.left_out)
        elif timed.batch not in (None, batch):
            remarks.append(f"timed at batch {timed.batch}")
        if timed.samples_s and timed.cold:
            remarks.append("one cold run within the time limit")
        elif 0 < len(timed.samples_s) < (self.settings.runs or MIN_RUNS):
            remarks.append(f"runs within the time limit: {len(timed.samples_s)}")
        if failure := compiled.failure or timed.failure:
            return "failed", _join(failure, *remarks)
        need, capacity = compiled.peak_bytes, self.capacity_bytes
        if need is not None and capacity is not None and need > capacity:
            return "refused", _join(f"needs {format_bytes(need)}, {format_bytes(capacity)} available", *remarks)
        return "ok", _join(*remarks)


def _ratio(value: float | None, unit: float | None) -> float | None:
    return value / unit if value is not None and unit else None


def _join(*remarks: str) -> str:
    return "; ".join(remark for remark in remarks if remark)


def _last_lines(output: str, count: int = 15) -> str:
    return "\n".join(output.splitlines()[-count:])
