"""How parameters lie on a mesh, and all that mirrors them: gradients, statistics, an optimizer's moments.

A problem's own ``sharding`` decides, or the names of the parameters' axes, or else the rule of ``parameter_sharding``.
Whether something mirrors the parameters is told by its paths: a subtree with the paths of all parameters, in which a
leaf has its parameter's shape. So two parameters of one shape can be sharded in two ways.
"""

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils

from pegprof.engine.trace import parameter_names
from pegprof.models.check_sharding import check_sharding
from pegprof.models.problem import Problem
from pegprof.targets.meshes import AXES, OF_BATCH, OF_PARAMETERS
from pegprof.user_code import home_of

Path = tuple[Any, ...]


def make_mesh(sizes: Mapping[str, int], devices: Sequence[Any]) -> jax.sharding.Mesh:
    """The mesh of some devices, of which it takes the first if there are more."""
    kinds = (jax.sharding.AxisType.Auto,) * len(sizes)
    taken = list(devices[: math.prod(sizes.values())])
    arranged = mesh_utils.create_device_mesh(tuple(sizes.values()), taken, allow_split_physical_axes=True)
    return jax.sharding.Mesh(arranged, tuple(sizes), axis_types=kinds)


def abstract_mesh(sizes: Mapping[str, int]) -> jax.sharding.AbstractMesh:
    """A mesh of no devices in particular, which is enough for a plan."""
    kinds = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)


def batch_sharding(mesh: Any) -> jax.NamedSharding:
    """That of every leaf of a batch: its leading axis."""
    return jax.NamedSharding(mesh, jax.P(tuple(axis for axis in OF_BATCH if axis in mesh.shape)))


def parameter_sharding(
    shape: Sequence[int], mesh: "jax.sharding.Mesh | jax.sharding.AbstractMesh"
) -> jax.NamedSharding:
    """That of a parameter, or of an optimizer's state of the same shape."""
    spec: list[str | None] = [None] * len(shape)
    for axis in (axis for axis in OF_PARAMETERS if axis in mesh.shape):
        divided = [n for n, size in enumerate(shape) if spec[n] is None and size % mesh.shape[axis] == 0]
        if divided:
            spec[max(divided, key=lambda n: shape[n])] = axis
    return jax.NamedSharding(mesh, jax.P(*spec))


def parameter_specs(problem: Problem, sizes: Mapping[str, int]) -> list[jax.P]:
    """The spec of each parameter on a mesh with axes of these sizes, in the order of their leaves.

    Raises:
      PegprofError: the problem's own ``sharding`` gives something else.
    """
    return _own_specs(problem, sizes) or [
        parameter_sharding(x.shape, abstract_mesh(sizes)).spec for x in jax.tree.leaves(problem.abstract_params())
    ]


def _own_specs(problem: Problem, sizes: Mapping[str, int]) -> list[jax.P] | None:
    """What a problem says of its parameters, or the names of their axes do; None if it is left to the rule."""
    params = problem.abstract_params()
    everything = abstract_mesh({axis: sizes.get(axis, 1) for axis in AXES})
    sharding = problem.sharding
    if "flax" in sys.modules:  # else there are no boxes of its either
        from pegprof.models.logical_axes import boxed_specs, check_boxes

        check_boxes(params, where=home_of(problem.init))
        sharding = sharding or boxed_specs
    if sharding is None:
        return None
    return check_sharding(sharding, params, mesh=everything, sizes=sizes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shardings:
    """Those of the parameters.

    Args:
      names: of the parameters.
      paths: to each parameter.
      shapes: of each.
      leaves: how each lies.
      follows_rule: whether by the rule that is known for other arrays too, and not by a function of the user's.
    """

    names: tuple[str, ...]
    paths: tuple[Path, ...]
    shapes: tuple[tuple[int, ...], ...]
    leaves: tuple[jax.NamedSharding, ...]
    follows_rule: bool

    @classmethod
    def of(cls, problem: Problem, mesh: jax.sharding.Mesh) -> "Shardings":
        """Those of a problem's parameters on a mesh."""
        params, own = problem.abstract_params(), _own_specs(problem, mesh.shape)
        found = jax.tree_util.tree_leaves_with_path(params)
        return cls(
            names=parameter_names(params),
            paths=tuple(path for path, _ in found),
            shapes=tuple(x.shape for _, x in found),
            leaves=tuple(jax.NamedSharding(mesh, spec) for spec in parameter_specs(problem, mesh.shape)),
            follows_rule=own is None,
        )

    def mirrored(self, tree: Any) -> Any:
        """For each leaf of a tree the sharding of the parameter that it mirrors; None if there is none."""
        found = [None if number is None else self.leaves[number] for number in self._numbers(tree)]
        return jax.tree.unflatten(jax.tree.structure(tree), found)

    def names_of(self, tree: Any) -> list[str]:
        """For each leaf of a tree the name of the parameter that it mirrors; "" if there is none."""
        return ["" if number is None else self.names[number] for number in self._numbers(tree)]

    def _numbers(self, tree: Any) -> list[int | None]:
        found = jax.tree_util.tree_leaves_with_path(tree)
        paths = [path for path, _ in found]
        numbers: list[int | None] = []
        while len(numbers) < len(found):
            start = len(numbers)
            if not self._begins(paths, start):
                numbers.append(None)
                continue
            leaves = [x for _, x in found[start : start + len(self.paths)]]
            alike = (x.shape == shape for x, shape in zip(leaves, self.shapes, strict=True))
            numbers += [number if is_alike else None for number, is_alike in enumerate(alike)]
        return numbers

    def _begins(self, paths: list[Path], start: int) -> bool:
        """Whether a subtree with the paths of all parameters begins at a leaf."""
        above = paths[start][: len(paths[start]) - len(self.paths[0])]
        return paths[start : start + len(self.paths)] == [(*above, *path) for path in self.paths]
