"""Can parameters lie on a mesh as a user's function says? ``check_sharding`` makes a spec for each of them, or refuses.

The function gets abstract parameters and a mesh with all of the axes that ``--mesh`` knows; one that the command line
leaves out has size one. So what it returns need not depend on which axes there are, and is cut down to them here.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from pegprof.engine.trace import parameter_names
from pegprof.errors import PegprofError, nearest
from pegprof.user_code import home_of, users_code

Path = tuple[Any, ...]

HINT_OF_TREE = "return a tree like the parameters, or a prefix of one, with jax.P(...) or a jax.NamedSharding for each"


def check_sharding(sharding: Any, params: Any, *, mesh: Any, sizes: Mapping[str, int]) -> list[jax.P] | None:
    """The spec of each parameter, in the order of their leaves, with axes that have several devices alone.

    None if the function returns None, and so leaves it to the rule.

    Args:
      sharding: the user's function of parameters and mesh.
      params: abstract ones.
      mesh: what the function gets.
      sizes: the sizes of the axes that there are, by name.

    Raises:
      PegprofError: the function raised, its result is no tree like the parameters, or a parameter cannot lie so.
    """
    if not callable(sharding):
        what = f"sharding is a {type(sharding).__name__}, not a function"
        raise PegprofError(what, hint="write sharding=lambda params, mesh: ..., which returns a tree like params")
    where = home_of(sharding)
    with users_code(where, "sharding"):
        returned = sharding(params, mesh)
    if returned is None:
        return None
    names, leaves = parameter_names(params), jax.tree.leaves(params)
    found = _spread(returned, params, names, where=where)
    return [
        _check_spec(_spec_of(entry, name, mesh, where=where), leaf.shape, name, mesh, sizes, where=where)
        for entry, leaf, name in zip(found, leaves, names, strict=True)
    ]


def _spread(returned: Any, params: Any, names: Sequence[str], *, where: str) -> list[Any]:
    """What the function says of each parameter: of itself, or of a subtree that it is in.

    Trees are compared by their paths. Those of a user's classes need not be equal to others made in the same way.
    """
    entries = dict(jax.tree_util.tree_leaves_with_path(returned, is_leaf=_is_entry))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    found, used = [], set()
    for path, name in zip(paths, names, strict=True):
        prefix = next((path[:n] for n in range(len(path), -1, -1) if path[:n] in entries), None)
        if prefix is None:
            raise PegprofError(f"sharding says nothing of the parameter {name}", where=where, hint=HINT_OF_TREE)
        used.add(prefix)
        found.append(entries[prefix])
    if unknown := next((path for path in entries if path not in used), None):
        raise PegprofError(f"sharding has {_named(unknown)}, which is no parameter", where=where, hint=HINT_OF_TREE)
    return found


def _named(path: Path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _is_entry(x: Any) -> bool:
    return x is None or isinstance(x, jax.P | jax.sharding.Sharding)


def _spec_of(entry: Any, name: str, mesh: Any, *, where: str) -> jax.P:
    if entry is None:
        return jax.P()
    if isinstance(entry, jax.P):
        return entry
    if not isinstance(entry, jax.NamedSharding):
        what = f"sharding has a {type(entry).__name__} for the parameter {name}"
        raise PegprofError(what, where=where, hint=HINT_OF_TREE)
    if dict(entry.mesh.shape) != dict(mesh.shape):
        what = f"sharding puts the parameter {name} on another mesh: {_sizes(entry.mesh.shape)}"
        hint = f"use the mesh that it is given, {_sizes(mesh.shape)}, or return jax.P(...)"
        raise PegprofError(what, where=where, hint=hint)
    return entry.spec


def _sizes(shape: Mapping[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in shape.items())


def _check_spec(
    spec: jax.P, shape: Sequence[int], name: str, mesh: Any, sizes: Mapping[str, int], *, where: str
) -> jax.P:
    """The spec without axes of one device, if an array of that shape can have it."""

    def refuse(what: str, hint: str) -> PegprofError:
        return PegprofError(f"the parameter {name} of shape {tuple(shape)} {what}", where=where, hint=hint)

    if len(spec) > len(shape):
        raise refuse(f"cannot be sharded as {spec}", f"its rank is {len(shape)}, and the spec has {len(spec)} entries")
    entries = [_axes(entry) for entry in spec]
    for axis, count in Counter(axis for entry in entries for axis in entry).items():
        if not isinstance(axis, str) or axis not in mesh.shape:
            known = [str(each) for each in mesh.shape]
            hint = nearest(str(axis), known)
            raise refuse(f"cannot be sharded over {axis!r}: the mesh has {', '.join(known)}", hint)
        if count > 1:
            raise refuse(f"cannot be sharded over {axis} twice: {spec}", "name each axis of the mesh once")
    kept = [tuple(axis for axis in entry if sizes.get(axis, 1) > 1) for entry in entries]
    for n, (size, axes) in enumerate(zip(shape, kept, strict=False)):
        parts = math.prod(sizes[axis] for axis in axes)
        if size % parts:
            raise refuse(
                f"cannot be cut into {parts} parts along its axis {n}, for {', '.join(axes)}",
                "leave an axis that is not divisible unsharded: None in its place",
            )
    return jax.P(*(entry[0] if len(entry) == 1 else entry or None for entry in kept))


def _axes(entry: Any) -> tuple[Any, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)
