"""Operators over a cache: one new token over contiguous rows, or any number over pages."""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from ejkernel.cache import PagedAttentionMetadata, PagedCacheView, TransformerCacheView
from ejkernel.modules import (
    page_attention,
    prefill_page_attention,
    ragged_decode_attention,
    ragged_page_attention,
)
from ejkernel.operators.impl import AttentionImpl, AttentionOutput
from ejkernel.operators.registry import AttentionRegistry

SEEN_BY_CACHE = "what is seen follows from the cache"


@AttentionRegistry.register
class AutoRegressiveDecodeAttn(AttentionImpl):
    """One new token per row over a contiguous cache: `ejkernel.modules.ragged_decode_attention`. Forward only.

    >>> import jax.numpy as jnp
    >>> from ejkernel.operators import AttentionMetadata, AutoRegressiveDecodeAttn
    >>> from ejkernel.types import TransformerCacheView
    >>> token = jnp.ones((2, 1, 1, 8))
    >>> cache = TransformerCacheView.create(2, 16, 1, 8, dtype=jnp.float32).append(token, token)
    >>> attend = AutoRegressiveDecodeAttn(AttentionMetadata())
    >>> attend(jnp.ones((2, 1, 4, 8)), cache.key, cache.value, cache).attention_outputs.shape
    (2, 1, 4, 8)
    """

    @classmethod
    def get_impl_name(cls) -> str:
        return "autoregressive_decodeattn"

    def forward_native(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache_view: Any = None,
        *,
        mask: Any = None,
        bias: Any = None,
        init_bias: Any = None,
        causal: bool = True,
        deterministic: bool = True,
        dropout_rng: Any = None,
        cache_metadata: Any = None,
        **ignore: Any,
    ) -> AttentionOutput:
        """Attention of the newest token over the valid ones.

        Args:
            q: `(B, 1, H, D)`.
            k: the cache, `(B, S, Hkv, D)`; `v` likewise.
            cache_view: a `TransformerCacheView`: tokens from `starts` up to `index` are valid.
            causal: True or False: the newest token sees all others anyway.
            ignore: other keywords, which a warning names.
        """
        self.warn_of_ignored(ignore)
        self.refuse(SEEN_BY_CACHE, mask=mask, bias=bias, init_bias=init_bias, cache_metadata=cache_metadata)
        self.refuse_dropout(deterministic)
        self.refuse_softmax_dtype()
        if not isinstance(cache_view, TransformerCacheView):
            raise TypeError(f"cache_view must be a TransformerCacheView, got {type(cache_view).__name__}")
        q, k, v = self.cast(q=q, k=k, v=v)
        out = ragged_decode_attention(
            q,
            k,
            v,
            cache_view.starts,
            cache_view.index,
            in_specs=self.metadata.specs("decode", q.shape, k.shape),
            **self.shared_options(),
        )
        return AttentionOutput(attention_outputs=out)


