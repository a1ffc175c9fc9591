"""From sizes and words to the arguments of attention over a cache."""

from typing import Annotated, Any

import jax
import jax.numpy as jnp

from ejkernel.about.sizes import Dtype, Option, Size, Window, parsed_window, struct

_ARRAYS = {
    "page_attention": ("query", "key_cache", "value_cache", "context_lens", "block_tables"),
    "ragged_page_attention": (
        "queries", "kv_pages", "context_lens", "block_tables", "query_start_loc", "num_seqs",
    ),
    "prefill_page_attention": ("query", "key_cache", "value_cache", "context_len", "page_indices"),
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
    window: Window = None,
    sinks: bool = False,
    soft_cap: float | None = None,
    lse: Annotated[bool, Option("Also return the log-sum-exp.")] = False,
    block_size: Annotated[int, Option("Of a cache, tokens per page.", least=1)] = 16,
) -> dict[str, Any]:
    """Arguments of a public function."""
    B, H, D, L = batch, heads, dim, block_size
    S, Hkv, Dv = kv_length or length, kv_heads or H, value_dim or D
    W = -(-S // L)
    tokens = length if operation in ("ragged_page_attention", "prefill_page_attention") else B

    def integers(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    everything = {
        "query": struct(dtype, tokens, H, D),
        "queries": struct(dtype, tokens, H, D),
        "key_cache": struct(dtype, B * W, L, Hkv, D),
        "value_cache": struct(dtype, B * W, L, Hkv, Dv),
        "kv_pages": struct(dtype, B * W, L, 2 * Hkv, D),
        "key_buffer": struct(dtype, B * W * L, Hkv, D),
        "value_buffer": struct(dtype, B * W * L, Hkv, Dv),
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
    }
    return {
        **{name: everything[name] for name in _ARRAYS[operation]},
        "softmax_aux": struct(dtype, H) if sinks else None,
        "sliding_window": parsed_window(window),
        "logits_soft_cap": soft_cap,
        "return_lse": lse or None,
    }
