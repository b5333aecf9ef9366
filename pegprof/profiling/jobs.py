"""What children do with a model without running it: describe it, compile it. Abstract values only."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib

from pegprof.checking import check_problem
from pegprof.engine.flops import count_flops
from pegprof.engine.kept import trace_kept
from pegprof.engine.statistics import resolve as resolve_stats
from pegprof.errors import PegprofError
from pegprof.problem import Problem, load_problem
from pegprof.profiling import agreement, methods, records, verdict
from pegprof.profiling.child import Reporter
from pegprof.profiling.environment import find_environment

Request = dict[str, Any]


def load(request: Request) -> Problem:
    """The model; in the process that it was defined in, it comes with the request."""
    return request.get("problem") or load_problem(request["model"], request["options"])


def method_options(request: Request) -> methods.Options:
    return methods.Options(
        stats=resolve_stats(request["stats"]),
        microbatch_size=request["microbatch_size"],
        backend=jax.default_backend(),
        memory_budget=request.get("capacity_bytes"),
    )


def describe(request: Request, reporter: Reporter) -> None:
    """Checks the whole request, so that what is wrong with it is said within seconds, and describes the model."""
    options = method_options(request)
    chosen = methods.resolve(request["methods"])
    minimum = max(stat.minimum_batch for stat in options.stats)
    for batch in request["batches"]:
        if batch < minimum:
            raise PegprofError(f"the statistics asked for need a batch of at least {minimum}, not {batch}")
        if any(method.microbatches for method in chosen) and batch % options.microbatch_size:
            hint = "choose a divisor of the batch"
            raise PegprofError(f"a batch of {batch} has no microbatches of {options.microbatch_size}", hint=hint)
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
        seq_len=problem.options.get("seq_len"),
        dtype=dtype,
        tolerance=agreement.TOLERANCES.get(dtype, agreement.TOLERANCES["float32"]),
        device=device.device_kind,
        device_bytes=(device.memory_stats() or {}).get("bytes_limit"),
        jax=jax.__version__,
        jaxlib=jaxlib.version.__version__,
        smallest_batch=minimum,
        batch_divisor=options.microbatch_size if any(method.microbatches for method in chosen) else 1,
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
    """One method at one batch size: XLA's bytes, the time it took to get them, flops."""
    problem, options = load(request), method_options(request)
    method = methods.METHODS[request["method"]]
    reporter.update(**records.encode(method.about(problem, options, request["batch"])))
    start_s = time.perf_counter()
    traced = jax.jit(method.make(problem, options)).trace(
        problem.abstract_params(), problem.abstract_batch(request["batch"])
    )
    compiled = traced.lower().compile()
    compile_s = time.perf_counter() - start_s
    reporter.update(compile_s=compile_s, flops=count_flops(traced.jaxpr), **memory_bytes(compiled))


def plan_model(request: Request, reporter: Reporter) -> None:
    """What surgery does for each parameter at one batch size."""
    plan = methods.plan_surgery(load(request), method_options(request), request["batch"])
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
        "plan": records.encode(methods.plan_surgery(problem, method_options(request), request["batch"])),
    }
    reporter.update(inspection=inspection)


def list_devices(request: Request, reporter: Reporter) -> None:
    """What JAX sees."""
    kinds = [device.device_kind for device in jax.devices()]
    reporter.update(backend=jax.default_backend(), devices=kinds, environment=records.encode(find_environment()))


def measure_activations(request: Request, reporter: Reporter) -> None:
    """The bytes that one more example adds to the temporaries of the plain gradient."""
    problem = load(request)
    grad, params = jax.jit(jax.grad(problem.loss)), problem.abstract_params()
    temp_bytes = [
        memory_bytes(grad.lower(params, problem.abstract_batch(batch)).compile())["temp_bytes"]
        for batch in verdict.SLOPE_BATCHES
    ]
    kept = trace_kept(problem.loss, params, problem.abstract_batch(verdict.TRACED_BATCH))
    reporter.update(temp_bytes=temp_bytes, traced_bytes_per_example=kept.bytes_per_example)


def memory_bytes(compiled: Any) -> dict[str, int]:
    """XLA's buffer assignment. The peak is the sum of the parts: XLA's own figure leaves temporaries out on CPU."""
    analysis = compiled.memory_analysis()
    sizes = {
        "argument_bytes": analysis.argument_size_in_bytes,
        "output_bytes": analysis.output_size_in_bytes,
        "temp_bytes": analysis.temp_size_in_bytes,
        "alias_bytes": analysis.alias_size_in_bytes,  # results that are written over arguments: not counted twice
    }
    return {**sizes, "peak_bytes": sum(sizes.values()) - 2 * sizes["alias_bytes"]}


def tree_bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _plain(value: Any) -> Any:
    """An option's value as JSON has it; whatever it is, it can be told from another."""
    return value if isinstance(value, int | float | str | None) else repr(value)
