"""What native sparse attention says about itself."""

from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.about.family import Check, Family, PublicFunction
from ejkernel.about.sizes import Dtype, Option, Size, struct
from ejkernel.kernels.native_sparse import whole
from ejkernel.kernels.native_sparse.reference import native_sparse, reference
from ejkernel.kernels.native_sparse.spec import canonicalise
from ejkernel.ops import Call


def _arguments(
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


def _defined(call: Call, dtype: Any) -> jax.Array:
    return reference(call, dtype)["out"]


def _blocks(T: int, heads: int, count: int, block_size: int) -> jax.Array:
    """Any blocks up to a query's own: (1, T, heads, count)."""
    draws = np.random.default_rng(1).random((1, T, heads, count))
    return jnp.asarray(np.floor(draws * (np.arange(T) // block_size + 1)[:, None, None]), jnp.int32)


def _check(name: str, operation: str, definition: Any, dtype: str, shapes: Any, fixed: Any, **static: Any) -> Check:
    return Check(name, operation, definition, dtype, shapes, fixed, static)


def _checks() -> list[Check]:
    def tokens(T: int, H: int, Hkv: int, D: int) -> dict[str, tuple[int, ...]]:
        return {"query": (1, T, H, D), "key": (1, T, Hkv, D), "value": (1, T, Hkv, D)}

    def chosen(T: int, heads: int, count: int, block_size: int) -> dict[str, Any]:
        return {"block_indices": _blocks(T, heads, count, block_size)}

    gates = dict.fromkeys(("g_cmp", "g_slc", "g_swa"), (1, 200, 4))
    packed = {"cu_seqlens": jnp.array([0, 70, 71, 180])}
    return [
        _check(
            "blocks of 16", "selected_attention", _defined, "float32", tokens(200, 4, 2, 64), chosen(200, 2, 3, 16),
            block_size=16,
        ),
        _check(
            "a group of 16 heads", "selected_attention", _defined, "bfloat16", tokens(200, 16, 1, 64),
            chosen(200, 1, 2, 64),
        ),
        _check(
            "three branches", "native_sparse_attention", native_sparse, "float32", tokens(200, 4, 2, 64) | gates, {},
            block_size=16, block_counts=4, window_size=40,
        ),
        _check(
            "packed sequences", "native_sparse_attention", native_sparse, "float32", tokens(200, 4, 2, 64) | gates,
            packed, block_size=16, block_counts=4, window_size=40,
        ),
    ]  # fmt: skip


FAMILY = Family(
    name="native_sparse",
    module=__name__,
    functions={
        "native_sparse_attention": PublicFunction("ejkernel.modules", whole.canonicalise),
        "selected_attention": PublicFunction("ejkernel.modules", canonicalise),
        "select_blocks": PublicFunction("ejkernel.modules", whole.selecting_call),
    },
    arguments=_arguments,
    checks=_checks,
)
