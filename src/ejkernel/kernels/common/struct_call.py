"""A canonical call on shapes alone."""

from collections.abc import Callable
from typing import Any

import jax

from ejkernel.ops import Call


def struct_call(canonicalise: Callable[..., Call], *structs: jax.ShapeDtypeStruct, **options: Any) -> Call:
    """What `canonicalise` makes of arrays like `structs`, by shapes; an option given as a function is made inside."""
    specs: list[Any] = []

    def build(*arrays: jax.Array) -> Any:
        call = canonicalise(*arrays, **{n: x() if callable(x) else x for n, x in options.items()})
        specs.append(call.spec)
        return call.arrays

    arrays: Any = jax.eval_shape(build, *structs)
    return Call(specs[0], arrays)
