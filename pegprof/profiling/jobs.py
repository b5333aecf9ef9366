"""What children do with a model without running it: describe it, compile it. Abstract values only."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib

from pegprof.checking.problem import check_problem
from pegprof.engine.plan import Plan
from pegprof.engine.statistics import resolve as resolve_stats
from pegprof.errors import PegprofError, first_line
from pegprof.problem import Problem, load_problem
from pegprof.profiling import agreement, methods, programs, records, verdict
from pegprof.profiling.child import Reporter
from pegprof.profiling.devices import one_of
from pegprof.profiling.elsewhere import Place
from pegprof.profiling.elsewhere import memory_bytes as memory_bytes
from pegprof.profiling.environment import find_environment
from pegprof.profiling.meshes import abstract_mesh, batch_sharding
from pegprof.profiling.residuals import trace_residuals
from pegprof.profiling.steps import choose_stats

Request = dict[str, Any]

OPTIMISM = 3
"""What surgery's planner foresees is from the trace. XLA fuses and recomputes, and has needed a third of that on a TPU:
so a schedule that is foreseen to need three times the memory is worth a compile. A slower one can follow."""

ROOMY = 0.8  # of a device's memory: less than that, and nothing is recomputed to save some


def load(request: Request) -> Problem:
    """The model; in the process that it was defined in, it comes with the request."""
    return request.get("problem") or load_problem(request["model"], request["options"])


def method_options(request: Request, problem: Problem) -> methods.Options:
    """What surgery's planner may use is what an optimizer's state leaves of the memory."""
    capacity_bytes, step, mesh = request.get("capacity_bytes"), request.get("step"), request.get("mesh")
    taken_bytes = programs.state_bytes(problem, step) or 0
    return methods.Options(
        stats=resolve_stats(request["stats"]),
        microbatch_size=request["microbatch_size"],
        backend=request.get("backend") or jax.default_backend(),
        memory_budget=None if capacity_bytes is None else max(0, capacity_bytes - taken_bytes),
        surgery_size=request.get("surgery_size"),
        kernels=request.get("kernels", True),
        step=step,
        batch_sharding=batch_sharding(abstract_mesh(mesh)) if mesh else None,
    )


def options_at(place: Place, request: Request, problem: Problem) -> methods.Options:
    """The same on the devices of a mesh."""
    options = method_options(request, problem)
    return options if place.mesh is None else dataclasses.replace(options, batch_sharding=batch_sharding(place.mesh))


def describe(request: Request, reporter: Reporter) -> None:
    """Checks the whole request, so that what is wrong with it is said within seconds, and describes the model."""
    step, size = request.get("step"), request["microbatch_size"]
    stats = resolve_stats(choose_stats(request["stats"], step))
    chosen = methods.resolve(request["methods"])
    minimum = max(stat.minimum_batch for stat in stats)
    for batch in request["batches"]:
        if batch < minimum:
            raise PegprofError(f"the statistics asked for need a batch of at least {minimum}, not {batch}")
        if any(method.microbatches for method in chosen) and batch % size:
            raise PegprofError(
                f"a batch of {batch} has no microbatches of {size}", hint="choose a divisor of the batch"
            )
    problem = load(request)
    params, _ = check_problem(problem, request["batches"][0])
    leaves = jax.tree.leaves(params)
    dtype = problem.options.get("dtype") or max(leaves, key=lambda x: x.size).dtype.name
    device = jax.devices()[0]
    reporter.update(
        model=problem.name,
        model_options={key: _plain(value) for key, value in problem.options.items()},
        environment=records.encode(find_environment()),
        parameters=sum(x.size for x in leaves),
        parameter_bytes=tree_bytes(params),
        optimizer_state_bytes=programs.state_bytes(problem, step),
        seq_len=problem.options.get("seq_len"),
        dtype=dtype,
        tolerance=agreement.TOLERANCES.get(dtype, agreement.TOLERANCES["float32"]),
        device=device.device_kind,
        device_bytes=(device.memory_stats() or {}).get("bytes_limit"),
        jax=jax.__version__,
        jaxlib=jaxlib.version.__version__,
        smallest_batch=minimum,
        batch_divisor=size if any(method.microbatches for method in chosen) else 1,
        flops_per_s=_measure_rate() if request.get("measure_rate") else None,
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


def compile_method(request: Request, reporter: Reporter) -> None:
    """One method at one batch size, for the device that is here or another: flops, XLA's bytes, the time it took."""
    problem, place = load(request), Place(request.get("device"), request.get("mesh"))
    options = options_at(place, request, problem)
    method, batch = methods.METHODS[request["method"]], request["batch"]
    if place.device and options.memory_budget is not None:  # the compiler has the last word
        options = dataclasses.replace(options, memory_budget=OPTIMISM * options.memory_budget)
    remark = ""
    while True:
        about = programs.describe_program(method, problem, options, batch)
        about = dataclasses.replace(about, note="; ".join(filter(None, [about.note, remark])))
        reporter.update(**records.encode(about))
        program = programs.make_program(method, problem, options)
        arguments = program.abstract_arguments(problem, batch)
        try:
            answer = place.compile(program.jit(place, arguments), *arguments, use_cache=request["cache"])
        except Exception as error:  # whatever a compiler says of kernels: there is another way
            if not (place.device and about.plan and about.plan.kernel_sites):
                raise
            options = dataclasses.replace(options, kernels=False)
            remark = f"without kernels, which do not compile: {first_line(error)}"
            reporter.update(progress=f"{method.name} {remark}")
            continue
        if place.device is None or fits(answer, request["capacity_bytes"]):
            break
        smaller = _plan_smaller(problem, options, batch, about.plan)
        if smaller is None:
            break
        options = smaller
        reporter.update(progress=f"{method.name} does not fit {about.microbatch_size} at a time, trying fewer")
    reporter.update(**answer)


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


def plan_model(request: Request, reporter: Reporter) -> None:
    """What surgery does for each parameter at one batch size."""
    problem = load(request)
    plan = methods.plan_surgery(problem, method_options(request, problem), request["batch"])
    reporter.update(plan=records.encode(plan))


def inspect(request: Request, reporter: Reporter) -> None:
    """The facts of a model, and what surgery does for it."""
    describe(request, reporter)
    problem, facts = load(request), reporter.answer
    batch, _ = jax.tree.flatten_with_path(problem.abstract_batch(request["batch"]))
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
        "plan": records.encode(methods.plan_surgery(problem, method_options(request, problem), request["batch"])),
    }
    reporter.update(inspection=inspection)


def list_devices(request: Request, reporter: Reporter) -> None:
    """What JAX sees."""
    kinds = [device.device_kind for device in jax.devices()]
    reporter.update(backend=jax.default_backend(), devices=kinds, environment=records.encode(find_environment()))


def measure_activations(request: Request, reporter: Reporter) -> None:
    """The temporaries of the plain gradient at two batch sizes: one more example adds its activations."""
    problem, place = load(request), Place(one_of(request.get("device")))
    params, grad = problem.abstract_params(), jax.jit(jax.grad(problem.loss))

    def compile_at(batch: int) -> dict[str, Any]:
        return place.compile(grad, params, problem.abstract_batch(batch), use_cache=request["cache"])

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


def tree_bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _plain(value: Any) -> Any:
    """An option's value as JSON has it; whatever it is, it can be told from another."""
    return value if isinstance(value, int | float | str | None) else repr(value)
