"""Attention of one new token per sequence, over a flat buffer of tokens or over contiguous caches."""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from ejkernel.kernels.paged.calls import BUFFER_LAYOUT, decode_call, ragged_decode_call, ragged_decode_layout
from ejkernel.kernels.paged.operations import DECODE_ATTENTION, RAGGED_DECODE_ATTENTION, attend
from ejkernel.kernels.paged.spec import shards


def decode_attention(
    query: Float[Array, "B H D"],
    key_buffer: jax.Array,
    value_buffer: jax.Array,
    req_to_tokens: Int[Array, "B W"],
    seq_lens: Int[Array, " B"],
    *,
    page_size: int = 1,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    chunk_size: int | None = None,
    mask_fn: Callable[..., Any] | None = None,
    score_fn: Callable[..., Any] | None = None,
    softmax_aux: Float[Array, "..."] | None = None,
    num_splits: int | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    return_lse: bool = False,
    platform: str | None = None,
    cfg: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of one new token per sequence over a flat buffer that all sequences share.

    Forward only.

    Args:
        query: `(B, H, D)`.
        key_buffer: `(tokens, Hkv, D)`; `value_buffer` `(tokens, Hkv, Dv)`.
        req_to_tokens: `(B, W)`: for each sequence its pages in order, counted in pages of `page_size` tokens of the
            buffer; with a page size of 1, simply where each of its tokens lies.
        seq_lens: `(B,)`, keys of each sequence, that of the new token included.
        page_size: tokens per page; must divide the buffer.
        softmax_scale: this and all other options as in `page_attention`.
        return_lse: also return the log-sum-exp, `(B, H)` float32.

    Returns:
        `(B, H, Dv)`; with `return_lse`, `(out, lse)`.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import decode_attention
    >>> buffer = jnp.ones((100, 2, 64))
    >>> tokens = jnp.array([[5, 9, 70], [42, 0, 0]])
    >>> decode_attention(jnp.ones((2, 4, 64)), buffer, buffer, tokens, jnp.array([3, 1])).shape
    (2, 4, 64)
    """
    call = decode_call(
        query,
        key_buffer,
        value_buffer,
        req_to_tokens,
        seq_lens,
        page_size=page_size,
        softmax_scale=softmax_scale,
        logits_soft_cap=logits_soft_cap,
        sliding_window=sliding_window,
        chunk_size=chunk_size,
        mask_fn=mask_fn,
        score_fn=score_fn,
        softmax_aux=softmax_aux,
        num_splits=num_splits,
        k_scale=k_scale,
        v_scale=v_scale,
        return_lse=return_lse,
    )
    split = shards(BUFFER_LAYOUT, mesh, in_specs, out_specs)
    return attend(DECODE_ATTENTION, call, query.shape, split, batched=True, platform=platform, cfg=cfg)


def ragged_decode_attention(
    query: Float[Array, "..."],
    key: jax.Array,
    value: jax.Array,
    sequence_start: Int[Array, " B"],
    sequence_end: Int[Array, " B"],
    softmax_aux: Float[Array, "..."] | None = None,
    *,
    softmax_scale: float | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    chunk_size: int | None = None,
    mask_fn: Callable[..., Any] | None = None,
    score_fn: Callable[..., Any] | None = None,
    logits_soft_cap: float | None = None,
    return_lse: bool = False,
    platform: str | None = None,
    cfg: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of one new token per sequence over contiguous caches, each valid from a start to an end.

    Forward only. Keys outside `[sequence_start, sequence_end)` are neither read nor counted, whatever they hold.

    Args:
        query: `(B, H, D)` or `(B, 1, H, D)`; it stands at position `sequence_end - 1`.
        key: `(B, S, Hkv, D)` in the dtype of the query, float8_e4m3fn, float8_e5m2 or int8.
        value: `(B, S, Hkv, Dv)`.
        sequence_start: `(B,)`, the first valid key.
        sequence_end: `(B,)`, one past the last.
        softmax_aux: as in `page_attention`; so are all options. Functions and chunks count keys from the first of the
            cache, whatever `sequence_start` says.
        return_lse: also return the log-sum-exp, float32: `(B, H)`, or `(B, H, 1)` for a 4-D query.
        mesh: devices to split sequences and heads over: `in_specs` has the specs of query, key and value.

    Returns:
        The output in the rank of the query; with `return_lse`, `(out, lse)`.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import ragged_decode_attention
    >>> cache = jnp.ones((2, 50, 2, 64))
    >>> ragged_decode_attention(jnp.ones((2, 4, 64)), cache, cache, jnp.array([0, 7]), jnp.array([50, 9])).shape
    (2, 4, 64)
    """
    call = ragged_decode_call(
        query,
        key,
        value,
        sequence_start,
        sequence_end,
        softmax_aux,
        softmax_scale=softmax_scale,
        sliding_window=sliding_window,
        chunk_size=chunk_size,
        mask_fn=mask_fn,
        score_fn=score_fn,
        logits_soft_cap=logits_soft_cap,
        return_lse=return_lse,
    )
    split = shards(ragged_decode_layout(query), mesh, in_specs, out_specs)
    return attend(RAGGED_DECODE_ATTENTION, call, query.shape, split, batched=True, platform=platform, cfg=cfg)
