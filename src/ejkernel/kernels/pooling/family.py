"""What mean pooling says about itself: its function, and the sizes it takes."""

from typing import Annotated, Any

from ejkernel.family import Dtype, Family, Option, PublicFunction, Size, struct
from ejkernel.kernels.pooling.checks import checks
from ejkernel.kernels.pooling.spec import canonicalise


def arguments(
    operation: str,
    *,
    batch: Size = 1,
    length: Size = 1024,
    heads: Size = 8,
    dim: Size = 64,
    dtype: Dtype = "bfloat16",
    chunk_size: Annotated[int | None, Option("Of mean_pooling, tokens per chunk.", least=1)] = None,
) -> dict[str, Any]:
    """From sizes to the arguments of the public function."""
    return {"x": struct(dtype, batch, length, heads, dim), "chunk_size": chunk_size}


FAMILY = Family(
    name="pooling",
    functions={"mean_pooling": PublicFunction("ejkernel.modules", canonicalise)},
    arguments=arguments,
    checks=checks,
)
