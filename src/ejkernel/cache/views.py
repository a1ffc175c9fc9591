"""Key-value caches as pytrees: contiguous rows, pages, and what a batch over pages needs to know."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ejkernel.cache.writes import stored, write_pages
from ejkernel.checks.arrays import FLOATS, ArrayInput, as_array, int_array, lengths_array
from ejkernel.checks.caches import CACHE_DTYPES
from ejkernel.checks.dims import format_shape
from ejkernel.checks.options import static_int
from ejkernel.checks.values import check_rows

DTYPES = (*FLOATS, *CACHE_DTYPES)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class TransformerCacheView:
    """A contiguous cache per sequence: row `b` holds its tokens at `starts[b] <= s < index[b]`.

    A pytree that `append` updates in place under jit where it is donated: nothing of the cache is copied. (XLA on a
    CPU does that for float32 and int8; it rewrites caches of 16-bit and 8-bit floats.) Arrays with further leading
    axes, as `vmap` and a `scan` over layers make them, are fine while they only pass through.

    Fields:
        key: (B, S, Hkv, D).
        value: (B, S, Hkv, Dv).
        starts: (B,) int32, the first valid token; what lies before it is padding on the left.
        index: (B,) int32, one past the last valid token: where the next one goes.

    Another `index` (`dataclasses.replace`) takes tokens back or empties a row for the next sequence.

    >>> import jax, jax.numpy as jnp
    >>> from ejkernel.modules import ragged_decode_attention
    >>> from ejkernel.types import TransformerCacheView
    >>> @jax.jit(donate_argnums=0)
    ... def step(cache, query, key, value):
    ...     cache = cache.append(key, value)
    ...     return cache, ragged_decode_attention(query, cache.key, cache.value, cache.starts, cache.index)
    >>> cache = TransformerCacheView.create(2, 16, 1, 8, dtype=jnp.float32)
    >>> cache, out = step(cache, jnp.ones((2, 1, 4, 8)), jnp.ones((2, 1, 1, 8)), jnp.ones((2, 1, 1, 8)))
    >>> out.shape, cache.index.tolist()
    ((2, 1, 4, 8), [1, 1])
    """

    # arrays; other leaves (shardings, axes) under tree maps, so shapes are checked where they are used
    key: Any
    value: Any
    starts: Any
    index: Any

    @classmethod
    def create(
        cls,
        batch_size: int,
        length: int,
        kv_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        dtype: DTypeLike = jnp.bfloat16,
        starts: ArrayInput | None = None,
    ) -> "TransformerCacheView":
        """An empty cache with room for `length` tokens in each of `batch_size` rows.

        Args:
            value_dim: head dimension of the values; default: that of the keys.
            dtype: float32, bfloat16, float16, float8_e4m3fn, float8_e5m2 or int8.
            starts: (B,), how many tokens of padding each row begins with; they are appended like others.

        To have it on many devices from the start, call it in a `jax.jit` with `out_shardings`.

        >>> cache = TransformerCacheView.create(2, 1024, 8, 128, dtype="float8_e4m3fn", starts=[0, 3])
        >>> cache.key.shape, cache.starts.tolist(), cache.index.tolist()
        ((2, 1024, 8, 128), [0, 3], [0, 0])
        """
        batch_size, length = static_int("batch_size", batch_size, 1), static_int("length", length, 1)
        key, value = _empty((batch_size, length), kv_heads, head_dim, value_dim, dtype)
        first = lengths_array("starts", np.zeros(batch_size, np.int32) if starts is None else starts, length)
        if first.shape != (batch_size,):
            raise ValueError(f"starts must have shape ({batch_size},), one per row, got {first.shape}")
        # a copy: the caller's array must outlive a donated cache
        return cls(key, value, first.copy(), jnp.zeros(batch_size, jnp.int32))

    @property
    def lengths(self) -> jax.Array:
        """(B,) int32, the valid tokens of each row."""
        return jnp.maximum(self.index - self.starts, 0)

    def append(self, key: jax.Array, value: jax.Array, lengths: ArrayInput | None = None) -> "TransformerCacheView":
        """The cache with new tokens behind those of each row: one, or a chunk.

        Numbers are cast to the dtype of the cache, rounded to nearest; into int8 and float8 what is beyond the range
        becomes its end. Tokens that no longer fit are left out, and `index` stays within the cache; with
        `EJKERNEL_CHECKS=1` that is an error.

        Args:
            key: (B, T, Hkv, D); a float dtype.
            value: (B, T, Hkv, Dv).
            lengths: (B,), how many of a row's T tokens are real; the others are not written. Default: all.

        >>> cache = TransformerCacheView.create(2, 4, 1, 1, dtype=jnp.float32)
        >>> chunk = jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).reshape(2, 3, 1, 1)
        >>> cache = cache.append(chunk, chunk, lengths=[3, 1])
        >>> cache.key[..., 0, 0].tolist(), cache.index.tolist()
        ([[1.0, 2.0, 3.0, 0.0], [4.0, 0.0, 0.0, 0.0]], [3, 1])
        """
        B, S, T = self._check_append(key, value)
        count = jnp.full(B, T, jnp.int32) if lengths is None else lengths_array("lengths", lengths, T)
        if count.shape != (B,):
            raise ValueError(f"lengths must have shape ({B},), one per row, got {count.shape}")
        index = jnp.asarray(self.index)
        check_rows(index, index + count > S, f"the tokens of a row must fit into the {S} of the cache; its index is")
        token = jnp.arange(T, dtype=jnp.int32)[None]
        position = index[:, None] + token
        written = (token < count[:, None]) & (position < S)
        # S + token is outside, so dropped, and like all others met once
        at = (jnp.arange(B, dtype=jnp.int32)[:, None], jnp.where(written, position, S + token))
        index = jnp.minimum(index + count, S)
        return TransformerCacheView(_put(self.key, at, key), _put(self.value, at, value), self.starts, index)

    def _check_append(self, key: Any, value: Any) -> tuple[int, int, int]:
        """B, S and T, after checking that the cache and the new tokens fit."""
        _check_pair("key", self.key, "value", self.value, "B S Hkv D")
        B, S, Hkv, D = self.key.shape
        for name, x in (("starts", self.starts), ("index", self.index)):
            if jnp.shape(x) != (B,):
                raise ValueError(f"{name} of the cache must have shape ({B},), one per row, got {jnp.shape(x)}")
        _check_pair("key", key, "value", value, "B T Hkv D")
        T = key.shape[1]
        if key.shape != (B, T, Hkv, D) or value.shape[3] != self.value.shape[3]:
            wanted = f"key ({B}, T, {Hkv}, {D}) and value ({B}, T, {Hkv}, {self.value.shape[3]})"
            raise ValueError(f"this cache takes {wanted}, got {key.shape} and {value.shape}: (B, T, Hkv, D)")
        if T > S:
            raise ValueError(f"{T} tokens do not fit into a cache of {S}")
        return B, S, T

    def __repr__(self) -> str:
        return _describe(self)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class PagedCacheView:
    """Keys and values in pages that sequences share out among them: `PageAllocator` says which belongs to which.

    A pytree; `write` and `copy_pages` update it in place under jit where it is donated (as in `TransformerCacheView`).

    Fields:
        key_pages: (pages, page_size, Hkv, D).
        value_pages: (pages, page_size, Hkv, Dv).

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import page_attention
    >>> from ejkernel.types import PagedCacheView
    >>> cache = PagedCacheView.create(8, 16, 2, 64, dtype=jnp.float32)
    >>> cache = cache.write(jnp.ones((3, 2, 64)), jnp.ones((3, 2, 64)), slots=[80, 81, 82])  # page 5, from its start
    >>> page_attention(jnp.ones((1, 4, 64)), cache.key_pages, cache.value_pages, [3], [[5]]).shape
    (1, 4, 64)
    """

    key_pages: Any
    value_pages: Any

    @classmethod
    def create(
        cls,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        dtype: DTypeLike = jnp.bfloat16,
    ) -> "PagedCacheView":
        """Empty pages of `page_size` tokens each; `value_dim` and `dtype` as in `TransformerCacheView.create`.

        >>> PagedCacheView.create(64, 16, 8, 128, dtype="int8")
        PagedCacheView(key_pages=int8(64, 16, 8, 128), value_pages=int8(64, 16, 8, 128))
        """
        num_pages, page_size = static_int("num_pages", num_pages, 1), static_int("page_size", page_size, 1)
        return cls(*_empty((num_pages, page_size), kv_heads, head_dim, value_dim, dtype))

    @property
    def num_pages(self) -> int:
        return self.key_pages.shape[0]

    @property
    def page_size(self) -> int:
        return self.key_pages.shape[1]

    def write(
        self, key: jax.Array, value: jax.Array, slots: Any, *, k_scale: Any = None, v_scale: Any = None
    ) -> "PagedCacheView":
        """The pages with new tokens in their slots; see `ejkernel.modules.write_kv_pages`.

        >>> key = jnp.ones((2, 1, 1))
        >>> cache = PagedCacheView.create(2, 3, 1, 1, dtype=jnp.float32).write(key, key, slots=[4, -1])
        >>> cache.key_pages[..., 0, 0].tolist()
        [[0.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
        """
        pages = {"key_pages": self.key_pages, "value_pages": self.value_pages}
        return PagedCacheView(*write_pages(pages, key, value, slots, k_scale, v_scale))

    def copy_pages(self, sources: ArrayInput, targets: ArrayInput) -> "PagedCacheView":
        """The pages with copies of some in others: before a sequence writes into a page that it shares.

        Args:
            sources: (N,), page ids. All are read before any is written.
            targets: (N,), page ids, none twice; a negative one is skipped, so that N may stay the same.

        >>> key = jnp.ones((1, 1, 1))
        >>> cache = PagedCacheView.create(3, 2, 1, 1, dtype=jnp.float32).write(key, key, slots=[0])
        >>> cache.copy_pages([0, 0], [2, -1]).key_pages[..., 0, 0].tolist()
        [[1.0, 0.0], [0.0, 0.0], [1.0, 0.0]]
        """
        _check_pair("key_pages", self.key_pages, "value_pages", self.value_pages, "P page_size Hkv D")
        sources, targets = as_array("sources", sources), as_array("targets", targets)
        if sources.shape != targets.shape or sources.ndim != 1:
            raise ValueError(f"sources {sources.shape} and targets {targets.shape} must both be (N,)")
        P = self.num_pages
        check_rows(targets, targets >= P, f"targets must be page ids below {P}")
        check_rows(sources, (targets >= 0) & ((sources < 0) | (sources >= P)), f"sources must be from 0 to {P - 1}")
        sources, targets = int_array("sources", sources), int_array("targets", targets)
        targets = jnp.where(targets < 0, P, targets)  # a negative index would count from the end

        def copied(pages: jax.Array) -> jax.Array:
            pages = jnp.asarray(pages)
            return pages.at[targets].set(pages.at[sources].get(mode="clip"), mode="drop")

        return PagedCacheView(copied(self.key_pages), copied(self.value_pages))

    def __repr__(self) -> str:
        return _describe(self)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class PagedAttentionMetadata:
    """Where the sequences of a batch lie in the pages, and where their queries lie in the batch. A pytree.

    Fields:
        context_lens: (N,), tokens of each sequence in the cache, those of its queries included.
        block_tables: (N, W), the page ids of each sequence in order; slots that are not used may hold anything.
        query_start_loc: (N + 1,), sequence n has the query tokens from entry n up to entry n + 1, for packed queries of
            any number each; None where all sequences have the same number.
        num_seqs: how many sequences count, where entries past them are padding; None is all.

    >>> from ejkernel.types import PagedAttentionMetadata
    >>> PagedAttentionMetadata.create([20, 5], [[3, 1], [7, 0]])
    PagedAttentionMetadata(context_lens=int32(2,), block_tables=int32(2, 2), query_start_loc=None, num_seqs=None)
    """

    context_lens: Any
    block_tables: Any
    query_start_loc: Any = None
    num_seqs: Any = None

    @classmethod
    def create(
        cls,
        context_lens: ArrayInput,
        block_tables: ArrayInput,
        query_start_loc: ArrayInput | None = None,
        num_seqs: ArrayInput | None = None,
    ) -> "PagedAttentionMetadata":
        """The same, as int32 and with its shapes checked. Host arrays stay on the host until a jitted call takes them.

        >>> PagedAttentionMetadata.create([20, 5], [[3, 1]])
        Traceback (most recent call last):
            ...
        ValueError: block_tables must have shape (N, W) with N = 2 sequences, got (1, 2)
        """
        lens, tables = _int32("context_lens", context_lens), _int32("block_tables", block_tables)
        if lens.ndim != 1:
            raise ValueError(f"context_lens must have shape (N,), got {lens.shape}")
        (N,) = lens.shape
        if tables.ndim != 2 or tables.shape[0] != N:
            raise ValueError(f"block_tables must have shape (N, W) with {N = } sequences, got {tables.shape}")
        starts = None if query_start_loc is None else _int32("query_start_loc", query_start_loc)
        if starts is not None and starts.shape != (N + 1,):
            raise ValueError(f"query_start_loc must have shape (N + 1,) with {N = } sequences, got {starts.shape}")
        count = None if num_seqs is None else _int32("num_seqs", num_seqs)
        if count is not None and count.shape != ():
            raise ValueError(f"num_seqs must be one number, got shape {count.shape}")
        return cls(lens, tables, starts, count)

    def __repr__(self) -> str:
        return _describe(self)


def _empty(
    rows: tuple[int, int], kv_heads: int, head_dim: int, value_dim: int | None, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Zeros (*rows, Hkv, D) and (*rows, Hkv, Dv)."""
    kv_heads, head_dim = static_int("kv_heads", kv_heads, 1), static_int("head_dim", head_dim, 1)
    value_dim = head_dim if value_dim is None else static_int("value_dim", value_dim, 1)
    if jnp.dtype(dtype).name not in DTYPES:
        raise TypeError(f"a cache has dtype {', '.join(DTYPES)}; got {jnp.dtype(dtype).name}")
    return jnp.zeros((*rows, kv_heads, head_dim), dtype), jnp.zeros((*rows, kv_heads, value_dim), dtype)


def _check_pair(key_name: str, key: Any, value_name: str, value: Any, dims: str) -> None:
    for name, x in ((key_name, key), (value_name, value)):
        if not hasattr(x, "dtype"):
            raise TypeError(f"{name} must be an array, got {type(x).__name__}")
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {format_shape(dims, x.shape)}")
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(f"{key_name} {key.shape} and {value_name} {value.shape} may differ in the last dimension only")
    if key.dtype != value.dtype:
        raise TypeError(f"{key_name} has dtype {key.dtype}, {value_name} {value.dtype}: they must be the same")


def _put(cache: jax.Array, at: Any, tokens: jax.Array) -> jax.Array:
    if tokens.dtype.name not in FLOATS:
        raise TypeError(f"new keys and values must be {', '.join(FLOATS)}; got {tokens.dtype}")
    return jnp.asarray(cache).at[at].set(stored(tokens, cache.dtype), mode="drop", unique_indices=True)


def _int32(name: str, x: ArrayInput) -> jax.Array | np.ndarray:
    """`x` as int32, on the host if it was there."""
    array = as_array(name, x)
    if isinstance(array, jax.Array):
        return int_array(name, array)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name} must hold integers, got dtype {array.dtype}")
    return array.astype(np.int32)


def _describe(view: Any) -> str:
    """The fields by dtype and shape: their numbers are many, and elsewhere."""
    fields = [
        f"{name}={x.dtype}{x.shape}" if hasattr(x, "shape") and hasattr(x, "dtype") else f"{name}={x!r}"
        for name, x in vars(view).items()
    ]
    return f"{type(view).__name__}({', '.join(fields)})"
