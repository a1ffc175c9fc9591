"""The conjunction of two masks, part by part, symbolic wherever the parts allow it."""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from . import segments
from .inputs import common_batch, concrete

if TYPE_CHECKING:
    from .mask import MaskInfo
    from .pattern import BlockPattern


def intersect(left: "MaskInfo", right: "MaskInfo") -> "MaskInfo":
    """What both masks show; the left one's explicit positions are kept, else the right one's."""
    check_partners(left, right)
    a, b = left.canonical(), right.canonical()
    frame = a if a.q_pos is not None else b
    a, b = _in_frame(a, frame), _in_frame(b, frame)
    q_ids, kv_ids = _intersect_ids(a, b)
    pattern, pattern_mask = _intersect_patterns(a, b)
    merged = dataclasses.replace(
        a,
        q_ids=q_ids,
        kv_ids=kv_ids,
        dense=both(both(a.dense, b.dense), pattern_mask),
        pattern=pattern,
        cross=a.cross or b.cross,
    ).narrowed(b.band)
    return merged if b.chunk is None else merged.apply_chunked(b.chunk)


def check_partners(left: "MaskInfo", right: "MaskInfo") -> None:
    """ValueError unless the two masks broadcast together."""
    a, b = left.shape, right.shape
    if a[2:] != b[2:]:
        raise ValueError(f"masks must have the same lengths (T, S), got {a[2:]} and {b[2:]}")
    common_batch({"left mask": a[0], "right mask": b[0]})
    if a[1] != b[1] and 1 not in (a[1], b[1]):
        raise ValueError(f"masks must have one head or as many, got {a[1]} and {b[1]}")


def same(a: Any, b: Any) -> bool:
    """Whether two arrays (or Nones) are known to be equal; traced ones only if they are the same object."""
    if a is b:
        return True
    if a is None or b is None or a.shape != b.shape:
        return False
    a, b = concrete(a), concrete(b)
    return a is not None and b is not None and np.array_equal(a, b)


def both(a: jax.Array | None, b: jax.Array | None) -> jax.Array | None:
    """`a & b`, where None hides nothing."""
    if a is None or b is None:
        return b if a is None else a
    return a & b


def _in_frame(mask: "MaskInfo", frame: "MaskInfo") -> "MaskInfo":
    """The same mask on another's positions: band and chunk become dense if they rest on different ones."""
    moved = dataclasses.replace(mask, q_pos=frame.q_pos, kv_pos=frame.kv_pos)
    if not mask.has_frame_parts() or (same(mask.q_pos, frame.q_pos) and same(mask.kv_pos, frame.kv_pos)):
        return moved
    own = mask.frame_mask(jnp.arange(mask.q_len), jnp.arange(mask.kv_len))  # (B|1, 1, T, S)
    return dataclasses.replace(moved, dense=both(mask.dense, own), band=(None, None), chunk=None)


def _intersect_ids(a: "MaskInfo", b: "MaskInfo") -> tuple[Any, Any]:
    if b.q_ids is None or (a.q_ids is b.q_ids and a.kv_ids is b.kv_ids):
        return a.q_ids, a.kv_ids
    if a.q_ids is None:
        return b.q_ids, b.kv_ids
    return segments.intersect(a.q_ids, a.kv_ids, b.q_ids, b.kv_ids)


def _intersect_patterns(a: "MaskInfo", b: "MaskInfo") -> "tuple[BlockPattern | None, jax.Array | None]":
    """One pattern, or the left one and a dense mask for the right one where their block sizes do not nest."""
    if a.pattern is None or b.pattern is None:
        return (b.pattern if a.pattern is None else a.pattern), None
    pattern = a.pattern.intersect(b.pattern, a.q_len, a.kv_len)
    if pattern is not None:
        return pattern, None
    alone = dataclasses.replace(b, q_ids=None, kv_ids=None, dense=None, band=(None, None), chunk=None)
    return a.pattern, alone.element_mask()
