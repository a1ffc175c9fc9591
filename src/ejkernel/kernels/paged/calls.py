"""From the arguments of each public function to the canonical call, and how its arrays lie on a mesh."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ejkernel.checks.caches import array, cache
from ejkernel.checks.options import static_int
from ejkernel.kernels.paged.spec import Layout, canonicalise
from ejkernel.ops import Call

_PAGES = "(pages, page_size, key heads, head_dim)"
_CACHES = {"key_pages": "key_cache", "value_pages": "value_cache"}
_BUFFERS = {"key_pages": "key_buffer", "value_pages": "value_buffer"}
_WHOLE = {"key_pages": "key", "value_pages": "value", "context_lens": "sequence_end", "starts": "sequence_start"}
_PAIR = ("key_pages", "value_pages")
_TABLE: Layout = {"context_lens": ("context_lens", (None, 0)), "block_tables": ("block_tables", (None, 0, 1))}


def page_call(
    query: Any, key_cache: Any, value_cache: Any, context_lens: Any, block_tables: Any, **options: Any
) -> Call:
    """Of `page_attention`: a batch of sequences with the same number of queries each."""
    layout = "(batch, heads, head_dim) or (batch, tokens, heads, head_dim)"
    query = array("query", query, layout, 3, 4, rows="any")
    pages = _two_caches(key_cache, value_cache)
    tokens = query.shape[1] if query.ndim == 4 else 1
    shape = (query.shape[0] * tokens, *query.shape[-2:])
    # an empty array may be split over devices as no reshape allows
    flat = query.reshape(shape) if query.shape[0] else jnp.zeros(shape, query.dtype)
    table = _needed("block_tables", block_tables)
    return canonicalise(flat, pages, context_lens, table, tokens=tokens, names=_CACHES, **options)


def ragged_page_call(
    queries: Any,
    kv_pages: Any,
    context_lens: Any,
    block_tables: Any,
    query_start_loc: Any,
    num_seqs: Any,
    **options: Any,
) -> Call:
    """Of `ragged_page_attention`: packed queries, pages interleaved or two by two."""
    queries = array("queries", queries, "(tokens, heads, head_dim)", 3, rows="any")
    if _is_pair(kv_pages):
        pages = {name: cache(f"{name} of kv_pages", x, _PAGES, 4) for name, x in zip(_PAIR, kv_pages, strict=True)}
    else:
        pages = {"kv_pages": cache("kv_pages", kv_pages, "(pages, page_size, 2 * key heads, head_dim)", 4)}
    return canonicalise(
        queries,
        pages,
        context_lens,
        _needed("block_tables", block_tables),
        query_start_loc=_needed("query_start_loc", query_start_loc),
        num_seqs=num_seqs,
        names={"query": "queries", "key_pages": "keys of kv_pages", "value_pages": "values of kv_pages"},
        **options,
    )


def prefill_call(
    query: Any, key_cache: Any, value_cache: Any, context_len: Any, page_indices: Any, **options: Any
) -> Call:
    """Of `prefill_page_attention`: the newest tokens of one sequence."""
    query = array("query", query, "(tokens, heads, head_dim)", 3, rows="any")
    if query.shape[0] == 0:  # a token that `finish` takes off again
        query = jnp.zeros((1, *query.shape[1:]), query.dtype)
    pages = _two_caches(key_cache, value_cache)
    lens, table = _one_row("context_len", context_len, 0), _one_row("page_indices", page_indices, 1)
    names = _CACHES | {"context_lens": "context_len", "block_tables": "page_indices"}
    return canonicalise(query, pages, lens, table, tokens=query.shape[0], names=names, **options)


def decode_call(
    query: Any, key_buffer: Any, value_buffer: Any, req_to_tokens: Any, seq_lens: Any, *, page_size: int, **options: Any
) -> Call:
    """Of `decode_attention`: a flat buffer of tokens, cut into pages."""
    query = array("query", query, "(batch, heads, head_dim)", 3, rows="any")
    page_size = static_int("page_size", page_size, 1)
    pages = {}
    for (name, given), x in zip(_BUFFERS.items(), (key_buffer, value_buffer), strict=True):
        x = cache(given, x, "(tokens, key heads, head_dim)", 3)
        if x.shape[0] % page_size:
            raise ValueError(f"{given} has {x.shape[0]} tokens, which pages of {page_size=} do not divide")
        pages[name] = x.reshape(-1, page_size, *x.shape[1:])
    names = {"context_lens": "seq_lens", "block_tables": "req_to_tokens", **_BUFFERS}
    table = _needed("req_to_tokens", req_to_tokens)
    return canonicalise(query, pages, seq_lens, table, tokens=1, names=names, **options)


def ragged_decode_call(
    query: Any,
    key: Any,
    value: Any,
    sequence_start: Any,
    sequence_end: Any,
    softmax_aux: Any = None,
    *,
    names: Mapping[str, str] = MappingProxyType(_WHOLE),
    **options: Any,
) -> Call:
    """Of `ragged_decode_attention`: every sequence has a contiguous cache, which is its one page."""
    layout = "(batch, heads, head_dim) or (batch, 1, heads, head_dim)"
    query = array("query", query, layout, 3, 4, rows="any")
    if query.ndim == 4 and query.shape[1] != 1:
        raise ValueError(f"query {query.shape} must have one token per sequence: (batch, 1, heads, head_dim)")
    layout, given = "(batch, length, key heads, head_dim)", {"key": key, "value": value}
    # as many caches as sequences
    pages = {f"{name}_pages": cache(name, x, layout, 4, rows="any") for name, x in given.items()}
    flat = query.reshape(-1, *query.shape[-2:])
    options |= {"starts": _needed(names["starts"], sequence_start), "softmax_aux": softmax_aux, "names": names}
    return canonicalise(flat, pages, sequence_end, tokens=1, **options)


def _two_caches(key_cache: Any, value_cache: Any) -> dict[str, Any]:
    return {
        "key_pages": cache("key_cache", key_cache, _PAGES, 4),
        "value_pages": cache("value_cache", value_cache, _PAGES, 4),
    }


def _is_pair(kv_pages: Any) -> bool:
    """Whether keys and values have pages of their own."""
    if isinstance(kv_pages, tuple | list) and len(kv_pages) != 2:
        raise ValueError(f"kv_pages must be one array or the pair (key_pages, value_pages), got {len(kv_pages)}")
    return isinstance(kv_pages, tuple | list)


def _needed(name: str, x: Any) -> Any:
    if x is None:
        raise TypeError(f"{name} is needed, got None")
    return x


def _one_row(name: str, x: Any, rank: int) -> Any:
    import jax
    import numpy as np

    x = x if isinstance(x, jax.Array) else np.asarray(x)
    if x.ndim != rank:
        raise ValueError(f"{name} must have {rank} dimensions: there is one sequence; got shape {x.shape}")
    return x[None]


# Layouts: the caller's arrays in order, each with the canonical one and where its axes come from --------------


def batch_layout(
    query: Any, names: tuple[str, str] = ("key_cache", "value_cache"), integers: Layout = _TABLE
) -> Layout:
    """Of `page_attention`; the query's token axis, if it has one, is not split."""
    rows = (None, 0, 1, 2) if query.ndim == 3 else (None, 0, 2, 3)
    return {
        "query": ("query", rows),
        names[0]: ("key_pages", (None, 0, 1, 2, 3)),
        names[1]: ("value_pages", (None, 0, 1, 2, 3)),
        **integers,
        "out": ("out", rows),
        "lse": ("lse", (None, 1, 0)),
    }


