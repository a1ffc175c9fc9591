"""The canonical call of paged attention: every check and every default is here.

Every array has a leading axis `B`, which is 1 unless vmap folded something into it. Behind it:

    query         (T, H, D)        the query tokens of all sequences, one sequence after the other
    key_pages     (P, L, Hkv, D)   pages of L tokens; value_pages (P, L, Hkv, Dv)
    kv_pages      (P, L, 2 Hkv, D) instead of both: row 2h holds keys, row 2h + 1 values
    context_lens  (N,)             keys of each sequence, its own queries' included
    block_tables  (N, W)           the pages of each sequence in order; absent: sequence n has page n alone
    query_start   (N + 1,)         first query of each sequence; absent: every sequence has `spec.tokens`
    num_seqs      ()               how many sequences count; absent: all
    starts        (N,)             keys before it are hidden
    window        ()               how many keys before its own a query sees, where that is traced
    sinks         (H,)             a logit without a value; k_scale, v_scale (Hkv,): cache value times scale
    int_rows, ... what mask and score functions read: see `rules.py`

Values of the integer arrays are as the caller gave them: implementations clamp what they read (`sequences` does it for
those in jax.numpy, and `page_ids` for the table), for another pass over them would cost a launch of its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import core as jax_core
from jax.sharding import NamedSharding

from ejkernel.checks.arrays import check_cumulative, check_sizes_known, integers, traced_number
from ejkernel.checks.caches import CACHE_DTYPES, cache_scale
from ejkernel.checks.options import flag, number, static_int
from ejkernel.checks.values import check
from ejkernel.expressions.binding import Rule
from ejkernel.kernels.common.rules import (
    Rules,
    cap_rule,
    composed,
    conjunction,
    mask_rule,
    recognised_cap,
    score_rule,
)
from ejkernel.kernels.paged import rules
from ejkernel.kernels.softmax.spec import joined_sinks, sink_logits, window_band
from ejkernel.ops import Call, Dims, Shards
from ejkernel.types.segments import searched

NO_GRADIENT = (
    "attention over a cache is for inference and has no gradient: train with flash_attention on keys and values, "
    "or put jax.lax.stop_gradient around the arguments"
)

ARRAYS = {
    "query": Dims("B T H D", broadcasts=False),
    "key_pages": Dims("B P L Hkv D"),
    "value_pages": Dims("B P L Hkv Dv"),
    "kv_pages": Dims("B P L 2Hkv D"),
    "context_lens": Dims("B N"),
    "block_tables": Dims("B N W"),
    "query_start": Dims("B M"),
    "num_seqs": Dims("B"),
    "starts": Dims("B N"),
    "window": Dims("B"),
    "sinks": Dims("B H"),
    "k_scale": Dims("B Hkv"),
    "v_scale": Dims("B Hkv"),
    **{name: Dims(names) for name, names in rules.ARRAYS.items()},
}
# as many query tokens of each sequence, so that sequences can be split over devices; contiguous caches split along
BY_SEQUENCE = ARRAYS | {
    "query": Dims("B N* H D", broadcasts=False),
    **{name: Dims(names.replace("T", "N*")) for name, names in rules.ARRAYS.items() if name.endswith("rows")},
}
CONTIGUOUS = BY_SEQUENCE | {"key_pages": Dims("B N S Hkv D"), "value_pages": Dims("B N S Hkv Dv")}

# lse is the log-sum-exp of a row's logits, top their maximum; both with sinks, -inf for a row that sees nothing
OUTPUTS = {"out": "B T H Dv", "lse": "B H T", "top": "B H T"}
OUTPUTS_BY_SEQUENCE = {"out": "B N* H Dv", "lse": "B H N*", "top": "B H N*"}


class Cost(NamedTuple):
    """What a caller says a call costs, as a `pallas.CostEstimate` does."""

    flops: int
    transcendentals: int
    bytes_accessed: int


# of a mask function that may hide any
EVERY_KEY = 2**30


@dataclass(frozen=True)
class Spec:
    """The static facts of a call.

    Attributes:
        scale: of the logits.
        tokens: queries of every sequence, where all have the same number; None: `query_start` says.
        causal: a sequence's queries are its last tokens and see the keys up to their own; else they see all.
        window: how many keys before its own a query sees; None is all, or as many as the array `window` says.
        chunk: a query sees keys of its own chunk of so many positions; None is all.
        rules: mask and score functions.
        hides: how many of a sequence's newest keys `rules.mask` may hide.
        soft_cap: of the logits, after the scale.
        num_splits: splits of the key axis that are computed side by side; None leaves it to the platform.
        with_lse: whether the caller wants the log-sum-exp.
        out_dtype: of `out`; None is that of the query. Results that are still to be merged are float32.
        cost: told to a compiler that asks; None is what the platform itself estimates.
        stands_in: whether one sequence, or one query, stands in for none.
    """

    scale: float
    tokens: int | None = None
    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    rules: Rules = Rules()
    hides: int = 0
    soft_cap: float | None = None
    num_splits: int | None = None
    with_lse: bool = False
    out_dtype: str | None = None
    cost: Cost | None = None
    stands_in: bool = False


class Dimensions(NamedTuple):
    """The sizes of a call, by their letters."""

    B: int
    T: int  # query tokens of all sequences
    N: int  # sequences
    H: int
    Hkv: int
    D: int
    Dv: int
    P: int  # pages
    L: int  # tokens per page
    W: int  # pages per sequence at most

    @property
    def G(self) -> int:
        return self.H // self.Hkv

    @property
    def S(self) -> int:
        """Keys per sequence at most."""
        return self.W * self.L


def dimensions(call: Call) -> Dimensions:
    B, T, H, D = call["query"].shape
    _, N = call["context_lens"].shape
    W = call["block_tables"].shape[2] if "block_tables" in call else 1
    if "kv_pages" in call:
        _, P, L, rows, Dv = call["kv_pages"].shape
        if rows % 2:
            raise ValueError(f"kv_pages has {rows} rows per token here: a mesh must split whole pairs of key and value")
        return Dimensions(B, T, N, H, rows // 2, D, Dv, P, L, W)
    _, P, L, Hkv, Dv = call["value_pages"].shape
    return Dimensions(B, T, N, H, Hkv, D, Dv, P, L, W)


def canonicalise(
    query: Any,
    pages: dict[str, Any],
    context_lens: Any,
    block_tables: Any = None,
    *,
    tokens: int | None = None,
    query_start_loc: Any = None,
    num_seqs: Any = None,
    starts: Any = None,
    softmax_aux: Any = None,
    softmax_scale: Any = None,
    logits_soft_cap: Any = None,
    sliding_window: Any = None,
    chunk_size: Any = None,
    mask_fn: Any = None,
    score_fn: Any = None,
    tree_mask: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    num_splits: Any = None,
    return_lse: bool = False,
    causal: bool = True,
    by_token: bool = False,
    names: Mapping[str, str] = MappingProxyType({}),
) -> Call:
    """Check a call on `query` (T, H, D) and `pages` {"key_pages", "value_pages"} or {"kv_pages"}, and name its arrays.

    Sequences have `tokens` queries each, or `query_start_loc` says where each one's begin. `names` are what the caller
    calls the arrays, where it is something else. With `by_token`, functions read the positions of queries.
    """
    arrays = {"query": query, **pages}
    T, H, D = query.shape
    Hkv, P, L = _check_pages(query, pages, names)
    arrays |= {"sinks": _sinks(softmax_aux, H)}
    scale, traced = _scale(softmax_scale, D)
    k_scale, v_scale = cache_scale("k_scale", k_scale, Hkv), cache_scale("v_scale", v_scale, Hkv)
    if traced is not None:  # it is as good as a factor of the keys
        k_scale = traced * (jnp.ones(Hkv) if k_scale is None else k_scale)
    window, traced_window = _window(sliding_window)
    arrays |= {"k_scale": k_scale, "v_scale": v_scale}
    chunk = None if chunk_size is None else static_int("chunk_size", chunk_size, 1)
    seen = None if mask_fn is None else mask_rule(mask_fn)
    if seen is not None and not by_token:
        window, chunk, seen = rules.limits(seen, window, chunk)
    hides = 0 if seen is None else EVERY_KEY
    cap, capped = cap_rule(logits_soft_cap)
    scores = composed(None if score_fn is None else score_rule(score_fn), capped)
    if cap is None and scores is not None and (known := recognised_cap(scores.expression)) is not None:
        cap, scores = known, None
    spec = Spec(
        scale=scale,
        tokens=tokens,
        causal=causal,
        window=window,
        chunk=chunk,
        soft_cap=cap,
        num_splits=None if num_splits is None else _splits(num_splits),
        with_lse=flag("return_lse", return_lse),
    )
    N = T // tokens if tokens is not None else None
    given = _Integers(context_lens, block_tables, query_start_loc, num_seqs, starts, traced_window)
    given = given.check_shapes(N, P, names)
    given.check_values(spec, T, P, L, names)
    arrays |= {name: None if x is None else jnp.asarray(x, jnp.int32) for name, x in given._asdict().items()}
    if tree_mask is not None:
        tree, newest = rules.tree_rule(tree_mask, given.context_lens, given.width * L)
        seen, hides = conjunction(seen, tree), max(hides, newest)
    present = {name: x for name, x in arrays.items() if x is not None}
    stand_ins = _stand_ins(present, tokens)
    arrays = {name: jnp.asarray(x)[None] for name, x in (present | stand_ins).items()}
    call = Call(replace(spec, stands_in=bool(stand_ins)), arrays)
    return call if stand_ins else _with_rules(call, seen, scores, hides, by_token)


def _with_rules(call: Call, mask: Rule | None, scores: Rule | None, hides: int, by_token: bool) -> Call:
    """The call with mask and score functions, bound to its tokens."""
    if mask is None and scores is None:
        return call
    bound, plan, read = rules.bound_rules(mask, scores, by_token)
    counts = {name: call[name] for name in ("context_lens", "query_start", "num_seqs") if name in call}
    arrays = call.arrays | _operands(Spec(1.0, call.spec.tokens), dimensions(call), plan, read, counts)
    return replace(call, spec=replace(call.spec, rules=bound, hides=hides), arrays=arrays)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _operands(
    spec: Spec, dims: "Dimensions", plan: rules.Plan, read: tuple[jax.Array, ...], counts: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """What mask and score functions read, of every token by its sequence and its position there."""
    read, counts = jax.tree.map(_whole, (read, counts))
    rows = sequences(spec, dims, {name: x[0] for name, x in counts.items()})
    token = jnp.arange(dims.T, dtype=jnp.int32)
    n = jnp.maximum(searched(rows.first, token) - 1, 0)
    return plan.operands(read, n, (rows.length - rows.queries - rows.first)[n] + token, dims.H)


def _scale(softmax_scale: Any, D: int) -> tuple[float, jax.Array | None]:
    """The factor of the logits that is part of the program, and one that is traced."""
    if isinstance(softmax_scale, jax_core.Tracer):
        return 1.0, traced_number("softmax_scale", softmax_scale)
    return D**-0.5 if softmax_scale is None else number("softmax_scale", softmax_scale), None


_MOST_SPLITS = 2**16


def _splits(num_splits: Any) -> int:
    splits = static_int("num_splits", num_splits, 1)
    if splits > _MOST_SPLITS:
        raise ValueError(f"num_splits={splits} must be at most {_MOST_SPLITS}")
    return splits


def _whole(x: jax.Array) -> jax.Array:
    """An array that is split over Explicit mesh axes, on every device."""
    sharding = jax.typeof(x).sharding
    if not any(sharding.spec):
        return x
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, jax.sharding.PartitionSpec()))


# Queries and pages ------------------------------------------------------------------------------------------


def _stand_ins(arrays: dict[str, Any], tokens: int | None) -> dict[str, Any]:
    """Where there is no sequence or no query, one that sees nothing: no platform knows of empty calls.

    `finish` takes it off again.
    """
    least = {"query": tokens or 1, "query_start": 2}
    short = {name: x for name, x in arrays.items() if x.ndim and x.shape[0] < least.get(name, 1)}
    return {name: jnp.zeros((least.get(name, 1), *x.shape[1:]), x.dtype) for name, x in short.items()}


def _check_pages(query: Any, pages: dict[str, Any], names: Mapping[str, str]) -> tuple[int, int, int]:
    """Hkv, P and L, after checking that queries and pages fit."""
    _, H, D = query.shape
    keys, values, queries = (names.get(name, name) for name in (next(iter(pages)), "value_pages", "query"))
    for name, x in pages.items():
        if x.dtype != query.dtype and x.dtype.name not in CACHE_DTYPES:
            raise TypeError(
                f"{names.get(name, name)} has dtype {x.dtype}, {queries} has {query.dtype}: they must be the same, or "
                f"the cache one of {', '.join(CACHE_DTYPES)}"
            )
    first, second = next(iter(pages.values())), pages.get("value_pages")
    P, L, rows, width = first.shape
    Hkv = rows if second is not None else rows // 2
    if second is None and rows % 2:
        raise ValueError(f"kv_pages {first.shape} must hold pairs of key and value: an even number of rows, not {rows}")
    if second is not None and second.shape[:3] != first.shape[:3]:
        raise ValueError(
            f"{keys} {first.shape} and {values} {second.shape} must have the same pages, page size and heads"
        )
    if second is not None and second.dtype != first.dtype:
        raise TypeError(f"{keys} has dtype {first.dtype} and {values} {second.dtype}: they must be the same")
    if width != D:
        raise ValueError(f"head_dim of {keys} {first.shape} must be that of {queries} {query.shape}: {D}")
    if H % Hkv:
        raise ValueError(
            f"query heads {H=} must be a multiple of key heads {Hkv=}; pages are (pages, size, heads, dim)"
        )
    return Hkv, P, L


def _sinks(softmax_aux: Any, H: int) -> jax.Array | None:
    sinks = sink_logits(softmax_aux, H)
    if sinks is None:
        return None
    return sinks.squeeze(1) if sinks.shape[1] == 1 else joined_sinks(sinks)


def _window(sliding_window: Any) -> tuple[int | None, jax.Array | None]:
    """How many keys before its own a query sees, where that is known, and where it is traced."""
    pair = sliding_window if isinstance(sliding_window, tuple | list) else (sliding_window, sliding_window)
    traced = [x for x in pair if isinstance(x, jax_core.Tracer)]
    for x in traced:
        if x.shape != () or not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"sliding_window must hold integers, got {x.dtype} of shape {x.shape}")
    known = tuple(None if isinstance(x, jax_core.Tracer) else x for x in pair) if traced else sliding_window
    lo = window_band(known).lo  # what lies to the right is hidden by causality anyway
    left = None
    if traced and isinstance(pair[0], jax_core.Tracer):  # a negative one shows nothing
        most = min(EVERY_KEY, jnp.iinfo(pair[0].dtype).max)
        left = jnp.maximum(jnp.minimum(pair[0], most).astype(jnp.int32), -1)
    return None if lo is None else -lo, left


def lowest_keys(spec: Spec, position: Any, window: Any = None) -> Any:
    """The first key that windows and chunks show to a query at a position; None where there are none."""
    lows = [position - w for w in (spec.window, window) if w is not None]
    on_host = not any(isinstance(x, jax.Array) for x in (position, window))
    if spec.chunk is not None:  # in kernels, rounding down would take longer; a query before the first key sees none
        over = position % spec.chunk if on_host else jax.lax.rem(position, jnp.full_like(position, spec.chunk))
        lows.append(position - over)
    return reduce(np.maximum if on_host else jnp.maximum, lows) if spec.causal and lows else None


# Lengths and tables -----------------------------------------------------------------------------------------


class _Integers(NamedTuple):
    """The integer arrays as given: lists, numpy or device values."""

    context_lens: Any
    block_tables: Any
    query_start: Any
    num_seqs: Any
    starts: Any
    window: Any

    @property
    def width(self) -> int:
        """Pages of a sequence at most."""
        return 1 if self.block_tables is None else self.block_tables.shape[1]

    def check_shapes(self, N: int | None, P: int, names: Mapping[str, str]) -> "_Integers":
        """Ranks, dtypes and sizes; what is not an array becomes one of numpy."""
        lens_name, table_name, starts_name = (names.get(n, n) for n in ("context_lens", "block_tables", "starts"))
        lens = integers(lens_name, self.context_lens, 1)
        rows = lens.shape[0] if N is None else N
        starts = None if self.starts is None else integers(starts_name, self.starts, 1)
        query_start = None if self.query_start is None else integers("query_start_loc", self.query_start, 1)
        for name, x, size, what in (
            (lens_name, lens, rows, "one entry per sequence"),
            (starts_name, starts, rows, "one entry per sequence"),
            ("query_start_loc", query_start, rows + 1, "one entry more than sequences"),
        ):
            if x is not None and x.shape[0] != size:
                raise ValueError(f"{name} {x.shape} must have {what}: {size}")
        tables = None
        if self.block_tables is not None:
            no_rows = rows == 0 and np.shape(self.block_tables) in ((0,), (0, 0))
            tables = np.zeros((0, 1), np.int32) if no_rows else integers(table_name, self.block_tables, 2)
            if tables.shape[1] == 0:
                raise ValueError(f"{table_name} must have at least one page per sequence, got none")
            if tables.shape[0] != rows:
                raise ValueError(f"{table_name} {tables.shape} must be (sequences, pages) with {rows} sequences")
            check_sizes_known(table_name, tables)
        elif rows != P:
            keys, queries = names.get("key_pages", "key_pages"), names.get("query", "query")
            raise ValueError(f"{keys} holds {P} sequences, {queries} {rows}")
        num_seqs = None if self.num_seqs is None else integers("num_seqs", self.num_seqs, 0, 1)
        if num_seqs is not None and num_seqs.size != 1:
            raise ValueError(f"num_seqs must be one number, got shape {num_seqs.shape}")
        num_seqs = None if num_seqs is None else num_seqs.reshape(())
        return _Integers(lens, tables, query_start, num_seqs, starts, self.window)

    def check_values(self, spec: Spec, T: int, P: int, L: int, names: Mapping[str, str]) -> None:
        """Ranges: always of host values, with `EJKERNEL_CHECKS=1` of device values too."""
        lens_name, table_name, starts_name = (names.get(n, n) for n in ("context_lens", "block_tables", "starts"))
        N = self.context_lens.shape[0]
        S, given = self.width * L, self[:-1]  # of what a window has no part in

        def counted(xp: Any) -> Any:
            return xp.arange(N, dtype=np.int32) < (N if self.num_seqs is None else self.num_seqs)

        if self.num_seqs is not None:
            check(self.num_seqs, lambda xp, n: (n < 0) | (n > N), f"num_seqs must be from 0 to {N}", given)
        if self.query_start is not None:
            check_cumulative("query_start_loc", self.query_start, T, of="query tokens", sequences=self.num_seqs)
        holder = "cache" if self.block_tables is None else "table"
        message = f"{lens_name} must be from 0 to {S}, what the {holder} holds"
        check(self.context_lens, lambda xp, n: ((n < 0) | (n > S)) & counted(xp), message, given)
        if self.query_start is not None:
            message = f"{lens_name} must count the queries of the sequence too, so be at least as many"
            queries = self.query_start
            check(self.context_lens, lambda xp, n: (n < xp.diff(queries)) & counted(xp), message, given)
        if self.starts is not None:
            message = f"{starts_name} must be from 0 to {S}"
            check(self.starts, lambda xp, n: ((n < 0) | (n > S)) & counted(xp), message, given)
        if self.block_tables is not None:
            tables = self.block_tables

            def outside(xp: Any) -> Any:
                used = self._used(xp, spec, L) & counted(xp)[:, None]
                return used & ((xp.asarray(tables) < 0) | (xp.asarray(tables) >= P))

            def first_outside(xp: Any) -> Any:
                return xp.take_along_axis(xp.asarray(tables), outside(xp).argmax(1)[:, None], 1)[:, 0]

            message = f"{table_name} must hold page ids from 0 to {P - 1} in the slots that are used"
            check(first_outside, lambda xp, _: outside(xp).any(1), message, self)

    def _used(self, xp: Any, spec: Spec, L: int) -> Any:
        """Which slots of the table (N, W) are read."""
        lens = xp.asarray(self.context_lens)[:, None]
        slots = xp.arange(self.block_tables.shape[1], dtype=np.int32)[None]
        used = slots * L < lens
        queries = spec.tokens if self.query_start is None else xp.diff(self.query_start)[:, None]
        if (low := lowest_keys(spec, lens - queries, self.window)) is not None:
            used &= (slots + 1) * L > low
        if self.starts is not None:
            used &= (slots + 1) * L > xp.asarray(self.starts)[:, None]
        return used


# What implementations in jax.numpy share --------------------------------------------------------------------


class Sequences(NamedTuple):
    """Where the queries and keys of each sequence lie, clamped to what there is; all (N,)."""

    first: jax.Array  # its first query token
    queries: jax.Array  # how many it has; 0 for one that does not count
    start: jax.Array  # its first visible key
    length: jax.Array  # its keys


def sequences(spec: Spec, dims: Dimensions, arrays: dict[str, jax.Array]) -> Sequences:
    """The sequences of one row of the batch axis; `arrays` are without that axis."""
    N, T = dims.N, dims.T
    number, length = jnp.arange(N, dtype=jnp.int32), jnp.clip(arrays["context_lens"], 0, dims.S)
    start = jnp.clip(arrays["starts"], 0, dims.S) if "starts" in arrays else jnp.zeros(N, jnp.int32)
    if spec.tokens is not None:
        return Sequences(number * spec.tokens, jnp.full(N, spec.tokens, jnp.int32), start, length)
    edges = jnp.clip(jax.lax.cummax(arrays["query_start"].at[0].set(0)), 0, T)
    counts = number < jnp.clip(arrays["num_seqs"], 0, N) if "num_seqs" in arrays else jnp.ones(N, bool)
    return Sequences(edges[:-1], jnp.where(counts, jnp.diff(edges), 0), start, length)


def page_ids(dims: Dimensions, arrays: dict[str, jax.Array]) -> jax.Array:
    """The table (N, W), every id within the pages there are."""
    if "block_tables" not in arrays:
        return jnp.arange(dims.N, dtype=jnp.int32)[:, None]
    return jnp.clip(arrays["block_tables"], 0, dims.P - 1)


def read_pages(arrays: dict[str, jax.Array], take: Callable[[jax.Array], jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Keys and values (..., Hkv, D) of the pages that `take` reads; interleaved ones are separated after reading."""
    if "kv_pages" in arrays:
        rows = take(arrays["kv_pages"])
        return rows[..., 0::2, :], rows[..., 1::2, :]
    return take(arrays["key_pages"]), take(arrays["value_pages"])


