"""The mask of some of its tokens: what a step of decoding keeps of the mask of all."""

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from ejkernel.expressions.binding import with_indices
from ejkernel.types.mask_algebra import both
from ejkernel.types.mask_fields import MaskFields

M = TypeVar("M", bound=MaskFields)


def last_tokens(ends: jax.Array, count: int, length: int) -> jax.Array:
    """Indices (B, count) of the tokens before each end (B,), moved into the `length` there are."""
    starts = jnp.clip(ends - count, 0, length - count)
    return starts[:, None] + jnp.arange(count, dtype=jnp.int32)


def at_tokens(mask: M, q_index: jax.Array | None = None, kv_index: jax.Array | None = None) -> M:
    """The mask of these queries (B|1, t) and keys (B|1, s); None keeps all.

    Tokens keep their positions, which become explicit, and block patterns, whose blocks are counted by index, become
    dense.
    """
    m = mask.canonical()
    q_all, kv_all = jnp.arange(m.q_len, dtype=jnp.int32)[None], jnp.arange(m.kv_len, dtype=jnp.int32)[None]
    q_pos, kv_pos = (q_all + (m.kv_len - m.q_len), kv_all) if m.q_pos is None else (m.q_pos, m.kv_pos)
    q, k = q_all if q_index is None else q_index, kv_all if kv_index is None else kv_index
    cells = None
    if m.pattern is not None:
        height, width = m.pattern.block_shape
        cells = _taken(_taken(jnp.asarray(m.pattern.blocks), q // height, 2), k // width, 3)
    return dataclasses.replace(
        mask,
        q_len=q.shape[1],
        kv_len=k.shape[1],
        q_ids=_taken(m.q_ids, q, 1),
        kv_ids=_taken(m.kv_ids, k, 1),
        q_pos=_taken(q_pos, q, 1),
        kv_pos=_taken(kv_pos, k, 1),
        dense=both(_taken(_taken(m.dense, q, 2), k, 3), cells),
        pattern=None,
        rule=m.rule and with_indices(m.rule, q, k),
        cross=True,
    )


def _taken(x: Any, index: jax.Array, axis: int) -> Any:
    """Of each row of `x` (B|1, ...) the entries (B|1, n) along an axis."""
    if x is None:
        return None
    shape = [1] * x.ndim
    shape[0], shape[axis] = index.shape
    return jnp.take_along_axis(x, index.reshape(shape), axis=axis)
