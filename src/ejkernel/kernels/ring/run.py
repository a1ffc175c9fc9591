"""Where the tokens of a call lie: inside a shard_map, on a mesh given or around the call, or as the arrays say."""

from dataclasses import replace
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from ejkernel.kernels.common.batch import shards as folded_shards
from ejkernel.kernels.ring.cost import choose
from ejkernel.kernels.ring.operations import RING_ATTENTION
from ejkernel.kernels.ring.sharded import along_length
from ejkernel.kernels.ring.spec import ARRAYS, canonicalise
from ejkernel.kernels.ring.walk import indices_decide, meets_in_halves
from ejkernel.kernels.softmax.operations import FLASH_ATTENTION
from ejkernel.kernels.softmax.spec import Band, dimensions
from ejkernel.ops import Call, Shards
from ejkernel.ops import run as run_operation
from ejkernel.ops.dispatch import Here, settled
from ejkernel.ops.dispatch import choose as choose_platform
from ejkernel.ops.explanation import answer, explaining
from ejkernel.ops.operation import Arrays
from ejkernel.ops.sharding import axes_of, likely_axes, mesh_of, parts, typed_specs

Axes = tuple[str, ...]


def attend(
    arrays: tuple[Any, ...], axis_name: Any, shards: tuple[Any, Any, Any], platform: Any, cfg: Any, **options: Any
) -> tuple[Call, Arrays]:
    """The canonical call and its outputs."""
    axes = axes_of(axis_name)
    if not axes or not all(isinstance(axis, str) for axis in axes):
        raise TypeError(f"axis_name={axis_name!r} must name a mesh axis, or two: for a ring and for heads")
    if len(axes) > 2:
        raise ValueError(f"axis_name={axis_name!r}: one mesh axis, or two: for a ring and for heads")
    if (devices := _bound(axes)) is not None:
        return _inside(arrays, axes, devices, shards, platform, cfg, options)
    call = canonicalise(*arrays, **options)
    split = _shards(call, axes, folded_shards(arrays[0].shape, *shards), axis_name)
    if explaining():
        answer(_explanation(settled(call, split), axes, split, platform, cfg))
    return call, run_operation(RING_ATTENTION, call, platform=platform, cfg=cfg, shards=split)


def _bound(axes: Axes) -> int | None:
    """The devices along axes that a shard_map (or vmap) around has, if it has them."""
    try:
        return lax.axis_size(axes)
    except NameError:
        return None


def _inside(arrays: Any, axes: Axes, devices: int, shards: Any, platform: Any, cfg: Any, options: Any):
    """On the arrays of one device."""
    if any(given is not None for given in shards):
        raise ValueError(
            f"mesh, in_specs and out_specs say nothing inside a shard_map, which splits over {axes} already"
        )
    call = settled(canonicalise(*arrays, devices=devices, **options))
    if explaining():
        answer(_explained(call, devices, axes, platform, cfg))
    return call, along_length(call, axes, Here(RING_ATTENTION, platform, cfg))


def _shards(call: Call, axes: Axes, given: Shards, axis_name: Any) -> Shards:
    """The mesh, and specs of queries, keys and values that split their tokens over the axes."""
    typed = typed_specs(call)
    mesh = given.found_mesh or (mesh_of(call[next(iter(typed))]) if typed else None)
    if mesh is None:
        raise ValueError(
            f"ring_attention over axis {axis_name!r} needs devices: give mesh=, enter a mesh (jax.set_mesh, "
            "`with mesh:`), or call it inside a shard_map over that axis"
        )
    for axis in axes:
        if axis not in mesh.shape:
            raise ValueError(f"axis_name {axis!r} is not an axis of the mesh, which has {tuple(mesh.shape)}")
    if given.in_specs is None:
        return Shards(mesh, _specs(call, axes, mesh, typed), given.out_specs)
    specs = given.in_specs.values() if isinstance(given.in_specs, dict) else given.in_specs
    said = {axes_of(spec[1]) for spec in specs if len(spec) > 1 and spec[1] is not None}
    if said - {axes}:
        raise ValueError(f"in_specs split lengths over {sorted(said - {axes})[0]}, axis_name over {axes}: say the same")
    return Shards(mesh, given.in_specs, given.out_specs)


def _specs(call: Call, axes: Axes, mesh: Any, typed: dict[str, PartitionSpec]) -> dict[str, PartitionSpec]:
    """Lengths over the axes. What types say of batch and heads stays; else further axes split the batch, or heads."""
    if typed:
        spec = typed.get("query") or next(iter(typed.values()))
        entries = [*spec, *[None] * (4 - len(spec))]
        batch, heads = axes_of(entries[0]), axes_of(entries[2])
    else:
        found = likely_axes(RING_ATTENTION, call, mesh, axes)
        batch, heads = found.get("B", ()), found.get("H", ())
    query = PartitionSpec(batch or None, axes, heads or None)
    return {"query": query} if heads else dict.fromkeys(("query", "key", "value"), query)


def _explanation(call: Call, axes: Axes, split: Shards, platform: Any, cfg: Any) -> Any:
    mesh: Any = split.found_mesh
    devices = parts(axes, mesh)
    dims = dimensions(call)
    if dims.T % devices or dims.S % devices:
        raise ValueError(f"lengths {dims.T} and {dims.S} do not divide over {axes} of {devices} devices")
    part: dict[str, Any] = {name: _cut(name, x, dict.fromkeys("TS", devices)) for name, x in call.arrays.items()}
    return _explained(replace(call, arrays=part), devices, axes, platform, cfg)


def _cut(name: str, x: Any, parts: dict[str, int]) -> Any:
    """An array's shape with the dimensions of these letters in so many parts; what broadcasts is not cut."""
    sizes = [n if n == 1 else n // parts.get(letter, 1) for letter, n in zip(ARRAYS[name].axes, x.shape, strict=True)]
    return jax.ShapeDtypeStruct(tuple(sizes), x.dtype)


def _explained(call: Call, devices: int, axes: Axes, platform: Any, cfg: Any) -> Any:
    """Which way tokens travel, and what each device's calls run."""
    halves = meets_in_halves(call)
    hop: dict[str, Any] = {name: _cut(name, x, {"C": devices}) for name, x in call.arrays.items() if name != "sinks"}
    if indices_decide(call.spec) and not halves and "q_positions" not in hop:
        lengths = {"q_positions": call["query"].shape[1], "kv_positions": call["key"].shape[1]}
        hop |= {name: jax.ShapeDtypeStruct((1, n), "int32") for name, n in lengths.items()}
    found = choose_platform(FLASH_ATTENTION, Call(call.spec.softmax, hop, call.target), platform, cfg)[1]
    choice = choose(call, devices) if call.spec.method == "auto" else None
    way = f"{call.spec.method}, as asked" if choice is None else str(choice)
    if halves and (call.spec.method if choice is None else choice.method) == "ring":
        half: dict[str, Any] = {name: _cut(name, x, dict.fromkeys("TS", 2)) for name, x in hop.items()}
        seen = Call(replace(call.spec.softmax, band=Band()), half, call.target)
        away = choose_platform(FLASH_ATTENTION, seen, platform, cfg)[1]
        way += f"; {away.platform} for halves that see all of another device's"
    return replace(found, operation="ring_attention", reason=f"{devices} devices along {axes}: {way}; {found.reason}")
