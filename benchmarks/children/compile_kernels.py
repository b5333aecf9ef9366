"""The child of ``tpu_kernels.py``: the kernel of one gradient of a model, compiled for one TPU; its schedule is dumped.

Runs as ``python -m benchmarks.children.compile_kernels`` in the environment of its target, which also says where libtpu
writes schedules. Operands are those that the engine gives the kernel: what it evaluates on chip is evaluated here too.
"""

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp

from pegprof.engine.accumulators import MEAN, SQUARE
from pegprof.engine.kernels import tpu
from pegprof.engine.kernels.base import Operand, Outer
from pegprof.engine.kernels.layout import arrange
from pegprof.engine.options import Options
from pegprof.engine.planner import find_sites
from pegprof.engine.rules import fused_tied
from pegprof.engine.rules.fused import outer_of, product_of
from pegprof.engine.sites import Site
from pegprof.engine.structures import Sum
from pegprof.engine.trace import trace_example
from pegprof.measure.worker import main
from pegprof.measure.worker.main import Reporter
from pegprof.measure.worker.place import Place
from pegprof.models.problem import load_problem
from pegprof.targets.chips import CHIPS, Chip
from pegprof.targets.hlo.estimate import estimate

KINDS = [MEAN, SQUARE]
USED = re.compile(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"')


def compile_kernel(request: dict[str, Any], reporter: Reporter) -> None:
    """The kernel of the gradient ``request["parameter"]``: what it says of itself, and what the compiler does."""
    place, chip, batch = Place(request["device"]), CHIPS[request["device"]], request["batch"]
    outer, ids, masked, precision = _operands(_site(request["model"], request["parameter"]), batch, chip)
    facts: dict[str, Any] = {}

    def run(s_arrays: Any, r_arrays: Any, ids: Any) -> Any:
        pair = [dataclasses.replace(x, arrays=a) for x, a in ((outer.s, s_arrays), (outer.r, r_arrays))]
        if ids is not None:
            pair[masked] = fused_tied.without_rows(pair[masked], ids)
        s, r = pair
        facts.update(_facts(Outer(s=s, r=r), chip))
        return tpu.fold_outer(s, r, KINDS, precision=precision, chip=chip)

    compiled = jax.jit(run).lower(*map(place.put, (outer.s.arrays, outer.r.arrays, ids))).compile()
    calls = [line for line in (compiled.as_text() or "").splitlines() if 'pegprof_kernel="outer"' in line]
    facts["used_bytes"] = max(int(n) for line in calls for n in USED.findall(line))
    reporter.update(**facts)


def compile_plain(request: dict[str, Any], reporter: Reporter) -> None:
    """XLA's own contraction of the same shape, priced by XLA."""
    place, sizes = Place(request["device"]), request["sizes"]
    s, r = (jax.ShapeDtypeStruct((request["batch"], sizes["T"], sizes[n]), request["dtype"]) for n in "DE")
    run = functools.partial(jnp.einsum, "btd,bte->de", preferred_element_type=jnp.float32)
    text = jax.jit(run).lower(place.put(s), place.put(r)).compile().as_text()
    priced = estimate(text or "", request["device"])
    reporter.update(plain_s=sum((each.compiler_s or 0.0) * each.trips for each in priced.operations))


@functools.cache
def _site(model: str, parameter: str) -> Site:
    problem = load_problem(model, {"layers": "1"})
    arguments = (problem.abstract_params(), problem.abstract_batch(2))
    trace = trace_example(problem.loss, arguments, Options(keep_batch_dim=problem.keep_batch_dim))
    (site,) = (site for site in find_sites(trace, KINDS).sites() if site.key == parameter)
    return site


def _operands(site: Site, batch: int, chip: Chip) -> tuple[Outer, Any, int, Any]:
    """The operands as abstract arrays; of a tied table also the ids, and which operand leaves out what they name."""
    if not any(isinstance(structure, Sum) for structure in site.structures):
        product = product_of(site.recomputing, site.tail.starts[0])
        assert product is not None
        return outer_of(product, batch, chip), None, 0, product.precision
    tied = fused_tied.TiedProduct.of(site, site.recomputing)
    assert tied is not None
    outer, swapped = outer_of(tied.product, batch, chip), arrange(tied.product.contraction, chip).swapped
    ids = jax.ShapeDtypeStruct((batch, outer.T), jnp.int32)  # every position looks up one row
    return outer, ids, int(tied.side == int(not swapped)), tied.product.precision


def _facts(outer: Outer, chip: Chip) -> dict[str, Any]:
    tile = tpu.choose_tile(outer, KINDS, chip)
    assert tile is not None
    return {
        "sizes": {"T": outer.T, "D": outer.D, "E": outer.E},
        "tile": dataclasses.asdict(tile),
        "tiles": outer.count(tile.D, tile.E),
        "steps": math.ceil(outer.T / tile.T),  # for each tile and example
        "rows": _words(outer.s),
        "columns": _words(outer.r),
        **dataclasses.asdict(tpu.outer_cost(outer, tile, KINDS, chip)),
    }


def _words(operand: Operand) -> str:
    """How an operand comes to the kernel."""
    made = f"{operand.steps} steps" if operand.evaluate else "stored"
    return made if operand.minor else f"{made}, positions last"


if __name__ == "__main__":
    main.serve(lambda name: {"compile_kernel": compile_kernel, "compile_plain": compile_plain}[name])
