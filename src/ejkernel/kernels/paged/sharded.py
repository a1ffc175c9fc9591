"""Caches split over devices along their length or by pages: each attends to what it has, and all merge by lse."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.paged.spec import dimensions, lowest_keys
from ejkernel.ops import Call
from ejkernel.ops.autodiff import default_rules
from ejkernel.ops.operation import Arrays

Run = Callable[[Call], Arrays]


class _Visible(NamedTuple):
    """The keys [start, end) that the one query of each sequence sees: (B, N)."""

    start: jax.Array
    end: jax.Array


def along_length(call: Call, axes: tuple[str, ...], run: Run) -> Arrays:
    """A device's shard of a call on contiguous caches (B, N, S, Hkv, D) whose length is split."""
    with default_rules():
        S = call["key_pages"].shape[2]
        call, seen = _one_query_each(call, S * lax.axis_size(axes))
        before = lax.axis_index(axes) * S
        local = {"starts": jnp.clip(seen.start - before, 0, S), "context_lens": jnp.clip(seen.end - before, 0, S)}
        return _merged(call, local, axes, run)


def along_pages(call: Call, axes: tuple[str, ...], run: Run) -> Arrays:
    """A device's shard of a call on pages (B, P, L, Hkv, D), of which it has some: tables shrink to those."""
    with default_rules():
        dims = dimensions(call)
        call, seen = _one_query_each(call, dims.S)
        first = lax.axis_index(axes) * dims.P
        ids = jnp.clip(call["block_tables"], 0, dims.P * lax.axis_size(axes) - 1) - first
        low, high = seen.start // dims.L, -(-seen.end // dims.L)  # slots that are seen
        slot = jnp.arange(dims.W, dtype=jnp.int32)
        used = (ids >= 0) & (ids < dims.P) & (low[..., None] <= slot) & (slot < high[..., None])
        # in their order, so that only the first and the last page may be partly visible
        order = jnp.argsort(~used, axis=-1, stable=True)
        count = used.sum(-1, dtype=jnp.int32)

        def has(slot: jax.Array) -> jax.Array:
            at = jnp.clip(slot, 0, dims.W - 1)[..., None]
            return jnp.take_along_axis(used, at, axis=-1)[..., 0]

        missing = jnp.where(has(high - 1), high * dims.L - seen.end, 0)
        local = {
            "block_tables": jnp.clip(jnp.take_along_axis(ids, order, axis=-1), 0, dims.P - 1),
            "starts": jnp.where(has(low), seen.start - low * dims.L, 0),
            "context_lens": jnp.where(count > 0, count * dims.L - missing, 0),
        }
        return _merged(call, local, axes, run)


def _one_query_each(call: Call, S: int) -> tuple[Call, _Visible]:
    """The call with a sequence for each query token, and what it sees of a cache of S keys."""
    spec, arrays = call.spec, dict(call.arrays)
    tokens = spec.tokens
    assert tokens is not None  # operations with ragged queries do not split their caches
    if any(rule is not None and rule.axes & {"i", "j"} for rule in spec.rules):
        raise ValueError(
            "mask_fn, score_fn and tree_mask that depend on positions: a device that has a part of the keys does not "
            "know theirs; split sequences and heads instead of pages and lengths"
        )

    def each(name: str) -> jax.Array:
        return jnp.repeat(arrays[name], tokens, axis=1)

    end = jnp.clip(each("context_lens"), 0, S)
    if "block_tables" in arrays:
        arrays["block_tables"] = each("block_tables")
    start = jnp.clip(each("starts"), 0, S) if "starts" in arrays else jnp.zeros_like(end)
    if spec.causal:
        behind = tokens - 1 - jnp.arange(end.shape[1], dtype=jnp.int32) % tokens
        end = jnp.maximum(end - behind, 0)
        window = arrays.pop("window", None)
        if (low := lowest_keys(spec, end - 1, None if window is None else window[:, None])) is not None:
            start = jnp.maximum(start, low)
    out = spec.out_dtype or arrays["query"].dtype.name
    spec = replace(spec, tokens=1, window=None, chunk=None, out_dtype=out)
    return replace(call, spec=spec, arrays=arrays), _Visible(start, end)


def _merged(call: Call, local: Arrays, axes: tuple[str, ...], run: Run) -> Arrays:
    """The outputs of all devices as one; only the first has the sinks."""
    arrays = call.arrays | local
    if "sinks" in arrays:
        arrays["sinks"] = jnp.where(lax.axis_index(axes) == 0, arrays["sinks"], -jnp.inf)
    outputs = run(Call(replace(call.spec, out_dtype="float32"), arrays, call.target))
    lse, some = outputs["lse"], lax.pmax(outputs["lse"], axes)
    base = jnp.where(jnp.isneginf(some), 0.0, some)
    weight = jnp.exp(lse - base)  # (B, H, T)
    total = lax.psum(weight, axes)
    share = jnp.where(total == 0.0, 0.0, weight / jnp.where(total == 0.0, 1.0, total))
    out = lax.psum(outputs["out"] * share.swapaxes(1, 2)[..., None], axes)
    lse = jnp.where(total == 0.0, -jnp.inf, base + jnp.log(jnp.where(total == 0.0, 1.0, total)))
    return {"out": out.astype(call.spec.out_dtype), "lse": lse, "top": lax.pmax(outputs["top"], axes)}
