"""What children do with a model without running it: describe it, compile it. Abstract values only."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib

from pegprof.engine.plan import Plan
from pegprof.engine.statistics import resolve as resolve_stats
from pegprof.errors import PegprofError, first_line
from pegprof.measure import protocol
from pegprof.measure.protocol import Subject
from pegprof.measure.worker import agreement, memory, methods, programs
from pegprof.measure.worker.environment import find_environment
from pegprof.measure.worker.main import Reporter
from pegprof.measure.worker.place import Place
from pegprof.measure.worker.residuals import trace_residuals
from pegprof.measure.worker.shardings import abstract_mesh, batch_sharding, parameter_specs
from pegprof.models.check_problem import check_problem
from pegprof.models.problem import Problem, load_problem
from pegprof.result import verdict
from pegprof.result.settings import Settings
from pegprof.result.steps import choose_stats
from pegprof.targets.devices import one_of

OPTIMISM = 3
"""What surgery's planner foresees is from the trace. XLA fuses and recomputes, and has needed a third of that on a TPU:
so a schedule that is foreseen to need three times the memory is worth a compile. A slower one can follow."""

ROOMY = 0.8  # of a device's memory: less than that, and nothing is recomputed to save some


def load(subject: Subject) -> Problem:
    """The model."""
    return load_problem(subject.settings.model, subject.settings.options)


def method_options(
    subject: Subject, problem: Problem, capacity_bytes: int | None, surgery_size: int | None = None
) -> methods.Options:
    """What surgery's planner may use is what an optimizer's state leaves of the memory."""
    settings, mesh = subject.settings, subject.mesh
    taken_bytes = programs.state_bytes(problem, settings.step) or 0
    return methods.Options(
        stats=resolve_stats(settings.stats),
        microbatch_size=settings.microbatch_size,
        backend=subject.backend or jax.default_backend(),
        memory_budget=None if capacity_bytes is None else max(0, capacity_bytes - taken_bytes),
        surgery_size=surgery_size,
        kernels=settings.kernels,
        step=settings.step,
        batch_sharding=batch_sharding(abstract_mesh(mesh)) if mesh else None,
    )


def options_at(place: Place, request: protocol.Compile, problem: Problem) -> methods.Options:
    """The same on the devices of a mesh."""
    options = method_options(request.subject, problem, request.capacity_bytes, request.surgery_size)
    if place.mesh is None:
        return options
    shardings = place.held_shardings(problem.abstract_params())
    return dataclasses.replace(options, batch_sharding=batch_sharding(place.mesh), param_shardings=shardings)


def describe(request: protocol.Describe, reporter: Reporter) -> None:
    """Checks all of the settings, so that what is wrong with them is said within seconds, and describes the model."""
    problem = _check(request.subject)
    for mesh in filter(None, (*request.meshes, request.subject.mesh)):
        parameter_specs(problem, mesh)
    reporter.update(**_facts(request.subject.settings, problem, measure_rate=request.measure_rate))


def _check(subject: Subject) -> Problem:
    """The model, with which all of the settings go together."""
    settings, size = subject.settings, subject.settings.microbatch_size
    stats, chosen = resolve_stats(choose_stats(settings.stats, settings.step)), methods.resolve(settings.methods)
    minimum = max(stat.minimum_batch for stat in stats)
    for batch in settings.batches:
        if batch < minimum:
            raise PegprofError(f"the statistics asked for need a batch of at least {minimum}, not {batch}")
        if any(method.microbatches for method in chosen) and batch % size:
            raise PegprofError(
                f"a batch of {batch} has no microbatches of {size}", hint="choose a divisor of the batch"
            )
    problem = load(subject)
    check_problem(problem, settings.batches[0])
    return problem


def _facts(settings: Settings, problem: Problem, *, measure_rate: bool) -> dict[str, Any]:
    """The fields of ``Facts``."""
    stats, chosen = resolve_stats(choose_stats(settings.stats, settings.step)), methods.resolve(settings.methods)
    params = problem.abstract_params()
    leaves = jax.tree.leaves(params)
    dtype = problem.options.get("dtype") or max(leaves, key=lambda x: x.size).dtype.name
    return dict(
        model=problem.name,
        model_options={key: _plain(value) for key, value in problem.options.items()},
        environment=find_environment(),
        parameters=sum(x.size for x in leaves),
        parameter_bytes=tree_bytes(params),
        optimizer_state_bytes=programs.state_bytes(problem, settings.step),
        seq_len=problem.options.get("seq_len"),
        dtype=dtype,
        tolerance=agreement.TOLERANCES.get(dtype, agreement.TOLERANCES["float32"]),
        device=jax.devices()[0].device_kind,
        device_bytes=memory.device_limit_bytes(),
        jax=jax.__version__,
        jaxlib=jaxlib.version.__version__,
        smallest_batch=max(stat.minimum_batch for stat in stats),
        batch_divisor=settings.microbatch_size if any(method.microbatches for method in chosen) else 1,
        flops_per_s=_measure_rate() if measure_rate else None,
    )


def _measure_rate(size: int = 1024, times: int = 3) -> float:
    """How fast this device multiplies matrices: no program that is worth timing does more in a second."""
    x = jnp.ones((size, size))
    multiply = jax.jit(lambda x: x @ x).lower(x).compile()

    def time_once() -> float:
        start_s = time.perf_counter()
        jax.block_until_ready(multiply(x))
        return time.perf_counter() - start_s

    return 2 * size**3 / min(time_once() for _ in range(times))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Built:
    """A program, what it was compiled to, and the structure of the arguments that it was compiled for.

    Trees of a user's classes need not be equal to others that are made in the same way: a static field may hold a
    lambda. So only leaves are kept from run to run, and each program is given them in its own structure.
    """

    program: programs.Program
    compiled: Any
    structure: Any


def compile_method(request: protocol.Compile, reporter: Reporter) -> Built | None:
    """One method at one batch size, for the device that is here or another: flops, XLA's bytes, the time it took.

    Returns what can be run, if it was compiled for the device that is here.
    """
    subject = request.subject
    problem = load(subject)
    place = Place(subject.device, subject.mesh, problem)
    options = options_at(place, request, problem)
    method, batch = methods.METHODS[request.method], request.batch
    if place.device and options.memory_budget is not None:  # the compiler has the last word
        options = dataclasses.replace(options, memory_budget=OPTIMISM * options.memory_budget)
    remark = ""
    while True:
        about = programs.describe_program(method, problem, options, batch)
        about = dataclasses.replace(about, notes=(*about.notes, *filter(None, [remark])))
        reporter.update(**_fields(about))
        program = programs.make_program(method, problem, options)
        arguments = program.abstract_arguments(problem, batch)
        try:
            compiled, answer = place.compile(
                program.jit(place, arguments), *arguments, use_cache=subject.settings.cache
            )
        except Exception as error:  # whatever a compiler says of kernels: there is another way
            if not (place.device and about.plan and about.plan.kernel_sites):
                raise
            options = dataclasses.replace(options, kernels=False)
            remark = f"without kernels, which do not compile: {first_line(error)}"
            reporter.update(progress=f"{method.name} {remark}")
            continue
        if place.device is None or fits(answer, request.capacity_bytes):
            break
        smaller = _plan_smaller(problem, options, batch, about.plan)
        if smaller is None:
            break
        options = smaller
        reporter.update(progress=f"{method.name} does not fit {about.microbatch_size} at a time, trying fewer")
    reporter.update(**answer)
    return None if place.device else Built(program=program, compiled=compiled, structure=jax.tree.structure(arguments))


def fits(answer: Mapping[str, Any], capacity_bytes: int | None) -> bool:
    """Whether a program that was compiled, or refused, fits into so much memory."""
    return not answer.get("refused") and (capacity_bytes is None or answer["peak_bytes"] <= capacity_bytes)


def _plan_smaller(problem: Problem, options: methods.Options, batch: int, plan: Plan | None) -> methods.Options | None:
    """A budget with which surgery's planner takes fewer examples at a time, if it can: it foresaw too little."""
    if plan is None or options.surgery_size is not None:
        return None
    foreseen = next(each.bytes for each in plan.schedules if each.microbatch_size == plan.microbatch_size)
    smaller = dataclasses.replace(options, memory_budget=int(foreseen) - 1)
    return smaller if methods.plan_surgery(problem, smaller, batch).microbatch_size < plan.microbatch_size else None


