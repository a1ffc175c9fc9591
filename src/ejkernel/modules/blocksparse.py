"""Attention over the blocks a pattern selects."""

from typing import Any

import jax
from jaxtyping import Array, Float

from ejkernel.kernels.common.batch import shards
from ejkernel.kernels.softmax.blocks import pattern_mask
from ejkernel.kernels.softmax.operations import BLOCKSPARSE_ATTENTION
from ejkernel.kernels.softmax.spec import canonicalise, finish
from ejkernel.ops import run
from ejkernel.types import MaskInfo


def blocksparse_attention(
    query: Float[Array, "*B T H D"],
    key: Float[Array, "*B S Hkv D"],
    value: Float[Array, "*B S Hkv Dv"],
    softmax_aux: Float[Array, "..."] | None = None,
    bias: Float[Array, "..."] | None = None,
    *,
    block_mask: Any,
    block_size: int | tuple[int, int] | None = None,
    mask_info: MaskInfo | None = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    return_lse: bool = False,
    platform: str | None = None,
    cfg: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Exact softmax attention over selected blocks: what is not selected is neither read nor computed.

    Args:
        query: `(B, T, H, D)`; leading dimensions as in `flash_attention`.
        key: `(B, S, Hkv, D)`.
        value: `(B, S, Hkv, Dv)`.
        softmax_aux: sink logits `(H,)`, `(H, n)`, or `(1, n)` that all heads share.
        bias: broadcasts to `(B, H, T, S)`.
        block_mask: bool `(blocks_q, blocks_k)`, `(H, ...)` or `(B, H, ...)`, a `BlockPattern`, or a function
            `(b, h, i, j) -> bool` of block indices. The function may be plain Python (it is called with ints, block by
            block; with more than 2 ** 17 blocks it is vectorised where it can be) or made of JAX (it is vectorised).
        block_size: queries and keys per block, an int or a pair. A `BlockPattern` made with a size brings its own; one
            made without takes this, or else 64.
        mask_info: further limits, all of which apply.
        causal: on by default, element by element.
        softmax_scale: default `D ** -0.5`. A traced one is multiplied into the queries.
        logits_soft_cap: as in `flash_attention`.
        sliding_window: as in `flash_attention`.
        return_lse: also return the log-sum-exp, `(B, H, T)` float32.
        platform: as in `flash_attention`; so are `cfg`, `mesh`, `in_specs`, `out_specs`.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import blocksparse_attention
    >>> from ejkernel.types import BlockPattern
    >>> q = jnp.ones((1, 256, 4, 32))
    >>> pattern = BlockPattern.local_stride(4, num_blocks=4, local_blocks=1, vert_stride=2, block_size=64)
    >>> blocksparse_attention(q, q, q, block_mask=pattern).shape
    (1, 256, 4, 32)
    """
    call = canonicalise(
        query,
        key,
        value,
        bias,
        softmax_aux=softmax_aux,
        mask_info=pattern_mask(query, key, block_mask, block_size, mask_info),
        softmax_scale=softmax_scale,
        causal=causal,
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap,
        return_lse=return_lse,
    )
    split = shards(query.shape, mesh, in_specs, out_specs)
    outputs = run(BLOCKSPARSE_ATTENTION, call, platform=platform, cfg=cfg, shards=split)
    return finish(call, outputs, query.shape, softmax_aux)
