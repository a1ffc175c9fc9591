"""dkernel's imports on ejkernel's kernels; see `ejkernel.torch`."""

from ejkernel.torch import LocalStrideSparseAttention, SparseAttention, combine_attn_partitions, get_sparse_attn_mask

__all__ = ["LocalStrideSparseAttention", "SparseAttention", "combine_attn_partitions", "get_sparse_attn_mask"]
