"""A mesh by name: how many devices along ``data``, ``fsdp`` and ``model``, and what is sharded over which.

The batch is sharded over ``data`` and ``fsdp``, parameters over ``fsdp`` and ``model``: each over the largest of their
axes that it divides, ``model`` first. What no axis divides is the same on all devices.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pegprof.errors import PegprofError, nearest

if TYPE_CHECKING:
    import jax

AXES = ("data", "fsdp", "model")
OF_BATCH = ("data", "fsdp")
OF_PARAMETERS = ("model", "fsdp")


def parse_mesh(text: str) -> dict[str, int]:
    """Sizes by axis.

    >>> parse_mesh("data=16,fsdp=4")
    {'data': 16, 'fsdp': 4}
    """
    mesh: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.strip().partition("=")
        if axis not in AXES:
            raise PegprofError(f"unknown mesh axis {axis!r}", hint=f"{nearest(axis, AXES)}: --mesh data=16,fsdp=4")
        if not size.isdecimal() or int(size) < 1 or axis in mesh:
            raise PegprofError(f"--mesh {text}: {part.strip()!r} is no size", hint="write --mesh data=16,fsdp=4")
        mesh[axis] = int(size)
    return mesh


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


def make_mesh(sizes: Mapping[str, int], devices: Sequence[Any]) -> "jax.sharding.Mesh":
    """The mesh of some devices, of which it takes the first if there are more."""
    import jax
    from jax.experimental import mesh_utils

    kinds = (jax.sharding.AxisType.Auto,) * len(sizes)
    taken = list(devices[: math.prod(sizes.values())])
    arranged = mesh_utils.create_device_mesh(tuple(sizes.values()), taken, allow_split_physical_axes=True)
    return jax.sharding.Mesh(arranged, tuple(sizes), axis_types=kinds)


def abstract_mesh(sizes: Mapping[str, int]) -> "jax.sharding.AbstractMesh":
    """A mesh of no devices in particular, which is enough for a plan."""
    import jax

    kinds = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)


def batch_sharding(mesh: Any) -> "jax.NamedSharding":
    """That of every leaf of a batch: its leading axis."""
    import jax

    return jax.NamedSharding(mesh, jax.P(tuple(axis for axis in OF_BATCH if axis in mesh.shape)))


def parameter_sharding(shape: Sequence[int], mesh: "jax.sharding.Mesh") -> "jax.NamedSharding":
    """That of a parameter, or of an optimizer's state of the same shape."""
    import jax

    spec: list[str | None] = [None] * len(shape)
    for axis in (axis for axis in OF_PARAMETERS if axis in mesh.shape):
        divided = [n for n, size in enumerate(shape) if spec[n] is None and size % mesh.shape[axis] == 0]
        if divided:
            spec[max(divided, key=lambda n: shape[n])] = axis
    return jax.NamedSharding(mesh, jax.P(*spec))
