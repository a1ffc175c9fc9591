"""The canonical call of attention over selected key blocks: every check and every default is here."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.checks.arrays import concrete, integers
from ejkernel.checks.options import flag, static_int
from ejkernel.checks.values import check_rows
from ejkernel.expressions.binding import Sizes, with_indices
from ejkernel.kernels.common.batch import Batch, folded, folded_broadcast, unfolded
from ejkernel.kernels.common.rules import Rules, mask_rule, score_rule
from ejkernel.kernels.common.scale import with_static_scale
from ejkernel.kernels.native_sparse.block_table import BlockTable, block_table, check_lengths
from ejkernel.kernels.softmax import rules
from ejkernel.kernels.softmax.rules import bound_rules
from ejkernel.kernels.softmax.spec import checked_tokens, joined_sinks, sink_logits, token_positions
from ejkernel.ops import Call, Dims
from ejkernel.ops.autodiff import default_rules

ARRAYS = {
    "query": Dims("B T H D", grad=True, broadcasts=False),
    "key": Dims("B S Hkv D", grad=True, broadcasts=False),
    "value": Dims("B S Hkv Dv", grad=True, broadcasts=False),
    # rows of the table of blocks, -1 for none; none twice for one query
    "indices": Dims("B T Hkv K", broadcasts=False),
    "starts": Dims("B N"),
    "limits": Dims("B T"),
    "sinks": Dims("B H", grad=True, given="softmax_aux"),
    # what mask and score functions read
    **rules.ARRAYS,
}

OUTPUTS = {"out": "B T H Dv", "lse": "B H T"}


@dataclass(frozen=True)
class Spec:
    """The static facts of a call."""

    scale: float
    block_size: int
    with_lse: bool = False
    rules: Rules = Rules()


class Dimensions(NamedTuple):
    """The sizes of a call, by their letters; N blocks, K of them for each query."""

    B: int
    T: int
    S: int
    H: int
    Hkv: int
    D: int
    Dv: int
    N: int
    K: int

    @property
    def G(self) -> int:
        return self.H // self.Hkv


def dimensions(call: Call) -> Dimensions:
    B, T, H, D = call["query"].shape
    _, S, Hkv, Dv = call["value"].shape
    return Dimensions(B, T, S, H, Hkv, D, Dv, call["starts"].shape[1], call["indices"].shape[3])


def canonicalise(
    query: Any,
    key: Any,
    value: Any,
    block_indices: Any,
    block_counts: Any = None,
    cu_seqlens: Any = None,
    softmax_aux: Any = None,
    *,
    kv_lengths: Any = None,
    block_size: int = 64,
    softmax_scale: Any = None,
    return_lse: bool = False,
    mask_fn: Any = None,
    score_fn: Any = None,
) -> Call:
    """Check everything about a call and bring it to its one canonical form."""
    query, key, value, batch, _ = checked_tokens(query, key, value)
    query, scale = with_static_scale("softmax_scale", query, softmax_scale)
    B, T, H, _ = query.shape
    _, S, Hkv, _ = key.shape
    block_size = static_int("block_size", block_size, 1)
    cu_seqlens, kv_lengths = check_lengths(B, T, S, cu_seqlens, kv_lengths)
    table = block_table(T, S, block_size, cu_seqlens, kv_lengths)
    indices = checked_indices(block_indices, (B, T, Hkv))
    counts = checked_counts(block_counts, batch, (B, T, Hkv))
    sinks = sink_logits(softmax_aux, H)
    arrays = {
        "query": query,
        "key": key,
        "value": value,
        "indices": table_rows(indices, counts, table),
        "starts": table.starts,
        "limits": table.limits,
        "sinks": None if sinks is None else joined_sinks(sinks)[None],
    }
    sizes = Sizes(B, T=T, S=S, H=query.shape[2])
    bound, operands = _bound(mask_fn, score_fn, cu_seqlens, sizes)
    arrays |= operands
    spec = Spec(scale, block_size, flag("return_lse", return_lse), bound)
    return Call(spec, {name: x for name, x in arrays.items() if x is not None})


def _bound(mask_fn: Any, score_fn: Any, cu_seqlens: Any, sizes: Sizes) -> tuple[Rules, dict[str, jax.Array]]:
    """Functions as rules of a call, whose indices count inside packed sequences; and what they read."""
    mask, scores = mask_fn and mask_rule(mask_fn), score_fn and score_rule(score_fn)
    if cu_seqlens is not None and (mask or scores):
        at = token_positions(cu_seqlens, sizes.T)
        mask, scores = mask and with_indices(mask, at, at), scores and with_indices(scores, at, at)
    return bound_rules(mask, scores, sizes)


def checked_indices(block_indices: Any, rows: tuple[int, int, int]) -> jax.Array:
    """(B, T, Hkv, K) integers; those that are no block of the query's sequence count as none."""
    indices = jnp.asarray(integers("block_indices", block_indices, *range(3, 16)), jnp.int32)
    if indices.shape[-3:-1] != rows[1:] or indices.size != rows[0] * rows[1] * rows[2] * indices.shape[-1]:
        raise ValueError(
            f"block_indices {indices.shape} must be (batch, length, key heads, blocks) with {rows} in front"
        )
    if indices.shape[-1] == 0:
        raise ValueError(f"block_indices {indices.shape} has room for no block")
    return folded(indices)


