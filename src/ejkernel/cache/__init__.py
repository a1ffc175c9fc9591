"""Caches of keys and values, and who has which pages of one. Their public path is `ejkernel.types`."""

from ejkernel.cache.allocator import Extension, OutOfPages, PageAllocator
from ejkernel.cache.states import StateCacheView
from ejkernel.cache.views import PagedAttentionMetadata, PagedCacheView, TransformerCacheView

__all__ = [
    "Extension",
    "OutOfPages",
    "PageAllocator",
    "PagedAttentionMetadata",
    "PagedCacheView",
    "StateCacheView",
    "TransformerCacheView",
]
