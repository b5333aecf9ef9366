"""A mesh by name: how many devices along ``data``, ``fsdp`` and ``model``, and what is sharded over which.

The batch is sharded over ``data`` and ``fsdp``, parameters over ``fsdp`` and ``model``: each over the largest of their
axes that it divides, ``model`` first. What no axis divides is the same on all devices.
"""

import math
from collections.abc import Mapping

from pegprof.errors import PegprofError, nearest

AXES = ("data", "fsdp", "model")
AUTO = "auto"
OF_BATCH = ("data", "fsdp")
OF_PARAMETERS = ("model", "fsdp")


def parse_mesh(text: str) -> dict[str, int]:
    """Sizes by axis.

    >>> parse_mesh("data=16,fsdp=4")
    {'data': 16, 'fsdp': 4}
    """
    if text.strip() == AUTO:
        what = "--mesh auto tries several meshes, and only pegprof fit does that"
        raise PegprofError(what, hint="name one, such as --mesh data=16,fsdp=4; pegprof fit says which are good")
    mesh: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.strip().partition("=")
        if axis not in AXES:
            raise PegprofError(f"unknown mesh axis {axis!r}", hint=f"{nearest(axis, AXES)}: --mesh data=16,fsdp=4")
        if not size.isdecimal() or int(size) < 1 or axis in mesh:
            raise PegprofError(f"--mesh {text}: {part.strip()!r} is not a size", hint="write --mesh data=16,fsdp=4")
        mesh[axis] = int(size)
    return mesh


def candidate_meshes(devices: int, per_host: int) -> list[dict[str, int]]:
    """The meshes of a slice that are worth trying, at most eight; sizes of ``fsdp`` and ``model`` are powers of two.

    - ``data`` alone moves least; ``fsdp`` alone holds least.
    - ``data`` × ``fsdp``, with ``fsdp`` within a host, where links are fastest, and with both about as large: each
      parameter is gathered from fewer devices, and held by more.
    - ``model`` over two and over four devices, beside ``data``, and four also beside ``fsdp``: activations are cut too.
      They travel in every layer, so ``model`` stays within a host.

    >>> [describe(mesh) for mesh in candidate_meshes(64, 4)]  # doctest: +NORMALIZE_WHITESPACE
    ['data=64', 'fsdp=64', 'data=16,fsdp=4', 'data=8,fsdp=8', 'data=32,model=2', 'data=16,model=4', 'fsdp=16,model=4']
    """
    within = per_host if per_host < devices else devices // 2
    even = 2 ** (int(math.log2(devices)) // 2)
    wanted: list[dict[str, int]] = [{"data": devices}, {"fsdp": devices}]
    for size in (2 ** int(math.log2(max(within, 1))), even):
        wanted.append({"data": devices // size, "fsdp": size})
    models = [size for size in (2, 4) if size <= per_host and devices // size > 1]
    wanted += [{"data": devices // size, "model": size} for size in models]
    wanted += [{"fsdp": devices // size, "model": size} for size in models[-1:]]
    found: list[dict[str, int]] = []
    for mesh in wanted:
        mesh = {axis: size for axis, size in mesh.items() if size > 1}
        if math.prod(mesh.values()) == devices and mesh not in found:
            found.append(mesh)
    return found


def check_mesh(mesh: Mapping[str, int], devices: int) -> None:
    """Refuse a mesh that has not as many devices."""
    asked = math.prod(mesh.values())
    if asked != devices:
        what = f"the mesh {describe(mesh)} has {asked} devices, and there are {devices}"
        raise PegprofError(what, hint="the sizes of its axes must multiply to their number")


def shares_of(mesh: Mapping[str, int]) -> int:
    """Into how many parts a batch is cut."""
    return math.prod(mesh.get(axis, 1) for axis in OF_BATCH)


def check_batch(mesh: Mapping[str, int], batch: int) -> None:
    """Refuse a batch that the mesh does not divide."""
    shares = shares_of(mesh)
    if batch % shares:
        what = f"a batch of {batch} cannot be cut into {shares} parts, for the mesh {describe(mesh)}"
        raise PegprofError(what, hint=f"choose a multiple of {shares}")


def describe(mesh: Mapping[str, int]) -> str:
    """As the command line has it."""
    return ",".join(f"{axis}={size}" for axis, size in mesh.items())
