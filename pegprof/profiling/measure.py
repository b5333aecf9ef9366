"""Settings in, Result out: what each method needs and how long it takes, each measured in fresh processes.

    describe the model ──> for each target: compile each method ──> verdict
                       ──> on the device that is here: what fits ──> run what fits, at one common batch

The parent never imports the model and never starts a JAX backend. A child that crashes costs its own row only.
``save`` is called with the Result so far whenever there is something new, so that nothing measured is ever lost.
"""

import dataclasses
import datetime
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pegprof
from pegprof.engine.plan import Plan
from pegprof.errors import ExitCode, PegprofError
from pegprof.problem import Problem
from pegprof.profiling import budget, here, meshes, records, targets
from pegprof.profiling.asking import Asker, Compiled, find_host
from pegprof.profiling.crew import Crew
from pegprof.profiling.environment import Environment
from pegprof.profiling.layers import Layer, find_layers
from pegprof.profiling.process import ChildFailure
from pegprof.profiling.progress import Talk
from pegprof.profiling.race import Peak, Terms, Timed
from pegprof.profiling.result import Result, Row, Settings, Status, Traffic
from pegprof.profiling.targets import Target, arrange, choose_targets, cpu_target
from pegprof.profiling.timing import Timing, last_lines
from pegprof.profiling.units import format_bytes, format_seconds
from pegprof.profiling.verdict import Verdict, slope
from pegprof.targets.collectives import Collective, floor_s

UNSTEADY = 0.1  # an interquartile range above this share of the median is worth a remark

Save = Callable[[Result], None]
Key = tuple[int, str, str]  # batch, method, target


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
    optimizer_state_bytes: int | None = None  # with a step


def measure(
    settings: Settings,
    *,
    talk: Talk,
    save: Save = _ignore,
    preview: Save = _ignore,
    outlined: Save = _ignore,
    debug: bool = False,
    problem: Problem | None = None,
    chosen: Sequence[Target] = (),
) -> Result:
    """Measures everything that was asked for.

    Args:
      settings: what to measure.
      talk: is told in words what is going on.
      save: is given the result so far after each stage.
      preview: is given the result once, when the memory is known and the timing, which takes longest, is to begin.
      outlined: is given the result once, before anything is compiled: what it will be of and made with, but no numbers
        yet. What it raises ends the measurement.
      debug: talk also passes on what children print.
      problem: a model that only this process knows. Everything then happens here, and the rows say so.
      chosen: the targets that the settings name, where the caller has found them already.
    """
    targets = tuple(chosen) or find_targets(settings, talk=talk, problem=problem)
    session = Session(
        settings, targets, talk=talk, save=save, preview=preview, outlined=outlined, debug=debug, problem=problem
    )
    return session.run()


def find_targets(settings: Settings, *, talk: Talk, problem: Problem | None = None) -> tuple[Target, ...]:
    """The targets that the settings name, in their order.

    Raises:
      PegprofError: one is not known, or the compiler for it is missing.
    """
    if problem is None:
        chosen = choose_targets(settings.targets, find_host(talk))
        return tuple(arrange(target, settings.mesh) for target in chosen)
    if settings.targets:
        hint = "put it into a file, and name it as file.py:name"
        raise PegprofError("a Problem of this process can be compiled for no other device", hint=hint)
    return (here.this_process(),)


