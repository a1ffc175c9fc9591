"""The table of key blocks: where each begins, and of each query its own block and the keys it may see."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.checks.arrays import concrete, cumulative_lengths, lengths_array
from ejkernel.kernels.common.packed_chunks import max_packed_chunks, packed_chunks
from ejkernel.ops import Call
from ejkernel.ops.autodiff import default_rules
from ejkernel.types.segments import searched


class BlockTable(NamedTuple):
    """All int32. The blocks of packed sequences follow each other in one table.

    Attributes:
        starts: the first key of every block, in rising order: (B|1, N). One that does not exist starts at S.
        first_row: of each query, the row of the table where its sequence begins: (B|1, T).
        own_block: of each query, its block, counted from there; -1 for padding: (B|1, T).
        limits: of each query, the key behind the last it may see; 0 for padding: (B|1, T).
        first_row_of_block: of each block, the row of the table where its sequence begins: (B|1, N).
    """

    starts: jax.Array
    first_row: jax.Array
    own_block: jax.Array
    limits: jax.Array
    first_row_of_block: jax.Array


def block_table(T: int, S: int, block_size: int, cu_seqlens: Any = None, kv_lengths: Any = None) -> BlockTable:
    """The table for T queries, the last of the S keys; of packed sequences; or at the end of caches of some length."""
    cu_seqlens, kv_lengths = (None if x is None else jnp.asarray(x, jnp.int32) for x in (cu_seqlens, kv_lengths))
    with default_rules():
        return _block_table(T, S, block_size, cu_seqlens, kv_lengths)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _block_table(T: int, S: int, block_size: int, cu_seqlens: Any, kv_lengths: Any) -> BlockTable:
    rows = block_rows(S, block_size, cu_seqlens)
    if cu_seqlens is not None:
        return _packed(cu_seqlens, S, block_size, rows)
    starts = np.arange(rows, dtype=np.int32)[None] * block_size
    length = np.full(1, S, np.int32) if kv_lengths is None else kv_lengths
    position = length[:, None] - T + np.arange(T, dtype=np.int32)
    real = position >= 0
    own_block = jnp.where(real, position // block_size, -1)
    limits = jnp.where(real, position + 1, 0)
    return BlockTable(jnp.asarray(starts), jnp.zeros_like(own_block), own_block, limits, jnp.zeros_like(starts))


def block_table_of(call: Call) -> BlockTable:
    """The table of a call of native sparse attention, or of one that only selects blocks."""
    spec, T = call.spec, call["query"].shape[1]
    cu_seqlens = call["cu_seqlens"][0] if "cu_seqlens" in call else None
    S = T
    if "key" in call:
        S = call["key"].shape[1]
    elif "kv_lengths" in call:  # a cache with as many keys as there are blocks for
        S = max(T, spec.rows * spec.block_size)
    return block_table(T, S, spec.block_size, cu_seqlens, call.get("kv_lengths"))


def first_keys(starts: jax.Array, indices: jax.Array, none: int) -> jax.Array:
    """The first key of every selected block, shaped as `indices` (B, ...), from the table (B|1, N); of none, `none`."""
    table = jnp.broadcast_to(starts, (indices.shape[0], starts.shape[1]))
    return jnp.where(indices >= 0, jax.vmap(lambda row, at: row[jnp.maximum(at, 0)])(table, indices), none)


def block_rows(S: int, block_size: int, cu_seqlens: Any = None) -> int:
    """Rows of the table: of packed sequences the most there can be, so that other lengths compile nothing."""
    if cu_seqlens is None:
        return -(-S // block_size)
    return max(1, max_packed_chunks(S, cu_seqlens.shape[-1] - 1, block_size))


def existing_blocks(S: int, block_size: int, cu_seqlens: Any = None) -> int:
    """How many blocks there are, where the lengths of packed sequences are known; else the rows of the table."""
    values = None if cu_seqlens is None else concrete(cu_seqlens)
    if values is None:
        return block_rows(S, block_size, cu_seqlens)
    return max(1, int((-(-np.diff(values) // block_size)).sum()))


def _packed(cu: jax.Array, S: int, block_size: int, rows: int) -> BlockTable:
    chunks = packed_chunks(cu[None], block_size, rows)
    token = jnp.arange(S, dtype=jnp.int32)
    sequence = searched(cu, token) - 1
    real = sequence < cu.shape[0] - 1
    sequence = jnp.minimum(sequence, cu.shape[0] - 2)
    first_row = jnp.where(real, chunks.first_row[0, sequence], 0)
    own_block = jnp.where(real, (token - cu[sequence]) // block_size, -1)
    starts = jnp.where(chunks.start < chunks.end, chunks.start, S)
    first_row_of_block = jnp.take(chunks.first_row[0], chunks.sequence)
    limits = jnp.where(real, token + 1, 0)
    return BlockTable(starts, first_row[None], own_block[None], limits[None], first_row_of_block)


def check_lengths(B: int, T: int, S: int, cu_seqlens: Any, kv_lengths: Any) -> tuple[Any, Any]:
    """Both as they are to be used: (N + 1,) for one row of packed sequences, or (B,) keys of each sequence."""
    if cu_seqlens is not None and kv_lengths is not None:
        raise ValueError("give cu_seqlens for packed sequences or kv_lengths for caches, not both")
    if cu_seqlens is not None:
        if B != 1 or T != S:
            raise ValueError(
                f"cu_seqlens packs sequences into one row of as many queries as keys; there are {B} rows of "
                f"{T} queries and {S} keys"
            )
        return cumulative_lengths("cu_seqlens", cu_seqlens, T), None
    if kv_lengths is not None:
        lengths = lengths_array("kv_lengths", kv_lengths, S)
        if lengths.shape[0] not in (1, B):
            raise ValueError(f"kv_lengths {lengths.shape} must have one length for each of the {B} sequences")
        return None, lengths
    if T > S > 0:  # of no keys at all, no query sees one
        raise ValueError(f"{T} queries are the last tokens of only {S} keys: query may not be longer than key")
    return None, None
