"""Native sparse attention as a whole: three branches over the same tokens, each weighed by its gate.

No kernel of its own: the softmax family attends to compressed keys and to the window, the pooling family compresses,
and the two operations of this family select blocks and attend to them.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from ejkernel.checks.arrays import concrete, float_array, int_array
from ejkernel.checks.options import static_int
from ejkernel.kernels.common.batch import folded, folded_broadcast
from ejkernel.kernels.common.scale import with_static_scale
from ejkernel.kernels.native_sparse import spec as selected
from ejkernel.kernels.native_sparse.block_table import (
    BlockTable,
    block_rows,
    block_table_of,
    check_lengths,
    existing_blocks,
)
from ejkernel.kernels.native_sparse.operations import NATIVE_SPARSE_ATTENTION, SELECT_BLOCKS, SELECTED_ATTENTION
from ejkernel.kernels.native_sparse.selection import selection_call
from ejkernel.kernels.pooling import spec as pooling
from ejkernel.kernels.pooling.operations import MEAN_POOLING
from ejkernel.kernels.softmax import spec as softmax
from ejkernel.kernels.softmax.operations import FLASH_ATTENTION
from ejkernel.ops import Call, Composite, Shards
from ejkernel.ops.autodiff import default_rules
from ejkernel.ops.sharding import run_sharded
from ejkernel.types import MaskInfo

# selected for a query, where nothing is said
BLOCKS = 16

GATES = ("g_cmp", "g_slc", "g_swa")


@dataclass(frozen=True)
class Spec:
    """Static facts.

    Attributes:
        window: tokens of the window; None where the array `window_size` says it.
        count: how many of its blocks count for each query; None: all, or what the array `block_counts` says.
        room: blocks that are selected for a query, where none are given.
        rows: blocks in all; of packed sequences the most there can be.
    """

    scale: float
    block_size: int
    window: int | None
    count: int | None
    room: int
    rows: int


def canonicalise(
    query: Any,
    key: Any,
    value: Any,
    g_cmp: Any = None,
    g_slc: Any = None,
    block_indices: Any = None,
    block_counts: Any = None,
    cu_seqlens: Any = None,
    *,
    g_swa: Any = None,
    compressed: Any = None,
    kv_lengths: Any = None,
    block_size: int = 64,
    window_size: Any = 0,
    softmax_scale: Any = None,
) -> Call:
    """Check everything about a call and bring it to its one canonical form."""
    query, key, value, batch, _ = softmax.checked_tokens(query, key, value)
    query, scale = with_static_scale("softmax_scale", query, softmax_scale)
    B, T, H, D = query.shape
    _, S, Hkv, Dv = value.shape
    block_size = static_int("block_size", block_size, 1)
    traced = isinstance(window_size, Tracer)
    window = None if traced else static_int("window_size", window_size, 0)
    ends, kv_lengths = check_lengths(B, T, S, cu_seqlens, kv_lengths)
    rows = block_rows(S, block_size, ends)
    gates = {"g_cmp": g_cmp, "g_slc": g_slc, "g_swa": g_swa}
    arrays: dict[str, Any] = {"query": query, "key": key, "value": value}
    arrays |= {name: _gate(name, gate, (*batch, T, H)) for name, gate in gates.items()}
    if all(gate is None for gate in gates.values()) and block_indices is None:
        raise ValueError("nothing to attend to: give g_cmp, g_slc, g_swa or block_indices")
    if g_swa is not None and window == 0:
        raise ValueError("g_swa weighs the window branch: give window_size, at least 1")
    if g_swa is None and window != 0:
        raise ValueError(f"window_size={window_size} is of the window branch: give its gate, g_swa")
    if block_counts is not None and g_slc is None and block_indices is None:
        raise ValueError("block_counts is of the selected branch: give its gate, g_slc, or block_indices")
    if compressed is not None and g_cmp is None and (g_slc is None or block_indices is not None):
        raise ValueError("compressed is of the compressed branch and of selecting: give g_cmp, or g_slc alone")
    if block_counts is None and block_indices is None:
        block_counts = BLOCKS
    counts = selected.checked_counts(block_counts, batch, (B, T, Hkv))
    if block_indices is not None:
        arrays["block_indices"] = selected.checked_indices(block_indices, (B, T, Hkv))
    arrays["block_counts"] = None if isinstance(counts, int) else counts
    if compressed is not None:
        existing = existing_blocks(S, block_size, cu_seqlens)
        arrays |= _compressed(compressed, (B, existing), (Hkv, D, Dv), query.dtype, rows)
    arrays["cu_seqlens"] = None if ends is None else ends[None]
    arrays["kv_lengths"] = kv_lengths
    arrays["window_size"] = int_array("window_size", window_size).reshape(1) if traced else None
    count = counts if isinstance(counts, int) else None
    spec = Spec(scale, block_size, window, count, _most_blocks(counts, rows), rows)
    return Call(spec, {name: x for name, x in arrays.items() if x is not None})


def _gate(name: str, gate: Any, shape: tuple[int, ...]) -> jax.Array | None:
    """A gate (..., T, H), which may broadcast, with one batch dimension."""
    if gate is None:
        return None
    gate = float_array(name, gate)
    if gate.ndim != len(shape) or any(n not in (1, m) for n, m in zip(gate.shape, shape, strict=True)):
        raise ValueError(f"{name} {gate.shape} must be (batch, length, heads) = {shape}")
    return folded_broadcast(jnp.broadcast_to(gate, (*gate.shape[:-2], *shape[-2:])), shape[:-2], rank=2)


def _compressed(
    compressed: Any, blocks: tuple[int, int], sizes: tuple[int, int, int], dtype: Any, rows: int
) -> dict[str, jax.Array]:
    """Keys (B, rows, Hkv, D) and values (B, rows, Hkv, Dv) that somebody compressed, for B sequences of some blocks."""
    B, existing = blocks
    Hkv, *widths = sizes
    if not isinstance(compressed, tuple | list) or len(compressed) != 2:
        raise TypeError(f"compressed must be a pair (keys, values), got {type(compressed).__name__}")
    padded = {}
    for kind, x, width in zip(("key", "value"), compressed, widths, strict=True):
        name = f"{kind} of compressed"
        x = folded(float_array(name, x))
        if x.shape[1] not in _compressed_rows(existing, rows) or x.shape != (B, x.shape[1], Hkv, width):
            raise ValueError(f"{name} {x.shape} must have a row for each block: {(B, existing, Hkv, width)}")
        if x.dtype != dtype:
            raise TypeError(f"{name} has dtype {x.dtype}, query has {dtype}: they must be the same")
        padded[f"compressed_{kind}"] = _with_rows(rows, x)
    return padded


def _compressed_rows(existing: int, rows: int) -> tuple[int, int, int]:
    """Rows that compressed keys may have: the last block may be left out while it is not whole, or all of the table."""
    return existing, existing - 1, rows


@partial(jax.jit, static_argnums=0)
def _with_rows(rows: int, x: jax.Array) -> jax.Array:
    """x (B, N, Hkv, D) with zeros for blocks that are not whole, or that there are not."""
    return jnp.pad(x, [(0, 0), (0, rows - x.shape[1]), (0, 0), (0, 0)])


def _most_blocks(counts: Any, rows: int) -> int:
    """The most blocks a query may take: what the counts say where they are known."""
    if counts is None:
        return rows
    if isinstance(counts, int):
        return max(1, min(counts, rows))
    values = concrete(counts)
    return rows if values is None or not values.size else int(min(rows, max(1, values.max())))


def run_whole(call: Call, composite: Composite, shards: Shards) -> jax.Array:
    """out (B, T, H, Dv), on every device's part of the call where the caller says how to split it."""
    if shards.in_specs is None:
        return branches(call, composite)["out"]
    return run_sharded(NATIVE_SPARSE_ATTENTION, call, shards, _Branches(composite))["out"]


