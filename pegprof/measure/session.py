"""Settings in, Result out: what each method needs and how long it takes, each measured in fresh processes.

    describe the model ──> for each target: compile each method ──> verdict
                       ──> on the device that is here: what fits ──> run what fits, at one common batch

Whatever happens is an event of the log, and the Result is made from that alone (``result/history.py``). The parent
never imports the model and never starts a JAX backend. A child that crashes costs its own row only.
"""

import datetime
import itertools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pegprof
from pegprof.errors import ExitCode, PegprofError
from pegprof.measure import in_process, protocol, schedule
from pegprof.measure.lanes import Terms
from pegprof.measure.process import ChildFailure, Tree
from pegprof.measure.progress import Talk
from pegprof.measure.rounds import run_together
from pegprof.measure.runners import Runners
from pegprof.measure.timing import Timing, last_lines
from pegprof.measure.workers import LIMIT_S, Program, Workers, find_host
from pegprof.models.problem import Problem
from pegprof.result import events
from pegprof.result.events import Event
from pegprof.result.findings import Compiled, Facts
from pegprof.result.history import History
from pegprof.result.layers import Layer, find_layers
from pegprof.result.log import Log
from pegprof.result.result import Result
from pegprof.result.settings import Settings
from pegprof.result.verdict import Verdict, slope
from pegprof.targets import meshes, selection
from pegprof.targets.selection import Target, arrange, choose_targets, cpu_target
from pegprof.units import format_bytes, format_seconds

SAVE_EVERY_S = 1.0
SMALL_SHARE = 1 / 16  # of the free memory: arguments that take less are made while others compile

Save = Callable[[Result], None]
Enough = Callable[[Result, int], bool]
"""From the result so far, and a batch: whether that need not be timed in further processes."""


def ignore(result: Result) -> None:
    """Saves nothing."""


def measure(
    settings: Settings,
    *,
    talk: Talk,
    save: Save = ignore,
    preview: Save = ignore,
    outlined: Save = ignore,
    enough: Enough = lambda result, batch: False,
    debug: bool = False,
    problem: Problem | None = None,
    chosen: Sequence[Target] = (),
    log_path: Path | None = None,
) -> Result:
    """Measures everything that was asked for.

    Args:
      settings: what to measure.
      talk: is told in words what is going on.
      save: is given the result so far when there is something new, so that nothing measured is ever lost.
      preview: is given the result once, when the memory is known and the timing, which takes longest, is to begin.
      outlined: is given the result once, before anything is compiled: what it will be of and made with, but no numbers
        yet. What it raises ends the measurement.
      enough: is asked after each of several processes whether there need not be another one.
      debug: talk also passes on what children print.
      problem: a model that only this process knows. Everything then happens here, and the rows say so.
      chosen: the targets that the settings name, where the caller has found them already.
      log_path: the file of the log. What it holds of the same measurement is not measured again.
    """
    targets = tuple(chosen) or find_targets(settings, talk=talk, problem=problem)
    session = Session(settings, targets, talk=talk, save=save, debug=debug, problem=problem, log_path=log_path)
    return session.run(preview=preview, outlined=outlined, enough=enough)


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
    return (in_process.this_process(),)


