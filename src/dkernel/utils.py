"""dkernel's patterns under the name of its file."""

from ejkernel.torch import get_sparse_attn_mask

__all__ = ["get_sparse_attn_mask"]
