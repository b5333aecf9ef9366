"""Whole programs on the device that is here: grad, vmap, surgery without and with kernels.

``time_programs`` compiles all of them in one process, compares their statistics and times them in interleaved rounds.
``measure_memory`` takes one program, in a process of its own, because a device's peak never falls.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from benchmarks.children.sampling import take_samples
from benchmarks.on_device_cases import PROGRAMS
from pegprof.engine.kernels import switch
from pegprof.engine.plan import Plan
from pegprof.engine.rules import find_strategy
from pegprof.engine.rules.fused import Kernel
from pegprof.engine.statistics import resolve as resolve_stats
from pegprof.errors import first_line
from pegprof.measure.worker import agreement, memory, methods, programs
from pegprof.measure.worker.main import Reporter
from pegprof.measure.worker.place import memory_bytes
from pegprof.models.problem import Problem, load_problem
from pegprof.targets.hlo.compiler_prices import GPU_OPTIONS
from pegprof.targets.hlo.estimate import estimate

ROUNDED_TO = {"cpu": "float32", "tpu": "bfloat16", "gpu": "float16"}
"""The dtype with the mantissa that products of float32 have by default: a GPU's TF32 has that of float16."""

Request = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ready:
    """A compiled program, and what the reader should know of it."""

    program: programs.Program
    compiled: Any
    about: dict[str, Any]


def describe_model(request: Request, reporter: Reporter) -> None:
    """Whether the model can be had in several dtypes, and which its own is."""
    problem = load_problem(request["model"], request["options"])
    largest = max(jax.tree.leaves(problem.abstract_params()), key=lambda x: x.size)
    chosen = "dtype" in problem.options
    reporter.update(takes_dtype=chosen, dtype=str(problem.options["dtype"] if chosen else largest.dtype.name))


def time_programs(request: Request, reporter: Reporter) -> None:
    """Reports ``programs``, what is known of each, and ``failures``, by name, as the work goes on.

    ``doing`` is what is compiled or run for the first time: that is to blame if this process dies.
    """
    problem, found, failures = _load(request), dict[str, dict[str, Any]](), dict[str, str]()
    arguments = _make_arguments(problem, request)
    ready: dict[str, Ready] = {}
    before: tuple[str, Any] | None = None
    for name in request["programs"]:
        reporter.update(doing=name, progress=f"{name} ...")
        try:
            ready[name] = _compile(name, problem, request)
            found[name] = ready[name].about
            before = _compare(name, ready[name], arguments, before, request, found[name])
        except Exception as error:  # whatever a compiler or a driver throws: the others go on
            ready.pop(name, None)
            failures[name] = first_line(error)
        reporter.update(programs=found, failures=failures)
    reporter.update(doing="")
    if ready:
        _add_times(ready, arguments, request, found)
        reporter.update(programs=found)


def _load(request: Request) -> Problem:
    return load_problem(request["model"], request["options"])


def _make_arguments(problem: Problem, request: Request) -> tuple[Any, Any]:
    params_key, batch_key = jax.random.split(jax.random.key(0))
    params = jax.jit(problem.init)(params_key)
    return jax.block_until_ready((params, jax.jit(problem.batch, static_argnums=1)(batch_key, request["batch"])))


@contextlib.contextmanager
def _kernels(enabled: bool, request: Request) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(switch.kernels(enabled))
        if enabled and request["interpret"]:
            stack.enter_context(switch.interpreted(request["chip"]))
        yield


def _compile(name: str, problem: Problem, request: Request, *, for_prices: bool = False) -> Ready:
    method_name, with_kernels = PROGRAMS[name]
    method, batch = methods.METHODS[method_name], request["batch"]
    start_s = time.perf_counter()
    with _kernels(with_kernels, request):
        options = methods.Options(
            stats=resolve_stats(request["stats"]),
            microbatch_size=1,
            backend=request["chip"] if switch.interprets() else switch.resolve_backend(None),
            surgery_size=request["microbatch"],
        )
        about = programs.describe_program(method, problem, options, batch)
        program = programs.make_program(method, problem, options)
        lowered = program.jit().lower(*program.abstract_arguments(problem, batch))
    compiled = _compile_with_prices(lowered) if for_prices else lowered.compile()
    said = {"compile_s": time.perf_counter() - start_s, "note": "; ".join(about.notes), **memory_bytes(compiled)}
    return Ready(program=program, compiled=compiled, about=said | (_about_plan(about.plan) if about.plan else {}))


def _compile_with_prices(lowered: Any) -> Any:
    """A GPU's compiler writes its prices if it is told to, and fails where it has none."""
    try:
        return lowered.compile(dict(GPU_OPTIONS) if jax.default_backend() == "gpu" else None)
    except jax.errors.JaxRuntimeError:
        return lowered.compile()


def _about_plan(plan: Plan) -> dict[str, Any]:
    by_kernel = {row.site for row in plan.rows if isinstance(_strategy_of(row.strategy), Kernel)}
    return {
        "kernel_sites": len(by_kernel),
        "microbatch": plan.microbatch_size,
        "remarks": "; ".join(plan.remarks),
    }


def _strategy_of(name: str) -> Any:
    return None if name == "constant" else find_strategy(name)


def _compare(
    name: str,
    ready: Ready,
    arguments: tuple[Any, Any],
    before: tuple[str, Any] | None,
    request: Request,
    row: dict[str, Any],
) -> tuple[str, Any]:
    """Runs a program for the first time; its statistics are what the next one is compared with."""
    stats = jax.device_get(ready.program.statistics(ready.compiled(*arguments)))
    if before:
        error = agreement.max_rel_error(stats, before[1])
        tolerance = max(agreement.TOLERANCES[x] for x in (request["dtype"], ROUNDED_TO[jax.default_backend()]))
        wrong = error is not None and not error <= tolerance
        row |= {"max_rel_error": error, "compared_with": before[0], "wrong": wrong, "tolerance": tolerance}
    return name, stats


def _add_times(
    ready: Mapping[str, Ready], arguments: tuple[Any, Any], request: Request, found: dict[str, dict[str, Any]]
) -> None:
    """Ratios are to grad, where that ran."""
    calls = {name: (lambda each=each: each.compiled(*arguments)) for name, each in ready.items()}
    reference = "grad" if "grad" in ready else next(iter(ready))
    samples = take_samples(calls, reference, rounds=request["rounds"], seconds=request["seconds"])
    for name, taken in samples.items():
        found[name] |= {"times_s": taken.times_s, "calls": taken.calls}
        if reference == "grad":
            found[name] |= {"ratios": taken.ratios, "reference_times_s": samples["grad"].times_s}


def measure_memory(request: Request, reporter: Reporter) -> None:
    """The device's peak of one program in this process, and what the estimator makes of its compiled text."""
    problem = _load(request)
    ready = _compile(request["program"], problem, request, for_prices=True)
    if request["estimates"]:
        reporter.update(estimated_s=estimate(ready.compiled.as_text(), request["chip"]).time_s)
    arguments = _make_arguments(problem, request)
    before = memory.device_peak_bytes()
    jax.block_until_ready(ready.compiled(*arguments))
    after = memory.device_peak_bytes()
    reporter.update(device_peak_bytes=after if after != before else None)  # else it was the making of the arguments
