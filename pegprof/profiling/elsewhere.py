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
from pegprof.profiling import cache
from pegprof.profiling.compilers import Compiler, install_line
from pegprof.profiling.devices import Device, find_device
from pegprof.profiling.meshes import batch_sharding, make_mesh, parameter_sharding
from pegprof.targets.collectives import find_collectives
from pegprof.targets.estimate import device_flops


class Place:
    """Where programs are compiled for: a device of the table or a mesh of them, or with None the one that is here.

    Args:
      name: of the device or the slice.
      mesh: the sizes of the mesh's axes by name; None for one device alone.
    """

    def __init__(self, name: str | None, mesh: Mapping[str, int] | None = None):
        self.device = find_device(name) if name else None
        devices = _find(self.device) if self.device else ()
        self.mesh = make_mesh(mesh, devices or jax.devices()) if mesh else None
        self._sharding = SingleDeviceSharding(devices[0]) if self.device else None

    def put(self, tree: Any) -> Any:
        """Abstract arguments, as arguments on that device; on a mesh, parameters."""
        if self.mesh is None and self._sharding is None:
            return tree
        return jax.tree.map(lambda x: _abstract(x, self.sharding_of(x)), tree)

    def sharding_of(self, x: Any) -> Any:
        """That of a parameter, or of something else that has its shape."""
        return self._sharding if self.mesh is None else parameter_sharding(x.shape, self.mesh)

    def lay(self, tree: Any) -> Any:
        """Parameters, and what has their shapes, on the devices of the mesh; as they are if there is none."""
        return tree if self.mesh is None else jax.tree.map(lambda x: jax.device_put(x, self.sharding_of(x)), tree)

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

    def compile(self, jitted: Any, *arguments: Any, use_cache: bool = False) -> dict[str, Any]:
        """Flops and XLA's bytes, or ``refused`` with what it would need; and how long that took, tracing included."""
        start_s = time.perf_counter()
        traced = jitted.trace(*self.put_all(arguments))
        flops = count_flops(traced.jaxpr)
        lowered = traced.lower()
        if self.device is None:
            answer = _read(lowered.compile(), is_sharded=self.mesh is not None)
            return {"flops": flops, **answer, "compile_s": time.perf_counter() - start_s}
        entry = cache.Entry.of(lowered.as_text(), self.device)
        if use_cache and (known := entry.read()):
            return {"flops": flops, **known, "from_cache": True}
        answer = _compile_or_refuse(lowered, self.device.compiler, is_sharded=self.mesh is not None)
        answer["compile_s"] = time.perf_counter() - start_s
        if use_cache:
            entry.write(answer)
        return {"flops": flops, **answer}


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


def _compile_or_refuse(lowered: Any, compiler: Compiler, *, is_sharded: bool = False) -> dict[str, Any]:
    """What a compiler says of a program, at the second try if it has one and fails at the first."""
    try:
        return _compile_once(lowered, is_sharded=is_sharded)
    except jax.errors.JaxRuntimeError as error:
        if compiler.second_try is None:
            raise
        try:
            return {**_compile_once(lowered, compiler.second_try.options, is_sharded=is_sharded), "second_try": True}
        except jax.errors.JaxRuntimeError:
            raise error from None  # it was not what the second try leaves out


def _compile_once(lowered: Any, options: Mapping[str, Any] | None = None, *, is_sharded: bool) -> dict[str, Any]:
    try:
        return _read(lowered.compile(options), is_sharded=is_sharded)
    except jax.errors.JaxRuntimeError as error:
        if found := parse_refusal(str(error)):
            needed_bytes, available_bytes = found
            return {"refused": True, "peak_bytes": needed_bytes, "available_bytes": available_bytes}
        raise


def _read(compiled: Any, *, is_sharded: bool) -> dict[str, Any]:
    """XLA's bytes. On a mesh they are those of a device, and so are its flops; with what it sends to others."""
    sizes: dict[str, Any] = dict(memory_bytes(compiled))
    if not is_sharded:
        return sizes
    text = compiled.as_text()
    return {**sizes, "flops": device_flops(text), "collectives": [each.to_json() for each in find_collectives(text)]}


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
