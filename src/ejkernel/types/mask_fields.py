"""The fields of a mask, and the element mask (B, H, T, S) that they make together; `MaskInfo` adds the rest."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp

from ejkernel.checks.arrays import common_batch
from ejkernel.checks.options import static_int
from ejkernel.expressions.binding import Rule, full_rank, has_single_head, head_counts, rule_value
from ejkernel.types.visibility import Band, Tokens, pattern_cells, visible

ARRAY_FIELDS = ("q_ids", "kv_ids", "q_pos", "kv_pos", "dense", "pattern", "rule")
STATIC_FIELDS = ("q_len", "kv_len", "band", "chunk", "cross")
_FARTHEST = 2**30  # a distance beyond which no two positions lie


@dataclass(frozen=True, eq=False, repr=False)
class MaskFields:
    """The fields of `MaskInfo`, which documents them."""

    q_len: int
    kv_len: int
    # arrays; other leaves (shardings, axes) under tree maps
    q_ids: Any = None
    kv_ids: Any = None
    q_pos: Any = None
    kv_pos: Any = None
    dense: Any = None
    pattern: Any = None
    rule: Rule | None = None
    band: Band = (None, None)
    chunk: int | None = None
    cross: bool = False

    def __post_init__(self):
        static_int("q_len", self.q_len, 0)
        static_int("kv_len", self.kv_len, 0)

    def element_mask(self, q_index: jax.Array | None = None, kv_index: jax.Array | None = None) -> jax.Array:
        """The mask at these query and key indices, (t,) and (s,): bool (B|1, H|1, t, s). None takes all.

        Every other view of the mask is built from this one.
        """
        m = self.canonical()
        everything = q_index is None and kv_index is None
        q_index = jnp.arange(self.q_len) if q_index is None else q_index
        kv_index = jnp.arange(self.kv_len) if kv_index is None else kv_index
        q, k = q_index[:, None], kv_index[None]
        rules = []
        if m.pattern is not None:
            rules.append(pattern_cells(jnp.asarray(m.pattern.blocks), q, k, m.pattern.block_shape))
        if m.dense is not None:
            rules.append(m.dense if everything else m.dense[:, :, q, k])
        queries, keys = m._positions_at(q_index, kv_index)
        if m.q_ids is not None:
            queries = queries._replace(segment=m.q_ids[:, None, q_index, None])
            keys = keys._replace(segment=m.kv_ids[:, None, None, kv_index])
        if m.rule is not None:
            rules.append(m._rule_at(q_index[:, None], kv_index[None]))
        pairs = jnp.ones((1, 1, len(q_index), len(kv_index)), bool)
        return visible(queries, keys, m.band, m.chunk, pairs=pairs, also=rules)

    def with_dense_rule(self) -> Self:
        """The same with a T x S array in place of its rule, for functions that read none."""
        if self.rule is None:
            return self
        m = self.canonical()
        seen = m._rule_at(jnp.arange(self.q_len)[:, None], jnp.arange(self.kv_len)[None])
        seen = jnp.broadcast_to(seen, (*seen.shape[:2], self.q_len, self.kv_len))
        return dataclasses.replace(m, rule=None, dense=seen if m.dense is None else m.dense & seen)

    def _rule_at(self, q_index: jax.Array, kv_index: jax.Array) -> jax.Array:
        """What the rule shows, (B|1, H|1, t, s)."""
        assert self.rule is not None
        heads = max(self._heads(), default=1)
        if heads == 1 and "h" in self.rule.expression.axes and not has_single_head(self.rule):
            raise ValueError(f"{self!r} depends on the number of a head: how many there are is known in a call alone")
        b, h = (jnp.arange(n, dtype=jnp.int32) for n in (self._batch(), heads))
        q_index, kv_index = (x.astype(jnp.int32) for x in (q_index, kv_index))
        axes = {"b": b[:, None, None, None], "h": h[:, None, None], "i": q_index, "j": kv_index}
        seen = rule_value(self.rule, axes)
        return seen.reshape((1,) * (4 - seen.ndim) + seen.shape)

    def _positions_at(self, q_index: jax.Array, kv_index: jax.Array) -> tuple[Tokens, Tokens]:
        """Positions (B|1, 1, t, 1) and (B|1, 1, 1, s)."""
        if self.q_pos is None:
            q, k = (q_index + (self.kv_len - self.q_len))[None], kv_index[None]
        else:
            q, k = self.q_pos[:, q_index], self.kv_pos[:, kv_index]
        return Tokens(q[:, None, :, None]), Tokens(k[:, None, None, :])

    @property
    def is_symbolic(self) -> bool:
        """Whether the mask is a description alone and holds no T x S array. Static."""
        return self.dense is None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H or 1, T, S), the shape of `attention_mask`."""
        m = self.canonical()
        return (m._batch(), max(m._heads(), default=1), self.q_len, self.kv_len)

    @property
    def batch_size(self) -> int:
        """B, 1 where nothing depends on the row."""
        return self.canonical()._batch()

    def canonical(self) -> Self:
        """The same with every array at its full rank (2 for ids and positions, 4 for dense and blocks) and length.

        Inside `vmap` and `scan` the fields lack their batch axis, after them they may have one more; a length of 1
        stands for any. Kernels read the fields through this.
        """
        T, S = self.q_len, self.kv_len
        lengths = {"q_ids": (T,), "kv_ids": (S,), "q_pos": (T,), "kv_pos": (S,), "dense": (T, S)}
        arrays = {name: _at_length(getattr(self, name), lengths) for name, lengths in lengths.items()}
        pattern = self.pattern and dataclasses.replace(self.pattern, blocks=with_rank(self.pattern.blocks, 4))
        fields = [*arrays.values(), pattern and pattern.blocks]
        rows = max((x.shape[0] for x in fields if x is not None), default=1)
        return dataclasses.replace(self, **arrays, pattern=pattern, rule=self.rule and full_rank(self.rule, rows))

    def with_lengths(self, q_len: int, kv_len: int) -> Self:
        """The same for other lengths, on each side where the arrays say nothing of single tokens; else as it is."""
        q_sizes = [x.shape[axis] for x, axis in ((self.q_ids, -1), (self.q_pos, -1), (self.dense, -2)) if x is not None]
        kv_sizes = [x.shape[-1] for x in (self.kv_ids, self.kv_pos, self.dense) if x is not None]
        free_q, free_kv = (
            self.pattern is None and self.rule is None and length > 1 and set(sizes) == {1}
            for length, sizes in ((self.q_len, q_sizes), (self.kv_len, kv_sizes))
        )
        return dataclasses.replace(
            self, q_len=q_len if free_q else self.q_len, kv_len=kv_len if free_kv else self.kv_len
        )

    def checked(self) -> Self:
        """Itself, if the shapes of its parts agree."""
        m = self.canonical()
        m._batch()
        T, S = self.q_len, self.kv_len
        for a, b in (("q_ids", "kv_ids"), ("q_pos", "kv_pos")):
            if (getattr(m, a) is None) != (getattr(m, b) is None):
                raise ValueError(f"{a} and {b} must be given together")
            for name, length in ((a, T), (b, S)):
                x = getattr(m, name)
                if x is not None and x.shape[1] != length:
                    raise ValueError(f"{name} must have shape (B, {length}), got {x.shape}")
        if m.dense is not None and m.dense.shape[2:] != (T, S):
            raise ValueError(f"dense must have shape (B, H, {T}, {S}), got {m.dense.shape}")
        heads = m._heads() - {1}
        if len(heads) > 1:
            raise ValueError(f"dense mask and pattern must have one head or as many, got {sorted(heads)}")
        return self if m.pattern is None else dataclasses.replace(self, pattern=self.pattern.fitted(T, S))

    def narrowed(self, band: Band) -> Self:
        """Also requires `lo <= k - q <= hi`, in positions."""
        lows = [x for x in (self.band[0], band[0]) if x is not None]
        highs = [x for x in (self.band[1], band[1]) if x is not None]
        low, high = max(lows, default=None), min(highs, default=None)
        # the sum of a limit and a position must fit in int32
        clamped = (None if x is None else max(-_FARTHEST, min(x, _FARTHEST)) for x in (low, high))
        return dataclasses.replace(self, band=tuple(clamped))

    def uses_positions(self) -> bool:
        """Whether positions matter: there is a band or a chunk."""
        return self.band != (None, None) or self.chunk is not None

    def ids_or_zeros(self) -> tuple[jax.Array, jax.Array]:
        """Segment ids (B|1, T) and (B|1, S), the same for all where nothing is segmented."""
        m = self.canonical()
        if m.q_ids is not None:
            return m.q_ids, m.kv_ids
        return jnp.zeros((1, self.q_len), jnp.int32), jnp.zeros((1, self.kv_len), jnp.int32)

    def _batch(self) -> int:
        parts = {name: getattr(self, name) for name in ARRAY_FIELDS}
        parts["pattern"], rule = self.pattern and self.pattern.blocks, parts.pop("rule")
        parts |= {} if rule is None else {f"array {n} of the rule": x for n, x in enumerate(rule.arrays)}
        return common_batch({name: x.shape[0] for name, x in parts.items() if x is not None})

    def _heads(self) -> set[int]:
        heads = {x.shape[1] for x in (self.dense, self.pattern and self.pattern.blocks) if x is not None}
        return heads if self.rule is None else heads | head_counts(self.rule)

    def __repr__(self) -> str:
        arrays = {"segments": self.q_ids, "positions": self.q_pos, "pattern": self.pattern}
        words = [f"T={self.q_len}", f"S={self.kv_len}"]
        words += [name for name, part in arrays.items() if part is not None]
        words += [f"dense={getattr(self.dense, 'shape', self.dense)}"] if self.dense is not None else []
        words += [f"band={self.band}"] if self.band != (None, None) else []
        words += [f"chunk={self.chunk}"] if self.chunk is not None else []
        words += [f"rule={shortened(repr(self.rule.expression), 80)}"] if self.rule is not None else []
        return f"{type(self).__name__}({', '.join(words)})"


def _at_length(x: Any, lengths: tuple[int, ...]) -> Any:
    """`x` at its full rank, with a length of 1 broadcast."""
    x = with_rank(x, 2 if len(lengths) == 1 else 4)
    if x is None or x.shape[-len(lengths) :] == lengths:
        return x
    leading, sizes = x.shape[: -len(lengths)], x.shape[-len(lengths) :]
    return jnp.broadcast_to(x, (*leading, *(n if size == 1 else size for size, n in zip(sizes, lengths, strict=True))))


def with_rank(x: Any, rank: int) -> Any:
    """Adds a missing batch axis, or folds extra leading axes into it."""
    if x is None or x.ndim == rank:
        return x
    return x[None] if x.ndim < rank else x.reshape(-1, *x.shape[-(rank - 1) :])


def shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
