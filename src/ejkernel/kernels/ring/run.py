"""Where the tokens of a call lie: inside a shard_map, on a mesh given or around the call, or as the arrays say."""

import math
from dataclasses import replace
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from ejkernel.kernels.common.batch import shards as folded_shards
from ejkernel.kernels.ring.cost import choose
from ejkernel.kernels.ring.operations import RING_ATTENTION
from ejkernel.kernels.ring.ring_pass import indices_decide, meets_in_halves
from ejkernel.kernels.ring.sharded import HOP, along_length, check_chunks, over_heads
from ejkernel.kernels.ring.spec import ARRAYS, Part, canonicalise
from ejkernel.kernels.softmax.spec import Band, dimensions
from ejkernel.ops import Call, Shards
from ejkernel.ops import run as run_operation
from ejkernel.ops.dispatch import LocalRun, recorded, with_target
from ejkernel.ops.dispatch import choose as choose_platform
from ejkernel.ops.operation import Arrays
from ejkernel.ops.recording import recorder
from ejkernel.ops.sharding import axes_of, likely_axes, mesh_of, parts, typed_specs
from ejkernel.ops.target import ambient_mesh

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
    call = canonicalise(*arrays, part=Part(_around(arrays[0], axes, shards[0])), **options)
    split = _shards(call, axes, folded_shards(arrays[0].shape, *shards), axis_name)
    if recorder() is not None:
        return call, _recorded(call, _explanation(with_target(call, split), axes, split, platform, cfg))
    return call, run_operation(RING_ATTENTION, call, platform=platform, cfg=cfg, shards=split)


def _bound(axes: Axes) -> int | None:
    """The devices along axes that a shard_map (or vmap) around has, if it has them."""
    try:
        return lax.axis_size(axes)
    except NameError:
        return None


def _around(query: Any, axes: Axes, mesh: Any) -> int:
    """The devices along the ring's axis of the mesh given, around the call, or of the query; 1 without one."""
    meshes = (mesh, ambient_mesh(), jax.typeof(query).sharding.mesh if isinstance(query, jax.Array) else None)
    return next((mesh.shape[axes[0]] for mesh in meshes if mesh is not None and axes[0] in mesh.shape), 1)


def _inside(arrays: Any, axes: Axes, devices: int, shards: Any, platform: Any, cfg: Any, options: Any):
    """On the arrays of one device."""
    if any(given is not None for given in shards):
        raise ValueError(
            f"mesh, in_specs and out_specs say nothing inside a shard_map, which splits over {axes} already"
        )
    own = Part(lax.axis_size(axes[0]), devices, lax.axis_index(axes))
    call = with_target(canonicalise(*arrays, part=own, **options))
    if recorder() is not None:
        sizes = tuple(lax.axis_size(axis) for axis in axes)
        return call, _recorded(call, _explained(call, sizes, axes, platform, cfg))
    return call, along_length(call, axes, LocalRun(RING_ATTENTION, platform, cfg))


def _recorded(call: Call, explanation: Any) -> Arrays:
    """As one call: what it makes of passes on the way is in its explanation."""
    return recorded(HOP, Call(call.spec.softmax, call.arrays, call.target), explanation)


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
    over = {axes_of(spec[1]) for spec in specs if len(spec) > 1 and spec[1] is not None}
    if over - {axes}:
        raise ValueError(f"in_specs split lengths over {sorted(over - {axes})[0]}, axis_name over {axes}: say the same")
    return Shards(mesh, given.in_specs, given.out_specs)


def _specs(call: Call, axes: Axes, mesh: Any, typed: dict[str, PartitionSpec]) -> dict[str, PartitionSpec]:
    """Lengths over the axes. What types say of batch and heads stays; else further axes split the batch, or heads."""
    if typed:
        spec = typed.get("query") or next(iter(typed.values()))
        entries = [*spec, *[None] * (4 - len(spec))]
        batch, heads = axes_of(entries[0]), axes_of(entries[2])
    else:
        likely = likely_axes(RING_ATTENTION, call, mesh, axes)
        batch, heads = likely.get("B", ()), likely.get("H", ())
    query = PartitionSpec(batch or None, axes, heads or None)
    return {"query": query} if heads else dict.fromkeys(("query", "key", "value"), query)