@dataclass(frozen=True)
class _Branches:
    """Adds them up, for a device's part of a call."""

    composite: Composite

    def __call__(self, call: Call) -> dict[str, jax.Array]:
        return branches(call, self.composite)


def branches(call: Call, composite: Composite) -> dict[str, jax.Array]:
    """out (B, T, H, Dv): the sum of the branches whose gates there are."""
    table = block_table_of(call)
    selects = "block_indices" in call or "g_slc" in call
    if composite.cfg is not None and not selects:
        raise ValueError(
            f"cfg={composite.cfg!r} is of the selected branch, and there is none: give g_slc or block_indices"
        )
    # a config is of kernels that attending to every block as causal attention would not run
    every_block = _selects_every_block(call) and composite.cfg is None
    gated: list[tuple[Any, jax.Array]] = []
    lse = None
    if "g_cmp" in call or (selects and "block_indices" not in call and not every_block):
        call = _with_compressed(call, composite)
        compressed = composite.run(FLASH_ATTENTION, _compressed_call(call, table), takes_cfg=False)
        lse = compressed["lse"]
        gated += [(call["g_cmp"], compressed["out"])] if "g_cmp" in call else []
    if selects and every_block:
        gated.append((call["g_slc"], composite.run(FLASH_ATTENTION, _dense_call(call, table), takes_cfg=False)["out"]))
    elif selects:
        gated.append((call.get("g_slc"), _selected_branch(call, table, lse, composite)))
    if "g_swa" in call:
        size = call["window_size"][0] if call.spec.window is None else call.spec.window
        window = _dense_call(call, table, sliding_window=(size - 1, 0))
        gated.append((call["g_swa"], composite.run(FLASH_ATTENTION, window, takes_cfg=False)["out"]))
    padding = table.limits == 0 if "cu_seqlens" in call or "kv_lengths" in call else None
    return {"out": _gated(gated, padding, call["query"].dtype)}