def checked_counts(block_counts: Any, batch: Batch, rows: tuple[int, int, int]) -> Any:
    """An int, or (B, T, Hkv) of them: how many of the indices count. None: all. The caller's may broadcast."""
    if block_counts is None:
        return None
    if not hasattr(block_counts, "shape") or (np.ndim(block_counts) == 0 and concrete(block_counts) is not None):
        return static_int("block_counts", block_counts, 0)
    counts = integers("block_counts", block_counts, *range(16))
    values = concrete(counts)
    given = counts if values is None else values
    check_rows(given, given < 0, "block_counts must not be negative")
    _, T, Hkv = rows
    each = counts.reshape(1, 1) if counts.ndim == 0 else counts[:, None] if counts.shape == (T,) else counts
    leading = each.shape[:-2]
    fits = counts.ndim == 0 or (each.ndim >= 2 and each.shape[-2] == T and each.shape[-1] in (1, Hkv))
    if not fits or any(n not in (1, m) for n, m in zip(leading[::-1], batch[::-1], strict=False)):
        raise ValueError(
            f"block_counts {counts.shape} must be a number, {(T,)}, or (batch, length, key heads or 1) = {rows}"
        )
    return jnp.broadcast_to(folded_broadcast(jnp.asarray(each, jnp.int32), batch, rank=2), rows)


def table_rows(indices: jax.Array, counts: Any, table: BlockTable) -> jax.Array:
    """Blocks (B, T, Hkv, K) counted from each sequence's first to rows of the table, each once; -1: none.

    `counts` is how many of them count: an int, (B, T, Hkv) of them, or None for all.
    """
    most = counts if isinstance(counts, int) else indices.shape[-1]
    with default_rules():
        return _table_rows(most, indices, None if isinstance(counts, int) else counts, table)


# indices of a query that are compared with each other; more are sorted
_FEW = 64


@partial(jax.jit, static_argnums=0)
def _table_rows(most: int, indices: jax.Array, counts: Any, table: BlockTable) -> jax.Array:
    number = np.arange(indices.shape[-1], dtype=np.int32)
    legal = (indices >= 0) & (indices <= table.own_block[:, :, None, None]) & (number < most)
    if counts is not None:
        legal &= number < counts[..., None]
    rows = jnp.where(legal, indices + table.first_row[:, :, None, None], -1)
    if number.size <= _FEW:
        same = (rows[..., :, None] == rows[..., None, :]) & (number[:, None] > number)
        return jnp.where(same.any(-1), -1, rows)
    rows = jnp.sort(rows, axis=-1)
    before = jnp.concatenate([jnp.full_like(rows[..., :1], -1), rows[..., :-1]], axis=-1)
    return jnp.where(rows == before, -1, rows)


def finish(call: Call, outputs: dict[str, jax.Array], shape: tuple[int, ...]) -> Any:
    """From the canonical outputs to what the caller asked for, whose query has that shape."""
    out, lse = unfolded(outputs["out"], shape[:-3]), unfolded(outputs["lse"], shape[:-3])
    return (out, lse) if call.spec.with_lse else out
