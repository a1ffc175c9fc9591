"""The canonical call of mean pooling: every check and default, and which tokens each row of the result averages."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.checks.arrays import INT32_MAX, concrete, cumulative_lengths, float_array
from ejkernel.checks.options import static_int
from ejkernel.kernels.common.batch import folded
from ejkernel.kernels.common.packed_chunks import chunks_of_tokens, max_packed_chunks, packed_chunks
from ejkernel.kernels.common.sizes import ceil_div
from ejkernel.ops import Call


@dataclass(frozen=True)
class Spec:
    """Static facts.

    Attributes:
        chunk_size: tokens per chunk.
        rows: rows of the result; with traced `cu_seqlens` the most there can be.
    """

    chunk_size: int
    rows: int


def canonicalise(x: Any, cu_seqlens: Any = None, *, chunk_size: int = 32) -> Call:
    """Check a call and name its arrays: `x` (B, T, H, D) and, for packed sequences, `cu_seqlens` (1, N + 1)."""
    x = float_array("x", x)
    if x.ndim < 3:
        raise ValueError(f"x must be (batch, length, heads, head_dim), its shape is {x.shape}")
    x = folded(x)
    chunk_size = static_int("chunk_size", chunk_size, 1)
    if chunk_size > INT32_MAX:
        raise ValueError(f"chunk_size={chunk_size} must fit in int32")
    if cu_seqlens is None:
        return Call(Spec(chunk_size, ceil_div(x.shape[1], chunk_size)), {"x": x})
    B, T, _, _ = x.shape
    if B != 1:
        raise ValueError(f"with cu_seqlens x must be (1, tokens, heads, head_dim), its shape is {x.shape}")
    ends = cumulative_lengths("cu_seqlens", cu_seqlens, T, fewest=0)
    values = concrete(cu_seqlens)
    if values is None:
        rows = max_packed_chunks(T, ends.size - 1, chunk_size)
    else:
        rows = sum(ceil_div(int(length), chunk_size) for length in np.diff(values))
    return Call(Spec(chunk_size, rows), {"x": x, "cu_seqlens": ends[None]})


def with_most_rows(call: Call) -> Call:
    """The call with as many rows as its sequences can have, whatever their lengths; those past the last are empty."""
    if "cu_seqlens" not in call:
        return call
    rows = max_packed_chunks(call["x"].shape[1], call["cu_seqlens"].shape[1] - 1, call.spec.chunk_size)
    return replace(call, spec=replace(call.spec, rows=rows))


def row_bounds(call: Call) -> jax.Array:
    """Of each row of the result, the first token and the one past its last: (B|1, rows, 2); equal for a row of none."""
    if "cu_seqlens" not in call:
        row = np.arange(call.spec.rows, dtype=np.int32)
        start = row * call.spec.chunk_size
        end = np.minimum(start + call.spec.chunk_size, call["x"].shape[1])
        return jnp.asarray(np.stack([start, end], -1)[None], jnp.int32)
    chunks = packed_chunks(call["cu_seqlens"], call.spec.chunk_size, call.spec.rows)
    return jnp.stack([chunks.start, chunks.end], -1)


def token_rows(call: Call) -> jax.Array:
    """The row each token is averaged into, or -1: (B|1, T)."""
    T = call["x"].shape[1]
    if "cu_seqlens" not in call:
        return jnp.asarray(np.arange(T, dtype=np.int32)[None] // call.spec.chunk_size, jnp.int32)
    return chunks_of_tokens(call["cu_seqlens"], call.spec.chunk_size, T)[0]


def batch(call: Call) -> int:
    """The batch of a call, any of whose arrays may hold one broadcast row."""
    return max(x.shape[0] for x in call.arrays.values())
