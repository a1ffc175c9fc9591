"""Packed sequences cut into pieces of one size, none of which crosses a sequence."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.types.segments import searched


class Pieces(NamedTuple):
    """Of each piece, its tokens and its sequence: (B, rows) each. Rows past the last piece have no tokens.

    Attributes:
        start: its first token.
        end: the token behind its last.
        sequence: the one it is a part of.
        first_row: the first piece of each sequence, and the number of pieces: (B, sequences + 1).
    """

    start: jax.Array
    end: jax.Array
    sequence: jax.Array
    first_row: jax.Array


def most_pieces(tokens: int, sequences: int, size: int) -> int:
    """The most pieces there can be: ceil(n / size) <= (n + size - 1) / size, summed over the sequences."""
    return (tokens + sequences * (size - 1)) // size


def cut(cu_seqlens: jax.Array, size: int, rows: int) -> Pieces:
    """The pieces of sequences that begin and end at `cu_seqlens` (B, sequences + 1)."""
    return jax.vmap(lambda cu: _cut(cu, size, rows))(cu_seqlens)


# one program up to here, where the steps of a cumulative sum are several
_MOST_TERMS = 2**22


def _sums_before(x: jax.Array) -> jax.Array:
    """The sums (N + 1,) of those of x (N,) before each, and of all."""
    if x.size**2 > _MOST_TERMS:
        return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(x, dtype=jnp.int32)])
    before = np.tri(x.size + 1, x.size, -1, dtype=bool)
    return jnp.where(before, x[None], 0).sum(1, dtype=jnp.int32)


def _cut(cu: jax.Array, size: int, rows: int) -> Pieces:
    row = np.arange(rows, dtype=np.int32)
    first_row = _sums_before((jnp.diff(cu) + size - 1) // size)
    sequence = searched(first_row, row) - 1
    start = cu[sequence] + (row - first_row[sequence]) * size
    # rows past the last piece belong to no sequence
    end = jnp.minimum(start + size, cu[jnp.minimum(sequence + 1, cu.size - 1)])
    return Pieces(start, jnp.maximum(start, end), sequence, first_row)
