"""What children do with a model by running it: make its arguments, run methods, check its examples.

    make_arguments ──> a file ──> Bench: prepare (compile), load (the arguments), run, run, run ...

A Bench holds compiled programs. The first run of one is also where its peak of memory is measured and its statistics
are compared; what comes after is the clock alone.
"""

import dataclasses
import math
import time
from typing import Any

import jax

import pegprof
from pegprof.engine.trace import parameter_names
from pegprof.profiling import agreement, exchange, jobs, memory, methods
from pegprof.profiling.child import Reporter
from pegprof.profiling.elsewhere import Place
from pegprof.profiling.jobs import Request
from pegprof.profiling.programs import Program, make_program

SHORT_S = 3.0
"""A first run finds library code that was never read, and threads that were never started. It is some MiB, paid once by
a process: where a run is short, there is time for a second one, which takes what every further run would take."""


def make_arguments(request: Request, reporter: Reporter) -> None:
    """Makes the parameters and a batch, once for all methods; reports where in the file they are."""
    problem = jobs.load(request)
    params_key, batch_key = jax.random.split(jax.random.key(request["seed"]))
    params = jax.jit(problem.init)(params_key)
    reporter.update(params=_save(request["file"], params))
    batch = jax.jit(problem.batch, static_argnums=1)(batch_key, request["batch"])
    reporter.update(batch=_save(request["file"], batch))