def by_row(call: Call, function: Callable[[dict[str, jax.Array]], Any]) -> Any:
    """`function` on every row of the batch axis; what broadcasts along it is shared."""
    B = call["query"].shape[0]
    if B == 1:
        return jax.tree.map(lambda x: x[None], function({name: x[0] for name, x in call.arrays.items()}))
    axes = {name: 0 if x.shape[0] == B else None for name, x in call.arrays.items()}
    arrays = {name: x if axes[name] == 0 else x[0] for name, x in call.arrays.items()}
    return jax.vmap(function, in_axes=(axes,))(arrays)


# After the kernel, and many devices -------------------------------------------------------------------------


def finish(call: Call, outputs: dict[str, jax.Array], shape: tuple[int, ...], *, batched: bool) -> Any:
    """Outputs in the rank of the query, whose shape is given.

    A batch of queries (N, H, D) or (N, T, H, D) has lse (N, H) or (N, H, T), packed ones (T, H, D) have (H, T).
    """
    if 0 in shape:  # without what stood in for nothing
        where = {"out": 1, "lse": 2}
        lengths = {name: (*outputs[name].shape[:axis], 0) for name, axis in where.items() if name in outputs}
        outputs = {
            name: jnp.zeros((*x, *outputs[name].shape[len(x) :]), outputs[name].dtype) for name, x in lengths.items()
        }
    out = outputs["out"][0]
    out = out.reshape(*shape[:-1], out.shape[-1])
    if not call.spec.with_lse:
        return out
    lse = outputs["lse"][0]
    if batched:
        lse = jnp.moveaxis(lse.reshape(lse.shape[0], *shape[:-2]), 0, 1)
    return out, lse