class Session:
    """One measurement. What it has found so far is ``history``, which its log keeps.

    Args:
      settings: what to measure.
      targets: for which devices.
      talk: is told in words what is going on.
      save: is given the result so far when there is something new.
      debug: talk also passes on what children print.
      problem: a model that only this process knows.
      tree: whose code children run, if not that of this folder.
      programs: the folder of what is compiled, if another session has it too.
      log_path: the file of the log.
    """

    def __init__(
        self,
        settings: Settings,
        targets: Sequence[Target],
        *,
        talk: Talk,
        save: Save = ignore,
        debug: bool = False,
        problem: Problem | None = None,
        tree: Tree | None = None,
        programs: str | None = None,
        log_path: Path | None = None,
    ):
        for target, batch in itertools.product(targets, settings.batches):
            meshes.check_batch(target.mesh, batch)
        self.settings, self.targets, self.talk, self.debug, self.problem = settings, targets, talk, debug, problem
        self.host = next((target for target in targets if target.runs), None)
        self.start_s = time.monotonic()
        self._save, self._saved_s = save, 0.0
        self.log = Log(log_path, heard=self._hear)
        self._begin()
        self.workers = Workers(settings=settings, talk=talk, debug=debug, problem=problem, tree=tree, programs=programs)

    @property
    def history(self) -> History:
        return self.log.history

    @property
    def facts(self) -> Facts:
        assert self.history.facts is not None, "the model is described first"
        return self.history.facts

    def result(self) -> Result:
        return self.history.result()

    def _begin(self) -> None:
        """The first event. A log that goes on must be of the same measurement."""
        begun = events.Begun(
            settings=self.settings,
            places=tuple(map(_place, self.targets)),
            timestamp=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            pegprof=pegprof.__version__,
            xla_flags=os.environ.get("XLA_FLAGS") or None,
            in_process=self.problem is not None,
        )
        if not self.history.places:
            self.log.add(begun)
            return
        known = self.history
        before = known.asked, known.places, known.pegprof, known.xla_flags
        if before != (begun.settings, begun.places, begun.pegprof, begun.xla_flags):
            self.log.close()
            what = "the log is of another measurement: its settings, devices or flags differ"
            raise PegprofError(what, hint="name another file, or repeat the command that the log is of")

    def _hear(self, event: Event) -> None:
        """Saves what can be reported: a compile at once, samples now and then."""
        is_rare = isinstance(event, events.MethodCompiled | events.Weighed | events.BatchTimed | events.Finished)
        now_s = time.monotonic()
        if self.history.compiled and (is_rare or now_s - self._saved_s > SAVE_EVERY_S):
            self._saved_s = now_s
            self._save(self.result())

    def run(self, *, preview: Save = ignore, outlined: Save = ignore, enough: Enough = lambda *_: False) -> Result:
        """All of it; the arguments are those of ``measure``."""
        if self.history.complete:  # the log has it all
            self._save(self.result())
            self.close()
            return self.result()
        try:
            self.describe()
            outlined(self.history.outline())
            self.compile_all()
            if self.settings.time and self.host:
                preview(self.result())
                for batch in self.settings.batches:
                    self._time(batch, self.host, enough)
            self.finish()
        except KeyboardInterrupt:
            if self.history.compiled:
                self._save(self.result())
            raise
        finally:
            self.close()
        return self.result()

    def finish(self) -> None:
        """Nothing is left to measure."""
        self.log.add(events.Finished())

    def make_way(self) -> None:
        """Leaves a device that can have but one process to others."""
        if self.host:
            self.workers.make_way(self.host)

    def close(self) -> None:
        self.workers.close()
        self.log.close()

    def compile_all(self) -> None:
        """Every method at every batch for every target, and the verdicts.

        On the device that is here two workers are at work at any time: the next method's has begun already, and the
        first one, when it has compiled its own, weighs activations and makes the arguments.
        """
        jobs = [(target, self._find_needed(target)) for target in self.targets]
        numbers, total = itertools.count(1), sum(len(needed) for _, needed in jobs)
        for target, needed in jobs:
            for number, (batch, method) in enumerate(needed, 1):
                if number < len(needed):
                    self._begin_compiling(target, *needed[number])
                self.compile(batch, method, target, count=f" ({next(numbers)} of {total})")
                if (batch, method) == (self.settings.batches[-1], self.settings.methods[0]):
                    self._begin_last_jobs(target)
                elif target.device and batch == self.settings.batches[-1]:
                    self.workers.release(target, method)
            if target.name not in self.history.verdicts and (verdict := self._find_verdict(target)):
                self.log.add(events.Weighed(verdict=verdict))
            if target.device:
                self.workers.release_all(target)

    def _begin_compiling(self, target: Target, batch: int, method: str) -> None:
        """Has the worker of a method begin to compile it, or for a device that is not here only to start: such a
        compiler takes a GiB or two."""
        request = protocol.GetReady() if target.device else self.compilation(batch, method, target)
        self.workers.begin(request, target, method=method)

    def _begin_last_jobs(self, target: Target) -> None:
        """What the first method's worker has to do after its last compile."""
        if target.name not in self.history.verdicts:
            self.workers.begin(self._weighing(target), target)
        batch = self.settings.batches[0]
        compiled = self.history.compiled[batch, self.settings.methods[0], target.name]
        is_small = (compiled.argument_bytes or 0) < SMALL_SHARE * selection.available_host_bytes()
        if target.runs and self.settings.time and not compiled.failure and is_small:
            self.workers.begin(self.workers.making_arguments(target, batch, self.settings.seed), target)

    def _find_needed(self, target: Target) -> list[tuple[int, str]]:
        """The batches and methods to compile: not what the log has, unless it is still to be run, or the machine
        lacked something."""
        needed = []
        for batch, method in itertools.product(self.settings.batches, self.settings.methods):
            compiled = self.history.compiled.get((batch, method, target.name))
            to_run = target.runs and self.settings.time and batch not in self.history.timed_batches
            if compiled is None or compiled.lacked or to_run:
                needed.append((batch, method))
        return needed

    def describe(self) -> None:
        """Finds out about the model, and what memory there is. The worker that compiles second starts meanwhile."""
        self.talk.doing(f"loading {self.settings.model}")
        where = self.host or cpu_target()
        request = protocol.Describe(
            subject=self.workers.subject(where),
            measure_rate=self.settings.time and self.host is not None,
            meshes=tuple(dict(target.mesh) for target in self.targets if target.mesh),
        )
        if self.host and len(self.settings.methods) > 1:
            self.workers.begin(protocol.GetReady(), where, method=self.settings.methods[1])
        try:
            facts = self.workers.ask(request, where)
        except ChildFailure as failure:
            is_device = "initialize backend" in failure.reason  # JAX's words for one that is busy or broken
            who = "the device" if is_device else f"the model {self.settings.model}"
            what = f"{who} could not be {'used' if is_device else 'loaded'}: {failure.reason}"
            raise PegprofError(what, hint=last_lines(failure.output), exit_code=ExitCode.UNMEASURED) from failure
        if self.host is None:
            self.workers.release_all(where)
        if known := self.history.facts:
            if known.environment != facts.environment:
                what = "the log was begun with other versions or settings of jax"
                raise PegprofError(what, hint="name another file", exit_code=ExitCode.INCOMPARABLE)
            return  # the same memory counts for all of its rows
        capacity_bytes = {target.name: self._find_capacity(target, facts) for target in self.targets}
        self.log.add(events.Described(facts=facts, capacity_bytes=capacity_bytes))

    def _find_capacity(self, target: Target, facts: Facts) -> int | None:
        if target.device:
            there: int | None = target.device.memory_bytes
        elif target.is_host:
            there = self.settings.planned_bytes or selection.free_host_bytes()
        else:
            there = facts.device_bytes
        bounds = [bound for bound in (there, self.settings.memory_limit_bytes) if bound is not None]
        return min(bounds, default=None)

    def compile(self, batch: int, method: str, target: Target, *, count: str = "") -> None:
        """Compiles one method, and keeps what comes of it."""
        self.keep_compiled(batch, method, target, self.try_compile(batch, method, target, count=count))

    def keep_compiled(self, batch: int, method: str, target: Target, compiled: Compiled) -> None:
        self.log.add(events.MethodCompiled(batch=batch, method=method, target=target.name, compiled=compiled))

    def compilation(self, batch: int, method: str, target: Target, surgery_size: int | None = None) -> protocol.Compile:
        """The request; ``surgery_size`` is how many examples surgery takes at a time, if the planner may not choose."""
        return protocol.Compile(
            subject=self.workers.subject(target),
            method=method,
            batch=batch,
            capacity_bytes=self.history.capacity_bytes[target.name],
            surgery_size=surgery_size,
        )

    def try_compile(
        self,
        batch: int,
        method: str,
        target: Target,
        *,
        count: str = "",
        surgery_size: int | None = None,
        limit_s: float = LIMIT_S,
    ) -> Compiled:
        """Compiles one method; ``surgery_size`` is as for ``compilation``."""
        where = f" for {target.name}" if target.device else ""
        self.talk.doing(f"compiling {method} at batch {batch}{where}{count}", kind=f"compile {target.name}")
        request = self.compilation(batch, method, target, surgery_size)
        compiled, printed = self.workers.compile(request, target, limit_s=limit_s)
        if printed and not self.debug:
            self.talk(f"{method} said:\n{last_lines(printed)}")
        self.talk(f"{method} at batch {batch}{where} {_outcome(compiled)}")
        return compiled

    def _weighing(self, target: Target) -> protocol.Weigh:
        return protocol.Weigh(subject=self.workers.subject(target))

    def _find_verdict(self, target: Target) -> Verdict | None:
        where = f" for {target.name}" if target.device else ""
        self.talk.doing(f"weighing one example's activations{where}")
        try:
            weights = self.workers.ask(self._weighing(target), target)
        except (ChildFailure, PegprofError) as failure:
            self.talk(f"no verdict{where}: {failure}")
            return None
        (first, first_bytes), (second, second_bytes) = sorted(weights.temp_bytes.items())
        return Verdict(
            target=target.name,
            activation_bytes_per_example=slope((first_bytes, second_bytes), (first, second)),
            parameter_bytes=self.facts.parameter_bytes,
            traced_bytes_per_example=weights.traced_bytes_per_example,
            layers=self._find_layers(target),
        )

    def _find_layers(self, target: Target) -> tuple[Layer, ...]:
        """From surgery's plan, whichever batch it is for, or from one made for the purpose."""
        plan = next(iter(self.history.plans(target.name).values()), None)
        if plan:
            return find_layers(plan)
        request = protocol.MakePlan(
            subject=self.workers.subject(target),
            batch=self.settings.batches[0],
            capacity_bytes=self.history.capacity_bytes[target.name],
        )
        try:
            planned = self.workers.ask(request, target, method=self.settings.methods[-1])
        except (ChildFailure, PegprofError) as failure:
            self.talk(f"no layers: {failure}")
            return ()
        return find_layers(planned.plan)

    def _time(self, batch: int, host: Target, enough: Enough) -> None:
        """Runs all methods that could be compiled, unless the log says that it has been done."""
        if batch in self.history.timed_batches:
            return
        if timing := self.make_timing(batch, host):
            run_together([timing], talk=self.talk, enough=lambda: enough(self.result(), batch))
            self.log.add(events.BatchTimed(batch=batch))

    def make_timing(self, batch: int, host: Target) -> Timing | None:
        """What runs all methods that could be compiled; None if there are none."""
        known = {method: self.history.compiled[batch, method, host.name] for method in self.settings.methods}
        compiled = {method: c for method, c in known.items() if not c.failure}
        if not compiled:
            return None
        rate = self.facts.flops_per_s
        argument_bytes = max(c.argument_bytes or 0 for c in compiled.values())
        batches_to_come = len(self.settings.batches) - self.settings.batches.index(batch)
        within_s = self.settings.processes_within_s
        runners = Runners(
            {method: Program.of(c, batch) for method, c in compiled.items()},
            workers=self.workers,
            host=host,
            full_batch=batch,
            argument_bytes=argument_bytes - (self.facts.optimizer_state_bytes or 0),  # the state is made by its user
            deadline_s=self._share(self.settings.time_limit_s, batches_to_come),
            capacity_bytes=self.history.capacity_bytes[host.name],
        )
        terms = Terms(
            batch=batch,
            batches=schedule.candidate_batches(
                batch, minimum=self.facts.smallest_batch, multiple_of=self.facts.batch_divisor
            ),
            peak_bytes={method: c.peak_bytes or 0 for method, c in compiled.items()},
            example_s=sum(c.flops or 0 for c in compiled.values()) / batch / rate if rate else None,
            tolerance=self.facts.tolerance if self.settings.check else None,
            check_examples=batch == self.settings.batches[0],
            measure_peaks=self.problem is None and not host.mesh,  # virtual devices take theirs all together
            processes=1 if self.problem else self.settings.processes,
            processes_until_s=None if within_s is None else self._share(within_s, batches_to_come),
        )
        return Timing(terms, log=self.log, runners=runners, talk=self.talk)

    def _share(self, limit_s: float, parts: int) -> float:
        """When the next of so many parts must end, if what is left of a limit is shared out evenly."""
        return (now_s := time.monotonic()) + (self.start_s + limit_s - now_s) / parts


def _place(target: Target) -> events.Place:
    """What rows say of a target."""
    device = target.device
    return events.Place(
        name=target.name,
        runs=target.runs,
        device=device.title if device else selection.cpu_name() if target.is_host else None,
        kind=device.kind if device else None,
        compiler=device.compiler.description if device else None,
        second_try=device.compiler.second_try.note if device and device.compiler.second_try else "",
        mesh=dict(target.mesh),
        devices=target.count,
    )


def _outcome(compiled: Compiled) -> str:
    if compiled.failure:
        return f"failed: {compiled.failure}"
    how = "from the cache" if compiled.from_cache else f"compiled in {format_seconds(compiled.compile_s)}"
    return f"needs {format_bytes(compiled.peak_bytes)} ({how})"
