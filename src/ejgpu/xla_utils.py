"""Packed sequences as arrays: the tokens and chunks that each has, and sums along them.

`cu_seqlens` `(N + 1,)` rises from 0: sequence n has the tokens from entry n up to entry n + 1. Results as long as there
are tokens (or chunks) need to know how many: outside of jit the values tell, inside give `total`. What is past the last
token, or chunk, has the sequence -1.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ejkernel.checks.arrays import bool_array, concrete, cumulative_lengths, integers
from ejkernel.checks.options import number, static_int
from ejkernel.kernels.common.packed_chunks import packed_chunks
from ejkernel.types import segments

__all__ = [
    "chunk_global_cumsum",
    "chunk_local_cumsum",
    "prepare_chunk_indices",
    "prepare_chunk_offsets",
    "prepare_cu_seqlens_from_mask",
    "prepare_lens",
    "prepare_position_ids",
    "prepare_sequence_ids",
    "prepare_token_indices",
]

UNBOUNDED = 2**31 - 1


def prepare_lens(cu_seqlens: jax.Array) -> jax.Array:
    """The length of each sequence, (N,).

    >>> prepare_lens(jnp.array([0, 3, 3, 10])).tolist()
    [3, 0, 7]
    """
    return jnp.diff(cumulative_lengths("cu_seqlens", cu_seqlens, UNBOUNDED))


def prepare_cu_seqlens_from_mask(mask: jax.Array) -> jax.Array:
    """`cu_seqlens` of the rows of a mask (N, L), true where there is a token.

    >>> prepare_cu_seqlens_from_mask(jnp.array([[1, 1, 0], [1, 0, 0]])).tolist()
    [0, 2, 3]
    """
    mask = jnp.asarray(bool_array("mask", mask))
    if mask.ndim != 2:
        raise ValueError(f"mask must have shape (sequences, length), got {mask.shape}")
    lengths = mask.sum(axis=1, dtype=jnp.int32)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lengths, dtype=jnp.int32)])


def prepare_position_ids(cu_seqlens: jax.Array, *, total: int | None = None) -> jax.Array:
    """The position of every token in its sequence, (tokens,).

    >>> prepare_position_ids(jnp.array([0, 2, 5])).tolist()
    [0, 1, 0, 1, 2]
    """
    return _tokens(cu_seqlens, total)[1]


def prepare_sequence_ids(cu_seqlens: jax.Array, *, total: int | None = None) -> jax.Array:
    """The sequence of every token, (tokens,).

    >>> prepare_sequence_ids(jnp.array([0, 2, 2, 5]), total=6).tolist()
    [0, 0, 2, 2, 2, -1]
    """
    return _tokens(cu_seqlens, total)[0]


def prepare_token_indices(cu_seqlens: jax.Array, *, total: int | None = None) -> jax.Array:
    """The sequence of every token and its position there, (tokens, 2).

    >>> prepare_token_indices(jnp.array([0, 1, 3])).tolist()
    [[0, 0], [1, 0], [1, 1]]
    """
    return jnp.stack(_tokens(cu_seqlens, total), axis=1)


def prepare_chunk_indices(cu_seqlens: jax.Array, chunk_size: int, *, total: int | None = None) -> jax.Array:
    """The sequence of every chunk and its number there, (chunks, 2); no chunk crosses a sequence.

    >>> prepare_chunk_indices(jnp.array([0, 3, 8]), 4).tolist()
    [[0, 0], [1, 0], [1, 1]]
    """
    offsets = prepare_chunk_offsets(cu_seqlens, chunk_size)
    return jnp.stack(_tokens(offsets, total), axis=1)


def prepare_chunk_offsets(cu_seqlens: jax.Array, chunk_size: int) -> jax.Array:
    """How many chunks come before each sequence, and how many there are, (N + 1,).

    >>> prepare_chunk_offsets(jnp.array([0, 3, 8]), 4).tolist()
    [0, 1, 3]
    """
    cu = cumulative_lengths("cu_seqlens", cu_seqlens, UNBOUNDED)
    return packed_chunks(cu[None], static_int("chunk_size", chunk_size, 1), 1).first_row[0]


def chunk_local_cumsum(
    g: jax.Array,
    chunk_size: int,
    reverse: bool = False,
    scale: float | None = None,
    cu_seqlens: jax.Array | None = None,
    head_first: bool = False,
    output_dtype: DTypeLike = jnp.float32,
) -> jax.Array:
    """Cumulative sums of the tokens, which restart in each chunk of each sequence; differentiable.

    Args:
        g: `(B, T, H)` or `(B, T, H, D)`.
        chunk_size: tokens per chunk.
        reverse: sum from the last token of a chunk to the first.
        scale: multiplies the sums.
        cu_seqlens: of sequences packed into one row; B is 1 then. Padding behind them gives zeros.
        head_first: g is `(B, H, T)` or `(B, H, T, D)`.
        output_dtype: of the sums, in which they are taken.

    >>> chunk_local_cumsum(jnp.ones((1, 5, 1)), 2).ravel().tolist()
    [1.0, 2.0, 1.0, 2.0, 1.0]
    """
    chunk_size = static_int("chunk_size", chunk_size, 1)
    return _sums(g, chunk_size, reverse, scale, cu_seqlens, head_first, output_dtype)


def chunk_global_cumsum(
    s: jax.Array,
    reverse: bool = False,
    cu_seqlens: jax.Array | None = None,
    scale: float | None = None,
    head_first: bool = False,
    output_dtype: DTypeLike = jnp.float32,
) -> jax.Array:
    """Cumulative sums of the tokens of each sequence; arguments as in `chunk_local_cumsum`.

    >>> chunk_global_cumsum(jnp.ones((1, 5, 1)), cu_seqlens=jnp.array([0, 2, 5])).ravel().tolist()
    [1.0, 2.0, 1.0, 2.0, 3.0]
    """
    return _sums(s, None, reverse, scale, cu_seqlens, head_first, output_dtype)


def _tokens(cu_seqlens: Any, total: int | None) -> tuple[jax.Array, jax.Array]:
    """The sequence of every token and its position in it, (tokens,) each."""
    if total is None:
        ends = concrete(integers("cu_seqlens", cu_seqlens, 1))
        if ends is None:
            raise ValueError("the number of tokens is not known while tracing: give total=")
        total = int(ends[-1])
    cu = cumulative_lengths("cu_seqlens", cu_seqlens, static_int("total", total, 0))
    sequence, position = segments.from_cu_seqlens(cu, total)
    return sequence[0], position[0]


def _sums(
    x: jax.Array,
    chunk_size: int | None,
    reverse: bool,
    scale: float | None,
    cu_seqlens: jax.Array | None,
    head_first: bool,
    dtype: DTypeLike,
) -> jax.Array:
    if x.ndim not in (3, 4):
        raise ValueError(
            f"expected (B, T, H) or (B, T, H, D), with head_first (B, H, T) or (B, H, T, D), got {x.shape}"
        )
    axis = 2 if head_first else 1
    x = jnp.moveaxis(x, axis, 0).astype(dtype)  # (T, ...)
    T = x.shape[0]
    sequence, position = jnp.zeros(T, jnp.int32), jnp.arange(T, dtype=jnp.int32)
    if cu_seqlens is not None:
        if x.shape[1] != 1:
            raise ValueError(f"cu_seqlens packs sequences into one row, got batch {x.shape[1]}")
        sequence, position = _tokens(cu_seqlens, T)
    first = position == 0 if chunk_size is None else position % chunk_size == 0
    if reverse:  # from the right, a sum starts at the last token before each one that starts a sum from the left
        first = jnp.concatenate([first[1:], jnp.ones(1, bool)]) | (sequence != jnp.append(sequence[1:], -1))
    sums = _segmented_sums(x, first, sequence >= 0, reverse)
    return jnp.moveaxis(sums if scale is None else number("scale", scale) * sums, 0, axis)


@partial(jax.jit, static_argnames="reverse")
def _segmented_sums(x: jax.Array, first: jax.Array, real: jax.Array, reverse: bool) -> jax.Array:
    """Cumulative sums of x (T, ...) that restart where `first` (T,) is true; tokens that are not `real` (T,) are 0."""
    shape = (x.shape[0], *(1,) * (x.ndim - 1))
    first, x = jnp.broadcast_to(first.reshape(shape), x.shape), jnp.where(real.reshape(shape), x, 0)

    def join(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return a[0] | b[0], jnp.where(b[0], b[1], a[1] + b[1])

    return jax.lax.associative_scan(join, (first, x), reverse=reverse)[1]
