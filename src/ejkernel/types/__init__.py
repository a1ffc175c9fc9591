"""Masks, block patterns, key-value caches and the dimension glossary."""

from .allocator import Extension, OutOfPages, PageAllocator
from .cache import PagedAttentionMetadata, PagedCacheView, TransformerCacheView
from .dims import DIMS, format_shape
from .mask import MaskInfo
from .pattern import BlockPattern

__all__ = [
    "DIMS",
    "BlockPattern",
    "Extension",
    "MaskInfo",
    "OutOfPages",
    "PageAllocator",
    "PagedAttentionMetadata",
    "PagedCacheView",
    "TransformerCacheView",
    "format_shape",
]
