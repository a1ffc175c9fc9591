"""The definitions: attention over the tokens of the selected blocks, and which blocks are selected."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.native_sparse import spec as selected
from ejkernel.kernels.native_sparse.block_table import BlockTable, block_table_of
from ejkernel.kernels.native_sparse.selection import assembled, free_blocks, selection_call
from ejkernel.kernels.native_sparse.spec import dimensions, table_rows
from ejkernel.kernels.softmax import reference as softmax
from ejkernel.kernels.softmax import spec as softmax_spec
from ejkernel.ops import Call


def visible(call: Call) -> jax.Array:
    """Which query sees which key: bool (B, Hkv, T, S)."""
    dims = dimensions(call)
    starts = jnp.broadcast_to(call["starts"], (dims.B, dims.N))
    # (B, T, Hkv, N): which blocks a query has
    chosen = (call["indices"][..., None] == jnp.arange(dims.N)).any(-2)
    key = jnp.arange(dims.S)
    block = jax.vmap(lambda row: jnp.searchsorted(row, key, side="right") - 1)(starts)  # (B, S)
    inside = key - jnp.take_along_axis(starts, block, 1) < call.spec.block_size
    of_key = jnp.take_along_axis(chosen, block[:, None, None], 3)  # (B, T, Hkv, S)
    seen = of_key & inside[:, None, None] & (key < call["limits"][:, :, None, None])
    return seen.swapaxes(1, 2)


def reference(call: Call, dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    """out (B, T, H, Dv) and lse (B, H, T), as softmax attention under a mask."""
    arrays = {name: x for name, x in call.arrays.items() if name not in ("indices", "starts", "limits")}
    arrays["mask"] = jnp.repeat(visible(call), dimensions(call).G, axis=1)
    return softmax.reference(Call(softmax_spec.Spec(scale=call.spec.scale, rules=call.spec.rules), arrays), dtype)


def importance(call: Call) -> jax.Array:
    """Weight (B, T, Hkv, N) that a query's heads give together to each block they choose among; -1 to the others."""
    B, T, H, D = call["query"].shape
    N, Hkv = call["key"].shape[1:3]
    query = call["query"].astype(jnp.float32).reshape(B, T, Hkv, H // Hkv, D)
    key = call["key"].astype(jnp.float32)
    logits = call.spec.scale * jnp.einsum("bthgd,bnhd->bthgn", query, key, precision="highest")
    lse = call["lse"].swapaxes(1, 2).reshape(B, T, Hkv, -1, 1)
    free = free_blocks(call["first_row"], call["own_block"], N)[:, :, None]
    weights = jnp.exp(jnp.where(free[..., None, :], logits - lse, -jnp.inf))
    return jnp.where(free, weights.sum(3), -1.0)


def select(call: Call) -> jax.Array:
    """(B, T, Hkv, K): the blocks that are always taken, then the weightiest."""
    weight = importance(call)
    order = jnp.argsort(-weight, axis=-1, stable=True)
    best = jnp.where(jnp.take_along_axis(weight, order, -1) >= 0, order - call["first_row"][:, :, None, None], -1)
    return assembled(call, best)


def native_sparse(call: Call, dtype: Any = jnp.float32) -> jax.Array:
    """out (B, T, H, Dv) of a whole call, from the definitions of its steps."""
    spec, S = call.spec, call["key"].shape[1]
    table = block_table_of(call)
    keys, values = (_compressed(call, name, table.starts) for name in ("key", "value"))
    compressed = _attention(call, call["query"], keys, values, _whole_blocks(spec.block_size, table), dtype)
    branches = [("g_cmp", compressed["out"])] if "g_cmp" in call else []
    if "block_indices" in call or "g_slc" in call:
        chosen = selection_call(call["query"], keys, compressed["lse"], table, scale=spec.scale, count=spec.room)
        indices = call["block_indices"] if "block_indices" in call else select(chosen)
        arrays = {name: call[name] for name in ("query", "key", "value")}
        arrays["indices"] = table_rows(indices, call.get("block_counts", spec.count), table)
        arrays |= {"starts": table.starts, "limits": table.limits}
        branches.append(("g_slc", reference(Call(selected.Spec(spec.scale, spec.block_size), arrays), dtype)["out"]))
    if "g_swa" in call:
        key, limits = jnp.arange(S), table.limits[..., None]
        window = call["window_size"][:, None, None] if spec.window is None else spec.window
        begin = jnp.maximum(limits - window, _begins(table)[..., None])
        seen = (key < limits) & (key >= begin)
        branches.append(("g_swa", _attention(call, call["query"], call["key"], call["value"], seen, dtype)["out"]))
    real, total = (table.limits > 0)[..., None, None], 0.0
    for name, out in branches:
        gate = call[name].astype(jnp.float32)[..., None] if name in call else 1.0
        total += jnp.where(real, gate, 0.0) * out.astype(jnp.float32)
    return jnp.asarray(total, dtype)


def select_whole(call: Call, dtype: Any = jnp.float32) -> jax.Array:
    """The blocks (B, T, Hkv, count) of a call of `select_blocks`, in the form of a whole one."""
    spec, table, keys = call.spec, block_table_of(call), call["compressed_key"]
    lse = _attention(call, call["query"], keys, keys, _whole_blocks(spec.block_size, table), dtype)["lse"]
    return select(selection_call(call["query"], keys, lse, table, scale=spec.scale, count=spec.room))


def _whole_blocks(block_size: int, table: BlockTable) -> jax.Array:
    """(B|1, T, N): the blocks of a query's sequence that end where it does or before."""
    ends = table.starts[:, None] + block_size <= table.limits[..., None]
    return ends & (table.first_row_of_block[:, None] == table.first_row[..., None])


def _compressed(call: Call, name: str, starts: jax.Array) -> jax.Array:
    """(B, N, Hkv, D): what is given, or the means of the blocks."""
    if f"compressed_{name}" in call:
        return call[f"compressed_{name}"]
    x, size = call[name].astype(jnp.float32), call.spec.block_size
    token = jnp.arange(x.shape[1])
    member = (starts[..., None] <= token) & (token < starts[..., None] + size)  # (1, N, S)
    total = jnp.where(member[..., None, None], x[:, None], 0).sum(2)
    return (total / size).astype(call[name].dtype)


def _attention(call: Call, query: Any, key: Any, value: Any, seen: jax.Array, dtype: Any) -> dict[str, jax.Array]:
    arrays = {"query": query, "key": key, "value": value, "mask": seen[:, None]}
    return softmax.reference(Call(softmax_spec.Spec(scale=call.spec.scale), arrays), dtype)


def _begins(table: BlockTable) -> jax.Array:
    """The first key of each query's sequence: (B|1, T)."""
    return jnp.take_along_axis(table.starts, table.first_row, 1)