def ragged_decode_layout(query: Any) -> Layout:
    """Of `ragged_decode_attention`."""
    ends: Layout = {"sequence_start": ("starts", (None, 0)), "sequence_end": ("context_lens", (None, 0))}
    return batch_layout(query, ("key", "value"), ends)


def ragged_layout(kv_pages: Any) -> Layout:
    """Of `ragged_page_attention`."""
    pages = _PAIR if _is_pair(kv_pages) else ("kv_pages",)
    return {
        "queries": ("query", (None, 0, 1, 2)),
        **{name: (name, (None, 0, 1, 2, 3)) for name in pages},
        **_TABLE,
        "query_start_loc": ("query_start", (None, 0)),
        "num_seqs": ("num_seqs", (None,)),
        "out": ("out", (None, 0, 1, 2)),
    }


def specs_by_array(kv_pages: Any, in_specs: Any) -> Any:
    """The specs of `ragged_page_attention`, where those of a pair of pages may be a pair, or one for both."""
    if not _is_pair(kv_pages):
        return in_specs
    if isinstance(in_specs, dict) and "kv_pages" in in_specs:
        given = in_specs["kv_pages"]
        pair = _pair_of_specs(given) if _is_nested(given) else (given, given)
        others = {name: spec for name, spec in in_specs.items() if name != "kv_pages"}
        return others | dict(zip(_PAIR, pair, strict=True))
    if _is_nested(in_specs) and len(in_specs) > 1 and _is_nested(in_specs[1]):
        return (in_specs[0], *_pair_of_specs(in_specs[1]), *in_specs[2:])
    return in_specs


def _is_nested(specs: Any) -> bool:
    return isinstance(specs, tuple | list) and not isinstance(specs, PartitionSpec)


def _pair_of_specs(specs: Any) -> Any:
    if len(specs) != 2:
        raise ValueError(f"in_specs of kv_pages is {specs}: it must be one PartitionSpec, or a pair of them")
    return specs


PREFILL_LAYOUT: Layout = {
    "query": ("query", (None, 0, 1, 2)),
    "key_cache": ("key_pages", (None, 0, 1, 2, 3)),
    "value_cache": ("value_pages", (None, 0, 1, 2, 3)),
    "context_len": ("context_lens", (None, None)),
    "page_indices": ("block_tables", (None, None, 0)),
    "out": ("out", (None, 0, 1, 2)),
    "lse": ("lse", (None, 0, 1)),
}
BUFFER_LAYOUT: Layout = {
    "query": ("query", (None, 0, 1, 2)),
    "key_buffer": ("key_pages", (None, 0, None, 1, 2)),
    "value_buffer": ("value_pages", (None, 0, None, 1, 2)),
    "req_to_tokens": ("block_tables", (None, 0, 1)),
    "seq_lens": ("context_lens", (None, 0)),
    "out": ("out", (None, 0, 1, 2)),
    "lse": ("lse", (None, 1, 0)),
}