def plan_model(request: protocol.MakePlan | protocol.Inspect, reporter: Reporter) -> None:
    """What surgery does for each parameter at one batch size."""
    reporter.update(plan=_plan(request, load(request.subject)))


def _plan(request: protocol.MakePlan | protocol.Inspect, problem: Problem) -> Plan:
    options = method_options(request.subject, problem, request.capacity_bytes)
    return methods.plan_surgery(problem, options, request.batch)


def inspect(request: protocol.Inspect, reporter: Reporter) -> None:
    """The facts of a model, and what surgery does for it."""
    problem = _check(request.subject)
    if request.subject.mesh:
        parameter_specs(problem, request.subject.mesh)
    facts = _facts(request.subject.settings, problem, measure_rate=False)
    batch, _ = jax.tree.flatten_with_path(problem.abstract_batch(request.batch))
    inspection = {
        "model": problem.name,
        "description": problem.description,
        "options": facts["model_options"],
        **{key: facts[key] for key in ("parameters", "parameter_bytes", "dtype")},
        "keep_batch_dim": problem.keep_batch_dim,
        "example": [
            {
                "name": jax.tree_util.keystr(path, simple=True, separator="/"),
                "dtype": str(x.dtype),
                "shape": x.shape[1:],
            }
            for path, x in batch
        ],
        "plan": _plan(request, problem),
    }
    reporter.update(inspection=inspection)


