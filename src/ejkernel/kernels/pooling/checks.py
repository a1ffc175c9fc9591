"""Two representative calls of mean pooling, each with its definition."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.family import Check
from ejkernel.kernels.pooling.reference import mean_pooling
from ejkernel.ops import Call


def _defined(call: Call, dtype: Any) -> jax.Array:
    return mean_pooling(call).astype(dtype)


def check(name: str, shape: tuple[int, ...], dtype: str, fixed: Any = (), **static: Any) -> Check:
    return Check(name, "mean_pooling", _defined, dtype, {"x": shape}, dict(fixed), static)


def checks() -> list[Check]:
    ends = jnp.array([0, 100, 101, 500])
    return [
        check("chunks of 32", (2, 500, 4, 64), "float32", chunk_size=32),
        check("packed sequences", (1, 512, 4, 64), "bfloat16", {"cu_seqlens": ends}, chunk_size=16),
    ]
