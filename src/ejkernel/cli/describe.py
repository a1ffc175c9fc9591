"""From the options of `ejkernel explain` to a call on shapes alone."""

import inspect
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel import modules
from ejkernel.kernels.softmax.spec import FLOATS
from ejkernel.ops import Explanation, explain, list_operations
from ejkernel.types import BlockPattern, MaskInfo


@dataclass(frozen=True)
class Request:
    """What was said about a call; None and False stand for nothing said."""

    operation: str
    batch: int = 1
    length: int = 1024
    kv_length: int | None = None
    heads: int = 8
    kv_heads: int | None = None
    dim: int = 64
    value_dim: int | None = None
    dtype: str = "bfloat16"
    causal: bool | None = None
    window: str | None = None
    documents: int | None = None
    bias: bool = False
    sinks: bool = False
    soft_cap: float | None = None
    dropout: float | None = None
    lse: bool = False
    block_size: int | None = None
    chunk_size: int | None = None
    platform: str | None = None


def explained(request: Request) -> Explanation:
    """What such a call would run. An option that the operation does not have raises `ValueError`."""
    if request.operation not in list_operations():
        raise ValueError(f"unknown operation {request.operation!r}; known: {', '.join(list_operations())}")
    if request.dtype not in FLOATS:
        raise ValueError(f"dtype {request.dtype!r} is not supported; use one of {', '.join(FLOATS)}")
    function = getattr(modules, request.operation)
    describe = {"mean_pooling": _pooling, **dict.fromkeys(_PAGED, _paged)}.get(request.operation, _attention)
    arguments = describe(request)
    arguments = {name: value for name, value in arguments.items() if value is not None}
    unknown = [name for name in arguments if name not in inspect.signature(function).parameters]
    if unknown:
        raise ValueError(f"{request.operation} has no {', '.join(unknown)}")
    return explain(function, **arguments)


def _struct(request: Request, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(request.dtype))


def _attention(request: Request) -> dict[str, Any]:
    B, T, H, D = request.batch, request.length, request.heads, request.dim
    S, Hkv, Dv = request.kv_length or T, request.kv_heads or H, request.value_dim or D
    return {
        "query": _struct(request, B, T, H, D),
        "key": _struct(request, B, S, Hkv, D),
        "value": _struct(request, B, S, Hkv, Dv),
        "bias": _struct(request, 1, H, T, S) if request.bias else None,
        "softmax_aux": _struct(request, H) if request.sinks else None,
        "mask_info": _documents(request.documents, T, S),
        "block_mask": _pattern(request, T, S),
        "sliding_window": parsed_window(request.window),
        "logits_soft_cap": request.soft_cap,
        "dropout_prob": request.dropout,
        "dropout_seed": None if request.dropout is None else 0,
        "return_lse": request.lse or None,
        **_common(request),
    }


def _pooling(request: Request) -> dict[str, Any]:
    absent = ("kv_length", "kv_heads", "value_dim", "window", "documents", "soft_cap", "dropout", "block_size")
    flags = {name: getattr(request, name) or None for name in ("bias", "sinks", "lse")}
    x = _struct(request, request.batch, request.length, request.heads, request.dim)
    return {"x": x, **flags, **{name: getattr(request, name) for name in absent}, **_common(request)}


_PAGED = {
    "page_attention": ("query", "key_cache", "value_cache", "context_lens", "block_tables"),
    "ragged_page_attention": (
        "queries", "kv_pages", "context_lens", "block_tables", "query_start_loc", "num_seqs",
    ),
    "prefill_page_attention": ("query", "key_cache", "value_cache", "context_len", "page_indices"),
    "decode_attention": ("query", "key_buffer", "value_buffer", "req_to_tokens", "seq_lens", "page_size"),
    "ragged_decode_attention": ("query", "key", "value", "sequence_start", "sequence_end"),
}  # fmt: skip


def _paged(request: Request) -> dict[str, Any]:
    """A call over a cache: `length` counts query tokens, `kv_length` the keys a sequence may have."""
    B, H, D, L = request.batch, request.heads, request.dim, request.block_size or 16
    S, Hkv, Dv = request.kv_length or request.length, request.kv_heads or H, request.value_dim or D
    W = -(-S // L)
    tokens = request.length if request.operation in ("ragged_page_attention", "prefill_page_attention") else B

    def integers(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    everything = {
        "query": _struct(request, tokens, H, D),
        "queries": _struct(request, tokens, H, D),
        "key_cache": _struct(request, B * W, L, Hkv, D),
        "value_cache": _struct(request, B * W, L, Hkv, Dv),
        "kv_pages": _struct(request, B * W, L, 2 * Hkv, D),
        "key_buffer": _struct(request, B * W * L, Hkv, D),
        "value_buffer": _struct(request, B * W * L, Hkv, Dv),
        "key": _struct(request, B, S, Hkv, D),
        "value": _struct(request, B, S, Hkv, Dv),
        "context_lens": integers(B),
        "context_len": integers(),
        "seq_lens": integers(B),
        "sequence_start": integers(B),
        "sequence_end": integers(B),
        "block_tables": integers(B, W),
        "req_to_tokens": integers(B, W),
        "page_indices": integers(W),
        "query_start_loc": integers(B + 1),
        "num_seqs": integers(),
        "page_size": L,
    }
    absent = {name: getattr(request, name) or None for name in ("documents", "bias", "dropout")}
    return {
        **{name: everything[name] for name in _PAGED[request.operation]},
        **absent,
        "softmax_aux": _struct(request, H) if request.sinks else None,
        "sliding_window": parsed_window(request.window),
        "logits_soft_cap": request.soft_cap,
        "return_lse": request.lse or None,
        **_common(request),
    }


def _common(request: Request) -> dict[str, Any]:
    return {"causal": request.causal, "chunk_size": request.chunk_size, "platform": request.platform}


def _documents(count: int | None, length: int, kv_length: int) -> MaskInfo | None:
    if count is None:
        return None
    if length != kv_length:
        raise ValueError(f"documents pack queries and keys alike; the lengths are {length} and {kv_length}")
    return MaskInfo.from_segments((jnp.arange(length, dtype=jnp.int32) * count // length)[None])


def _pattern(request: Request, length: int, kv_length: int) -> BlockPattern | None:
    """A pattern of the right shape: which blocks it holds does not decide what runs."""
    if request.operation != "blocksparse_attention":
        if request.block_size is not None:
            raise ValueError(f"{request.operation} has no block_size")
        return None
    size = request.block_size or 64
    return BlockPattern.from_dense(jnp.ones((-(-length // size), -(-kv_length // size)), bool), block_size=size)


def parsed_window(text: str | None) -> int | tuple[int | None, int | None] | None:
    """`"64"`, or `"64,0"` for (left, right), where an empty side is unbounded.

    >>> parsed_window("64"), parsed_window("64,"), parsed_window("8,0")
    (64, (64, None), (8, 0))
    """
    if text is None:
        return None
    try:
        sides = [int(part) if part.strip() else None for part in text.split(",")]
    except ValueError:
        sides = []
    match sides:
        case [int(both)]:
            return both
        case [left, right]:
            return left, right
    raise ValueError(f"window {text!r} must be a number or left,right")