def _selects_every_block(call: Call) -> bool:
    """Whether the selected branch is causal attention."""
    count = call.spec.count
    return "block_indices" not in call and "g_slc" in call and count is not None and count >= call.spec.rows


def _gated(gated: list[tuple[Any, jax.Array]], padding: jax.Array | None, dtype: Any) -> jax.Array:
    """Branches (B, T, H, Dv) times their gates (B|1, T, H), or 1; zeros where there is padding (B|1, T)."""
    with default_rules():
        return _weighed(gated, padding).astype(dtype)


@jax.jit
def _weighed(gated: list[tuple[Any, jax.Array]], padding: jax.Array | None) -> jax.Array:
    def weighed(gate: jax.Array | None, out: jax.Array) -> jax.Array:
        out = out.astype(jnp.float32)
        if gate is None:
            return out
        gate = gate.astype(jnp.float32)
        # what padding holds, such as nan, has no meaning
        gate = gate if padding is None else jnp.where(padding[..., None], 0.0, gate)
        return gate[..., None] * out

    terms = [weighed(gate, out) for gate, out in gated]
    return sum(terms[1:], terms[0])


def _with_compressed(call: Call, composite: Composite) -> Call:
    """The call with compressed keys and values: the means of the blocks, where none are given."""
    if "compressed_key" in call:
        return call
    arrays, spec = dict(call.arrays), call.spec
    ends = {name: call[name] for name in ("cu_seqlens",) if name in call}
    for name in ("key", "value"):
        pooled = Call(pooling.Spec(spec.block_size, spec.rows), {"x": call[name], **ends})
        arrays[f"compressed_{name}"] = composite.run(MEAN_POOLING, pooled, takes_cfg=False)["out"]
    return Call(spec, arrays, call.target)


@partial(jax.jit, static_argnums=(0, 1))
def _compressed_mask(block_size: int, packed: bool, table: BlockTable) -> MaskInfo:
    """A query sees the blocks of its sequence that end where it does or before."""
    last, at = table.starts + (block_size - 1), table.limits - 1
    if not packed:
        return MaskInfo(at.shape[1], last.shape[1], q_pos=at, kv_pos=last)
    ids = jnp.where(table.own_block >= 0, table.first_row, -1)
    return MaskInfo(at.shape[1], last.shape[1], q_ids=ids, kv_ids=table.first_row_of_block, q_pos=at, kv_pos=last)


