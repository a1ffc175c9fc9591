"""Segments of sequences, which programs scan side by side, as tables that kernels read."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import triton

from ejkernel.kernels.common.packed_chunks import max_packed_chunks, packed_chunks
from ejkernel.kernels.linear.scans import Scan


class Segments(NamedTuple):
    """The segments of a row of the batch.

    Attributes:
        rows: how many there are.
        slots: states that a row of the batch starts with.
        tokens: of a segment, where sequences are not packed.
        table: (B or 1, rows, 4) where they are: the first token, the one behind the last, the slot, the sequence. The
            slot of padding, which is scanned for the zeros to be written, is -1.
        order: (B or 1, rows, 2): the sequence, -1 for padding, and whether it is the last of it.
        first: (B or 1, rows): whether it is the first of its sequence. Both in the order of the scan.
    """

    rows: int
    slots: int
    tokens: int
    table: jax.Array | None = None
    order: jax.Array | None = None
    first: Any = None

    def before_last(self, scan: Scan) -> "Segments":
        """Those whose states are needed: not the last of a packed sequence, unless its final state is wanted."""
        if self.table is None or self.order is None or scan.with_state:
            return self
        no_tokens = jnp.asarray([0, 0, -1, 0], jnp.int32)
        return self._replace(table=jnp.where(self.order[..., 1:] != 0, no_tokens, self.table))


def whole_sequences(scan: Scan) -> Segments:
    """Every sequence a segment, and the padding behind them."""
    T = scan.a.shape[1]
    if scan.cu_seqlens is None:
        return Segments(1, 1, T)
    rows, N = scan.cu_seqlens.shape
    end = jnp.concatenate([scan.cu_seqlens[:, 1:], jnp.full((rows, 1), T, jnp.int32)], 1)
    slot = jnp.broadcast_to(jnp.asarray([*range(N - 1), -1], jnp.int32), (rows, N))
    return Segments(N, N - 1, T, jnp.stack([scan.cu_seqlens, end, slot, slot], -1))


def segments_of(scan: Scan, size: int) -> Segments:
    """Segments of so many tokens, the last of a sequence perhaps of fewer."""
    T = scan.a.shape[1]
    if scan.cu_seqlens is None:
        rows = triton.cdiv(T, size)
        return Segments(rows, rows, size, first=np.arange(rows)[None] == (rows - 1 if scan.descending else 0))
    batch, N = scan.cu_seqlens.shape
    ends = jnp.concatenate([scan.cu_seqlens, jnp.full((batch, 1), T, jnp.int32)], 1)  # padding is one more sequence
    rows = max_packed_chunks(T, N, size)
    chunks = packed_chunks(ends, size, rows)
    row = np.arange(rows, dtype=np.int32)[None]
    real = chunks.sequence < N - 1
    sequence = jnp.minimum(chunks.sequence, N - 1)
    lowest = row == jnp.take_along_axis(chunks.first_row, sequence, 1)
    highest = row == jnp.take_along_axis(chunks.first_row, sequence + 1, 1) - 1
    first, last = (highest, lowest) if scan.descending else (lowest, highest)
    table = jnp.stack([chunks.start, chunks.end, jnp.where(real, row, -1), chunks.sequence], -1)
    order = jnp.stack([jnp.where(real, chunks.sequence, -1), last.astype(jnp.int32)], -1)
    return Segments(rows, rows, size, table, order, first)