Layout = dict[str, tuple[str, tuple[int | None, ...]]]


def shards(layout: Layout, mesh: Any, in_specs: Any, out_specs: Any) -> Shards:
    """The caller's words on many devices, brought to the canonical arrays.

    `layout` names the caller's arrays in order; for each, the canonical one and which of the caller's axes each of its
    axes is (None: one that the caller does not have).
    """
    P = jax.sharding.PartitionSpec

    def moved(name: str, spec: Any) -> tuple[str, Any]:
        if name not in layout:
            raise ValueError(f"in_specs names unknown arrays [{name!r}]; known: {list(layout)}")
        if not isinstance(spec, P):
            raise TypeError(f"the spec of {name} is {spec!r}: it must be one PartitionSpec")
        canonical, axes = layout[name]
        lost = [entry for axis, entry in enumerate(spec) if axis not in axes and entry is not None]
        if lost:
            raise ValueError(f"spec {spec} of {name} splits over {lost} an axis that cannot be split")
        return canonical, P(*(None if axis is None or axis >= len(spec) else spec[axis] for axis in axes))

    def renamed(specs: Any, names: list[str]) -> Any:
        if specs is None:
            return None
        if isinstance(specs, P):
            specs = [specs]
        if len(specs) > len(names) and not isinstance(specs, dict):
            raise ValueError(f"{len(specs)} specs are too many for {', '.join(names)}")
        named = specs.items() if isinstance(specs, dict) else zip(names, specs, strict=False)
        return dict(moved(name, spec) for name, spec in named)

    inputs = [name for name in layout if name not in ("out", "lse")]
    return Shards(mesh, renamed(in_specs, inputs), renamed(out_specs, ["out", "lse"]))
