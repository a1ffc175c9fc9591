"""Made by tests/stubs.py from flash.py."""

from collections.abc import Callable
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ejkernel.types import MaskInfo

@overload
def flash_attention(
    query: Float[Array, "*B T H D"],
    key: Float[Array, "*B S Hkv D"],
    value: Float[Array, "*B S Hkv Dv"],
    bias: Float[Array, "..."] | None = None,
    cum_seqlens_q: Int[Array, " N1"] | None = None,
    cum_seqlens_k: Int[Array, " N1"] | None = None,
    softmax_aux: Float[Array, "..."] | None = None,
    *,
    mask_info: MaskInfo | None = None,
    softmax_scale: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: int | jax.Array | None = None,
    causal: bool = False,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    normalize_output: bool = True,
    precision: Any = None,
    logits_dtype: Any = jnp.float32,
    return_lse: Literal[False] = False,
    mask_fn: Callable[..., Any] | None = None,
    score_fn: Callable[..., Any] | None = None,
    alibi_slopes: Float[Array, "..."] | None = None,
    platform: str | None = None,
    cfg: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> jax.Array: ...
@overload
def flash_attention(
    query: Float[Array, "*B T H D"],
    key: Float[Array, "*B S Hkv D"],
    value: Float[Array, "*B S Hkv Dv"],
    bias: Float[Array, "..."] | None = None,
    cum_seqlens_q: Int[Array, " N1"] | None = None,
    cum_seqlens_k: Int[Array, " N1"] | None = None,
    softmax_aux: Float[Array, "..."] | None = None,
    *,
    mask_info: MaskInfo | None = None,
    softmax_scale: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: int | jax.Array | None = None,
    causal: bool = False,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    normalize_output: bool = True,
    precision: Any = None,
    logits_dtype: Any = jnp.float32,
    return_lse: Literal[True],
    mask_fn: Callable[..., Any] | None = None,
    score_fn: Callable[..., Any] | None = None,
    alibi_slopes: Float[Array, "..."] | None = None,
    platform: str | None = None,
    cfg: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def flash_attention(
    query: Float[Array, "*B T H D"],
    key: Float[Array, "*B S Hkv D"],
    value: Float[Array, "*B S Hkv Dv"],
    bias: Float[Array, "..."] | None = None,
    cum_seqlens_q: Int[Array, " N1"] | None = None,
    cum_seqlens_k: Int[Array, " N1"] | None = None,
    softmax_aux: Float[Array, "..."] | None = None,
    *,
    mask_info: MaskInfo | None = None,
    softmax_scale: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: int | jax.Array | None = None,
    causal: bool = False,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    normalize_output: bool = True,
    precision: Any = None,
    logits_dtype: Any = jnp.float32,
    return_lse: bool,
    mask_fn: Callable[..., Any] | None = None,
    score_fn: Callable[..., Any] | None = None,
    alibi_slopes: Float[Array, "..."] | None = None,
    platform: str | None = None,
    cfg: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
