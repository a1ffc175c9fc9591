"""MaskInfo: which keys each query sees, kept as a description instead of a T x S array."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike

from ejkernel.checks.arrays import (
    ArrayInput,
    bool_array,
    common_batch,
    concrete,
    cumulative_lengths,
    integers,
    lengths_array,
    limits,
    rows,
)
from ejkernel.checks.options import static_int
from ejkernel.checks.values import check_rows, enabled
from ejkernel.expressions.binding import Rule
from ejkernel.expressions.nodes import INT, LOAD, B, Expression, I, J, load, rebuilt, rewritten
from ejkernel.expressions.tracing import traced
from ejkernel.types import segments
from ejkernel.types.conversions import mask_to_segment_ids, segment_ids_to_mask
from ejkernel.types.mask_algebra import chunked, intersect, same, unite
from ejkernel.types.mask_fields import ARRAY_FIELDS, STATIC_FIELDS, MaskFields, with_rank
from ejkernel.types.mask_rules import both as both_rules
from ejkernel.types.mask_rules import bounds_rule, causal_rule
from ejkernel.types.pattern import BlockPattern
from ejkernel.types.recognition import recognised
from ejkernel.types.shardings import mask_shardings
from ejkernel.types.slices import at_tokens, last_tokens
from ejkernel.types.visualize import MOST_DRAWN, Kind, checked_cells, drawn, has_values, html, visibility

__all__ = ["MaskInfo", "mask_to_segment_ids", "segment_ids_to_mask"]

PUBLIC_NAMES = {
    "q_segment_ids": "q_ids",
    "kv_segment_ids": "kv_ids",
    "q_positions": "q_pos",
    "kv_positions": "kv_pos",
}


@functools.partial(jax.tree_util.register_dataclass, data_fields=list(ARRAY_FIELDS), meta_fields=list(STATIC_FIELDS))
@dataclass(frozen=True, eq=False, repr=False)
class MaskInfo(MaskFields):
    """Which keys each query sees: everything that all of the parts below allow. `MaskInfo(T, S)` allows everything.

    All of it is a description: a T x S array is made only by `attention_mask` and `bias`, and where
    `apply_kv_lengths` cuts a block pattern; `is_symbolic` and the repr say whether a mask holds one.

    Positions decide causality, windows and chunks: the explicit ones where given, else plain indices with the ends
    aligned (query `i` stands at `i + S - T`, key `j` at `j`).

    A pytree: arrays are leaves, the rest is static. It can be made inside `jit` from traced arrays, pass through
    `jit`, `vmap` and `scan` (which take or add a leading axis: reads see a missing batch axis as batch 1 and fold
    extra ones into the batch), and a change of ids never retraces. Batch sizes are B or 1.

    Fields (all but the lengths optional):
        q_len, kv_len: T and S.
        q_ids, kv_ids: segment ids (B|1, T) and (B|1, S) int32; equal ids see each other, negative is padding.
        q_pos, kv_pos: explicit positions (B|1, T) and (B|1, S) int32.
        dense: bool (B|1, H|1, T, S).
        pattern: BlockPattern with blocks (B|1, H|1, nq, nk).
        rule: an expression of indices, with the arrays it reads: functions, bounds, what other parts cannot say.
        band: (lo, hi), keeps `lo <= k_pos - q_pos <= hi`; None is unbounded.
        chunk: keeps `q_pos // chunk == k_pos // chunk`.
        cross: queries and keys were described apart, so they are not known to be the same tokens.

    >>> mask = MaskInfo.from_segments([[1, 1, 2, 2, -1]]).apply_causal()
    >>> mask.attention_mask[0, 0].astype(int).tolist()
    [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]]
    >>> mask.q_positions.tolist()
    [[0, 1, 0, 1, 0]]
    """

    # make

    @classmethod
    def from_segments(
        cls,
        q_segment_ids: ArrayInput,
        kv_segment_ids: ArrayInput | None = None,
        q_positions: ArrayInput | None = None,
        kv_positions: ArrayInput | None = None,
    ) -> "MaskInfo":
        """A query sees the keys of its own segment; negative ids are padding.

        Args:
            q_segment_ids: (T,) or (B, T) integers, in any order.
            kv_segment_ids: (S,) or (B, S); None means self attention, the same as the queries'.
            q_positions, kv_positions: shaped like the ids; they then decide causality, windows and chunks. For self
                attention the keys' may be left out. They are compared only inside a segment.

        >>> MaskInfo.from_segments([1, 1, 2]).attention_mask[0, 0].astype(int).tolist()
        [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
        """
        q_ids = rows("q_segment_ids", q_segment_ids)
        if kv_segment_ids is q_segment_ids:
            kv_segment_ids = None
        kv_ids = q_ids if kv_segment_ids is None else rows("kv_segment_ids", kv_segment_ids)
        q_len, kv_len = q_ids.shape[1], kv_ids.shape[1]
        if kv_segment_ids is None and kv_positions is None:
            kv_positions = q_positions
        if (q_positions is None) != (kv_positions is None):
            missing = "q_positions" if q_positions is None else "kv_positions"
            raise ValueError(f"q_positions and kv_positions must be given together, {missing} is missing")
        q_pos = None if q_positions is None else rows("q_positions", q_positions, q_len)
        kv_pos = None if kv_positions is None else rows("kv_positions", kv_positions, kv_len)
        kv_pos = q_pos if kv_positions is q_positions else kv_pos
        cross = not (same(q_ids, kv_ids) and same(q_pos, kv_pos))
        return cls(q_len, kv_len, q_ids, kv_ids, q_pos, kv_pos, cross=cross).checked()

    @classmethod
    def from_attention_mask(cls, mask: ArrayInput) -> "MaskInfo":
        """A mask of bool or 0/1 integers, true where visible.

        Args:
            mask: (B, S) is a padding mask of self attention, in which padded queries see nothing either; a matrix of
                queries and keys is `mask[None]`, (1, T, S). (B, T, S) and (B, H, T, S) are kept as they are, each
                dimension its size or 1. A length of 1 broadcasts: (B, 1, 1, S) hides keys from any number of queries
                (as many as keys until something says otherwise: a call, another mask, `replace(q_len=...)`) and stays
                symbolic, as does (B, 1, T, 1).

        >>> MaskInfo.from_attention_mask([[1, 1, 0]]).q_segment_ids.tolist()
        [[0, 0, -1]]
        >>> MaskInfo.from_attention_mask([[[[1, 1, 0]]]]).attention_mask[0, 0].astype(int).tolist()
        [[1, 1, 0], [1, 1, 0], [1, 1, 0]]
        """
        array = jnp.asarray(bool_array("mask", mask))
        if array.ndim == 2:
            ids = segments.from_padding_mask(array)
            return cls(ids.shape[1], ids.shape[1], ids, ids)
        if array.ndim not in (3, 4):
            raise ValueError(f"mask must have shape (B, S), (B, T, S) or (B, H, T, S), got {array.shape}")
        dense = array if array.ndim == 4 else array[:, None]
        B, H, T, S = dense.shape
        if H == 1 and (T == 1) != (S == 1):
            given = segments.from_padding_mask(dense.reshape(B, T * S))
            one_segment = segments.zeros_beside(given)
            q_ids, kv_ids = (one_segment, given) if T == 1 else (given, one_segment)
            return cls(T * S, T * S, q_ids, kv_ids)
        q_len, kv_len = (S if T == 1 else T), (T if S == 1 else S)
        return cls(q_len, kv_len, dense=dense, cross=q_len != kv_len)

    @classmethod
    def from_cu_seqlens(
        cls, cu_q: ArrayInput, cu_kv: ArrayInput | None = None, *, max_q_len: int, max_kv_len: int | None = None
    ) -> "MaskInfo":
        """Sequences packed one after another into one row; the mask of a (1, L) batch.

        With keys of their own (`cu_kv`), causality and windows align the end of each sequence's queries with the end
        of its keys. Tokens past the last entry are padding.

        Args:
            cu_q, cu_kv: (N+1,) cumulative lengths, from 0; `cu_kv=None` means the same as `cu_q`.
            max_q_len, max_kv_len: L, the lengths of the packed rows.

        >>> mask = MaskInfo.from_cu_seqlens([0, 2, 3], max_q_len=4)
        >>> mask.q_segment_ids.tolist(), mask.cu_seqlens_q.tolist()
        ([[0, 0, 1, -1]], [0, 2, 3])
        """
        q_len = static_int("max_q_len", max_q_len, 0)
        kv_len = q_len if max_kv_len is None else static_int("max_kv_len", max_kv_len, 0)
        q_cu = cumulative_lengths("cu_q", cu_q, q_len)
        if cu_kv is None and kv_len == q_len:
            ids, _ = segments.from_cu_seqlens(q_cu, q_len)
            return cls(q_len, kv_len, ids, ids)
        kv_cu = cumulative_lengths("cu_q" if cu_kv is None else "cu_kv", cu_q if cu_kv is None else cu_kv, kv_len)
        if q_cu.shape != kv_cu.shape:
            raise ValueError(f"cu_q and cu_kv must describe as many sequences, got {q_cu.shape=}, {kv_cu.shape=}")
        q_ids, q_pos = segments.from_cu_seqlens(q_cu, q_len)
        kv_ids, kv_pos = segments.from_cu_seqlens(kv_cu, kv_len)
        q_pos = segments.ends_aligned(q_ids, q_pos, q_cu, kv_cu)
        return cls(q_len, kv_len, q_ids, kv_ids, q_pos, kv_pos, cross=not same(q_ids, kv_ids))

    @classmethod
    def from_lengths(
        cls, q_lengths: ArrayInput, kv_lengths: ArrayInput | None = None, *, q_len: int, kv_len: int | None = None
    ) -> "MaskInfo":
        """Rows padded on the right: tokens from each length on are padding.

        Causality goes by plain indices with the ends of the padded rows aligned; give positions to
        `from_segments` for anything else.

        Args:
            q_lengths, kv_lengths: (B,); `kv_lengths=None` means self attention, the same as the queries'.
            q_len, kv_len: T and S.

        >>> MaskInfo.from_lengths([2, 3], q_len=3).q_segment_ids.tolist()
        [[0, 0, -1], [0, 0, 0]]
        """
        T = static_int("q_len", q_len, 0)
        S = T if kv_len is None else static_int("kv_len", kv_len, 0)
        q_ids = segments.from_lengths(lengths_array("q_lengths", q_lengths, T), T)
        if kv_lengths is None:
            if S != T:
                raise ValueError(f"kv_lengths must be given when kv_len differs from q_len, got {q_len=}, {kv_len=}")
            return cls(T, S, q_ids, q_ids)
        kv_ids = segments.from_lengths(lengths_array("kv_lengths", kv_lengths, S), S)
        return cls(T, S, q_ids, kv_ids, cross=not same(q_ids, kv_ids)).checked()

    @classmethod
    def from_block_pattern(cls, pattern: BlockPattern, *, q_len: int, kv_len: int | None = None) -> "MaskInfo":
        """A block-sparse mask; the pattern may be larger than the lengths need, never smaller.

        >>> MaskInfo.from_block_pattern(BlockPattern.sliding_blocks(8, 1, block_size=16), q_len=100).shape
        (1, 1, 100, 100)
        """
        if not isinstance(pattern, BlockPattern):
            raise TypeError(
                f"pattern must be a BlockPattern, got {type(pattern).__name__}; see BlockPattern.from_dense"
            )
        T = static_int("q_len", q_len, 0)
        S = T if kv_len is None else static_int("kv_len", kv_len, 0)
        return cls(T, S, pattern=pattern.fitted(T, S), cross=T != S)

    @classmethod
    def from_random(
        cls, batch_size: int, q_len: int, kv_len: int | None = None, sparsity: float = 0.5, seed: int = 0
    ) -> "MaskInfo":
        """A dense random mask (B, 1, T, S) in which the fraction `sparsity` of each row of the batch is masked out.

        >>> int(MaskInfo.from_random(1, 10, 10, sparsity=0.25).attention_mask.sum())
        75
        """
        B, T = static_int("batch_size", batch_size, 1), static_int("q_len", q_len, 0)
        S = T if kv_len is None else static_int("kv_len", kv_len, 0)
        if not 0 <= sparsity <= 1:
            raise ValueError(f"sparsity must lie in [0, 1], got {sparsity}")
        ranks = jnp.broadcast_to(jnp.arange(T * S), (B, T * S))
        ranks = jax.random.permutation(jax.random.key(seed), ranks, axis=1, independent=True)
        return cls(T, S, dense=(ranks >= round(sparsity * T * S)).reshape(B, 1, T, S), cross=T != S)

    @classmethod
    def from_function(
        cls, mask_fn: Callable[..., Any], *, q_len: int, kv_len: int | None = None, batch_size: int = 1
    ) -> "MaskInfo":
        """What a function of `(b, h, i, j)` shows: int32 scalars, of batch row, query head, query and key, to a bool.

        The function is traced once, under `jit` too. Indices are plain ones, from 0. It may index arrays that it closes
        over, of any shape; its program is the same for other values in them. Kernels skip blocks of keys that it
        hides, forward and backward, and compute the mask where it hides some, without an array of pairs.

        Args:
            mask_fn: the function.
            q_len, kv_len: T and S.
            batch_size: how many rows there are to read, where the function uses `b`; a call has its own.

        >>> lengths = jnp.array([1, 3])  # a prefix that all see, in each row
        >>> mask = MaskInfo.from_function(lambda b, h, i, j: (j <= i) | (j < lengths[b]), q_len=3, batch_size=2)
        >>> mask.attention_mask.shape
        (2, 1, 3, 3)
        """
        T = static_int("q_len", q_len, 0)
        S = T if kv_len is None else static_int("kv_len", kv_len, 0)
        return cls(T, S, cross=T != S)._with_function(mask_fn, static_int("batch_size", batch_size, 1))

    @classmethod
    def from_bounds(
        cls, starts: ArrayInput | None = None, ends: ArrayInput | None = None, *, q_len: int, kv_len: int | None = None
    ) -> "MaskInfo":
        """Query i sees the keys in `[starts[i], ends[i])`, by index.

        Args:
            starts, ends: int (T,), (B, T) or (B, H, T); None leaves that side open. Those outside of [0, S] are
                clamped; with `EJKERNEL_CHECKS=1` they are an error.
            q_len, kv_len: T and S.

        >>> MaskInfo.from_bounds([0, 1, 1], [2, 2, 3], q_len=3).attention_mask[0, 0].astype(int).tolist()
        [[1, 1, 0], [0, 1, 0], [0, 1, 1]]
        """
        T = static_int("q_len", q_len, 0)
        S = T if kv_len is None else static_int("kv_len", kv_len, 0)
        return cls(T, S, cross=T != S).apply_bounds(starts, ends)

    @classmethod
    def from_key_bounds(
        cls, starts: ArrayInput | None = None, ends: ArrayInput | None = None, *, q_len: int, kv_len: int | None = None
    ) -> "MaskInfo":
        """Key j is seen by the queries in `[starts[j], ends[j])`, by index.

        Args:
            starts, ends: int (S,), (B, S) or (B, H, S); None leaves that side open. Those outside of [0, T] are
                clamped; with `EJKERNEL_CHECKS=1` they are an error.
            q_len, kv_len: T and S.

        >>> MaskInfo.from_key_bounds([0, 1, 1], [3, 2, 3], q_len=3).attention_mask[0, 0].astype(int).tolist()
        [[1, 0, 0], [1, 1, 1], [1, 0, 1]]
        """
        T = static_int("q_len", q_len, 0)
        S = T if kv_len is None else static_int("kv_len", kv_len, 0)
        return cls(T, S, cross=T != S).apply_key_bounds(starts, ends)

    @classmethod
    def prefix_lm(cls, prefix_lengths: ArrayInput, *, q_len: int, kv_len: int | None = None) -> "MaskInfo":
        """Causal, and the first `prefix_lengths` (B,) keys of each row are seen by all its queries.

        >>> MaskInfo.prefix_lm([2], q_len=3).attention_mask[0, 0].astype(int).tolist()
        [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
        """
        T = static_int("q_len", q_len, 0)
        S = T if kv_len is None else static_int("kv_len", kv_len, 0)
        lengths = lengths_array("prefix_lengths", prefix_lengths, S)
        return cls(T, S, cross=T != S)._with_rule(Rule((J <= I + (S - T)) | (J < load(0, (B,), INT)), (lengths,)))

    @classmethod
    def tree(cls, ends: ArrayInput) -> "MaskInfo":
        """A tree of tokens in depth-first order: each sees its ancestors and itself.

        Rollouts that share a prefix are one row: the prefix, then each rollout, whose tokens end where it ends.

        Args:
            ends: int (T,) or (B, T): one past the last token of the subtree under each token. Those past T are
                clamped, and a token that ends before it begins is hidden; with `EJKERNEL_CHECKS=1` both are errors.

        >>> MaskInfo.tree([4, 3, 3, 4]).attention_mask[0, 0].astype(int).tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]
        """
        x = rows("ends", ends)
        T = x.shape[1]
        if enabled():
            message = f"ends must lie past their own token and be at most {T}"
            check_rows(x, (x <= jnp.arange(T, dtype=jnp.int32)) | (x > T), message)
        return cls(T, T)._with_rule(Rule((J <= I) & (I < load(0, (B, J), INT)), (x,)))

    # refine

    def apply_causal(self, offset: ArrayInput = 0) -> "MaskInfo":
        """Also requires `k <= q + offset`, in positions.

        Args:
            offset: a number; or a traced one, or one for each row (B,).

        >>> MaskInfo(2, 3).apply_causal().attention_mask[0, 0].astype(int).tolist()
        [[1, 1, 0], [1, 1, 1]]
        >>> MaskInfo(2, 2).apply_causal(offset=[0, 1]).attention_mask[:, 0].astype(int).tolist()
        [[[1, 0], [1, 1]], [[1, 1], [1, 1]]]
        """
        if not isinstance(offset, Tracer) and np.ndim(offset) == 0:
            return self.narrowed((None, static_int("offset", offset)))
        offsets = jnp.asarray(integers("offset", offset, 0, 1), jnp.int32).reshape(-1)
        common_batch({"mask": self.batch_size, "offset": offsets.shape[0]})
        return self._with_rule(causal_rule(self, offsets))

    def apply_function(self, mask_fn: Callable[..., Any]) -> "MaskInfo":
        """Also requires `mask_fn(b, h, i, j)`: see `from_function`.

        >>> mask = MaskInfo(3, 3).apply_causal().apply_function(lambda b, h, i, j: j != 1)
        >>> mask.attention_mask[0, 0].astype(int).tolist()
        [[1, 0, 0], [1, 0, 0], [1, 0, 1]]
        """
        return self._with_function(mask_fn, self.batch_size)

    def _with_function(self, mask_fn: Callable[..., Any], batch_size: int) -> "MaskInfo":
        body = traced(mask_fn, "mask_fn", scores=False)
        rule = Rule(body.expression, body.arrays)
        if batch_size > 1:
            # numbers of rows that stay theirs where a vmap makes more of them
            row = load(len(rule.arrays), (B,), INT)
            parts = self.recognised(rule)
            rule = Rule(_by_number(rule.expression, row), (*rule.arrays, jnp.arange(batch_size, dtype=jnp.int32)))
            return self._with_rule(rule) if parts.rule is not None else self & parts
        return self & self.recognised(rule)

    def recognised(self, rule: Rule, *, differences_alone: bool = False) -> "MaskInfo":
        """A mask of these lengths that shows what a rule does, as band, chunk and segments where it is such."""
        T, S = self.q_len, self.kv_len
        parts = recognised(rule, T, S, differences_alone=differences_alone)
        chunk, rest = parts.chunk, parts.rest
        if chunk is not None and T != S:  # of positions, which are counted from the end
            chunk, rest = None, both_rules(rest, Rule((I // chunk).equals(J // chunk)))
        cross = T != S or not same(parts.q_ids, parts.kv_ids)
        mask = MaskInfo(T, S, parts.q_ids, parts.kv_ids, chunk=chunk, rule=rest, cross=cross)
        low, high = (None if x is None else x - (S - T) for x in parts.band)
        return mask.narrowed((low, high))

    def apply_bounds(self, starts: ArrayInput | None = None, ends: ArrayInput | None = None) -> "MaskInfo":
        """Also requires that query i sees keys in `[starts[i], ends[i])` alone: see `from_bounds`."""
        return self._with_rule(bounds_rule(*self._limits(starts, ends, self.q_len, self.kv_len), of_keys=False))

    def apply_key_bounds(self, starts: ArrayInput | None = None, ends: ArrayInput | None = None) -> "MaskInfo":
        """Also requires that key j is seen by queries in `[starts[j], ends[j])` alone: see `from_key_bounds`."""
        return self._with_rule(bounds_rule(*self._limits(starts, ends, self.kv_len, self.q_len), of_keys=True))

    def _limits(self, starts: ArrayInput | None, ends: ArrayInput | None, length: int, most: int) -> tuple[Any, Any]:
        given = {name: x for name, x in (("starts", starts), ("ends", ends)) if x is not None}
        arrays = {name: limits(name, x, length, most) for name, x in given.items()}
        common_batch({"mask": self.batch_size, **{name: x.shape[0] for name, x in arrays.items()}})
        return arrays.get("starts"), arrays.get("ends")

    def _with_rule(self, rule: Rule) -> "MaskInfo":
        return dataclasses.replace(self, rule=both_rules(self.rule, rule))

    def apply_sliding_window(self, window: int | tuple[int | None, int | None], offset: int = 0) -> "MaskInfo":
        """Also requires `q + offset - left <= k <= q + offset + right`, in positions.

        Args:
            window: (left, right), None for no limit on that side; one number is both.
            offset: moves the window towards later keys.

        >>> MaskInfo(3, 3).apply_sliding_window((1, 0)).attention_mask[0, 0].astype(int).tolist()
        [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
        """
        pair = tuple(window) if isinstance(window, (tuple, list)) else (window, window)
        if len(pair) != 2:
            raise ValueError(f"window must be an int or (left, right), got {window!r}")
        left, right = (None if x is None else static_int("window", x, 0) for x in pair)
        offset = static_int("offset", offset)
        return self.narrowed((None if left is None else offset - left, None if right is None else offset + right))

    def apply_chunked(self, chunk_size: int) -> "MaskInfo":
        """Also requires query and key in the same chunk, `q // chunk_size == k // chunk_size`, in positions.

        A second chunk size stays symbolic if one divides the other.

        >>> MaskInfo(3, 3).apply_chunked(2).attention_mask[0, 0].astype(int).tolist()
        [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
        """
        chunk_size = static_int("chunk_size", chunk_size, 1)
        return chunked(self, chunk_size)

    def apply_kv_lengths(
        self,
        lengths: ArrayInput,
        *,
        q_len: int | None = None,
        end_index: ArrayInput | None = None,
        sliding_window: int | None = None,
    ) -> "MaskInfo":
        """Also hides the keys from `lengths` on, by index: their segment ids become -1.

        A step of decoding takes the few queries that it computes out of the mask of all tokens, too. They keep the
        positions they had, for causality and windows that are applied later.

        Args:
            lengths: (B,), or one number for all rows.
            q_len, end_index: together: the mask of the `q_len` queries before `end_index` (B,), by index.
            sliding_window: the mask of so many keys alone, those before `lengths`, of a cache that holds no others.

        >>> MaskInfo(2, 3).apply_kv_lengths([1]).attention_mask[0, 0].astype(int).tolist()
        [[1, 0, 0], [1, 0, 0]]
        >>> causal = MaskInfo(4, 4).apply_causal()
        >>> causal.apply_kv_lengths([2, 3], q_len=1, end_index=[2, 3]).attention_mask[:, 0, 0].astype(int).tolist()
        [[1, 1, 0, 0], [1, 1, 1, 0]]
        """
        T, S = self.q_len, self.kv_len
        ends = lengths_array("lengths", lengths, S)
        inside = segments.from_lengths(ends, S)
        q_ids, kv_ids = self.ids_or_zeros()
        common_batch({"mask": self.batch_size, "lengths": inside.shape[0]})
        hidden = dataclasses.replace(self, q_ids=q_ids, kv_ids=jnp.where(inside < 0, -1, kv_ids))
        if (q_len is None) != (end_index is None):
            raise ValueError(f"q_len and end_index must be given together, got {q_len=}, {end_index=}")
        q_index = kv_index = None
        if q_len is not None and end_index is not None:
            count = static_int("q_len", q_len, 1)
            if count > T:
                raise ValueError(f"{q_len=} is more than the {T} queries of the mask")
            q_index = last_tokens(lengths_array("end_index", end_index, T, least=count), count, T)
            common_batch({"mask": self.batch_size, "lengths": inside.shape[0], "end_index": q_index.shape[0]})
        if sliding_window is not None:
            kv_index = last_tokens(ends, min(static_int("sliding_window", sliding_window, 1), S), S)
        return hidden if q_index is None and kv_index is None else at_tokens(hidden, q_index, kv_index)

    def apply_token_type_ids(
        self,
        token_type_ids: ArrayInput,
        kv_token_type_ids: ArrayInput | None = None,
        *,
        combine: Literal["union", "intersect", "replace"] = "union",
    ) -> "MaskInfo":
        """Lets token types change the mask: images seen both ways in causal text, or types kept apart.

        Args:
            token_type_ids: (T,) or (B, T) types of the queries, and of the keys unless those are given.
            kv_token_type_ids: (S,) or (B, S).
            combine: "union" also shows keys of the query's own type, within its segment; type 0 is ordinary text and
                adds nothing, padding stays padding. "intersect" also requires equal types. "replace" forgets every
                other part (but not explicit positions) and shows equal types. Negative types match nothing.

        >>> mask = MaskInfo(4, 4).apply_causal().apply_token_type_ids([0, 1, 1, 0])
        >>> mask.attention_mask[0, 0].astype(int).tolist()
        [[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
        """
        q_types = rows("token_type_ids", token_type_ids, self.q_len)
        name = "token_type_ids" if kv_token_type_ids is None else "kv_token_type_ids"
        kv_types = rows(name, token_type_ids if kv_token_type_ids is None else kv_token_type_ids, self.kv_len)
        types = MaskInfo(self.q_len, self.kv_len, q_types, kv_types, cross=self.cross)
        if combine == "intersect":
            return self & types
        if combine == "replace":
            return dataclasses.replace(types, q_pos=self.q_pos, kv_pos=self.kv_pos).checked()
        if combine != "union":
            raise ValueError(f"combine must be 'union', 'intersect' or 'replace', got {combine!r}")
        typed = dataclasses.replace(types, q_ids=jnp.where(q_types > 0, q_types, -1))
        unsegmented = dataclasses.replace(self, q_ids=None, kv_ids=None)
        if not self.uses_positions() and self.dense is None and self.pattern is None:
            return self  # segments alone: nothing to loosen
        common_batch({"mask": self.batch_size, "token_type_ids": types.batch_size})
        return dataclasses.replace(unsegmented | typed, q_ids=self.q_ids, kv_ids=self.kv_ids)

    def __and__(self, other: "MaskInfo") -> "MaskInfo":
        """What both show. Where the explicit positions differ, the left one's are kept."""
        if not isinstance(other, MaskInfo):
            return NotImplemented
        return intersect(self, other)

    def __or__(self, other: "MaskInfo") -> "MaskInfo":
        """What either shows; explicit positions are kept, the left one's first.

        Where one mask shows all that the other does, part by part, it is that one; where they differ only in bands that
        meet or in patterns whose block sizes nest, these are joined. Elsewhere the parts in which the two differ become
        a rule, which is computed pair by pair inside kernels.

        >>> causal = MaskInfo(4, 4).apply_causal()
        >>> causal | MaskInfo(4, 4).apply_sliding_window((1, 2))
        MaskInfo(T=4, S=4, band=(None, 2))
        >>> causal | MaskInfo(4, 4).apply_chunked(2)
        MaskInfo(T=4, S=4, rule=((j - i) <= 0) | ((i // 2) == (j // 2)))
        """
        if not isinstance(other, MaskInfo):
            return NotImplemented
        return unite(self, other)

    def replace(self, **parts: Any) -> "MaskInfo":
        """A copy with other parts, named as the fields or as the reads (`q_segment_ids=...`, `q_positions=...`).

        >>> MaskInfo.from_segments([1, 1, 2]).replace(q_segment_ids=[[1, 2, 2]]).q_segment_ids.tolist()
        [[1, 2, 2]]
        """
        fields = {PUBLIC_NAMES.get(name, name): value for name, value in parts.items()}
        unknown = fields.keys() - {*ARRAY_FIELDS, *STATIC_FIELDS}
        if unknown or len(fields) < len(parts):
            known = sorted({*ARRAY_FIELDS, *STATIC_FIELDS, *PUBLIC_NAMES})
            raise TypeError(f"replace got unknown or repeated parts {sorted(parts)}, known are {known}")
        lengths = {"q_ids": "q_len", "q_pos": "q_len", "kv_ids": "kv_len", "kv_pos": "kv_len"}
        for name, length in lengths.items():
            if fields.get(name) is not None:
                fields[name] = rows(name, fields[name], fields.get(length, getattr(self, length)))
        if "band" in fields:
            lo, hi = fields["band"]
            fields["band"] = tuple(None if x is None else static_int("band", x) for x in (lo, hi))
        if fields.get("chunk") is not None:
            fields["chunk"] = static_int("chunk", fields["chunk"], 1)
        if fields.get("dense") is not None:
            fields["dense"] = jnp.asarray(bool_array("dense", fields["dense"]))
        return dataclasses.replace(self, **fields).checked()

    # read

    @property
    def attention_mask(self) -> jax.Array:
        """The whole mask, true where visible: bool (B, H or 1, T, S)."""
        return jnp.broadcast_to(self.element_mask(), self.shape)

    def get_or_compute_attention_mask(self, dtype: DTypeLike = jnp.bool_) -> jax.Array:
        """`attention_mask` in that dtype: 1 where visible, else 0.

        >>> MaskInfo(2, 2).apply_causal().get_or_compute_attention_mask(dtype=jnp.float32)[0, 0].tolist()
        [[1.0, 0.0], [1.0, 1.0]]
        """
        return self.attention_mask.astype(dtype)

    @property
    def bias(self) -> jax.Array:
        """The mask to add to logits: float32 (B, H or 1, T, S), 0 where visible, else the lowest finite number.

        A bias cannot say that a query sees nothing: in a plain softmax such a row becomes a uniform one. The functions
        of this library take it for a row that sees nothing.
        """
        return jnp.where(self.attention_mask, 0.0, jnp.finfo(jnp.float32).min).astype(jnp.float32)

    @property
    def q_segment_ids(self) -> jax.Array:
        """Segment ids of the queries, (B, T) int32, zeros where nothing is segmented.

        Ids say nothing of band, chunk and pattern. A dense part is converted, if concrete and made of segments;
        otherwise ValueError.
        """
        return jnp.broadcast_to(self._segment_ids()[0], (self.batch_size, self.q_len))

    @property
    def kv_segment_ids(self) -> jax.Array:
        """Segment ids of the keys, (B, S) int32; see `q_segment_ids`."""
        return jnp.broadcast_to(self._segment_ids()[1], (self.batch_size, self.kv_len))

    @property
    def q_positions(self) -> jax.Array:
        """Positions of the queries, (B, T) int32: the explicit ones, else counted from 0 in each segment."""
        return self._positions(self.q_pos, 0, self.q_len)

    @property
    def kv_positions(self) -> jax.Array:
        """Positions of the keys, (B, S) int32: the explicit ones, else counted from 0 in each segment."""
        return self._positions(self.kv_pos, 1, self.kv_len)

    @property
    def cu_seqlens_q(self) -> jax.Array:
        """Cumulative segment lengths (N+1,) of the queries, row by row, padding left out.

        Needs concrete, contiguous segments. A sequence without tokens leaves no trace.
        """
        return segments.cu_seqlens("cu_seqlens_q", self.q_segment_ids)

    @property
    def cu_seqlens_kv(self) -> jax.Array:
        """Cumulative segment lengths (N+1,) of the keys; see `cu_seqlens_q`."""
        return segments.cu_seqlens("cu_seqlens_kv", self.kv_segment_ids)

    def is_self_attention(self) -> bool:
        """Whether queries and keys are the same tokens, as far as the making of the mask tells. Static."""
        return self.q_len == self.kv_len and not self.cross

    def get_shardings(
        self,
        *,
        mesh: Mesh | AbstractMesh,
        batch_axis: str | tuple[str, ...] | None = ("dp", "fsdp"),
        head_axis: str | tuple[str, ...] | None = "tp",
        q_axis: str | tuple[str, ...] | None = "sp",
        kv_axis: str | tuple[str, ...] | None = None,
    ) -> "MaskInfo":
        """A MaskInfo with a `NamedSharding` for each array, for `jax.device_put` and `in_shardings`.

        Axes that the mesh does not have, or that do not divide a dimension, leave it replicated; within an array an
        axis serves the first dimension that asks for it.

        >>> mesh = jax.make_mesh((1,), ("dp",))
        >>> mask = MaskInfo.from_segments([[1, 1, 2]])
        >>> tuple(jax.device_put(mask, mask.get_shardings(mesh=mesh)).q_ids.sharding.spec)
        ('dp', None)
        """
        return mask_shardings(self, mesh, {"B": batch_axis, "H": head_axis, "T": q_axis, "S": kv_axis})

    def visualize(self, kind: Kind = "text", *, batch: int = 0, head: int = 0, max_cells: int = 64) -> Any:
        """A picture of one row and head: "text" and "svg" are a str, "figure" a matplotlib Figure.

        Long masks are shown in groups of tokens. A notebook shows the picture by itself.

        >>> print(MaskInfo(3, 3).apply_causal().visualize())
        MaskInfo(T=3, S=3, band=(None, 0))  batch 0, head 0; rows: queries, columns: keys
        █··
        ██·
        ███
        """
        cells = visibility(self, batch, head, checked_cells(max_cells))
        title = repr(self) if kind == "figure" else f"{self!r}  batch {batch}, head {head}"
        return drawn(kind, cells, title, (self.q_len, self.kv_len))

    def _repr_html_(self) -> str | None:
        """For notebooks; None, which shows the repr, where its values are not known or are very many."""
        if self.q_len * self.kv_len > MOST_DRAWN or not has_values(*jax.tree.leaves(self)):
            return None
        return html(repr(self), self.visualize("svg"))

    def _segment_ids(self) -> tuple[Any, Any]:
        m = self.canonical()
        if m.dense is None:
            return m.ids_or_zeros()
        mask = dataclasses.replace(m, band=(None, None), chunk=None, pattern=None).element_mask()
        if concrete(mask) is None:
            raise ValueError("segment ids of a dense mask need its values, these are traced")
        return segments.from_dense(mask)

    def _positions(self, explicit: jax.Array | None, side: int, length: int) -> jax.Array:
        positions = with_rank(explicit, 2)
        if positions is None:
            positions = segments.positions_within(self.ids_or_zeros()[side])
        return jnp.broadcast_to(positions, (self.batch_size, length))


def _by_number(expression: Expression, row: Expression) -> Expression:
    """The expression with the number of a row in place of its index, but where that is an array's first index."""

    def rule(node: Expression) -> Expression | None:
        if node.name != LOAD:
            return rebuilt(node, tuple(row if arg is B else arg for arg in node.args)) if B in node.args else None
        return rebuilt(node, (node.args[0], *(row if arg is B else arg for arg in node.args[1:])))

    return row if expression is B else rewritten(expression, rule)
