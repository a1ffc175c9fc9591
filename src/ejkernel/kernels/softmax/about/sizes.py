"""From sizes and words to the arguments of softmax attention."""

from typing import Annotated, Any

import jax.numpy as jnp

from ejkernel.about.sizes import Dtype, Option, Size, Window, parsed_window, struct
from ejkernel.types import BlockPattern, MaskInfo


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
    block_size: Annotated[int | None, Option("Of blocksparse_attention.", least=1)] = None,
) -> dict[str, Any]:
    """Arguments of a public function."""
    B, T, H, D = batch, length, heads, dim
    S, Hkv, Dv = kv_length or T, kv_heads or H, value_dim or D
    return {
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


def _documents(count: int | None, length: int, kv_length: int) -> MaskInfo | None:
    if count is None:
        return None
    if length != kv_length:
        raise ValueError(f"documents pack queries and keys alike; the lengths are {length} and {kv_length}")
    return MaskInfo.from_segments((jnp.arange(length, dtype=jnp.int32) * count // length)[None])


def _pattern(operation: str, block_size: int | None, length: int, kv_length: int) -> BlockPattern | None:
    """A pattern of the right shape: which blocks it holds does not decide what runs."""
    if operation != "blocksparse_attention":
        if block_size is not None:
            raise ValueError(f"{operation} has no block_size")
        return None
    size = block_size or 64
    return BlockPattern.from_dense(jnp.ones((-(-length // size), -(-kv_length // size)), bool), block_size=size)