def check_examples(request: Request, reporter: Reporter) -> None:
    """Whether examples leave each other alone, and whether the engine is right: ``pegprof.check_examples`` in words.

    Reports ``loss`` too, in words, where it is no finite number.
    """
    problem = jobs.load(request)
    params = _load(request["file"], request["arguments"]["params"], problem.abstract_params())
    batch = _load(request["file"], request["arguments"]["batch"], problem.abstract_batch(2), first=request["examples"])
    found = pegprof.check_examples(problem.loss, params, batch, keep_batch_dim=problem.keep_batch_dim)
    reporter.update(
        ok=found.ok, text=str(found), cause=found.interaction or None, engine_fault=found.engine_fault or None
    )
    value = float(jax.jit(problem.loss)(params, batch))
    if not math.isfinite(value):
        what = "NaN" if math.isnan(value) else "infinite"
        reporter.update(loss=f"the loss of {request['examples']} examples is {what}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ready:
    """A program, what it was compiled to, and the structure of the arguments that it was compiled for.

    Trees of a user's classes need not be equal to others that are made in the same way: a static field may hold a
    lambda. So only leaves are kept from run to run, and each program is given them in its own structure.
    """

    program: Program
    compiled: Any
    structure: Any


class Bench:
    """The programs of one process, one for each method, and the arguments that they share."""

    def __init__(self) -> None:
        self._programs: dict[str, Ready] = {}
        self._held: tuple[Any, ...] = ()  # the parameters, and with a step the optimizer's state
        self._batch: Any = None

    def prepare(self, request: Request, reporter: Reporter) -> None:
        """Compiles a method for a batch size: reports XLA's bytes, and the time that it took."""
        problem, method = jobs.load(request), methods.METHODS[request["method"]]
        place = Place(None, request.get("mesh"))
        options = jobs.options_at(place, request, problem)
        self._programs.pop(method.name, None)
        start_s = time.perf_counter()
        program = make_program(method, problem, options)
        arguments = program.abstract_arguments(problem, request["batch"])
        compiled = program.jit(place, arguments).lower(*place.put_all(arguments)).compile()
        structure = jax.tree.structure(arguments)
        self._programs[method.name] = Ready(program=program, compiled=compiled, structure=structure)
        reporter.update(compile_s=time.perf_counter() - start_s, **jobs.memory_bytes(compiled))

    def load(self, request: Request, reporter: Reporter) -> None:
        """Gets the arguments from the file: the parameters, and as many examples as the batch has.

        The parameters are read once; before the first of a method's steps they are read again, and its state is made.
        """
        problem, where, place = jobs.load(request), request["arguments"], Place(None, request.get("mesh"))
        program = self._programs[request["method"]].program
        self._batch = None
        if program.optimizer or not self._held:
            self._held = ()
            params = _load(request["file"], where["params"], problem.abstract_params())
            self._held = jax.block_until_ready(place.lay(program.start(params)))
        batch = _load(request["file"], where["batch"], problem.abstract_batch(2), first=request["batch"])
        self._batch = jax.block_until_ready(place.lay_batch(batch))

    def unload(self, request: Request, reporter: Reporter) -> None:
        """Gives the arguments up, and their memory back, until they are loaded again."""
        self._held, self._batch = (), None
        memory.give_back()

    def run(self, request: Request, reporter: Reporter) -> None:
        """Runs a method as often as asked for, once if nothing is said, and reports the times, ``times_s``.

        With ``rewarm`` there is one more run before those, which does not count; with ``measure_peak`` the memory that
        it took is reported too, of a second run if it is a short one; with ``keep`` where in the file its statistics
        are now; with ``compare_with``, which is what another method kept, the largest relative error; with
        ``find_nonfinite`` which of its statistics are no finite numbers, in words, "" if all are.
        """
        method, held_bytes = request["method"], memory.resident_bytes()
        times_s: list[float] = []
        if request.get("measure_peak"):
            before = memory.device_peak_bytes()
            (stats, time_s), above_bytes = memory.measure_host_peak(lambda: self._time(method))
            after = memory.device_peak_bytes()
            reporter.update(host_bytes=above_bytes, device_peak_bytes=after if after != before else None)
            times_s = [time_s]
        else:
            if request.get("rewarm"):
                self._time(method)
            for _ in range(request.get("times", 1)):
                stats, time_s = self._time(method)
                times_s.append(time_s)
        reporter.update(times_s=times_s)
        if request.get("keep"):
            try:
                reporter.update(kept={name: _save(request["file"], tree) for name, tree in stats.items()})
            except OSError as error:  # the folder for temporary files is full: the run is good all the same
                reporter.update(not_kept=str(error))
        if kept := request.get("compare_with"):
            reporter.update(max_rel_error=_compare(stats, kept, request["file"]))
        if request.get("find_nonfinite"):
            found = agreement.find_nonfinite(stats, parameter_names(self._held[0]))
            reporter.update(nonfinite=str(found) if found else "")
        del stats
        if request.get("measure_peak") and after is None and time_s <= SHORT_S:
            _, again_bytes = memory.measure_host_peak(lambda: self._time(method)[1])
            reporter.update(host_bytes=min(above_bytes, again_bytes))
        memory.wait_until_given_back(held_bytes)

    def _time(self, method: str) -> tuple[Any, float]:
        ready = self._programs[method]
        arguments = jax.tree.unflatten(ready.structure, jax.tree.leaves((*self._held, self._batch)))
        start_s = time.perf_counter()
        result = jax.block_until_ready(ready.compiled(*arguments))
        time_s = time.perf_counter() - start_s
        self._held = ready.program.held_after(self._held, result)
        return ready.program.statistics(result), time_s


def _compare(stats: dict[str, Any], kept: dict[str, Any], file: int) -> float | None:
    """Leaf by leaf: the two trees have the same structure, which the file does not know."""
    found = {name: jax.tree.leaves(tree) for name, tree in stats.items()}
    reference = {name: [exchange.view(file, exchange.Slot(**slot)) for slot in slots] for name, slots in kept.items()}
    return agreement.max_rel_error(found, reference)


def _save(file: int, tree: Any) -> list[dict[str, Any]]:
    return [dataclasses.asdict(slot) for slot in exchange.save(file, jax.tree.leaves(tree))]


def _load(file: int, slots: list[dict[str, Any]], like: Any, first: int | None = None) -> Any:
    """A tree of the same structure as ``like``, on the device."""
    leaves = [exchange.load(file, exchange.Slot(**slot), first) for slot in slots]
    return jax.block_until_ready(jax.tree.unflatten(jax.tree.structure(like), leaves))
