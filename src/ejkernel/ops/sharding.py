"""The one shard_map path: specs for q, k, v in, specs for every other array derived from their dimension letters.

Over Explicit mesh axes the types of the arrays are specs too. There the kernels must run in a shard_map: their programs
do not say how each of their steps would be split.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import core as jax_core
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ejkernel.ops.operation import Arrays, Call, Operation

Axes = tuple[str, ...]

# what errors call the specs, by whether they are those of types
_SOURCE = {False: "in_specs", True: "the shardings of the arrays"}


@dataclass(frozen=True)
class Shards:
    """What the caller said about many devices: `mesh`, `in_specs`, `out_specs`."""

    mesh: Mesh | None = None
    in_specs: Any = None
    out_specs: Any = None

    def __post_init__(self) -> None:
        if self.mesh is None and (self.in_specs is not None or self.out_specs is not None):
            raise ValueError("in_specs and out_specs need mesh=")


def typed_specs(call: Call) -> dict[str, PartitionSpec]:
    """The arrays that are split over Explicit mesh axes, which types show, and how."""
    specs = {name: jax.typeof(x).sharding.spec for name, x in call.arrays.items()}
    return {name: spec for name, spec in specs.items() if any(spec)}


def _mesh_of(x: jax.Array) -> Mesh | AbstractMesh:
    """The mesh of an array that has one; that of a traced one is abstract."""
    sharding: Any = jax.typeof(x).sharding if isinstance(x, jax_core.Tracer) else x.sharding
    return sharding.mesh


def _axes_of_type(mesh: Mesh | AbstractMesh, *types: AxisType) -> frozenset[str]:
    return frozenset(name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind in types)


def _axes(entry: Any) -> Axes:
    if entry is None:
        return ()
    return tuple(entry) if isinstance(entry, tuple | list) else (entry,)


def _parts(axes: Axes, mesh: Mesh | AbstractMesh) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _named_specs(operation: Operation, call: Call, in_specs: Any) -> dict[str, PartitionSpec]:
    if isinstance(in_specs, Mapping):
        unknown = sorted(set(in_specs) - set(operation.arrays))
        if unknown:
            raise ValueError(f"in_specs names unknown arrays {unknown}; known: {list(operation.arrays)}")
        return {name: spec for name, spec in in_specs.items() if name in call}
    if isinstance(in_specs, PartitionSpec) or not isinstance(in_specs, Sequence):
        raise TypeError(f"in_specs={in_specs!r} must be one PartitionSpec per leading array, or a dict by name")
    names = [name for name in operation.arrays if name in call]
    if len(in_specs) > len(names):
        raise ValueError(f"in_specs has {len(in_specs)} entries for {len(names)} arrays {names}")
    return dict(zip(names, in_specs, strict=False))


def _sizes(operation: Operation, call: Call) -> dict[str, int]:
    """The size of each dimension letter; an array may broadcast along one with size 1."""
    sizes: dict[str, int] = {}
    for name, x in call.arrays.items():
        for letter, n in zip(operation.arrays[name].axes, x.shape, strict=True):
            sizes[letter] = max(n, sizes.get(letter, 1))
    return sizes


def _axes_by_dimension(
    operation: Operation, call: Call, specs: dict[str, PartitionSpec], typed: bool
) -> dict[str, Axes]:
    """Mesh axes of each dimension letter, from the specs given; those of types leave whole ones to other arrays."""
    found: dict[str, Axes] = {}
    for name, spec in specs.items():
        letters = operation.arrays[name].axes
        if len(spec) > len(letters):
            raise ValueError(f"in_specs of {name} is {spec}, but it has dimensions {letters}")
        entries = (*spec, *(None for _ in letters[len(spec) :]))
        for letter, entry, size in zip(letters, entries, call[name].shape, strict=True):
            axes = _axes(entry)
            if not axes and (size == 1 or typed):
                continue  # it broadcasts, or is whole and can be cut: this says nothing about the dimension
            if found.setdefault(letter, axes) != axes:
                raise ValueError(
                    f"{_SOURCE[typed]} disagree on dimension {letter}: {found[letter]} and {axes} (in {name})"
                )
    sizes = _sizes(operation, call)
    for pair in operation.splits.tied:
        for letter, other in (pair, pair[::-1]):
            if letter not in found and sizes.get(letter, 1) > 1:
                found[letter] = found.get(other, ())
    return found


def _check(found: dict[str, Axes], call: Call, operation: Operation, mesh: Mesh | AbstractMesh, typed: bool) -> None:
    sizes = _sizes(operation, call)
    for letter, axes in found.items():
        for axis in axes:
            if axis not in mesh.shape:
                raise ValueError(f"in_specs name mesh axis {axis!r}; the mesh has {tuple(mesh.shape)}")
        parts = _parts(axes, mesh)
        splittable = (*operation.splits.free, *operation.splits.passed_on)
        if parts > 1 and letter not in splittable:
            instead = operation.splits.otherwise.get(letter)
            raise ValueError(
                f"{_SOURCE[typed]} split dimension {letter} over {axes}: {operation.name} can only be split over "
                f"{', '.join(splittable)}{'' if instead is None else f'; {instead}'}"
            )
        if sizes[letter] % parts:
            raise ValueError(
                f"dimension {letter} of size {sizes[letter]} does not divide over {axes} of {parts} devices"
            )
    for one, other in operation.splits.tied:
        alike = found.get(one, ()) == found.get(other, ())
        if other in sizes and not alike and not (sizes[other] == 1 and not found.get(other)):
            raise ValueError(
                f"dimension {one} is split over {found.get(one, ())} and {other} over {found.get(other, ())}; "
                f"with {other} of size {sizes[other]} they must be split alike"
            )


def _spec_for(letters: Sequence[str], shape: Sequence[int], found: dict[str, Axes]) -> PartitionSpec:
    """The spec of an array: broadcast dimensions of size 1 are not split."""
    return PartitionSpec(*(found.get(c, ()) or None if n != 1 else None for c, n in zip(letters, shape, strict=True)))


def on_mesh_of(arrays: Any) -> AbstractContextManager[None]:
    """Within, new arrays have the mesh that the types of `arrays` have, if any: a program may join them."""
    meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays))
    mesh = next((mesh for mesh in meshes if _axes_of_type(mesh, AxisType.Explicit)), None)
    return nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh)


def varying_like(start: Any, arrays: Any) -> Any:
    """`start` marked as varying over the mesh axes that `arrays` vary over, as a loop inside a shard_map must be."""

    def varies_over(x: Any) -> frozenset[str]:
        return jax.typeof(x).manual_axis_type.varying

    axes = frozenset().union(*(varies_over(x) for x in jax.tree.leaves(arrays)))

    def marked(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - varies_over(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(marked, start)


def run_sharded(operation: Operation, call: Call, shards: Shards, body: Callable[[Call], Arrays]) -> Arrays:
    """Run `body` on every device's part of the call, as `in_specs` say or else the types of the arrays."""
    typed = shards.in_specs is None
    given = typed_specs(call) if typed else _named_specs(operation, call, shards.in_specs)
    mesh = shards.mesh or _mesh_of(call[next(iter(given))])
    found = _axes_by_dimension(operation, call, given, typed)
    _check(found, call, operation, mesh, typed)
    in_specs = {n: _spec_for(operation.arrays[n].axes, x.shape, found) for n, x in call.arrays.items()}
    in_specs |= {} if typed else given
    derived = {n: PartitionSpec(*(found.get(c, ()) or None for c in d.split())) for n, d in operation.outputs.items()}
    wanted = _output_specs(operation, shards.out_specs)

    def alone(arrays: Arrays) -> Arrays:
        return body(Call(call.spec, arrays, call.target))

    def local(arrays: Arrays) -> Arrays:
        run = body
        for letter, pass_on in operation.splits.passed_on.items():
            if _parts(axes := found.get(letter, ()), mesh) > 1:
                run = partial(pass_on, axes=axes, run=run)
        return run(Call(call.spec, arrays, call.target))

    # only the names are wanted: what is split over Explicit axes must not be, outside of a shard_map
    shapes = jax.eval_shape(alone, {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in call.arrays.items()})
    out_specs = {name: wanted.get(name, derived[name]) for name in shapes}
    return _shard_map(local, mesh, (in_specs,), out_specs)(call.arrays)


