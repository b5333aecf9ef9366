"""What children do with a model by running it: make its arguments, run methods, check its examples.

    make_arguments ──> a file ──> Bench: compile, load (the arguments), run, run, run ...

A Bench holds compiled programs. The first run of one is also where its peak of memory is measured and its statistics
are compared; what comes after is the clock alone.
"""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

import pegprof
from pegprof.engine.trace import parameter_names
from pegprof.measure import protocol
from pegprof.measure.protocol import Slot
from pegprof.measure.worker import agreement, array_files, compiling, memory
from pegprof.measure.worker.compiling import Built
from pegprof.measure.worker.main import Reporter
from pegprof.measure.worker.place import Place

SHORT_S = 0.5
"""A first run finds library code that was never read, and threads that were never started. It is some MiB, paid once by
a process: where a run is short, there is time for a second one, which takes what every further run would take."""


def make_arguments(request: protocol.MakeArguments, reporter: Reporter) -> None:
    """Makes the parameters and a batch, once for all methods; reports where in the file they are."""
    problem = compiling.load(request.subject)
    params_key, batch_key = jax.random.split(jax.random.key(request.seed))
    params = jax.jit(problem.init)(params_key)
    reporter.update(params=_save(request.file, params))
    batch = jax.jit(problem.batch, static_argnums=1)(batch_key, request.batch)
    reporter.update(batch=_save(request.file, batch))
    del params, batch
    memory.give_back()


def check_examples(request: protocol.CheckExamples, reporter: Reporter) -> None:
    """Whether examples leave each other alone, and whether the engine is right: ``pegprof.check_examples`` in words."""
    problem, where = compiling.load(request.subject), request.arguments
    params = _load(request.file, where.params, problem.abstract_params())
    batch = _load(request.file, where.batch, problem.abstract_batch(2), first=request.examples)
    found = pegprof.check_examples(problem.loss, params, batch, keep_batch_dim=problem.keep_batch_dim)
    reporter.update(ok=found.ok, text=str(found), cause=found.interaction or "", engine_fault=found.engine_fault or "")
    value = float(jax.jit(problem.loss)(params, batch))
    if not math.isfinite(value):
        what = "NaN" if math.isnan(value) else "infinite"
        reporter.update(loss=f"the loss of {request.examples} examples is {what}")


class Bench:
    """The programs of one process, one for each method, and the arguments that they share."""

    def __init__(self) -> None:
        self._programs: dict[tuple[str, int], Built] = {}  # by method and batch
        self._held: tuple[Any, ...] = ()  # the parameters, and with a step the optimizer's state
        self._batch: Any = None
        self._loaded = 0  # examples
        self._params_at: Any = None  # where in the file the parameters are

    def compile(self, request: protocol.Compile, reporter: Reporter) -> None:
        """As ``compiling.compile_method``; what can be run is kept."""
        if built := compiling.compile_method(request, reporter):
            self._programs[request.method, request.batch] = built

    def load(self, request: protocol.Load, reporter: Reporter) -> None:
        """Gets the arguments from the file: the parameters, and as many examples as the batch has.

        The parameters are read once; before the first of a method's steps they are read again, and its state is made.
        """
        problem, where = compiling.load(request.subject), request.arguments
        place = Place(None, request.subject.mesh, problem)
        program = self._programs[request.method, request.batch].program
        self._batch, self._loaded = None, request.batch
        if program.optimizer or not self._held or self._params_at != where.params:
            self._held, self._params_at = (), where.params
            params = _load(request.file, where.params, problem.abstract_params())
            self._held = jax.block_until_ready(place.lay(program.start(params)))
        batch = _load(request.file, where.batch, problem.abstract_batch(2), first=request.batch)
        self._batch = jax.block_until_ready(place.lay_batch(batch))

    def unload(self, request: protocol.Unload, reporter: Reporter) -> None:
        """Gives the arguments up, and their memory back, until they are loaded again."""
        self._held, self._batch = (), None
        memory.give_back()

    def run(self, request: protocol.Run, reporter: Reporter) -> None:
        """Runs a method, and reports all that was asked for."""
        method, held_bytes = request.method, memory.resident_bytes()
        times_s: list[float] = []
        if request.measure_peak:
            before = memory.device_peak_bytes()
            (stats, time_s), above_bytes = memory.measure_host_peak(lambda: self._time(method))
            after = memory.device_peak_bytes()
            reporter.update(host_bytes=above_bytes, device_peak_bytes=after if after != before else None)
            times_s = [time_s]
        else:
            if request.rewarm:
                self._time(method)
            for _ in range(request.times):
                stats, time_s = self._time(method)
                times_s.append(time_s)
        reporter.update(times_s=times_s)
        if request.keep:
            try:
                reporter.update(kept={name: _save(request.file, tree) for name, tree in stats.items()})
            except OSError as error:  # the folder for temporary files is full: the run is good all the same
                reporter.update(not_kept=str(error))
        if request.compare_with:
            reporter.update(max_rel_error=_compare(stats, request.compare_with, request.file))
        if request.find_nonfinite:
            found = agreement.find_nonfinite(stats, parameter_names(self._held[0]))
            reporter.update(nonfinite=str(found) if found else "")
        del stats
        if request.measure_peak and after is None and time_s <= SHORT_S:
            _, again_bytes = memory.measure_host_peak(lambda: self._time(method)[1])
            reporter.update(host_bytes=min(above_bytes, again_bytes))
        memory.wait_until_given_back(held_bytes)

    def _time(self, method: str) -> tuple[Any, float]:
        built = self._programs[method, self._loaded]
        arguments = jax.tree.unflatten(built.structure, jax.tree.leaves((*self._held, self._batch)))
        start_s = time.perf_counter()
        result = jax.block_until_ready(built.compiled(*arguments))
        time_s = time.perf_counter() - start_s
        self._held = built.program.held_after(self._held, result)
        return built.program.statistics(result), time_s


def _compare(stats: dict[str, Any], kept: Mapping[str, Sequence[Slot]], file: int) -> float | None:
    """Leaf by leaf: the two trees have the same structure, which the file does not know."""
    found = {name: jax.tree.leaves(tree) for name, tree in stats.items()}
    reference = {name: [array_files.view(file, slot) for slot in slots] for name, slots in kept.items()}
    return agreement.max_rel_error(found, reference)


def _save(file: int, tree: Any) -> list[Slot]:
    return array_files.save(file, jax.tree.leaves(tree))


def _load(file: int, slots: Sequence[Slot], like: Any, first: int | None = None) -> Any:
    """A tree of the same structure as ``like``, on the device."""
    leaves = [array_files.load(file, slot, first) for slot in slots]
    return jax.block_until_ready(jax.tree.unflatten(jax.tree.structure(like), leaves))