def list_devices(request: protocol.ListDevices, reporter: Reporter) -> None:
    """What JAX sees."""
    kinds = [device.device_kind for device in jax.devices()]
    reporter.update(backend=jax.default_backend(), devices=kinds, environment=find_environment())


def measure_activations(request: protocol.Weigh, reporter: Reporter) -> None:
    """The temporaries of the plain gradient at two batch sizes: one more example adds its activations."""
    problem, place = load(request.subject), Place(one_of(request.subject.device))
    params, grad = problem.abstract_params(), jax.jit(jax.grad(problem.loss))

    def compile_at(batch: int) -> dict[str, Any]:
        return place.compile(grad, params, problem.abstract_batch(batch), use_cache=request.subject.settings.cache)[1]

    if place.device is None:
        temp_bytes = {batch: compile_at(batch)["temp_bytes"] for batch in verdict.SLOPE_BATCHES}
    else:
        temp_bytes = _find_slope(compile_at, place.device.memory_bytes)
    kept = trace_residuals(problem.loss, params, problem.abstract_batch(verdict.TRACED_BATCH))
    reporter.update(temp_bytes=temp_bytes, traced_bytes_per_example=kept.bytes_per_example)


def _find_slope(compile_at: Callable[[int], dict[str, Any]], memory_bytes: int) -> dict[int, int]:
    """Two batch sizes, each twice the other, as near the usual ones as a device has room for.

    Where memory is short, a TPU's compiler recomputes what it would keep elsewhere, and the slope says nothing.
    """
    batch = verdict.SLOPE_BATCHES[0]
    while (answer := compile_at(batch)).get("refused") and batch > 1:
        batch //= 2
    other = 2 * batch if not answer.get("refused") and 2 * answer["peak_bytes"] < ROOMY * memory_bytes else batch // 2
    answers = {batch: answer, other: compile_at(other)} if other else {}
    if not answers or any(each.get("refused") for each in answers.values()):
        raise PegprofError(f"not even a batch of {batch} fits")
    if len({each.get("second_try", False) for each in answers.values()}) > 1:
        raise PegprofError(f"the compiler fails at one of the batches {batch} and {other}, and takes another way there")
    return {b: answers[b]["temp_bytes"] for b in sorted(answers)}


def _fields(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def tree_bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _plain(value: Any) -> Any:
    """An option's value as JSON has it; whatever it is, it can be told from another."""
    return value if isinstance(value, int | float | str | None) else repr(value)
