"""Masks, block patterns, key-value caches and the dimension glossary."""

from ejkernel.cache import (
    Extension,
    OutOfPages,
    PageAllocator,
    PagedAttentionMetadata,
    PagedCacheView,
    StateCacheView,
    TransformerCacheView,
)
from ejkernel.checks.dims import DIMS, format_shape
from ejkernel.types.conversions import mask_to_segment_ids, segment_ids_to_mask
from ejkernel.types.mask import MaskInfo
from ejkernel.types.pattern import BlockPattern

__all__ = [
    "DIMS",
    "BlockPattern",
    "Extension",
    "MaskInfo",
    "OutOfPages",
    "PageAllocator",
    "PagedAttentionMetadata",
    "PagedCacheView",
    "StateCacheView",
    "TransformerCacheView",
    "format_shape",
    "mask_to_segment_ids",
    "segment_ids_to_mask",
]
