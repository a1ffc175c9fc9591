"""Chunks of packed sequences: of one size, none of which crosses a sequence."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.types.segments import searched


class PackedChunks(NamedTuple):
    """Of each chunk, its tokens and its sequence: (B, rows) each. Rows past the last chunk have no tokens.

    Attributes:
        start: its first token.
        end: the token behind its last.
        sequence: the one it belongs to.
        first_row: the first chunk of each sequence, and the number of chunks: (B, sequences + 1).
    """

    start: jax.Array
    end: jax.Array
    sequence: jax.Array
    first_row: jax.Array


def max_packed_chunks(tokens: int, sequences: int, size: int) -> int:
    """The most chunks there can be: ceil(n / size) <= (n + size - 1) / size, summed over the sequences."""
    return (tokens + sequences * (size - 1)) // size


def packed_chunks(cu_seqlens: jax.Array, size: int, rows: int) -> PackedChunks:
    """The chunks of sequences that begin and end at `cu_seqlens` (B, sequences + 1)."""
    return jax.vmap(lambda cu: _of_one_row(cu, size, rows))(cu_seqlens)


def chunks_of_tokens(cu_seqlens: jax.Array, size: int, tokens: int) -> tuple[jax.Array, jax.Array]:
    """Of each token its chunk, -1 where it has no sequence, and its position in the chunk: (B, tokens) each."""

    def of_one_row(cu: jax.Array) -> tuple[jax.Array, jax.Array]:
        token = np.arange(tokens, dtype=np.int32)
        sequence, first_row = searched(cu, token) - 1, _first_rows(cu, size)
        position = jnp.subtract(token, cu[sequence])
        has_sequence = (sequence >= 0) & (sequence < cu.size - 1)
        return jnp.where(has_sequence, first_row[sequence] + position // size, -1), position % size

    return jax.vmap(of_one_row)(cu_seqlens)


def equal_lengths(shape: tuple[int, ...], tokens: int) -> jax.Array:
    """Cumulative lengths (B, sequences + 1) of sequences equally long."""
    return jnp.broadcast_to(np.linspace(0, tokens, shape[1]).astype(np.int32), shape)


# up to here one program of XLA, where a cumulative sum would be several
_MOST_TERMS = 2**22


def _first_rows(cu: jax.Array, size: int) -> jax.Array:
    """The first chunk of each sequence, and the number of all chunks: (sequences + 1,)."""
    chunks = (jnp.diff(cu) + size - 1) // size
    if chunks.size**2 > _MOST_TERMS:
        return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(chunks, dtype=jnp.int32)])
    before = np.tri(chunks.size + 1, chunks.size, -1, dtype=bool)
    return jnp.where(before, chunks[None], 0).sum(1, dtype=jnp.int32)


def _of_one_row(cu: jax.Array, size: int, rows: int) -> PackedChunks:
    row = np.arange(rows, dtype=np.int32)
    first_row = _first_rows(cu, size)
    sequence = searched(first_row, row) - 1
    start = cu[sequence] + (row - first_row[sequence]) * size
    # rows past the last chunk belong to no sequence
    end = jnp.minimum(start + size, cu[jnp.minimum(sequence + 1, cu.size - 1)])
    return PackedChunks(start, jnp.maximum(start, end), sequence, first_row)
