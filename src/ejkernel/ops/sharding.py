"""The one shard_map path: specs for q, k, v in, specs for every other array derived from their dimension letters."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from ejkernel.ops.operation import Arrays, Call, Operation

Axes = tuple[str, ...]

# dimensions that may be split without devices talking to each other
_FREE = ("B", "N", "H", "Hkv")


@dataclass(frozen=True)
class Shards:
    """What the caller said about many devices: `mesh`, `in_specs`, `out_specs`."""

    mesh: Mesh | None = None
    in_specs: Any = None
    out_specs: Any = None

    def __post_init__(self) -> None:
        if self.mesh is None and (self.in_specs is not None or self.out_specs is not None):
            raise ValueError("in_specs and out_specs need mesh=")


def _axes(entry: Any) -> Axes:
    if entry is None:
        return ()
    return tuple(entry) if isinstance(entry, tuple | list) else (entry,)


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


def _axes_by_dimension(operation: Operation, call: Call, specs: dict[str, PartitionSpec]) -> dict[str, Axes]:
    """Mesh axes of each dimension letter, from the specs given."""
    found: dict[str, Axes] = {}
    for name, spec in specs.items():
        letters = operation.arrays[name].axes
        if len(spec) > len(letters):
            raise ValueError(f"in_specs of {name} is {spec}, but it has dimensions {letters}")
        entries = (*spec, *(None for _ in letters[len(spec) :]))
        for letter, entry, size in zip(letters, entries, call[name].shape, strict=True):
            axes = _axes(entry)
            if size == 1 and not axes:
                continue  # it broadcasts: this says nothing about the dimension
            if found.setdefault(letter, axes) != axes:
                raise ValueError(f"in_specs disagree on dimension {letter}: {found[letter]} and {axes} (in {name})")
    if "Hkv" not in found and _sizes(operation, call).get("Hkv", 1) > 1:
        found["Hkv"] = found.get("H", ())
    return found


def _check(found: dict[str, Axes], call: Call, operation: Operation, mesh: Mesh) -> None:
    for letter, axes in found.items():
        if axes and letter not in _FREE:
            raise ValueError(
                f"in_specs split dimension {letter} over {axes}: {operation.name} can only be split over batch and "
                "heads; ring_attention splits lengths"
            )
    sizes = _sizes(operation, call)
    split_alike = found.get("H", ()) == found.get("Hkv", ())
    if "Hkv" in sizes and not split_alike and not (sizes["Hkv"] == 1 and not found.get("Hkv")):
        raise ValueError(
            f"query heads are split over {found.get('H', ())} and key heads over {found.get('Hkv', ())}; "
            f"with {sizes['Hkv']} key heads they must be split alike"
        )
    for letter, axes in found.items():
        parts = 1
        for axis in axes:
            if axis not in mesh.shape:
                raise ValueError(f"in_specs name mesh axis {axis!r}; the mesh has {tuple(mesh.shape)}")
            parts *= mesh.shape[axis]
        if sizes[letter] % parts:
            raise ValueError(
                f"dimension {letter} of size {sizes[letter]} does not divide over {axes} of {parts} devices"
            )


def _spec_for(letters: Sequence[str], shape: Sequence[int], found: dict[str, Axes]) -> PartitionSpec:
    """The spec of an array: broadcast dimensions of size 1 are not split."""
    return PartitionSpec(*(found.get(c, ()) or None if n != 1 else None for c, n in zip(letters, shape, strict=True)))


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
    """Run `body` on every device's part of the call."""
    mesh = shards.mesh
    assert mesh is not None
    given = _named_specs(operation, call, shards.in_specs)
    found = _axes_by_dimension(operation, call, given)
    _check(found, call, operation, mesh)
    in_specs = {n: _spec_for(operation.arrays[n].axes, x.shape, found) for n, x in call.arrays.items()}
    in_specs |= given
    derived = {n: PartitionSpec(*(found.get(c, ()) or None for c in d.split())) for n, d in operation.outputs.items()}
    wanted = _output_specs(operation, shards.out_specs)

    def local(arrays: Arrays) -> Arrays:
        return body(Call(call.spec, arrays, call.target))

    shapes = jax.eval_shape(lambda arrays: body(Call(call.spec, arrays, call.target)), call.arrays)
    out_specs = {name: wanted.get(name, derived[name]) for name in shapes}
    # the kernels are opaque to the replication checker
    return jax.shard_map(local, mesh=mesh, in_specs=(in_specs,), out_specs=out_specs, check_vma=False)(call.arrays)


def _output_specs(operation: Operation, out_specs: Any) -> dict[str, PartitionSpec]:
    if out_specs is None:
        return {}
    if isinstance(out_specs, Mapping):
        return dict(out_specs)
    listed = [out_specs] if isinstance(out_specs, PartitionSpec) else list(out_specs)
    return dict(zip(operation.outputs, listed, strict=False))
