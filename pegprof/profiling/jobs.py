"""What children do with a model without running it: describe it, compile it. Abstract values only."""

import dataclasses
import time
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib

from pegprof.engine.flops import count_flops
from pegprof.engine.statistics import resolve as resolve_stats
from pegprof.errors import PegprofError
from pegprof.problem import Problem, load_problem
from pegprof.profiling import methods, verdict
from pegprof.profiling.child import Reporter, describe_exception

Request = dict[str, Any]


def load(request: Request) -> Problem:
    return load_problem(request["model"], request["options"])


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
    params = problem.abstract_params()
    _check_loss(problem, params, request["batches"][0])
    leaves = jax.tree.leaves(params)
    device = jax.devices()[0]
    reporter.update(
        model=problem.name,
        parameters=sum(x.size for x in leaves),
        parameter_bytes=tree_bytes(params),
        seq_len=problem.options.get("seq_len"),
        dtype=problem.options.get("dtype") or max(leaves, key=lambda x: x.size).dtype.name,
        device=device.device_kind,
        device_bytes=(device.memory_stats() or {}).get("bytes_limit"),
        jax=jax.__version__,
        jaxlib=jaxlib.version.__version__,
    )


def _check_loss(problem: Problem, params: Any, batch: int) -> None:
    try:
        value = jax.eval_shape(problem.loss, params, problem.abstract_batch(batch))
    except PegprofError:
        raise
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
        where = f"{frames[-1].filename}:{frames[-1].lineno}"
        raise PegprofError(f"the loss of {problem.name} raised {describe_exception(error)}", where=where) from error
    if getattr(value, "shape", None) != () or not jnp.issubdtype(value.dtype, jnp.floating):
        hint = "return one number, the mean over the examples"
        raise PegprofError(f"the loss of {problem.name} returned {value}, not a scalar", hint=hint)


def compile_method(request: Request, reporter: Reporter) -> None:
    """One method at one batch size: XLA's bytes, the time it took to get them, flops."""
    problem, options = load(request), method_options(request)
    method = methods.METHODS[request["method"]]
    reporter.update(**dataclasses.asdict(method.about(problem, options, request["batch"])))
    start_s = time.perf_counter()
    traced = jax.jit(method.make(problem, options)).trace(
        problem.abstract_params(), problem.abstract_batch(request["batch"])
    )
    compiled = traced.lower().compile()
    compile_s = time.perf_counter() - start_s
    reporter.update(compile_s=compile_s, flops=count_flops(traced.jaxpr), **memory_bytes(compiled))


def measure_activations(request: Request, reporter: Reporter) -> None:
    """The bytes that one more example adds to the temporaries of the plain gradient."""
    problem = load(request)
    grad, params = jax.jit(jax.grad(problem.loss)), problem.abstract_params()
    temp_bytes = [
        memory_bytes(grad.lower(params, problem.abstract_batch(batch)).compile())["temp_bytes"]
        for batch in verdict.SLOPE_BATCHES
    ]
    reporter.update(temp_bytes=temp_bytes, traced_bytes_per_example=_traced_bytes_per_example(problem))


def _traced_bytes_per_example(problem: Problem) -> int:
    """What the backward pass keeps of one example: the second example's share, so that kept parameters cancel out."""

    def backward_pass(params: Any, batch: Any) -> Any:  # a pytree whose leaves are what it keeps
        return jax.vjp(lambda params: problem.loss(params, batch), params)[1]

    def kept_bytes(batch: int) -> int:
        return tree_bytes(jax.eval_shape(backward_pass, problem.abstract_params(), problem.abstract_batch(batch)))

    return kept_bytes(2) - kept_bytes(1)


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
