"""What the toy family says about itself: its function, and the sizes it takes."""

from typing import Annotated

import jax
import jax.numpy as jnp

from ejkernel.family import Family, Option, PublicFunction, Size, TypicalCall, struct
from toy_family.checks import canonicalise, checks


def arguments(
    operation,
    *,
    batch: Size = 2,
    length: Size = 8,
    dim: Size = 3,
    decay: Annotated[float, Option("Of the toy, per token.")] = 0.5,
):
    x, state = struct("float32", batch, length, dim), struct("float32", batch, dim)
    return {
        "x": x,
        "state": state,
        "lengths": jax.ShapeDtypeStruct((batch,), jnp.int32),
        "decay": decay,
    }


FAMILY = Family(
    name="toy",
    functions={"decayed_sum": PublicFunction("toy_family.operations", canonicalise)},
    arguments=arguments,
    checks=checks,
    typical_calls=lambda backend, quick: [TypicalCall(("decayed_sum",), {"length": 8})],
)
