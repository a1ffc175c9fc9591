"""Made by tests/stubs.py from cascade.py."""

from collections.abc import Callable
from typing import Any, Literal, overload

import jax
from jaxtyping import Array, Float, Int

@overload
def cascade_attention(
    query: Float[Array, "..."],
    key_cache: jax.Array,
    value_cache: jax.Array,
    context_lens: Int[Array, " B"],
    block_tables: Int[Array, "B W"],
    prefix_len: Any,
    *,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    mask_fn: Callable[..., Any] | None = None,
    score_fn: Callable[..., Any] | None = None,
    tree_mask: Any = None,
    softmax_aux: Float[Array, "..."] | None = None,
    num_splits: int | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    return_lse: Literal[False] = False,
    platform: str | None = None,
    cfg: Any = None,
) -> jax.Array: ...
@overload
def cascade_attention(
    query: Float[Array, "..."],
    key_cache: jax.Array,
    value_cache: jax.Array,
    context_lens: Int[Array, " B"],
    block_tables: Int[Array, "B W"],
    prefix_len: Any,
    *,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    mask_fn: Callable[..., Any] | None = None,
    score_fn: Callable[..., Any] | None = None,
    tree_mask: Any = None,
    softmax_aux: Float[Array, "..."] | None = None,
    num_splits: int | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    return_lse: Literal[True],
    platform: str | None = None,
    cfg: Any = None,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def cascade_attention(
    query: Float[Array, "..."],
    key_cache: jax.Array,
    value_cache: jax.Array,
    context_lens: Int[Array, " B"],
    block_tables: Int[Array, "B W"],
    prefix_len: Any,
    *,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    mask_fn: Callable[..., Any] | None = None,
    score_fn: Callable[..., Any] | None = None,
    tree_mask: Any = None,
    softmax_aux: Float[Array, "..."] | None = None,
    num_splits: int | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    return_lse: bool,
    platform: str | None = None,
    cfg: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
