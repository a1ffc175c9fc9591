"""The public functions: one per operation, with its full documentation and no logic."""

from ejkernel.modules.attention import attention
from ejkernel.modules.blocksparse import blocksparse_attention
from ejkernel.modules.flash import flash_attention
from ejkernel.modules.mean_pooling import mean_pooling
from ejkernel.modules.sdpa import scaled_dot_product_attention

__all__ = ["attention", "blocksparse_attention", "flash_attention", "mean_pooling", "scaled_dot_product_attention"]