@AttentionRegistry.register
class PagedAttn(AttentionImpl):
    """Over a cache in pages: prompts, answers and both in one batch. Forward only.

    >>> import jax.numpy as jnp
    >>> from ejkernel.operators import AttentionMetadata, PagedAttn
    >>> from ejkernel.types import PagedAttentionMetadata, PagedCacheView
    >>> cache = PagedCacheView.create(8, 16, 2, 64, dtype=jnp.float32)
    >>> metadata = PagedAttentionMetadata.create([20, 5], [[3, 1], [7, 0]])
    >>> attend = PagedAttn(AttentionMetadata())
    >>> attend(jnp.ones((2, 1, 4, 64)), None, None, cache, metadata).attention_outputs.shape
    (2, 1, 4, 64)
    """

    @classmethod
    def get_impl_name(cls) -> str:
        return "paged_attention"

    def forward_native(
        self,
        q: jax.Array,
        k: Any,
        v: Any,
        cache_view: Any = None,
        cache_metadata: Any = None,
        *,
        mask: Any = None,
        bias: Any = None,
        init_bias: Any = None,
        causal: bool = True,
        deterministic: bool = True,
        dropout_rng: Any = None,
        **ignore: Any,
    ) -> AttentionOutput:
        """Attention of the newest tokens of each sequence over its pages.

        Args:
            q: `(B, 1, H, D)` or `(B, H, D)` for one token of each sequence (decode), `(1, T, H, D)` for a chunk of one
                sequence (prefill). With `query_start_loc`, packed tokens of any number for each sequence (mixed):
                `(1, tokens, H, D)`, `(tokens, H, D)`, or `(tokens, 1, H, D)`.
            k: not read: keys and values are in the pages, written there before. `v` likewise.
            cache_view: a `PagedCacheView`.
            cache_metadata: a `PagedAttentionMetadata`.
            causal: True: tokens see those up to themselves.
            ignore: other keywords, which a warning names.

        Returns:
            The output in the layout of q.
        """
        self.warn_of_ignored(ignore)
        self.refuse(SEEN_BY_CACHE, mask=mask, bias=bias, init_bias=init_bias)
        self.refuse("tokens see those up to themselves", causal=None if causal else causal)
        self.refuse_dropout(deterministic)
        self.refuse_softmax_dtype()
        if not isinstance(cache_view, PagedCacheView):
            raise TypeError(f"cache_view must be a PagedCacheView, got {type(cache_view).__name__}")
        if not isinstance(cache_metadata, PagedAttentionMetadata):
            raise TypeError(f"cache_metadata must be a PagedAttentionMetadata, got {type(cache_metadata).__name__}")
        (q,) = self.cast(q=q)
        if q.ndim not in (3, 4):
            layouts = "(1, tokens, heads, head_dim), (batch, 1, heads, head_dim) or (batch, heads, head_dim)"
            raise ValueError(f"q must be {layouts}, got {q.shape}")
        rows = q[:, None] if q.ndim == 3 else q
        out = self._attend(rows, cache_view, cache_metadata)
        return AttentionOutput(attention_outputs=out[:, 0] if q.ndim == 3 else out)

    def _attend(self, q: jax.Array, cache: PagedCacheView, metadata: PagedAttentionMetadata) -> jax.Array:
        """Over q (batch, tokens, heads, head_dim) or, packed, with one of the first two 1."""
        pages = cache.key_pages, cache.value_pages
        lens, tables, starts = metadata.context_lens, metadata.block_tables, metadata.query_start_loc
        options = {"softmax_scale": self.metadata.softmax_scale, "platform": self.metadata.platform}
        if starts is not None:
            if 1 not in q.shape[:2]:
                packed = "(1, tokens, heads, head_dim), (tokens, 1, heads, head_dim) or (tokens, heads, head_dim)"
                raise ValueError(f"q with a query_start_loc must be {packed}, got {q.shape}")
            tokens = q.reshape(-1, *q.shape[2:])
            options |= self._shardings(q, pages[0], packed=True)
            out = ragged_page_attention(tokens, pages, lens, tables, starts, metadata.num_seqs, **options)
            return out.reshape(*q.shape[:2], *out.shape[1:])
        if q.shape[0] == 1 and q.shape[1] > 1:
            options |= self._shardings(q, pages[0], packed=True)
            return prefill_page_attention(q[0], *pages, lens[0], tables[0], **options)[None]
        return page_attention(q, *pages, lens, tables, **options, **self._shardings(q, pages[0], packed=False))

    def _shardings(self, q: jax.Array, pages: jax.Array, *, packed: bool) -> dict[str, Any]:
        """Sequences and heads are split over the mesh; pages and packed tokens are not."""
        specs = self.metadata.specs(self.get_mode(q), q.shape, pages.shape)
        if specs is None:
            return {}
        query, (_, _, kv_heads, _) = specs[0], specs[1]
        cache = PartitionSpec(None, None, kv_heads, None)
        return {
            "mesh": self.metadata.mesh,
            "in_specs": (PartitionSpec(None, query[2], None) if packed else query, cache, cache),
        }
