"""What native sparse attention says about itself: its functions, their sizes, which are worth tuning."""

from typing import Annotated, Any

import jax

from ejkernel.family import Dtype, Family, Option, PublicFunction, Size, TypicalCall, struct
from ejkernel.kernels.native_sparse import whole
from ejkernel.kernels.native_sparse.checks import checks
from ejkernel.kernels.native_sparse.spec import canonicalise


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
    """From sizes and words to the arguments of a public function."""
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


def typical_calls(backend: str, quick: bool) -> list[TypicalCall]:
    """Long sequences. A CPU gets sizes that it can do."""
    if backend == "cpu":
        length, heads, kv_heads, dim, blocks = (256, 2, 1, 16, 2) if quick else (4096, 8, 2, 64, 8)
        lengths, dtype = [length], "float32"
    else:
        heads, kv_heads, dim, blocks, dtype = 64, 4, 128, 16, "bfloat16"
        lengths = [32768] if quick else [32768, 65536]
    sizes = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "blocks": blocks, "dtype": dtype}
    return [TypicalCall(("selected_attention",), {"length": length, **sizes}) for length in lengths]


FAMILY = Family(
    name="native_sparse",
    functions={
        "native_sparse_attention": PublicFunction("ejkernel.modules", whole.canonicalise),
        "selected_attention": PublicFunction("ejkernel.modules", canonicalise),
        "select_blocks": PublicFunction("ejkernel.modules", whole.selecting_call),
    },
    arguments=arguments,
    checks=checks,
    typical_calls=typical_calls,
)
