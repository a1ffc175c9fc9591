"""Attention over a cache whose sequences share a prefix, which is read once for all of them."""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from ejkernel.kernels.paged.cascade import cascade_calls, merge_answers
from ejkernel.kernels.paged.operations import CASCADE_ATTENTION, PAGE_ATTENTION, PREFILL_PAGE_ATTENTION
from ejkernel.ops import Composite


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
    return_lse: bool = False,
    platform: str | None = None,
    cfg: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`page_attention` for sequences that begin alike: their common prefix is read once, not once per sequence.

    The queries of all sequences attend together over the prefix, each over its own rest, and both parts are merged by
    their log-sum-exp. The answer is that of `page_attention` with the same arguments. It pays where the prefix is
    longer than the rest times what is left of the batch: a system prompt, few-shot examples, parallel samples.

    Args:
        query: `(B, H, D)` or `(B, T, H, D)`, as in `page_attention`; so are the caches and all options. Windows and
            chunks are for `page_attention`: they show little of a prefix.
        context_lens: `(B,)`, keys of each sequence, prefix and queries included; an empty one gives zeros.
        block_tables: `(B, W)`; the pages of the first `prefix_len` keys must be the same in every row not empty:
            checked where all of lengths and table are on the host, or with `EJKERNEL_CHECKS=1`.
        prefix_len: a number, traced or not, of keys that all sequences share; any number, not only whole pages. What
            would go beyond a sequence's first query is left to its own part.

    Returns:
        As `page_attention`.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import cascade_attention
    >>> cache = jnp.ones((8, 16, 2, 64))
    >>> tables = jnp.array([[3, 1, 2], [3, 1, 7]])  # 32 keys in common
    >>> cascade_attention(jnp.ones((2, 4, 64)), cache, cache, jnp.array([40, 35]), tables, 32).shape
    (2, 4, 64)
    """
    prefix_call, suffix_call = cascade_calls(
        query,
        key_cache,
        value_cache,
        context_lens,
        block_tables,
        prefix_len,
        softmax_scale=softmax_scale,
        logits_soft_cap=logits_soft_cap,
        mask_fn=mask_fn,
        score_fn=score_fn,
        tree_mask=tree_mask,
        softmax_aux=softmax_aux,
        num_splits=num_splits,
        k_scale=k_scale,
        v_scale=v_scale,
        return_lse=return_lse,
    )
    composite = Composite(CASCADE_ATTENTION, platform, cfg)
    prefix = composite.run(PREFILL_PAGE_ATTENTION, prefix_call)
    suffix = composite.run(PAGE_ATTENTION, suffix_call)
    return merge_answers(suffix_call, prefix, suffix, query.shape)
