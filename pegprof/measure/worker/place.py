"""Compiling for a device that is not here, inside a child whose environment was made for that: a jitted function and
abstract arguments in, XLA's bytes out.

That a program does not fit is an answer, not an error: the TPU's compiler says what it needs and what there is. What a
compiler once answered is kept (``cache.py``), by the program's text.
"""

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from pegprof.engine.flops import count_flops
from pegprof.errors import ExitCode, PegprofError, first_line
from pegprof.measure.worker.shardings import Shardings, batch_sharding, make_mesh, parameter_sharding
from pegprof.models.problem import Problem
from pegprof.targets import cache
from pegprof.targets.compilers import Compiler, install_line
from pegprof.targets.devices import Device, find_device
from pegprof.targets.hlo.collectives import find_collectives
from pegprof.targets.hlo.estimate import device_flops


class Place:
    """Where programs are compiled for: a device of the table or a mesh of them, or with None the one that is here.

    Args:
      name: of the device or the slice.
      mesh: the sizes of the mesh's axes by name; None for one device alone.
      problem: whose parameters lie on the mesh as it says. Without one, by the rule for their shapes.
    """

    def __init__(self, name: str | None, mesh: Mapping[str, int] | None = None, problem: Problem | None = None):
        self.device = find_device(name) if name else None
        devices = _find(self.device) if self.device else ()
        self.mesh = make_mesh(mesh, devices or jax.devices()) if mesh else None
        self._sharding = SingleDeviceSharding(devices[0]) if self.device else None
        self._shardings = Shardings.of(problem, self.mesh) if self.mesh is not None and problem else None

    def put(self, tree: Any) -> Any:
        """Abstract arguments, as arguments on that device; on a mesh, parameters and what else is held."""
        if self.mesh is None and self._sharding is None:
            return tree
        return jax.tree.map(_abstract, tree, self.held_shardings(tree))

    def result_shardings(self, tree: Any) -> Any:
        """On a mesh, those of statistics: as the parameters lie that they mirror, None for what mirrors none."""
        return None if self._shardings is None else self._shardings.mirrored(tree)

    def held_shardings(self, tree: Any) -> Any:
        """Those of what a program takes and gives back: parameters, an optimizer's state that mirrors them or not."""
        if self.mesh is None:
            return jax.tree.map(lambda x: self._sharding, tree)
        if self._shardings is None:
            return jax.tree.map(self._other_sharding, tree)
        return jax.tree.map(
            lambda x, known: self._other_sharding(x) if known is None else known, tree, self._shardings.mirrored(tree)
        )

    def _other_sharding(self, x: Any) -> jax.NamedSharding:
        """That of an array on the mesh that is no parameter and mirrors none."""
        assert self.mesh is not None
        is_ruled = self._shardings is None or self._shardings.follows_rule
        return parameter_sharding(x.shape, self.mesh) if is_ruled else jax.NamedSharding(self.mesh, jax.P())

    def lay(self, tree: Any) -> Any:
        """Parameters, and what else is held, on the devices of the mesh; as they are if there is none."""
        return tree if self.mesh is None else jax.tree.map(jax.device_put, tree, self.held_shardings(tree))

    def lay_batch(self, batch: Any) -> Any:
        """Likewise a batch."""
        return batch if self.mesh is None else jax.device_put(batch, batch_sharding(self.mesh))

    def put_all(self, arguments: Sequence[Any]) -> list[Any]:
        """The arguments of a program, of which the last is the batch."""
        *held, batch = arguments
        if self.mesh is None:
            return [*map(self.put, held), self.put(batch)]
        own = batch_sharding(self.mesh)
        return [*map(self.put, held), jax.tree.map(lambda x: _abstract(x, own), batch)]

    def compile(self, jitted: Any, *arguments: Any, use_cache: bool = False) -> tuple[Any, dict[str, Any]]:
        """Flops and XLA's bytes, or ``refused`` with what it would need; and how long that took, tracing included.

        Before them the compiled program, if it is for the device that is here.
        """
        start_s = time.perf_counter()
        traced = jitted.trace(*self.put_all(arguments))
        flops = count_flops(traced.jaxpr)
        lowered = traced.lower()
        outputs = self._shardings.names_of(lowered.out_info) if self._shardings else None
        if self.device is None:
            compiled = lowered.compile()
            answer = _read(compiled, outputs)
            return compiled, {"flops": flops, **answer, "compile_s": time.perf_counter() - start_s}
        entry = cache.Entry.of(lowered.as_text(), self.device)
        if use_cache and (known := entry.read()):
            return None, {"flops": flops, **known, "from_cache": True}
        answer = _compile_or_refuse(lowered, self.device.compiler, outputs)
        answer["compile_s"] = time.perf_counter() - start_s
        if use_cache:
            entry.write(answer)
        return None, {"flops": flops, **answer}


def _abstract(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _find(device: Device) -> Sequence[Any]:
    """The devices of the kind, which can be compiled for and not run on."""
    try:
        topology = topologies.get_topology_desc(platform=device.compiler.platform, **device.topology)
    except Exception as error:  # whatever is wrong with the wheels: of another version, half removed
        raise PegprofError(
            f"the compiler for {device.name} does not start: {first_line(error)}",
            hint=f"{install_line(device.compiler.extra)} installs it anew",
            exit_code=ExitCode.UNMEASURED,
        ) from error
    return tuple(topology.devices)


def _compile_or_refuse(lowered: Any, compiler: Compiler, outputs: Sequence[str] | None = None) -> dict[str, Any]:
    """What a compiler says of a program, at the second try if it has one and fails at the first."""
    try:
        return _compile_once(lowered, outputs)
    except jax.errors.JaxRuntimeError as error:
        if compiler.second_try is None:
            raise
        try:
            return {**_compile_once(lowered, outputs, compiler.second_try.options), "second_try": True}
        except jax.errors.JaxRuntimeError:
            raise error from None  # it was not what the second try leaves out


def _compile_once(
    lowered: Any, outputs: Sequence[str] | None, options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    try:
        return _read(lowered.compile(options), outputs)
    except jax.errors.JaxRuntimeError as error:
        if found := parse_refusal(str(error)):
            needed_bytes, available_bytes = found
            return {"refused": True, "peak_bytes": needed_bytes, "available_bytes": available_bytes}
        raise


def _read(compiled: Any, outputs: Sequence[str] | None) -> dict[str, Any]:
    """XLA's bytes. On a mesh they are those of a device, and so are its flops; with what it sends to others.

    ``outputs`` are then the parameters that the results mirror.
    """
    sizes: dict[str, Any] = dict(memory_bytes(compiled))
    if outputs is None:
        return sizes
    text = compiled.as_text()
    found = [each.to_json() for each in find_collectives(text, outputs)]
    return {**sizes, "flops": device_flops(text), "collectives": found}


# What libtpu 0.0.42 says; by "HLO temporaries" it means arguments and results too. The second is what older ones said.
_REFUSALS = (
    re.compile(
        r"total memory required for HLO temporaries \(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)(.?)\)"
    ),
    re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm"),
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_refusal(message: str) -> tuple[int, int] | None:
    """The bytes that a program needs and those that there are, from the words of a compiler that refused it.

    >>> parse_refusal("the total memory required for HLO temporaries (22.50G) exceeds available HBM (15.75G).")
    (24159191040, 16911433728)
    """
    found = next((match for pattern in _REFUSALS if (match := pattern.search(message))), None)
    if found is None:
        return None
    needed, unit, available, available_unit = found.groups()
    return int(float(needed) * _UNITS[unit]), int(float(available) * _UNITS[available_unit])


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
