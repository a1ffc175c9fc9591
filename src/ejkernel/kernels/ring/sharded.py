"""A device's shard of a call whose tokens are split: which of three methods, and the two that are no ring pass."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.common.dropout import moved
from ejkernel.kernels.ring.cost import choose
from ejkernel.kernels.ring.layout import from_zigzag, hops_needed, shard_of, to_zigzag
from ejkernel.kernels.ring.ring_pass import Hop, Ring, indices_decide, meets_in_halves, ring_pass
from ejkernel.kernels.ring.spec import ARRAYS, OUTPUTS, moving
from ejkernel.kernels.softmax.operations import FLASH_ATTENTION
from ejkernel.kernels.softmax.spec import Band, Spec, dimensions
from ejkernel.ops import Call, Dims
from ejkernel.ops.autodiff import default_rules
from ejkernel.ops.dispatch import LocalRun
from ejkernel.ops.operation import Arrays, Plan

Inner = Callable[[Call], Arrays]

# a device's own call: softmax attention, under the name that was called
HOP = replace(FLASH_ATTENTION, name="ring_attention", configs_of=FLASH_ATTENTION.name)


def along_length(call: Call, axes: tuple[str, ...], run: LocalRun) -> Arrays:
    """A device's shard of a call whose tokens are split over `axes`: one, or one for a ring and one for heads."""
    run = replace(run, operation=HOP)
    if len(axes) > 2:
        raise ValueError(
            f"tokens are split over {axes}: ring_attention takes one axis, or two, for a ring and for heads"
        )
    first, heads = axes[:1], axes[1:]
    if not call["query"].size or not call["key"].size:
        # their columns are of all devices' keys, and nothing depends on them
        arrays = {name: x for name, x in call.arrays.items() if name not in ("bias", "mask")}
        return run(Call(call.spec.softmax, arrays, call.target))
    with default_rules():
        method = _method(call, first)
        if heads:
            return all_to_all(call, heads, lambda call: _around(call, first, run, _method(call, first)))
        if method == "all_to_all":
            return all_to_all(call, first, lambda call: _on_all_tokens(call, lax.axis_size(first), run))
        return _around(call, axes, run, method)


def _method(call: Call, axes: tuple[str, ...]) -> str:
    return choose(call, lax.axis_size(axes)).method if call.spec.method == "auto" else call.spec.method


def check_chunks(call: Call, axes: tuple[str, ...], devices: int) -> None:
    """ValueError where zigzag's two chunks do not divide what a device has."""
    T, S = call["query"].shape[1], call["key"].shape[1]
    if call.spec.layout == "zigzag" and devices > 1 and (T % 2 or S % 2):
        raise ValueError(
            f"zigzag gives each of the {devices} devices of {axes} two chunks: {T} queries and {S} "
            f"keys on a device are not both even; pad the lengths to multiples of {2 * devices}"
        )


def _around(call: Call, axes: tuple[str, ...], run: LocalRun, method: str) -> Arrays:
    """By a ring, or with all keys on every device."""
    devices = lax.axis_size(axes)
    check_chunks(call, axes, devices)
    if devices == 1:
        return run(Call(call.spec.softmax, call.arrays, call.target))
    return with_all_keys(call, axes, run) if method == "all_gather" else by_ring(call, axes, run)


def by_ring(call: Call, axes: tuple[str, ...], run: LocalRun) -> Arrays:
    """A ring pass; see `ring_pass`."""
    spec, arrays = call.spec, call.arrays
    devices, dims = lax.axis_size(axes), dimensions(call)
    hops = hops_needed(spec.layout, devices, dims.T * devices, dims.S * devices, spec.band, spec.chunk)
    if "q_positions" in call:  # which may be anything
        hops = hops_needed(spec.layout, devices, devices, devices, Band(), None)
    ring = Ring(spec, axes, devices, hops, meets_in_halves(call))

    def plan(softmax: Spec, home: bool) -> Plan:
        met = Hop(ring, arrays, moving(arrays), ring.device(), home=home)
        return run.plan(Call(softmax, met.meeting(0).arrays, call.target))

    half_plan = plan(replace(spec.softmax, band=Band()), False) if ring.halves else None
    return ring_pass(replace(ring, plan=plan(spec.softmax, True), half_plan=half_plan), arrays)


# All keys on a device ---------------------------------------------------------------------------------------


