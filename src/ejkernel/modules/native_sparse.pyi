"""Made by tests/stubs.py from native_sparse.py."""

from collections.abc import Callable
from typing import Any, Literal, overload

import jax
from jaxtyping import Array, Float, Int

def native_sparse_attention(
    query: Float[Array, "*B T H D"],
    key: Float[Array, "*B S Hkv D"],
    value: Float[Array, "*B S Hkv Dv"],
    g_cmp: Float[Array, "*B T H"] | None = None,
    g_slc: Float[Array, "*B T H"] | None = None,
    block_indices: Int[Array, "*B T Hkv K"] | None = None,
    block_counts: Any = None,
    cu_seqlens: Int[Array, " N1"] | None = None,
    *,
    g_swa: Float[Array, "*B T H"] | None = None,
    compressed: tuple[Float[Array, "*B N Hkv D"], Float[Array, "*B N Hkv Dv"]] | None = None,
    kv_lengths: Int[Array, " B"] | None = None,
    block_size: int = 64,
    window_size: int | jax.Array = 0,
    softmax_scale: float | None = None,
    platform: str | None = None,
    cfg: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "*B T H Dv"]: ...
@overload
def selected_attention(
    query: Float[Array, "*B T H D"],
    key: Float[Array, "*B S Hkv D"],
    value: Float[Array, "*B S Hkv Dv"],
    block_indices: Int[Array, "*B T Hkv K"],
    block_counts: Any = None,
    cu_seqlens: Int[Array, " N1"] | None = None,
    softmax_aux: Float[Array, "..."] | None = None,
    *,
    kv_lengths: Int[Array, " B"] | None = None,
    block_size: int = 64,
    softmax_scale: float | None = None,
    return_lse: Literal[False] = False,
    mask_fn: Callable[..., Any] | None = None,
    score_fn: Callable[..., Any] | None = None,
    platform: str | None = None,
    cfg: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> jax.Array: ...
@overload
def selected_attention(
    query: Float[Array, "*B T H D"],
    key: Float[Array, "*B S Hkv D"],
    value: Float[Array, "*B S Hkv Dv"],
    block_indices: Int[Array, "*B T Hkv K"],
    block_counts: Any = None,
    cu_seqlens: Int[Array, " N1"] | None = None,
    softmax_aux: Float[Array, "..."] | None = None,
    *,
    kv_lengths: Int[Array, " B"] | None = None,
    block_size: int = 64,
    softmax_scale: float | None = None,
    return_lse: Literal[True],
    mask_fn: Callable[..., Any] | None = None,
    score_fn: Callable[..., Any] | None = None,
    platform: str | None = None,
    cfg: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def selected_attention(
    query: Float[Array, "*B T H D"],
    key: Float[Array, "*B S Hkv D"],
    value: Float[Array, "*B S Hkv Dv"],
    block_indices: Int[Array, "*B T Hkv K"],
    block_counts: Any = None,
    cu_seqlens: Int[Array, " N1"] | None = None,
    softmax_aux: Float[Array, "..."] | None = None,
    *,
    kv_lengths: Int[Array, " B"] | None = None,
    block_size: int = 64,
    softmax_scale: float | None = None,
    return_lse: bool,
    mask_fn: Callable[..., Any] | None = None,
    score_fn: Callable[..., Any] | None = None,
    platform: str | None = None,
    cfg: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
def select_blocks(
    query: Float[Array, "*B T H D"],
    compressed_key: Float[Array, "*B N Hkv D"],
    block_counts: int = 16,
    cu_seqlens: Int[Array, " N1"] | None = None,
    *,
    kv_lengths: Int[Array, " B"] | None = None,
    block_size: int = 64,
    softmax_scale: float | None = None,
    platform: str | None = None,
    cfg: Any = None,
) -> Int[Array, "*B T Hkv K"]: ...
