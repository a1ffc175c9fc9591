"""Attention with its matrix of weights, by the definition."""

from functools import partial
from typing import Any

import jax

from ejkernel.checks.arrays import float_dtype
from ejkernel.kernels.softmax.reference import dropped, weighted_values, weights
from ejkernel.kernels.softmax.spec import Spec
from ejkernel.ops import Call, say_it_has_no_kernel


def with_weights(call: Call, dtype: Any = None) -> tuple[jax.Array, jax.Array]:
    """out (B, T, H, Dv) and weights (B, H, T, S), both in `dtype`."""
    dtype = call["query"].dtype if dtype is None else float_dtype("dtype", dtype)
    say_it_has_no_kernel("attention", call.arrays, "its definition: the matrix of weights is an output")
    return _with_weights(call.spec, dtype, call.arrays)


@partial(jax.jit, static_argnums=(0, 1))
def _with_weights(spec: Spec, dtype: Any, arrays: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    call = Call(spec, arrays)
    p, _ = weights(call, dtype)
    p = dropped(call, p).astype(dtype)
    return weighted_values(call, p).astype(dtype), p
