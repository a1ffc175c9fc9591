"""What the family of softmax attention says about itself: its functions, their sizes, which are worth tuning."""

from functools import partial
from typing import Annotated, Any

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
    check_documents,
    parsed_window,
    struct,
)
from ejkernel.kernels.softmax.checks import checks, dot_product_call, pattern_call
from ejkernel.kernels.softmax.spec import canonicalise
from ejkernel.types import BlockPattern, MaskInfo

# what functions call the arguments of flash_attention
_OTHER_NAMES = {
    "attention": {"dropout_seed": "dropout_rng"},
    "dot_product_attention": {
        "causal": "is_causal",
        "sliding_window": "local_window_size",
        "return_lse": "return_residual",
    },
}


def arguments(
    operation: str,
    *,
    batch: Size = 1,
    length: Annotated[int, Option("Queries.", least=1)] = 1024,
    kv_length: Annotated[int | None, Option("Keys; default: the length.", least=1)] = None,
    heads: Size = 8,
    kv_heads: Annotated[int | None, Option("Default: as many as query heads.", least=1)] = None,
    dim: Annotated[int, Option("Head dimension of queries and keys.", least=1)] = 64,
    value_dim: Annotated[int | None, Option("Head dimension of values; default: of keys.", least=1)] = None,
    dtype: Dtype = "bfloat16",
    causal: bool | None = None,
    window: Window = None,
    documents: Annotated[int | None, Option("Packed documents in a row.", least=1)] = None,
    bias: bool = False,
    sinks: bool = False,
    soft_cap: float | None = None,
    dropout: Annotated[float | None, Option("Probability.")] = None,
    lse: Annotated[bool, Option("Also return the log-sum-exp.")] = False,
    block_size: Annotated[int | None, Option("Of blocksparse_attention, tokens of a block.", least=1)] = None,
) -> dict[str, Any]:
    """From sizes and words to the arguments of a public function."""
    B, T, H, D = batch, length, heads, dim
    S, Hkv, Dv = kv_length or T, kv_heads or H, value_dim or D
    arguments = {
        "query": struct(dtype, B, T, H, D),
        "key": struct(dtype, B, S, Hkv, D),
        "value": struct(dtype, B, S, Hkv, Dv),
        "bias": struct(dtype, 1, H, T, S) if bias else None,
        "softmax_aux": struct(dtype, H) if sinks else None,
        "mask_info": _documents(documents, T, S),
        "block_mask": _pattern(operation, block_size, T, S),
        "causal": causal,
        "sliding_window": parsed_window(window),
        "logits_soft_cap": soft_cap,
        "dropout_prob": dropout,
        "dropout_seed": None if dropout is None else 0,
        "return_lse": lse or None,
    }
    return {_OTHER_NAMES.get(operation, {}).get(name, name): value for name, value in arguments.items()}


def _documents(count: int | None, length: int, kv_length: int) -> MaskInfo | None:
    if count is None:
        return None
    if length != kv_length:
        raise ValueError(f"documents pack queries and keys alike; the lengths are {length} and {kv_length}")
    check_documents(count, length)
    return MaskInfo.from_segments((jnp.arange(length, dtype=jnp.int32) * count // length)[None])


def _pattern(operation: str, block_size: int | None, length: int, kv_length: int) -> BlockPattern | None:
    """A pattern of the right shape: which blocks it holds does not decide what runs."""
    if operation != "blocksparse_attention":
        if block_size is not None:
            raise ValueError(f"{operation} has no block_size")
        return None
    size = block_size or 64
    return BlockPattern.from_dense(jnp.ones((-(-length // size), -(-kv_length // size)), bool), block_size=size)


def typical_calls(backend: str, quick: bool) -> list[TypicalCall]:
    """What people train, most often called first. A CPU gets sizes that it can do."""

    def call(length: int, heads: int, dim: int, **sizes: Any) -> TypicalCall:
        given = {"length": length, "heads": heads, "dim": dim, **sizes}
        return TypicalCall(("flash_attention", "scaled_dot_product_attention"), given)

    def masked(length: int, heads: int, dim: int, **sizes: Any) -> list[TypicalCall]:
        masks: list[dict[str, Any]] = [{}, {"window": f"{length // 16 - 1},0"}, {"documents": 16}]
        return [call(length, heads, dim, causal=True, **sizes, **mask) for mask in masks]

    if backend == "cpu":
        length, heads = (256, 2) if quick else (4096, 8)
        dense = [call(length, heads, 64, dtype="float32", causal=causal) for causal in (False, True)]
        return dense + masked(2 * length, heads, 64, dtype="float32")

    def dense_at(length: int, *dims: int) -> list[TypicalCall]:
        batch = 16384 // length
        return [call(length, 2048 // dim, dim, batch=batch, causal=c) for dim in dims for c in (False, True)]

    if quick:
        return dense_at(2048, 128)
    full, causal = partial(call, causal=False), partial(call, causal=True)
    return [
        *dense_at(8192, 128, 64, 256),
        *masked(16384, 32, 128, kv_heads=8),
        *masked(8192, 32, 64, kv_heads=8),
        causal(1024, 12, 64, batch=8),  # GPT-2
        causal(4096, 32, 128, batch=4, kv_heads=8),  # Llama
        full(2048, 16, 64, batch=4, bias=True),  # T5
        causal(2048, 16, 80, batch=4),  # Phi
        full(4096, 8, 40, batch=2),  # UNet
        full(4096, 8, 40, batch=2, kv_length=77),
        full(512, 12, 64, batch=32),  # BERT
        full(197, 12, 64, batch=64),  # ViT
        full(577, 16, 64, batch=64),  # CLIP
        full(1500, 20, 64, batch=4),  # Whisper
        full(1024, 16, 72, batch=16),  # DiT
        causal(4096, 32, 96),  # Phi-3
        causal(4096, 8, 256, batch=2, kv_heads=4, window="1023,0"),  # Gemma
        causal(2048, 16, 64, batch=2, dtype="float32"),  # GPT-2
        *dense_at(2048, 128, 64, 256),
        *dense_at(16384, 128, 64, 256),
    ]


def _roofline(batch: int = 2, length: int = 8192, width: int = 2048) -> Roofline:
    from ejkernel.kernels.softmax.pallas_tpu.roofline import table  # loads the kernels for TPUs

    return Roofline(f"Attention, batch {batch}, {length} tokens, heads * head_dim {width}", table(batch, length, width))


FAMILY = Family(
    name="softmax",
    functions={
        "flash_attention": PublicFunction("ejkernel.modules", canonicalise),
        "blocksparse_attention": PublicFunction("ejkernel.modules", pattern_call),
        "scaled_dot_product_attention": PublicFunction("ejkernel.modules", canonicalise),
        "dot_product_attention": PublicFunction("ejkernel.modules", dot_product_call),
        "attention": PublicFunction("ejkernel.modules", canonicalise),
    },
    arguments=arguments,
    checks=checks,
    typical_calls=typical_calls,
    roofline=_roofline,
)
