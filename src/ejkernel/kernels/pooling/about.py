"""What mean pooling says about itself."""

from typing import Annotated, Any

import jax
import jax.numpy as jnp

from ejkernel.about.family import Check, Family, PublicFunction
from ejkernel.about.sizes import Dtype, Option, Size, struct
from ejkernel.kernels.pooling.reference import mean_pooling
from ejkernel.kernels.pooling.spec import canonicalise
from ejkernel.ops import Call


def _arguments(
    operation: str,
    *,
    batch: Size = 1,
    length: Size = 1024,
    heads: Size = 8,
    dim: Size = 64,
    dtype: Dtype = "bfloat16",
    chunk_size: Annotated[int | None, Option("Of mean_pooling, tokens per chunk.", least=1)] = None,
) -> dict[str, Any]:
    return {"x": struct(dtype, batch, length, heads, dim), "chunk_size": chunk_size}


def _defined(call: Call, dtype: Any) -> jax.Array:
    return mean_pooling(call).astype(dtype)


def check(name: str, shape: tuple[int, ...], dtype: str, fixed: Any = (), **static: Any) -> Check:
    return Check(name, "mean_pooling", _defined, dtype, {"x": shape}, dict(fixed), static)


def _checks() -> list[Check]:
    ends = jnp.array([0, 100, 101, 500])
    return [
        check("chunks of 32", (2, 500, 4, 64), "float32", chunk_size=32),
        check("packed sequences", (1, 512, 4, 64), "bfloat16", {"cu_seqlens": ends}, chunk_size=16),
    ]


FAMILY = Family(
    name="pooling",
    module=__name__,
    functions={"mean_pooling": PublicFunction("ejkernel.modules", canonicalise)},
    arguments=_arguments,
    checks=_checks,
)