class Session:
    """One measurement; the state is what has been found so far."""

    def __init__(
        self,
        settings: Settings,
        targets: Sequence[Target],
        *,
        talk: Talk,
        save: Save,
        preview: Save,
        debug: bool,
        problem: Problem | None,
        outlined: Save = _ignore,
    ):
        for target, batch in itertools.product(targets, settings.batches):
            meshes.check_batch(target.mesh, batch)
        self.settings, self.targets, self.talk, self.debug, self.problem = settings, targets, talk, debug, problem
        self.save, self.preview, self.outlined = save, preview, outlined
        self.asker = Asker(settings=settings, talk=talk, debug=debug, problem=problem)
        self.host = next((target for target in targets if target.runs), None)
        self.compiled: dict[Key, Compiled] = {}
        self.timed: dict[tuple[int, str], Timed] = {}
        self.verdicts: dict[str, Verdict] = {}
        self.complete = False
        self.start_s = time.monotonic()
        self.timestamp = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")

    def run(self) -> Result:
        try:
            self._run_stages()
        except KeyboardInterrupt:
            if self.compiled:
                self.save(self.result())
            raise
        finally:
            self.asker.close()
        self.complete = True
        self.save(self.result())
        return self.result()

    def _run_stages(self) -> None:
        self.describe(then=self.targets[0])
        self.outlined(self._outline())
        total = len(self.targets) * len(self.settings.batches) * len(self.settings.methods)
        for target in self.targets:
            for batch, method in itertools.product(self.settings.batches, self.settings.methods):
                self.compile(batch, method, target, count=f" ({len(self.compiled) + 1} of {total})", then=target)
                self.save(self.result())
            if verdict := self._find_verdict(target):
                self.verdicts[target.name] = verdict
                self.save(self.result())
        if self.settings.time and self.host:
            self.preview(self.result())
            for batch in self.settings.batches:
                self._time(batch, self.host)

    def describe(self, *, then: Target | None = None) -> None:
        """Finds out about the model, and what memory there is; ``then`` is as for ``Asker.ask``."""
        self.talk.doing(f"loading {self.settings.model}")
        measure_rate = self.settings.time and self.host is not None
        try:
            answer = self.asker.ask("describe", self.host or cpu_target(), then=then, measure_rate=measure_rate)
        except ChildFailure as failure:
            what = f"the model {self.settings.model} could not be loaded: {failure.reason}"
            raise PegprofError(what, hint=last_lines(failure.output), exit_code=ExitCode.UNMEASURED) from failure
        self.facts = Facts(**answer)
        self.capacity_bytes = {target.name: self._find_capacity(target) for target in self.targets}

    def _find_capacity(self, target: Target) -> int | None:
        if target.device:
            there: int | None = target.device.memory_bytes
        elif target.is_host:
            there = self.settings.planned_bytes or targets.free_host_bytes()
        else:
            there = self.facts.device_bytes
        bounds = [bound for bound in (there, self.settings.memory_limit_bytes) if bound is not None]
        return min(bounds, default=None)

    def compile(self, batch: int, method: str, target: Target, *, count: str = "", **fields: Any) -> Compiled:
        """Compiles one method, and keeps what comes of it; ``fields`` are those of ``Asker.compile``."""
        where = f" for {target.name}" if target.device else ""
        self.talk.doing(f"compiling {method} at batch {batch}{where}{count}", kind=f"compile {target.name}")
        capacity_bytes = self.capacity_bytes[target.name]
        compiled, printed = self.asker.compile(target, batch, method, capacity_bytes=capacity_bytes, **fields)
        self.compiled[batch, method, target.name] = compiled
        if printed and not self.debug:
            self.talk(f"{method} said:\n{last_lines(printed)}")
        self.talk(f"{method} at batch {batch}{where} {_outcome(compiled)}")
        return compiled

    def _find_verdict(self, target: Target) -> Verdict | None:
        where = f" for {target.name}" if target.device else ""
        self.talk.doing(f"weighing one example's activations{where}")
        try:
            answer = self.asker.ask("activations", target)
        except (ChildFailure, PegprofError) as failure:
            self.talk(f"no verdict{where}: {failure}")
            return None
        (first, first_bytes), (second, second_bytes) = sorted(
            (int(b), size) for b, size in answer["temp_bytes"].items()
        )
        return Verdict(
            target=target.name,
            activation_bytes_per_example=slope((first_bytes, second_bytes), (first, second)),
            parameter_bytes=self.facts.parameter_bytes,
            traced_bytes_per_example=answer["traced_bytes_per_example"],
            layers=self._find_layers(target),
        )

    def _find_layers(self, target: Target) -> tuple[Layer, ...]:
        """From surgery's plan, whichever batch it is for, or from one made for the purpose."""
        plan = next(iter(self._plans(target).values()), None)
        if plan:
            return find_layers(plan)
        capacity_bytes = self.capacity_bytes[target.name]
        try:
            answer = self.asker.ask("plan", target, batch=self.settings.batches[0], capacity_bytes=capacity_bytes)
        except (ChildFailure, PegprofError) as failure:
            self.talk(f"no layers: {failure}")
            return ()
        return find_layers(records.decode(Plan, answer["plan"]))

    def _plans(self, target: Target) -> dict[int, Plan]:
        found = {
            batch: compiled.plan
            for (batch, _, name), compiled in list(self.compiled.items())  # searches of ``fit`` may add to it meanwhile
            if compiled.plan and name == target.name
        }
        return {batch: records.decode(Plan, plan) for batch, plan in found.items()}

    def _time(self, batch: int, host: Target) -> None:
        """Runs all methods that could be compiled."""
        compiled = {m: c for m in self.settings.methods if not (c := self.compiled[batch, m, host.name]).failure}
        if not compiled:
            return
        rate = self.facts.flops_per_s
        argument_bytes = max(c.argument_bytes or 0 for c in compiled.values())
        batches_to_come = len(self.settings.batches) - self.settings.batches.index(batch)
        left_s = self.start_s + self.settings.time_limit_s - time.monotonic()
        crew = Crew(
            compiled,
            request={
                **dataclasses.asdict(self.settings),
                **host.request,
                "capacity_bytes": self.capacity_bytes[host.name],
            },
            full_batch=batch,
            argument_bytes=argument_bytes - (self.facts.optimizer_state_bytes or 0),  # the state is made by its user
            start=lambda *files: self.asker.start(host, *files),
            deadline_s=time.monotonic() + left_s / batches_to_come,
            capacity_bytes=self.capacity_bytes[host.name],
            on_host=host.is_host,
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
            measure_peaks=self.problem is None and not host.mesh,  # virtual devices take theirs all together
        )
        timing = Timing(terms, crew=crew, talk=self.talk, changed=lambda: self._keep(batch, timing))
        try:
            timing.run()
        finally:
            self._keep(batch, timing)

    def _keep(self, batch: int, timing: Timing) -> None:
        self.timed |= {(batch, method): timed for method, timed in timing.timed().items()}
        self.save(self.result())

    def result(self) -> Result:
        first, *others = self.targets
        return Result(
            settings=self.settings,
            rows=tuple(self._row(batch, method, target) for batch, method, target in self._keys()),
            verdict=self.verdicts.get(first.name),
            samples_s={key: self.timed[key].samples_s for key in self._timed_keys()},
            plans=self._plans(first),
            environment=records.decode(Environment, self.facts.environment),
            options=self.facts.model_options,
            complete=self.complete,
            other_verdicts=tuple(self.verdicts[target.name] for target in others if target.name in self.verdicts),
            other_plans={target.name: plans for target in others if (plans := self._plans(target))},
            traffic=tuple(
                Traffic(batch=batch, method=method, target=target.name, collectives=found)
                for batch, method, target in self._keys()
                if (found := self._collectives(batch, method, target))
            ),
        )

    def _collectives(self, batch: int, method: str, target: Target) -> tuple[Collective, ...]:
        compiled = self.compiled.get((batch, method, target.name), Compiled())
        return tuple(Collective(**each) for each in compiled.collectives)

    def _outline(self) -> Result:
        """The result with all of its rows, as if each compile had said nothing."""
        everything = itertools.product(self.settings.batches, self.targets, self.settings.methods)
        return dataclasses.replace(
            self.result(), rows=tuple(self._row(batch, method, target) for batch, target, method in everything)
        )

    def _keys(self) -> list[tuple[int, str, Target]]:
        """What is compiled so far, batch by batch, and for each the targets in the order in which they were named."""
        compiled = list(self.compiled)
        batches = dict.fromkeys(batch for batch, _, _ in compiled)
        everything = itertools.product(batches, self.targets, self.settings.methods)
        return [(batch, m, target) for batch, target, m in everything if (batch, m, target.name) in compiled]

    def _timed_keys(self) -> list[tuple[int, str]]:
        """What has times so far, in the order of the rows."""
        everything = itertools.product(self.settings.batches, self.settings.methods)
        return [key for key in everything if key in self.timed and self.timed[key].samples_s]

    def _row(self, batch: int, method: str, target: Target) -> Row:
        compiled = self.compiled.get((batch, method, target.name), Compiled())
        grad_compiled = self.compiled.get((batch, "grad", target.name), Compiled())
        timed, grad_timed = (
            self.timed.get((batch, name), Timed()) if target is self.host else Timed() for name in (method, "grad")
        )
        capacity_bytes = self._capacity_of(compiled, target)
        status, reason = self._judge(batch, target, compiled, timed)
        verdict = self.verdicts.get(target.name)
        sent = self._collectives(batch, method, target)
        is_sharded = bool(target.mesh) and compiled.assigned_bytes is not None
        return Row(
            model=self.facts.model,
            parameters=self.facts.parameters,
            batch=batch,
            seq_len=self.facts.seq_len,
            dtype=self.facts.dtype,
            stats=",".join(self.settings.stats),
            method=method,
            microbatch_size=compiled.microbatch_size,
            target=target.name,
            device=self._name_device(target),
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
            peak_ratio=_ratio(compiled.assigned_bytes, grad_compiled.assigned_bytes),
            capacity_bytes=capacity_bytes,
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
            compiler=target.device.compiler.description if target.device else None,
            step=self.settings.step,
            optimizer_state_bytes=self.facts.optimizer_state_bytes,
            mesh=meshes.describe(target.mesh) or None,
            devices=target.count if target.mesh else None,
            collective_bytes=sum(each.total_bytes for each in sent) if is_sharded else None,
            loop_collective_bytes=sum(each.total_bytes for each in sent if each.loop) if is_sharded else None,
            collective_floor_s=floor_s(sent, target.device.kind) if is_sharded and target.device else None,
        )

    def _capacity_of(self, compiled: Compiled, target: Target) -> int | None:
        """What there is: a compiler that refuses knows best."""
        bounds = (self.capacity_bytes[target.name], compiled.available_bytes)
        return min((bound for bound in bounds if bound is not None), default=None)

    def _name_device(self, target: Target) -> str:
        if target.device:
            return target.device.title
        return targets.cpu_name() if target.is_host else self.facts.device

    def _judge(self, batch: int, target: Target, compiled: Compiled, timed: Timed) -> tuple[Status, str]:
        """A row's status, and all that there is to say about it."""
        remarks = [compiled.note, "in this process" if self.problem else ""]
        if compiled.second_try and target.device and target.device.compiler.second_try:
            remarks.append(target.device.compiler.second_try.note)
        if compiled.from_cache:
            remarks.append("from the cache, as compiled before")
        ended = timed.samples_s or timed.failure or timed.refused or timed.skipped or compiled.failure
        if target is self.host and self.settings.time and not (self.complete or ended):
            remarks.append("not timed yet")
        if timed.batch not in (None, batch):
            remarks.append(f"timed at batch {timed.batch}")
        remarks += [*timed.remarks, self._remark_on_spread(timed), _remark_on_peak(timed.peak)]
        if failure := compiled.failure or timed.failure:
            return "failed", _join(failure, *remarks)
        capacity_bytes = self._capacity_of(compiled, target)
        if not compiled.fits(capacity_bytes):
            too_much = f"needs {format_bytes(compiled.peak_bytes)}, {format_bytes(capacity_bytes)} available"
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
        if any("time limit" in remark for remark in timed.remarks):
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


def _outcome(compiled: Compiled) -> str:
    if compiled.failure:
        return f"failed: {compiled.failure}"
    how = "from the cache" if compiled.from_cache else f"compiled in {format_seconds(compiled.compile_s)}"
    return f"needs {format_bytes(compiled.peak_bytes)} ({how})"


def _ratio(value: float | None, unit: float | None) -> float | None:
    return value / unit if value is not None and unit else None


def _join(*remarks: str) -> str:
    return "; ".join(remark for remark in remarks if remark)