def with_all_keys(call: Call, axes: tuple[str, ...], run: LocalRun) -> Arrays:
    """Keys of all devices are gathered; in the backward their gradients are summed where they belong."""
    spec, devices = call.spec, lax.axis_size(axes)
    gathered = {
        n: lax.all_gather(x, axes, axis=ARRAYS[n].axes.index("S"), tiled=True) for n, x in moving(call.arrays).items()
    }
    arrays = _ordered(call.arrays | gathered, "SC", spec.layout, devices)
    t, S = arrays["query"].shape[1], arrays["key"].shape[1]
    mine = shard_of(spec.layout, lax.axis_index(axes), devices, t)
    if indices_decide(spec) and "q_positions" not in arrays:
        arrays["q_positions"] = (mine.index + (S - t * devices))[None]
        arrays["kv_positions"] = jnp.arange(S, dtype=jnp.int32)[None]
    runs = mine.runs() if spec.dropout else [(jnp.int32(0), 0, t)]
    outputs = []
    for start, q0, q1 in runs:
        some = {n: _rows(n, x, q0, q1) for n, x in arrays.items()}
        if spec.dropout:
            seeds = moved(arrays["dropout_seeds"], jnp.asarray(start, jnp.int32), jnp.uint32(0))
            some["dropout_seeds"] = seeds
        outputs.append(run(Call(spec.softmax, some, call.target)))
    return {n: jnp.concatenate([one[n] for one in outputs], Dims(OUTPUTS[n]).axes.index("T")) for n in OUTPUTS}


def _rows(name: str, x: jax.Array, q0: int, q1: int) -> jax.Array:
    axes = ARRAYS[name].axes
    if "T" not in axes or x.shape[axes.index("T")] == 1:
        return x
    return lax.slice_in_dim(x, q0, q1, axis=axes.index("T"))


def _ordered(arrays: Arrays, letters: str, layout: str, devices: int) -> Arrays:
    """Arrays whose dimensions of those letters are whole, in the order of the tokens."""
    if layout == "contiguous" or devices == 1:
        return dict(arrays)

    def one(name: str, x: jax.Array) -> jax.Array:
        for axis, letter in enumerate(ARRAYS[name].axes):
            if letter in letters and x.shape[axis] > 1:
                x = from_zigzag(x, devices, axis)
        return x

    return {name: one(name, x) for name, x in arrays.items()}


# Heads for tokens --------------------------------------------------------------------------------------------


def over_heads(call: Call, axis: tuple[str, ...], count: int) -> int:
    """How often key heads are repeated to be split over an axis of so many devices; an error where they cannot be."""
    dims = dimensions(call)
    if dims.H % count or (dims.Hkv % count and count % dims.Hkv):
        raise ValueError(
            f"query heads H={dims.H} and key heads Hkv={dims.Hkv} do not divide over {axis} of {count} devices, "
            "as all_to_all needs: H must be a multiple of it, Hkv a multiple or a divisor; use a ring over that axis"
        )
    return max(1, count // dims.Hkv)


def all_to_all(call: Call, axis: tuple[str, ...], inner: Inner) -> Arrays:
    """`inner` on the tokens of all devices of an axis and a share of the heads."""
    count, device = lax.axis_size(axis), lax.axis_index(axis)
    repeats = over_heads(call, axis, count)

    def swapped(x: jax.Array, heads: int, length: int) -> jax.Array:
        return lax.all_to_all(x, axis, split_axis=heads, concat_axis=length, tiled=True)

    sizes = dict(zip("BTSH", dimensions(call)[:4], strict=True))

    def one(name: str, x: jax.Array) -> jax.Array:
        letters = ARRAYS[name].axes
        # what broadcasts has size 1 there
        head = next((i for i, c in enumerate(letters) if c == "H" and x.shape[i] == sizes["H"]), None)
        length = next((i for i, c in enumerate(letters) if c in "TS" and x.shape[i] == sizes[c]), None)
        if letters[2:3] == ("Hkv",):
            x, head = jnp.repeat(x, repeats, axis=2), 2
        if head is not None and length is not None:
            return swapped(x, head, length)
        if length is not None:
            return lax.all_gather(x, axis, axis=length, tiled=True)
        if head is not None:
            return lax.dynamic_slice_in_dim(x, device * (x.shape[head] // count), x.shape[head] // count, head)
        return x

    outputs = inner(replace(call, arrays={name: one(name, x) for name, x in call.arrays.items()}))
    return {"out": swapped(outputs["out"], 1, 2), "lse": swapped(outputs["lse"], 2, 1)}


def _on_all_tokens(call: Call, devices: int, run: LocalRun) -> Arrays:
    """All tokens are on the device: softmax attention as on one device."""
    spec = call.spec
    arrays = _ordered(call.arrays, "TSC", spec.layout, devices)
    outputs = run(Call(spec.softmax, arrays, call.target))
    outputs = {name: outputs[name] for name in OUTPUTS}
    if spec.layout == "contiguous" or devices == 1:
        return outputs
    return {n: to_zigzag(x, devices, Dims(OUTPUTS[n]).axes.index("T")) for n, x in outputs.items()}
