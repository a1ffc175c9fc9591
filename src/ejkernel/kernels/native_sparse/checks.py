"""A few representative calls of native sparse attention, each with its definition."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.family import Check
from ejkernel.kernels.native_sparse.reference import native_sparse, reference, select_whole
from ejkernel.ops import Call


def _defined(call: Call, dtype: Any) -> jax.Array:
    return reference(call, dtype)["out"]


def _blocks(T: int, heads: int, count: int, block_size: int) -> jax.Array:
    """Any blocks up to a query's own: (1, T, heads, count)."""
    draws = np.random.default_rng(1).random((1, T, heads, count))
    return jnp.asarray(np.floor(draws * (np.arange(T) // block_size + 1)[:, None, None]), jnp.int32)


def checks() -> list[Check]:
    def tokens(T: int, H: int, Hkv: int, D: int) -> dict[str, tuple[int, ...]]:
        return {"query": (1, T, H, D), "key": (1, T, Hkv, D), "value": (1, T, Hkv, D)}

    def chosen(T: int, heads: int, count: int, block_size: int) -> dict[str, Any]:
        return {"block_indices": _blocks(T, heads, count, block_size)}

    gates = dict.fromkeys(("g_cmp", "g_slc", "g_swa"), (1, 200, 4))
    packed = {"cu_seqlens": jnp.array([0, 70, 71, 180])}
    sizes = {"block_size": 16, "block_counts": 4, "window_size": 40}
    return [
        Check(
            "blocks of 16", "selected_attention", _defined, "float32", tokens(200, 4, 2, 64), chosen(200, 2, 3, 16),
            {"block_size": 16},
        ),
        Check(
            "a group of 16 heads", "selected_attention", _defined, "bfloat16", tokens(200, 16, 1, 64),
            chosen(200, 1, 2, 64),
        ),
        Check(
            "8 blocks of 4", "select_blocks", select_whole, "float32",
            {"query": (1, 100, 4, 64), "compressed_key": (1, 25, 2, 64)}, {}, {"block_counts": 8, "block_size": 4},
            differentiable=False,
        ),
        Check(
            "three branches", "native_sparse_attention", native_sparse, "float32", tokens(200, 4, 2, 32) | gates, {},
            sizes, slow=True,
        ),
        Check(
            "packed sequences", "native_sparse_attention", native_sparse, "float32", tokens(200, 4, 2, 32) | gates,
            packed, sizes, slow=True,
        ),
    ]  # fmt: skip
