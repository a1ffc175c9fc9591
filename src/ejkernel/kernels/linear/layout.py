"""Tokens to chunks and back."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.common.packed_chunks import chunks_of_tokens, max_packed_chunks, packed_chunks


class Layout(NamedTuple):
    """Where the tokens of chunks are. A chunk belongs to one sequence.

    Attributes:
        tokens: (B or 1, rows, chunk); None where chunks simply follow each other.
        valid: (B or 1, rows, chunk): which of them there are.
        first: (B or 1, rows): whether a chunk is the first of its sequence.
        sequence: (B or 1, rows).
        token_index: (B or 1, T): of every token its number among those of all chunks, past the end for padding.
        last: (B or 1, N): the last chunk of each sequence, -1 if it has none.
    """

    T: int
    chunk: int
    sequences: int
    tokens: Any
    valid: Any
    first: Any
    sequence: Any
    token_index: Any
    last: Any

    def gather(self, x: jax.Array) -> jax.Array:
        """(B, T, H, ...) to (B, rows, H, chunk, ...), zero where there is no token."""
        B, rows = x.shape[0], self.valid.shape[1]
        if self.tokens is None:
            x = jnp.pad(x, ((0, 0), (0, rows * self.chunk - self.T), *((0, 0),) * (x.ndim - 2)))
            x = x.reshape(B, rows, self.chunk, *x.shape[2:])
        else:
            x = jax.vmap(lambda x, index: x[index])(x, jnp.broadcast_to(self.tokens, (B, *self.tokens.shape[1:])))
            x = jnp.where(self.valid.reshape(*self.valid.shape, *(1,) * (x.ndim - 3)), x, 0)
        return jnp.moveaxis(x, 3, 2)

    def scatter(self, x: jax.Array) -> jax.Array:
        """(rows, B, H, chunk, ...) to (B, T, H, ...), zero for tokens of no chunk."""
        x = jnp.moveaxis(jnp.moveaxis(x, 0, 1), 2, 3)  # (B, rows, chunk, H, ...)
        B, rows, chunk, *trailing = x.shape
        x = x.reshape(B, rows * chunk, *trailing)
        if self.tokens is None:
            return x[:, : self.T]
        index = jnp.broadcast_to(self.token_index, (B, self.T))
        return jax.vmap(lambda x, index: x.at[index].get(mode="fill", fill_value=0))(x, index)

    def final_states(self, starts: jax.Array, state: jax.Array, after: jax.Array | None) -> jax.Array:
        """(B, N, H, A, C): of those after every chunk, the last; a sequence without tokens keeps its start."""
        if after is None:
            return state[:, None]
        last = jnp.broadcast_to(self.last, (starts.shape[0], self.sequences))
        final = jax.vmap(lambda x, index: x[jnp.maximum(index, 0)])(jnp.moveaxis(after, 0, 1), last)
        return jnp.where((last >= 0)[..., None, None, None], final, starts)


def layout_of(T: int, cu_seqlens: jax.Array | None, chunk: int) -> Layout:
    """The chunks of T tokens, so many each."""
    if cu_seqlens is None:
        rows = -(-T // chunk)
        valid = np.arange(rows * chunk).reshape(1, rows, chunk) < T
        zeros = np.zeros((1, rows), np.int32)
        return Layout(T, chunk, 1, None, valid, zeros == 1, zeros, None, None)
    cu, N = cu_seqlens, cu_seqlens.shape[1] - 1
    packed = packed_chunks(cu, chunk, max_packed_chunks(T, N, chunk))
    tokens = packed.start[..., None] + np.arange(chunk, dtype=np.int32)[None, None]
    valid = tokens < packed.end[..., None]
    sequence = jnp.clip(packed.sequence, 0, max(N - 1, 0))
    first = packed.start == jax.vmap(lambda cu, index: cu[index])(cu, sequence)
    row, position = chunks_of_tokens(cu, chunk, T)
    index = jnp.where(row < 0, np.iinfo(np.int32).max, row * chunk + position)
    last = jnp.where(jnp.diff(cu) > 0, packed.first_row[:, 1:] - 1, -1)
    return Layout(T, chunk, N, jnp.where(valid, tokens, 0), valid, first, sequence, index, last)
