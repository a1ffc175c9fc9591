"""Segment ids: (B, L) int32 per side; a query sees the keys with its own id, negative ids are padding."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.checks.arrays import concrete
from ejkernel.checks.values import check_rows
from ejkernel.types.visibility import Tokens, visible

# what makes ids is compiled: outside jit, its constants would be sent to the device one by one


@partial(jax.jit, static_argnums=1)
def from_lengths(lengths: jax.Array, length: int) -> jax.Array:
    """Ids 0 below each length and -1 beyond: (B,) -> (B, L)."""
    return jnp.where(jnp.arange(length, dtype=jnp.int32)[None] < lengths[:, None], 0, -1).astype(jnp.int32)


_MOST_COMPARISONS = 2**22


def searched(ascending: jax.Array, at: jax.Array | np.ndarray, side: str = "right") -> jax.Array:
    """How many of `ascending` (N,) are no greater than each of `at`; less than each where the side is "left"."""
    # loops and scans are many small programs on an accelerator, comparisons one
    method = "compare_all" if ascending.size * at.size <= _MOST_COMPARISONS else "scan_unrolled"
    return jnp.searchsorted(ascending, at, side=side, method=method).astype(jnp.int32)


@partial(jax.jit, static_argnums=1)
def from_cu_seqlens(cu: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
    """Ids (the sequence's number) and positions within the sequence, both (1, L); tokens past the end get -1 and 0."""
    index = jnp.arange(length, dtype=jnp.int32)
    number = searched(cu[1:], index)  # empty sequences are stepped over
    inside = (index >= cu[0]) & (index < cu[-1])
    ids = jnp.where(inside, number, -1)
    positions = jnp.where(inside, index - cu[jnp.clip(number, 0, cu.shape[0] - 2)], 0)
    return ids[None], positions[None]


@jax.jit
def from_padding_mask(mask: jax.Array) -> jax.Array:
    """Ids 0 where a bool array shows a token and -1 where it hides one."""
    return jnp.where(mask, 0, -1).astype(jnp.int32)


@jax.jit
def zeros_beside(ids: jax.Array) -> jax.Array:
    """Ids (B, 1) of another side, all of whose tokens are in the segment 0 of `ids` (B, L)."""
    return jnp.zeros((ids.shape[0], 1), jnp.int32)


@jax.jit
def ends_aligned(q_ids: jax.Array, q_pos: jax.Array, q_cu: jax.Array, kv_cu: jax.Array) -> jax.Array:
    """Positions of queries that are the last tokens of their sequences' keys; 0 for padding."""
    ahead = jnp.diff(kv_cu) - jnp.diff(q_cu)  # (N,) keys before each sequence's first query
    return jnp.where(q_ids >= 0, q_pos + ahead[jnp.maximum(q_ids, 0)], 0)


@jax.jit
def positions_within(ids: jax.Array) -> jax.Array:
    """How many earlier tokens of the row have the same id (0 for padding); segments need not be contiguous."""
    order = jnp.argsort(ids, axis=-1, stable=True)
    ranked = jnp.take_along_axis(ids, order, axis=-1)
    index = jnp.broadcast_to(jnp.arange(ids.shape[-1], dtype=jnp.int32), ids.shape)
    starts = jax.lax.cummax(jnp.where(_is_new(ranked), index, 0), axis=ids.ndim - 1)
    inverse = jnp.argsort(order, axis=-1)
    return jnp.where(ids >= 0, jnp.take_along_axis(index - starts, inverse, axis=-1), 0)


@jax.jit
def intersect(q_a: jax.Array, kv_a: jax.Array, q_b: jax.Array, kv_b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Ids of the pairs (a, b), so that equal pairs get equal ids; one side's ids are kept where the other has only one.

    Needs a sort of T + S tokens per row, never a T x S array.
    """
    q_len = q_a.shape[-1]
    batch = max(x.shape[0] for x in (q_a, kv_a, q_b, kv_b))
    a = _side_by_side(q_a, kv_a, batch)
    b = _side_by_side(q_b, kv_b, batch)
    ids = jnp.where(_is_single(b), a, jnp.where(_is_single(a), b, _rank_pairs(a, b)))
    ids = jnp.where((a >= 0) & (b >= 0), ids, -1)
    return ids[:, :q_len], ids[:, q_len:]


def from_dense(mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Ids (B, T) and (B, S) that say exactly what a mask (B, H, T, S) says; ValueError where none can.

    Of a traced mask that is known with `EJKERNEL_CHECKS=1` alone.
    """
    q_ids, kv_ids, expressed = _numbered_by_first_query(mask[:, 0])
    other_heads, other_pairs = (mask != mask[:, :1]).any((1, 2, 3)), (expressed != mask[:, 0]).any((1, 2))
    for wrong, reason in (
        (other_heads, "differs between heads"),
        (other_pairs, "is not made of segments (two queries share a key but not all keys)"),
    ):
        message = f"the attention mask {mask.shape} {reason}: segment ids cannot express it"
        values = concrete(wrong)
        if values is None:
            check_rows(wrong, wrong, message)
        elif values.any():
            raise ValueError(message)
    return q_ids, kv_ids


@jax.jit
def _numbered_by_first_query(mask: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Ids (B, T) and (B, S) of a mask (B, T, S), numbered by the first query of each segment, and the mask they say."""
    first_query, first_key = mask.argmax(1), mask.argmax(2)  # (B, S), (B, T)
    q_sees, kv_seen = mask.any(2), mask.any(1)
    # a query is in the segment of the first query that sees its first key
    leader = jnp.where(q_sees, jnp.take_along_axis(first_query, first_key, axis=1), -1)  # (B, T)
    number = jnp.cumsum(leader == jnp.arange(mask.shape[1]), axis=1) - 1
    q_ids = jnp.where(q_sees, jnp.take_along_axis(number, jnp.maximum(leader, 0), axis=1), -1).astype(jnp.int32)
    kv_ids = jnp.where(kv_seen, jnp.take_along_axis(number, first_query, axis=1), -1).astype(jnp.int32)
    return q_ids, kv_ids, same_segment(q_ids, kv_ids)


def same_segment(q_ids: jax.Array, kv_ids: jax.Array) -> jax.Array:
    """The mask (B, T, S) of ids (B, T) and (B, S)."""
    return visible(Tokens(0, q_ids[:, :, None]), Tokens(0, kv_ids[:, None, :]))


def cu_seqlens(name: str, ids: jax.Array) -> jax.Array:
    """Cumulative lengths (N+1,) of the segments, row by row, over the tokens that are not padding."""
    values = concrete(ids)
    if values is None:
        raise ValueError(f"{name} needs concrete segment ids: their number is not known while tracing")
    B, L = values.shape
    run_starts = np.ones((B, L), bool)
    run_starts[:, 1:] = values[:, 1:] != values[:, :-1]
    run_starts &= values >= 0
    for row, (row_ids, starts) in enumerate(zip(values, run_starts, strict=True)):
        if len(np.unique(row_ids[starts])) != starts.sum():
            raise ValueError(f"{name} needs contiguous segments, row {row} has an id in two places: {row_ids}")
    real_before = np.cumsum(values >= 0) - (values >= 0).reshape(-1)  # (B * L,)
    return jnp.asarray(np.append(real_before[run_starts.reshape(-1)], (values >= 0).sum()), jnp.int32)


def _is_new(ranked: jax.Array) -> jax.Array:
    first = jnp.ones((*ranked.shape[:-1], 1), bool)
    return jnp.concatenate([first, ranked[..., 1:] != ranked[..., :-1]], axis=-1)


def _side_by_side(q: jax.Array, kv: jax.Array, batch: int) -> jax.Array:
    return jnp.concatenate([jnp.broadcast_to(x, (batch, x.shape[-1])) for x in (q, kv)], axis=-1)  # (B, T + S)


def _is_single(ids: jax.Array) -> jax.Array:
    """(B, 1): whether a row has at most one id besides padding."""
    highest = ids.max(axis=-1, keepdims=True)
    return ((ids < 0) | (ids == highest)).all(axis=-1, keepdims=True)


def _rank_pairs(a: jax.Array, b: jax.Array) -> jax.Array:
    order = jnp.lexsort((b, a), axis=-1)
    new_a = _is_new(jnp.take_along_axis(a, order, axis=-1))
    new_b = _is_new(jnp.take_along_axis(b, order, axis=-1))
    ranks = jnp.cumsum(new_a | new_b, axis=-1, dtype=jnp.int32) - 1
    return jnp.take_along_axis(ranks, jnp.argsort(order, axis=-1), axis=-1)
