"""Where the arrays of a mask live on a mesh."""

import math
from collections.abc import Collection, Mapping
from typing import TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ejkernel.expressions.binding import array_dims
from ejkernel.types.mask_fields import MaskFields

MASK_DIMS = {
    "q_ids": "B T",
    "kv_ids": "B S",
    "q_pos": "B T",
    "kv_pos": "B S",
    "dense": "B H T S",
    "pattern": "B H nq nk",
}
M = TypeVar("M", bound=MaskFields)
Axes = str | tuple[str, ...] | None


def mask_shardings(mask: M, mesh: Mesh | AbstractMesh, axes: Mapping[str, Axes]) -> M:
    """The mask's tree with a NamedSharding per array, from mesh axes by dimension."""
    letters = {"b": "B", "h": "H", "i": "T", "j": "S", "": ""}
    of_rule = [] if mask.rule is None else [[letters[dim] for dim in dims] for dims in array_dims(mask.rule)]

    def sharding(path, x):
        dims = of_rule[path[-1].idx] if path[0].name == "rule" else MASK_DIMS[path[0].name].split()
        dims = [""] * (x.ndim - len(dims)) + dims[-x.ndim :]
        spec, used = [], set()  # an axis serves the first dimension that asks for it
        for dim, size in zip(dims, x.shape, strict=True):
            names = _fitting(mesh, axes.get(dim), size, used)
            used.update(names)
            spec.append(names[0] if len(names) == 1 else names or None)
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree_util.tree_map_with_path(sharding, mask)


def _fitting(mesh: Mesh | AbstractMesh, axes: Axes, size: int, used: Collection[str]) -> tuple[str, ...]:
    """The unused axes that the mesh has, if together they divide the dimension."""
    wanted = (axes,) if isinstance(axes, str) else axes or ()
    names = tuple(name for name in wanted if name in mesh.shape and name not in used)
    return () if size % math.prod(mesh.shape[name] for name in names) else names
