"""The public functions: one per operation, with its full documentation and no logic."""

from ejkernel.kernels.ring.layout import from_zigzag, to_zigzag
from ejkernel.modules.blocksparse import blocksparse_attention
from ejkernel.modules.cascade import cascade_attention
from ejkernel.modules.decode import decode_attention, ragged_decode_attention
from ejkernel.modules.delta_rule import (
    gated_delta_product,
    gated_delta_rule,
    kimi_delta_attention,
    rwkv7_attention,
)
from ejkernel.modules.dot_product import dot_product_attention
from ejkernel.modules.flash import flash_attention
from ejkernel.modules.kv_cache import write_interleaved_kv_pages, write_kv_pages
from ejkernel.modules.linear import gla_attention, lightning_attention, mamba2_attention, recurrent_attention
from ejkernel.modules.native_sparse import native_sparse_attention, select_blocks, selected_attention
from ejkernel.modules.paged import page_attention, prefill_page_attention, ragged_page_attention
from ejkernel.modules.pooling import mean_pooling
from ejkernel.modules.ring import ring_attention
from ejkernel.modules.sdpa import scaled_dot_product_attention
from ejkernel.modules.signatures import show_signatures
from ejkernel.modules.weights import attention

__all__ = [
    "attention",
    "blocksparse_attention",
    "cascade_attention",
    "decode_attention",
    "dot_product_attention",
    "flash_attention",
    "from_zigzag",
    "gated_delta_product",
    "gated_delta_rule",
    "gla_attention",
    "kimi_delta_attention",
    "lightning_attention",
    "mamba2_attention",
    "mean_pooling",
    "native_sparse_attention",
    "page_attention",
    "prefill_page_attention",
    "ragged_decode_attention",
    "ragged_page_attention",
    "recurrent_attention",
    "ring_attention",
    "rwkv7_attention",
    "scaled_dot_product_attention",
    "select_blocks",
    "selected_attention",
    "to_zigzag",
    "write_interleaved_kv_pages",
    "write_kv_pages",
]

show_signatures(globals()[name] for name in __all__)
