"""dkernel's modules under the name of its file."""

from ejkernel.torch import LocalStrideSparseAttention, SparseAttention, combine_attn_partitions

__all__ = ["LocalStrideSparseAttention", "SparseAttention", "combine_attn_partitions"]
