"""The local-stride rule of dkernel: recent blocks, and every so many of the others."""

from typing import Any

import numpy as np

from ejkernel.checks.options import int_pair, static_int


def local_stride_blocks(
    num_heads: int,
    q_blocks: range,
    kv_blocks: range,
    local_blocks: int | tuple[int, int],
    vert_stride: int,
    *,
    homo_head: bool = False,
    num_dense_heads: int = 0,
    num_kv_heads: int | None = None,
    head_step: int | None = None,
    offset: int = 0,
    causal: bool = True,
    relative: bool = False,
) -> np.ndarray:
    """Bool (heads|1, len(q_blocks), len(kv_blocks)): which of these key blocks each of these query blocks sees.

    Seen are the blocks at a distance below `local_blocks`, one number or (before, after), and beside them the columns
    `(k + h * head_step + offset) % vert_stride == 0` of head `h`; with `relative`, in every head, each
    `vert_stride`-th block outward from the local ones. `causal` hides the blocks behind a query's own. The last
    `num_dense_heads` see all that is not hidden. Where no head differs there is one.
    """
    num_heads = static_int("num_heads", num_heads, 1)
    vert_stride = static_int("vert_stride", vert_stride, 1)
    before, after = int_pair("local_blocks", local_blocks, 1)
    num_dense_heads = static_int("num_dense_heads", num_dense_heads, 0)
    offset = static_int("offset", offset)
    step = max(1, vert_stride // num_heads) if head_step is None else static_int("head_step", head_step)
    patterns = num_heads if num_kv_heads is None else static_int("num_kv_heads", num_kv_heads, 1)
    if num_heads % patterns:
        raise ValueError(f"{num_heads=} must be a multiple of {num_kv_heads=}")
    if num_dense_heads > patterns:
        most = f"{num_heads=}" if num_kv_heads is None else f"{num_kv_heads=}"
        raise ValueError(f"num_dense_heads must be at most {most}, got {num_dense_heads}")
    if (homo_head or relative) and num_dense_heads == 0:  # no head differs
        num_heads = patterns = 1
    head: Any = np.arange(patterns).repeat(num_heads // patterns)[:, None, None]
    q, k = np.asarray(q_blocks)[:, None], np.asarray(kv_blocks)
    if relative:
        outside = np.maximum(q - k - before + 1, 0) + np.maximum(k - q - after + 1, 0)
        seen = outside % vert_stride == 0
    else:
        local = (q - k < before) & (k - q < after)
        seen = local | ((k + (0 if homo_head else head * step) + offset) % vert_stride == 0)
    seen = seen | (head >= patterns - num_dense_heads)
    return seen & (k <= q) if causal else seen
