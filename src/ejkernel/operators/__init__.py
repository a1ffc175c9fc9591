"""Attention as objects: classes with settings, chosen by name. All of them call `ejkernel.modules`."""

from ejkernel.operators.cached import AutoRegressiveDecodeAttn, PagedAttn
from ejkernel.operators.impl import AttentionImpl, AttentionOutput
from ejkernel.operators.metadata import AttentionMetadata, PartitionAxis
from ejkernel.operators.registry import AttentionRegistry
from ejkernel.operators.ring import RingAttn
from ejkernel.operators.softmax import FlashAttn, ScaledDotProductAttn, SplashAttn, VanillaAttn

__all__ = [
    "AttentionImpl",
    "AttentionMetadata",
    "AttentionOutput",
    "AttentionRegistry",
    "AutoRegressiveDecodeAttn",
    "FlashAttn",
    "PagedAttn",
    "PartitionAxis",
    "RingAttn",
    "ScaledDotProductAttn",
    "SplashAttn",
    "VanillaAttn",
]