def _shard_map(function: Callable[..., Any], mesh: Mesh | AbstractMesh, in_specs: Any, out_specs: Any):
    """A shard_map over every axis that is not yet manual; arrays come to it split over the Explicit ones in any way."""
    explicit = _axes_of_type(mesh, AxisType.Explicit)
    free = explicit | _axes_of_type(mesh, AxisType.Auto)
    # all axes is the default, which leaves out one that vmap holds
    names = set(free) if len(free) < len(mesh.axis_names) else set()
    # the kernels are opaque to the replication checker
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=names, check_vma=False
    )

    def typed(spec: PartitionSpec) -> NamedSharding:
        entries = (tuple(axis for axis in _axes(entry) if axis in explicit) for entry in spec)
        return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in entries)))

    if not explicit:
        return mapped
    return lambda *arrays: mapped(*jax.sharding.reshard(arrays, jax.tree.map(typed, in_specs)))


def split_vmap(rule: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """A rule of custom_vmap, whose outputs are all mapped, on every device's part where the mapped axis is split."""

    def split(axis_size: int, in_batched: Any, *groups: Any) -> tuple[Any, Any]:
        leaves = zip(jax.tree.leaves(groups), jax.tree.leaves(in_batched), strict=True)
        shardings = [jax.typeof(x).sharding for x, mapped in leaves if mapped]
        sharding = next((sharding for sharding in shardings if sharding.spec[0]), None)
        if sharding is None:
            return rule(axis_size, in_batched, *groups)
        entry, mesh = sharding.spec[0], sharding.mesh
        part = axis_size // _parts(_axes(entry), mesh)
        specs = jax.tree.map(lambda mapped: PartitionSpec(entry if mapped else None), tuple(in_batched))
        local = _shard_map(lambda *parts: rule(part, in_batched, *parts)[0], mesh, specs, PartitionSpec(entry))
        outputs = local(*groups)
        return outputs, jax.tree.map(lambda _: True, outputs)

    return split


def _output_specs(operation: Operation, out_specs: Any) -> dict[str, PartitionSpec]:
    if out_specs is None:
        return {}
    if isinstance(out_specs, Mapping):
        return dict(out_specs)
    listed = [out_specs] if isinstance(out_specs, PartitionSpec) else list(out_specs)
    return dict(zip(operation.outputs, listed, strict=False))
