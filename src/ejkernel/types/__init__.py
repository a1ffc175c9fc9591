"""Masks, block patterns, key-value caches and the dimension glossary."""

import importlib
from typing import TYPE_CHECKING, Any

from ejkernel.types.dims import DIMS, format_shape
from ejkernel.types.mask import MaskInfo
from ejkernel.types.pattern import BlockPattern

if TYPE_CHECKING:
    from ejkernel.cache import (
        Extension,
        OutOfPages,
        PageAllocator,
        PagedAttentionMetadata,
        PagedCacheView,
        StateCacheView,
        TransformerCacheView,
    )

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
]

# public names of a room far above, which uses operations and so masks: loaded when one is asked for
_UPSTAIRS = {name: "ejkernel.cache" for name in __all__ if name not in globals()}


def __getattr__(name: str) -> Any:
    if name not in _UPSTAIRS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_UPSTAIRS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
