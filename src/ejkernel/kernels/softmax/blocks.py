"""From what a caller may call a block mask to a MaskInfo."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.types import BlockPattern, MaskInfo


def pattern_mask(query: Any, key: Any, block_mask: Any, block_size: Any, mask_info: MaskInfo | None) -> MaskInfo:
    """The mask of a block pattern, with whatever else `mask_info` says."""
    for name, x in (("query", query), ("key", key)):
        if getattr(x, "ndim", None) != 4:
            raise ValueError(f"{name} must have 4 dimensions (batch, length, heads, head_dim), got {jnp.shape(x)}")
    B, T, H, _ = query.shape
    S = key.shape[1]
    pattern = _pattern(block_mask, block_size, (B, H, T, S))
    mask = MaskInfo.from_block_pattern(pattern, q_len=T, kv_len=S)
    return mask if mask_info is None else mask & mask_info


def _pattern(block_mask: Any, block_size: Any, sizes: tuple[int, int, int, int]) -> BlockPattern:
    if isinstance(block_mask, BlockPattern):
        if block_size is not None and _pair(block_size) != _pair(block_mask.block_size):
            raise ValueError(f"block_size={block_size} but the pattern's blocks are {block_mask.block_size}")
        return block_mask
    if block_size is None:
        raise ValueError("block_size is needed unless block_mask is a BlockPattern")
    if callable(block_mask):
        block_mask = _evaluated(block_mask, sizes, _pair(block_size))
    pattern = BlockPattern.from_dense(block_mask, block_size=block_size)
    counts = tuple(-(-n // block) for n, block in zip(sizes[2:], _pair(block_size), strict=True))
    if jnp.shape(block_mask)[-2:] != counts:
        raise ValueError(
            f"block_mask has shape {jnp.shape(block_mask)}; lengths {sizes[2]} and {sizes[3]} in blocks of "
            f"{_pair(block_size)} need {counts} blocks"
        )
    return pattern


def _pair(size: Any) -> tuple[int, int]:
    pair = tuple(size) if isinstance(size, tuple | list) else (size, size)
    if len(pair) != 2 or any(not isinstance(n, int) or n < 1 for n in pair):
        raise ValueError(f"block_size={size!r} must be a positive int or a pair of them")
    return pair


def _evaluated(function: Any, sizes: tuple[int, int, int, int], block: tuple[int, int]) -> jax.Array:
    """bool (B, H, blocks_q, blocks_k) of a function of block indices."""
    B, H, T, S = sizes
    counts = (B, H, -(-T // block[0]), -(-S // block[1]))
    indices = jnp.meshgrid(*(jnp.arange(n) for n in counts), indexing="ij")
    flat = jax.vmap(lambda b, h, i, j: jnp.asarray(function(b, h, i, j), bool))(*(x.reshape(-1) for x in indices))
    return flat.reshape(counts)
