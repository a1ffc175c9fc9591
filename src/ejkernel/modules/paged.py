"""Attention over a paged cache: a batch of sequences, packed queries of any number, one sequence's chunk."""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from ejkernel.kernels.paged.calls import (
    PREFILL_LAYOUT,
    batch_layout,
    page_call,
    prefill_call,
    ragged_layout,
    ragged_page_call,
    specs_by_array,
)
from ejkernel.kernels.paged.operations import PAGE_ATTENTION, PREFILL_PAGE_ATTENTION, RAGGED_PAGE_ATTENTION, attend
from ejkernel.kernels.paged.spec import shards


def page_attention(
    query: Float[Array, "..."],
    key_cache: jax.Array,
    value_cache: jax.Array,
    context_lens: Int[Array, " B"],
    block_tables: Int[Array, "B W"],
    *,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    chunk_size: int | None = None,
    mask_fn: Callable[..., Any] | None = None,
    score_fn: Callable[..., Any] | None = None,
    tree_mask: Any = None,
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
    """Attention of each sequence's newest tokens over its pages of a key-value cache: decoding.

    Forward only. Lengths and tables are read on the device: changing them compiles nothing. Only the pages of a
    sequence's real length (and window) are read; other slots of its row may hold anything, other pages even NaN.

    Args:
        query: `(B, H, D)` or `(B, 1, H, D)`; `(B, T, H, D)` for T tokens each, as in speculative decoding. They are the
            last tokens of their sequences, so each sees the keys up to its own.
        key_cache: `(pages, page_size, Hkv, D)` in the dtype of the query, float8_e4m3fn, float8_e5m2 or int8. `Hkv`
            divides `H`; the page size is any.
        value_cache: `(pages, page_size, Hkv, Dv)`.
        context_lens: `(B,)`, keys of each sequence, those of the queries included; 0 gives zeros.
        block_tables: `(B, W)`, the ids of each sequence's pages in order.
        softmax_scale: a number, which may be traced; default `D ** -0.5`.
        logits_soft_cap: `c` turns the scaled logits into `c * tanh(logits / c)`; it may be traced.
        sliding_window: `w`, or `(left, right)`: a token sees itself and `left` keys before; pages before are skipped.
            It may be traced.
        chunk_size: a token sees the keys of its own chunk only, those with the same `position // chunk_size`; pages
            before are skipped.
        mask_fn: `mask_fn(b, h, i, j) -> bool`: whether sequence b, query head h, at position i sees the key at position
            j, beside causality and everything else that hides keys. See "Masks and scores" in the docs.
        score_fn: `score_fn(score, b, h, i, j)` is the logit, from that after scale and soft cap.
        tree_mask: bool `(B, n, n)`, or `(n, n)` for all sequences: which of a sequence's newest n keys its newest n
            tokens see, as drafts that are branches of a tree; all of them see all keys before. A token comes after
            those that it sees.
        softmax_aux: sink logits `(H,)`, `(H, n)`, or `(1, n)` that all heads share; they join every softmax once and
            have no value.
        num_splits: compute the key axis in this many parts and merge them; default: what the platform finds best.
        k_scale: scalar or `(Hkv,)`: cached keys times this are the keys. `v_scale`: the same for values.
        return_lse: also return the log-sum-exp, float32, sinks included: `(B, H, T)`, or `(B, H)` for a 3-D query.
        platform: `None` or `"auto"`, `"xla"`, `"triton"`, `"pallas"`.
        cfg: the platform's `Config`, or a dict of its fields.
        mesh: devices to split sequences and heads over: `in_specs` has the specs of query, key_cache and value_cache
            (or a dict by name), the others' are derived. Pages are not split; inside a `shard_map` of your own every
            device may have its own.
        in_specs: see `mesh`.
        out_specs: spec of the output (and of lse), derived by default.

    Returns:
        The output, in the rank of the query and with head dimension `Dv`; with `return_lse`, `(out, lse)`.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import page_attention
    >>> cache = jnp.ones((8, 16, 2, 64))  # 8 pages of 16 tokens
    >>> tables = jnp.array([[3, 1], [7, 0]])  # the second sequence needs one page: its other slot may hold anything
    >>> page_attention(jnp.ones((2, 1, 4, 64)), cache, cache, jnp.array([20, 5]), tables).shape
    (2, 1, 4, 64)
    >>> drafts = jnp.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)  # two ways to go on after the first of three tokens
    >>> slopes = jnp.array([0.5, 0.25, 0.125, 0.0625])
    >>> page_attention(
    ...     jnp.ones((2, 3, 4, 64)), cache, cache, jnp.array([20, 5]), tables, tree_mask=drafts,
    ...     score_fn=lambda score, b, h, i, j: score - slopes[h] * (i - j),
    ... ).shape
    (2, 3, 4, 64)
    """
    call = page_call(
        query,
        key_cache,
        value_cache,
        context_lens,
        block_tables,
        softmax_scale=softmax_scale,
        logits_soft_cap=logits_soft_cap,
        sliding_window=sliding_window,
        chunk_size=chunk_size,
        mask_fn=mask_fn,
        score_fn=score_fn,
        tree_mask=tree_mask,
        softmax_aux=softmax_aux,
        num_splits=num_splits,
        k_scale=k_scale,
        v_scale=v_scale,
        return_lse=return_lse,
    )
    split = shards(batch_layout(query), mesh, in_specs, out_specs)
    return attend(PAGE_ATTENTION, call, query.shape, split, batched=True, platform=platform, cfg=cfg)


def ragged_page_attention(
    queries: Float[Array, "T H D"],
    kv_pages: jax.Array | tuple[jax.Array, jax.Array],
    context_lens: Int[Array, " N"],
    block_tables: Int[Array, "N W"],
    query_start_loc: Int[Array, "..."],
    num_seqs: Any,
    softmax_aux: Float[Array, "..."] | None = None,
    *,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    chunk_size: int | None = None,
    mask_fn: Callable[..., Any] | None = None,
    score_fn: Callable[..., Any] | None = None,
    tree_mask: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    platform: str | None = None,
    cfg: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> jax.Array:
    """Prefill, decode and mixed batches in one call: any number of query tokens per sequence.

    Forward only. Nothing depends on the values of the lengths but the work done: no reading back, no compiling.

    Args:
        queries: `(T, H, D)`, the newest tokens of all sequences, one sequence after the other.
        kv_pages: `(pages, page_size, 2 * Hkv, D)`: keys in the even rows, values in the odd ones. Or the pair
            `(key_pages, value_pages)` of a `PagedCacheView`, `(pages, page_size, Hkv, D)` each.
        context_lens: `(N,)`, keys of each sequence, those of its queries included.
        block_tables: `(N, W)`, the ids of each sequence's pages in order.
        query_start_loc: `(N + 1,)`: sequence n has the queries from entry n up to entry n + 1, and they are its last
            tokens. Rows past entry `num_seqs` come back zero.
        num_seqs: how many sequences there are, None for all; entries past it, in all arrays, are ignored.
        softmax_aux: as in `page_attention`; so are all options.
        mesh: devices to split heads over: `in_specs` has the specs of queries and kv_pages (of a pair: a pair,
            or one after the other).

    Returns:
        `(T, H, D)`, of a pair `(T, H, Dv)`.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import ragged_page_attention
    >>> pages = jnp.ones((8, 16, 4, 64))
    >>> tables = jnp.array([[3, 1], [7, 0], [0, 0]])
    >>> # the first sequence decodes one token, the second prefills five; there is no third
    >>> out = ragged_page_attention(
    ...     jnp.ones((8, 4, 64)), pages, jnp.array([20, 5, 0]), tables, jnp.array([0, 1, 6, 6]), 2
    ... )
    >>> out.shape, bool(out[6:].any())
    ((8, 4, 64), False)
    """
    call = ragged_page_call(
        queries,
        kv_pages,
        context_lens,
        block_tables,
        query_start_loc,
        num_seqs,
        softmax_aux=softmax_aux,
        softmax_scale=softmax_scale,
        logits_soft_cap=logits_soft_cap,
        sliding_window=sliding_window,
        chunk_size=chunk_size,
        mask_fn=mask_fn,
        score_fn=score_fn,
        tree_mask=tree_mask,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    split = shards(ragged_layout(kv_pages), mesh, specs_by_array(kv_pages, in_specs), out_specs)
    return attend(RAGGED_PAGE_ATTENTION, call, queries.shape, split, batched=False, platform=platform, cfg=cfg)


def prefill_page_attention(
    query: Float[Array, "T H D"],
    key_cache: jax.Array,
    value_cache: jax.Array,
    context_len: Any,
    page_indices: Int[Array, " W"],
    *,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    chunk_size: int | None = None,
    mask_fn: Callable[..., Any] | None = None,
    score_fn: Callable[..., Any] | None = None,
    tree_mask: Any = None,
    softmax_aux: Float[Array, "..."] | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    return_lse: bool = False,
    platform: str | None = None,
    cfg: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of one sequence's newest chunk over its pages, which hold the chunk's own keys already.

    Forward only.

    Args:
        query: `(T, H, D)`, the last T tokens of the sequence.
        key_cache: `(pages, page_size, Hkv, D)`; `value_cache` and all options as in `page_attention`.
        context_len: a number, keys of the sequence, those of the chunk included.
        page_indices: `(W,)`, the ids of its pages in order.
        return_lse: also return the log-sum-exp, `(H, T)` float32.

    Returns:
        `(T, H, Dv)`; with `return_lse`, `(out, lse)`.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import prefill_page_attention
    >>> cache = jnp.ones((8, 16, 2, 64))
    >>> prefill_page_attention(jnp.ones((5, 4, 64)), cache, cache, 20, jnp.array([3, 1])).shape
    (5, 4, 64)
    """
    call = prefill_call(
        query,
        key_cache,
        value_cache,
        context_len,
        page_indices,
        softmax_scale=softmax_scale,
        logits_soft_cap=logits_soft_cap,
        sliding_window=sliding_window,
        chunk_size=chunk_size,
        mask_fn=mask_fn,
        score_fn=score_fn,
        tree_mask=tree_mask,
        softmax_aux=softmax_aux,
        k_scale=k_scale,
        v_scale=v_scale,
        return_lse=return_lse,
    )
    split = shards(PREFILL_LAYOUT, mesh, in_specs, out_specs)
    return attend(PREFILL_PAGE_ATTENTION, call, query.shape, split, batched=False, platform=platform, cfg=cfg)
