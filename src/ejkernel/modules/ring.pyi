"""Made by tests/stubs.py from ring.py."""

from collections.abc import Callable
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ejkernel.types import MaskInfo

@overload
def ring_attention(
    query: Float[Array, "*B T H D"],
    key: Float[Array, "*B S Hkv D"],
    value: Float[Array, "*B S Hkv Dv"],
    bias: Float[Array, "..."] | None = None,
    softmax_aux: Float[Array, "..."] | None = None,
    *,
    axis_name: str | tuple[str, str] = "sp",
    mask_info: MaskInfo | None = None,
    causal: bool = False,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: int | jax.Array | None = None,
    layout: str = "contiguous",
    method: str = "auto",
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
def ring_attention(
    query: Float[Array, "*B T H D"],
    key: Float[Array, "*B S Hkv D"],
    value: Float[Array, "*B S Hkv Dv"],
    bias: Float[Array, "..."] | None = None,
    softmax_aux: Float[Array, "..."] | None = None,
    *,
    axis_name: str | tuple[str, str] = "sp",
    mask_info: MaskInfo | None = None,
    causal: bool = False,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: int | jax.Array | None = None,
    layout: str = "contiguous",
    method: str = "auto",
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
def ring_attention(
    query: Float[Array, "*B T H D"],
    key: Float[Array, "*B S Hkv D"],
    value: Float[Array, "*B S Hkv Dv"],
    bias: Float[Array, "..."] | None = None,
    softmax_aux: Float[Array, "..."] | None = None,
    *,
    axis_name: str | tuple[str, str] = "sp",
    mask_info: MaskInfo | None = None,
    causal: bool = False,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: int | jax.Array | None = None,
    layout: str = "contiguous",
    method: str = "auto",
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
