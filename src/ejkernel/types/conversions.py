"""Segment ids from masks and masks from segment ids, as functions of arrays."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ejkernel.checks.arrays import ArrayInput, bool_array, rows
from ejkernel.checks.options import flag
from ejkernel.types import segments


def segment_ids_to_mask(
    segment_ids: ArrayInput | tuple[ArrayInput, ArrayInput],
    dtype: DTypeLike = jnp.bool_,
    return_separate_masks: bool = False,
) -> Any:
    """The mask (B, 1, T, S) in which a query sees the keys of its own segment.

    Args:
        segment_ids: `(B, T)` integers of queries and keys alike, or a pair of the queries' `(B, T)` and the keys'
            `(B, S)`. Negative ones are padding.
        dtype: of the masks, which hold 1 where a token is seen and 0 elsewhere.
        return_separate_masks: also which queries `(B, T)` and keys `(B, S)` are no padding.

    Returns:
        The mask, or `(q_mask, kv_mask, mask)`.

    >>> from ejkernel.types import segment_ids_to_mask
    >>> segment_ids_to_mask([[1, 1, 2, -1]], dtype=int)[0, 0].tolist()
    [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    """
    if isinstance(segment_ids, tuple):
        if len(segment_ids) != 2:
            raise ValueError(f"segment_ids must be an array or a pair of them, got {len(segment_ids)} in a tuple")
        q_ids, kv_ids = rows("segment_ids[0]", segment_ids[0]), rows("segment_ids[1]", segment_ids[1])
    else:
        q_ids = kv_ids = rows("segment_ids", segment_ids)
    mask = segments.same_segment(q_ids, kv_ids)[:, None].astype(dtype)
    if not flag("return_separate_masks", return_separate_masks):
        return mask
    return (q_ids >= 0).astype(dtype), (kv_ids >= 0).astype(dtype), mask


def mask_to_segment_ids(mask: ArrayInput, per_head: bool = False) -> tuple[jax.Array, jax.Array]:
    """Segment ids of queries and keys that say what a mask says: the way back from `segment_ids_to_mask`.

    Segments are numbered from 0 in the order of their first queries; a query that sees nothing, and a key that nobody
    sees, have -1. A mask that is not made of segments (a causal one, say) has no such ids: that is an error where its
    values are known. Where they are traced it is one with `EJKERNEL_CHECKS=1`.

    Args:
        mask: bool or 0/1, `(T, S)`, `(B, T, S)` or `(B, H, T, S)`.
        per_head: ids for each head of a `(B, H, T, S)` mask; else its heads must agree.

    Returns:
        int32 ids shaped as the mask without S and without T; without its heads too, unless `per_head`.

    >>> from ejkernel.types import mask_to_segment_ids
    >>> q_ids, kv_ids = mask_to_segment_ids([[1, 1, 0], [1, 1, 0], [0, 0, 1], [0, 0, 0]])
    >>> q_ids.tolist(), kv_ids.tolist()
    ([0, 0, 1, -1], [0, 0, 1])
    """
    given = jnp.asarray(bool_array("mask", mask))
    if given.ndim not in (2, 3, 4):
        raise ValueError(f"mask must have shape (T, S), (B, T, S) or (B, H, T, S), got {given.shape}")
    *leading, T, S = given.shape
    if flag("per_head", per_head) or given.ndim < 4:
        by_row = given.reshape(-1, 1, T, S)
    else:
        by_row, leading = given, leading[:1]
    q_ids, kv_ids = segments.from_dense(by_row)
    return q_ids.reshape(*leading, T), kv_ids.reshape(*leading, S)