def _explanation(call: Call, axes: Axes, split: Shards, platform: Any, cfg: Any) -> Any:
    mesh: Any = split.found_mesh
    specs: Any = split.in_specs
    query = specs.get("query", ()) if isinstance(specs, dict) else next(iter(specs), ())
    batch, _, heads, *_ = (axes_of(entry) for entry in (*query, *[None] * 4))
    dims, divided = dimensions(call), {}
    for letter, over in {"B": batch, "T": axes, "S": axes, "H": heads}.items():
        size, divided[letter] = getattr(dims, letter), parts(over, mesh)
        if size % divided[letter]:
            raise ValueError(
                f"dimension {letter} of size {size} does not divide over {over} of {divided[letter]} devices"
            )
    divided["Hkv"] = dims.Hkv // max(1, dims.Hkv // divided["H"])  # a device has what its query heads need
    shard = _sized(call, 1, divided)
    return _explained(shard, tuple(mesh.shape[axis] for axis in axes), axes, platform, cfg)


def _sized(call: Call, times: int, divided: dict[str, int], letters: str = "") -> Call:
    """A call on shapes, with `letters` so many times as long, and others divided; what broadcasts stays."""
    lengths = {"T": call["query"].shape[1], "S": call["key"].shape[1]}

    def size(letter: str, n: int) -> int:
        broadcasts = n == 1 != lengths.get(letter)
        return n if broadcasts else n * (times if letter in letters else 1) // divided.get(letter, 1)

    shapes = {n: [*map(size, ARRAYS[n].axes, x.shape)] for n, x in call.arrays.items()}
    arrays: dict[str, Any] = {n: jax.ShapeDtypeStruct(shapes[n], x.dtype) for n, x in call.arrays.items()}
    return replace(call, arrays=arrays)


def _heads_split(call: Call, axis: Axes, devices: int) -> Call:
    """All tokens of an axis, and a share of the heads."""
    repeats = over_heads(call, axis, devices)
    return _sized(call, devices, {"H": devices, "Hkv": devices // repeats}, "TS")


def _explained(call: Call, devices: tuple[int, ...], axes: Axes, platform: Any, cfg: Any) -> Any:
    """What travels, and what each device's calls run."""
    count, around = math.prod(devices), devices[0]
    if len(axes) > 1:
        call = _heads_split(call, axes[1:], devices[1])
    check_chunks(call, axes[:1], around)
    choice = choose(call, around) if call.spec.method == "auto" else None
    method = call.spec.method if choice is None else choice.method
    method_reason = f"{method}, as asked" if choice is None else str(choice)
    halves = False
    if len(axes) == 1 and method == "all_to_all":
        call = _heads_split(call, axes, around)
    elif around > 1:
        passes = method != "all_gather"
        halves = passes and meets_in_halves(call)
        call = _met(call, around, passes, halves)
    hop = Call(call.spec.softmax, call.arrays, call.target)
    explanation = choose_platform(HOP, hop, platform, cfg)[1]
    if halves:
        each, rows = _sized(hop, 1, dict.fromkeys("TS", 2)), 2 * dimensions(hop).B
        both: dict[str, Any] = {n: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for n, x in each.arrays.items()}
        seen = Call(replace(each.spec, band=Band()), both, each.target)
        half = choose_platform(HOP, seen, platform, cfg)[1]
        method_reason += f"; {half.platform} for halves that see all of another device's"
        method_reason += f", config {half.config} (from {half.config_source})"
    counted = "1 device" if count == 1 else f"{count} devices"
    return replace(explanation, reason=f"{counted} along {axes}: {method_reason}; {explanation.reason}")


def _met(call: Call, devices: int, passes: bool, halves: bool) -> Call:
    """Of a device's shard, the call where its queries meet the keys of a hop, or those of all devices."""
    met = _sized(call, 1, {"C": devices}) if passes else _sized(call, devices, {}, "S")
    lengths = {"q_positions": met["query"].shape[1], "kv_positions": met["key"].shape[1]}
    arrays: dict[str, Any] = {name: x for name, x in met.arrays.items() if not (passes and name == "sinks")}
    if indices_decide(call.spec) and not halves and "q_positions" not in arrays:
        arrays |= {name: jax.ShapeDtypeStruct((1, n), "int32") for name, n in lengths.items()}
    met = replace(met, arrays=arrays)
    if call.spec.dropout and call.spec.layout == "zigzag":  # run by run
        met = _sized(met, 1, dict.fromkeys("TSC" if passes else "T", 2))
    return met