def _compressed_call(call: Call, table: BlockTable) -> Call:
    """Attention to the compressed blocks."""
    tokens = (call[name] for name in ("query", "compressed_key", "compressed_value"))
    mask = _compressed_mask(call.spec.block_size, "cu_seqlens" in call, table)
    return softmax.canonicalise(*tokens, mask_info=mask, causal=True, softmax_scale=call.spec.scale, return_lse=True)


@partial(jax.jit, static_argnums=0)
def _cache_mask(S: int, table: BlockTable) -> MaskInfo:
    """The keys of caches of different lengths, by where they stand."""
    keys = jnp.arange(S, dtype=jnp.int32)[None]
    return MaskInfo(table.limits.shape[1], S, q_pos=table.limits - 1, kv_pos=keys)


def _dense_call(call: Call, table: BlockTable, **options: Any) -> Call:
    """Causal attention to the tokens themselves."""
    tokens = (call[name] for name in ("query", "key", "value"))
    if "cu_seqlens" in call:
        options["cum_seqlens_q"] = call["cu_seqlens"][0]
    elif "kv_lengths" in call:
        options["mask_info"] = _cache_mask(call["key"].shape[1], table)
    return softmax.canonicalise(*tokens, causal=True, softmax_scale=call.spec.scale, **options)


def _selected_branch(call: Call, table: BlockTable, lse: Any, composite: Composite) -> jax.Array:
    """Attention to the blocks given, or to those that the compressed keys say."""
    indices = call.get("block_indices")
    if indices is None:
        indices = composite.run(SELECT_BLOCKS, _selection(call, table, lse), takes_cfg=False)["indices"]
    arrays = {name: call[name] for name in ("query", "key", "value")}
    arrays |= {"starts": table.starts, "limits": table.limits}
    arrays["indices"] = selected.table_rows(indices, call.get("block_counts", call.spec.count), table)
    return composite.run(SELECTED_ATTENTION, Call(selected.Spec(call.spec.scale, call.spec.block_size), arrays))["out"]


def selecting_call(
    query: Any,
    compressed_key: Any,
    block_counts: Any = BLOCKS,
    cu_seqlens: Any = None,
    *,
    kv_lengths: Any = None,
    block_size: int = 64,
    softmax_scale: Any = None,
) -> Call:
    """Check a call of `select_blocks` and bring it to the form of a whole call, of which it is a part."""
    compressed_key = float_array("compressed_key", compressed_key)
    query, key, *_ = softmax.checked_tokens(query, compressed_key, compressed_key)
    query, scale = with_static_scale("softmax_scale", query, softmax_scale)
    B, T, _, _ = query.shape
    block_size, count = static_int("block_size", block_size, 1), static_int("block_counts", block_counts, 1)
    S = T if kv_lengths is None else max(T, key.shape[1] * block_size)
    ends, kv_lengths = check_lengths(B, T, S, cu_seqlens, kv_lengths)
    rows, existing = block_rows(S, block_size, ends), existing_blocks(S, block_size, cu_seqlens)
    if key.shape[1] not in _compressed_rows(existing, rows):
        raise ValueError(
            f"compressed_key {compressed_key.shape} must have a row for each of the {existing} blocks of {T} tokens; "
            "queries that are the last tokens of more need kv_lengths"
        )
    key = _with_rows(rows, key)
    arrays: dict[str, Any] = {"query": query, "compressed_key": key, "compressed_value": key}
    arrays["cu_seqlens"] = None if ends is None else ends[None]
    arrays["kv_lengths"] = kv_lengths
    spec = Spec(scale, block_size, 0, count, count, rows)
    return Call(spec, {name: x for name, x in arrays.items() if x is not None})


def run_selection(call: Call, composite: Composite) -> jax.Array:
    """The blocks (B, T, Hkv, count) that a whole call would select."""
    table = block_table_of(call)
    lse = composite.run(FLASH_ATTENTION, _compressed_call(call, table), takes_cfg=False)["lse"]
    return composite.run(SELECT_BLOCKS, _selection(call, table, lse))["indices"]


def _selection(call: Call, table: BlockTable, lse: jax.Array) -> Call:
    tokens = call["query"], call["compressed_key"], lse
    return selection_call(*tokens, table, scale=call.spec.scale, count=call.spec.room)
