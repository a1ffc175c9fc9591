"""The PyTorch front end: dkernel's block-sparse attention and `flash_attention` on tensors, on the kernels of JAX."""

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "ejkernel.torch and dkernel need PyTorch: pip install 'ejkernel-attention[torch]'", name="torch"
    ) from error

from ejkernel.torch.attention import LocalStrideSparseAttention, SparseAttention
from ejkernel.torch.combine import combine_attn_partitions
from ejkernel.torch.flash import flash_attention
from ejkernel.torch.pattern import get_sparse_attn_mask

__all__ = [
    "LocalStrideSparseAttention",
    "SparseAttention",
    "combine_attn_partitions",
    "flash_attention",
    "get_sparse_attn_mask",
]
