"""From the sizes of the command line to the arguments of a public function."""

from typing import Annotated, Any

import jax

from ejkernel.about.sizes import Dtype, Option, Size, struct


def arguments(
    operation: str,
    *,
    batch: Size = 1,
    length: Size = 4096,
    heads: Size = 16,
    kv_heads: Annotated[int | None, Option("Key heads; default: a sixteenth of the heads.", least=1)] = None,
    dim: Size = 128,
    dtype: Dtype = "bfloat16",
    blocks: Annotated[int, Option("Blocks that a query selects.", least=1)] = 16,
    block_size: Annotated[int, Option("Tokens of a block.", least=1)] = 64,
) -> dict[str, Any]:
    kv_heads = kv_heads or max(1, heads // 16)
    query, key = struct(dtype, batch, length, heads, dim), struct(dtype, batch, length, kv_heads, dim)
    if operation == "select_blocks":
        rows = -(-length // block_size)
        compressed = struct(dtype, batch, rows, kv_heads, dim)
        return {"query": query, "compressed_key": compressed, "block_counts": blocks, "block_size": block_size}
    tokens = {"query": query, "key": key, "value": key, "block_size": block_size}
    if operation == "selected_attention":
        return tokens | {"block_indices": jax.ShapeDtypeStruct((batch, length, kv_heads, blocks), "int32")}
    gate = struct(dtype, batch, length, heads)
    return tokens | {"g_cmp": gate, "g_slc": gate, "block_counts": blocks}
