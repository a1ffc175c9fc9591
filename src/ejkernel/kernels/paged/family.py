"""What the family of attention over a cache says about itself: its functions, their sizes, which are worth tuning."""

from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from ejkernel.family import (
    Dtype,
    Family,
    Option,
    PublicFunction,
    Roofline,
    Size,
    TypicalCall,
    Window,
    parsed_window,
    struct,
)
from ejkernel.kernels.paged import calls
from ejkernel.kernels.paged.checks import cascade_call, checks
from ejkernel.kernels.paged.spec import CACHE_DTYPES

CacheDtype = Annotated[str | None, Option(f"Of a cache, also {', '.join(CACHE_DTYPES)}; default: the dtype.")]

_ARRAYS = {
    "page_attention": ("query", "key_cache", "value_cache", "context_lens", "block_tables"),
    "ragged_page_attention": (
        "queries", "kv_pages", "context_lens", "block_tables", "query_start_loc", "num_seqs",
    ),
    "prefill_page_attention": ("query", "key_cache", "value_cache", "context_len", "page_indices"),
    "cascade_attention": ("query", "key_cache", "value_cache", "context_lens", "block_tables", "prefix_len"),
    "decode_attention": ("query", "key_buffer", "value_buffer", "req_to_tokens", "seq_lens", "page_size"),
    "ragged_decode_attention": ("query", "key", "value", "sequence_start", "sequence_end"),
}  # fmt: skip


def arguments(
    operation: str,
    *,
    batch: Size = 1,
    length: Annotated[int, Option("Of a cache, all new tokens together; of a decode, keys.", least=1)] = 1024,
    kv_length: Annotated[int | None, Option("Of a cache, keys of a sequence at most.", least=1)] = None,
    heads: Size = 8,
    kv_heads: Annotated[int | None, Option("Default: as many as query heads.", least=1)] = None,
    dim: Annotated[int, Option("Head dimension of queries and keys.", least=1)] = 64,
    value_dim: Annotated[int | None, Option("Head dimension of values; default: of keys.", least=1)] = None,
    dtype: Dtype = "bfloat16",
    cache_dtype: CacheDtype = None,
    window: Window = None,
    sinks: bool = False,
    soft_cap: float | None = None,
    lse: Annotated[bool, Option("Also return the log-sum-exp.")] = False,
    block_size: Annotated[int, Option("Of a cache, tokens per page.", least=1)] = 16,
) -> dict[str, Any]:
    """From sizes and words to the arguments of a public function."""
    B, H, D, L = batch, heads, dim, block_size
    S, Hkv, Dv = kv_length or length, kv_heads or H, value_dim or D
    W = -(-S // L)
    tokens = length if operation in ("ragged_page_attention", "prefill_page_attention") else B

    def integers(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    def cached(*shape: int) -> Any:
        if cache_dtype in CACHE_DTYPES:
            return jax.ShapeDtypeStruct(shape, cache_dtype)
        return struct(cache_dtype or dtype, *shape)

    everything = {
        "query": struct(dtype, tokens, H, D),
        "queries": struct(dtype, tokens, H, D),
        "key_cache": cached(B * W, L, Hkv, D),
        "value_cache": cached(B * W, L, Hkv, Dv),
        "kv_pages": cached(B * W, L, 2 * Hkv, D),
        "key_buffer": cached(B * W * L, Hkv, D),
        "value_buffer": cached(B * W * L, Hkv, Dv),
        "key": struct(dtype, B, S, Hkv, D),
        "value": struct(dtype, B, S, Hkv, Dv),
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
        "prefix_len": S // 2,
    }
    return {
        **{name: everything[name] for name in _ARRAYS[operation]},
        "softmax_aux": struct(dtype, H) if sinks else None,
        "sliding_window": parsed_window(window),
        "logits_soft_cap": soft_cap,
        "return_lse": lse or None,
    }


def typical_calls(backend: str, quick: bool) -> list[TypicalCall]:
    """Decoding and batches of both kinds. A CPU gets sizes that it can do."""

    def call(operation: str, batch: int, keys: int, page: int, more: dict[str, Any], **sizes: Any) -> TypicalCall:
        return TypicalCall((operation,), {"batch": batch, "kv_length": keys, "block_size": page, **more, **sizes})

    if backend == "cpu":
        keys, page = (64, 16) if quick else (2048, 64)
        small = {"heads": 8, "kv_heads": 2, "dim": 64, "dtype": "float32"}
        mixed = call("ragged_page_attention", 4, keys, page, small, length=3 + keys // 2)
        return [call("page_attention", 4, keys, page, small), mixed]
    large = {"heads": 32, "kv_heads": 8, "dim": 128}
    decode, mixed = (partial(call, name, more=large) for name in ("page_attention", "ragged_page_attention"))
    calls = [decode(32, 8192, 64), decode(32, 8192, 64, cache_dtype="float8_e4m3fn"), decode(1, 8192, 64)]
    if quick:
        return calls
    return [
        *calls,
        decode(128, 4096, 64),
        decode(1, 131072, 64),
        decode(32, 8192, 16),
        decode(32, 8192, 16, cache_dtype="float8_e4m3fn"),
        decode(32, 8192, 64, cache_dtype="float8_e5m2"),
        decode(32, 8192, 64, cache_dtype="int8"),
        mixed(64, 8192, 64, length=60 + 4 * 2048),
        mixed(4, 2048, 64, length=4 * 2048),
        mixed(60, 8192, 64, length=60),
    ]


def _roofline(batch: int = 32, length: int = 4096, width: int = 4096) -> Roofline:
    from ejkernel.kernels.paged.pallas_tpu.roofline import table  # loads the kernels for TPUs

    return Roofline(f"A decode step over pages, {batch} sequences of {length} keys", table(batch, length, width))


FAMILY = Family(
    name="paged",
    functions={
        "page_attention": PublicFunction("ejkernel.modules", calls.page_call),
        "ragged_page_attention": PublicFunction("ejkernel.modules", calls.ragged_page_call),
        "prefill_page_attention": PublicFunction("ejkernel.modules", calls.prefill_call),
        "cascade_attention": PublicFunction("ejkernel.modules", cascade_call),
        "decode_attention": PublicFunction("ejkernel.modules", calls.decode_call),
        "ragged_decode_attention": PublicFunction("ejkernel.modules", calls.ragged_decode_call),
    },
    arguments=arguments,
    checks=checks,
    typical_calls=typical_calls,
    roofline=_roofline,
)
