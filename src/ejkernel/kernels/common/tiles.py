"""Tiles of attention in jax.numpy: what XLA and Pallas kernels share."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def matmul(a: jax.Array, b: jax.Array, contract: tuple[int, int], precision: Any = None) -> jax.Array:
    """a and b contracted over one axis each, accumulated in float32."""
    numbers = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, numbers, precision=precision, preferred_element_type=jnp.float32)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """x, float32, to the nearest numbers of a dtype; gradients pass straight through."""
    info = jnp.finfo(dtype)
    # not by a pair of conversions, which XLA for GPUs takes out
    return x if jnp.dtype(dtype) == jnp.float32 else jax.lax.reduce_precision(x, info.nexp, info.nmant)


@rounded.defjvp
def _straight_through(dtype: Any, primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return rounded(*primals, dtype), tangents[0]


def finite(x: jax.Array) -> jax.Array:
    """x with zeros for what is not finite.

    0 * nan is nan, so in a product over rows a hidden one could leak. Such products use finite rows, and the logits of
    a bad row are made nan instead (`nan_rows`): masking then hides them from all who must not see them.
    """
    return jnp.where(jnp.isfinite(x), x, 0)


def nan_rows(x: jax.Array, *marking: jax.Array) -> jax.Array:
    """x (..., L, D) with nan for the rows in which one of the arrays `marking` (..., L, D') is not finite."""
    fine = jnp.stack([jnp.isfinite(m).all(-1, keepdims=True) for m in marking]).all(0)
    return jnp.where(fine, x, jnp.nan)


def capped(logits: jax.Array, soft_cap: float | None) -> jax.Array:
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


def uncapped_gradient(gradient: jax.Array, logits: jax.Array, soft_cap: float | None) -> jax.Array:
    """The gradient before the cap, from the one after it and the capped logits."""
    return gradient if soft_cap is None else gradient * (1.0 - jnp.square(logits / soft_cap))


# exp(x) on [-log(2) / 2, log(2) / 2] but for its constant, 1: the least relative error, 9e-8, of these degrees
_EXP = (0.0082903106, 0.041897933, 0.16667636, 0.49999149, 0.99999971)
_LOG2_E = 1.4426950408889634
# log(2) as a sum of two, the first of so few bits that its product with a whole number is exact
_LOG_2, _LOG_2_LOW = 0.693359375, -2.12194440e-4
# added to a whole number n, it leaves n + 127 in the last bits, where the exponent of 2^n has it
_ROUNDED = np.float32(1.5 * 2**23 + 127)


def exp_on_cpu(x: jax.Array) -> jax.Array:
    """The exponential of float32 up to 88, to 2e-7, zero below 2^-126; XLA's takes 1.7 times as long there."""
    x = jnp.where(x < -88.0, -88.0, x)  # nan stays
    n = jax.lax.round(x * _LOG2_E, jax.lax.RoundingMethod.TO_NEAREST_EVEN)
    remainder = (x - n * _LOG_2) - n * _LOG_2_LOW
    series = jnp.full_like(x, _EXP[0])
    for coefficient in (*_EXP[1:], 1.0):
        series = series * remainder + coefficient
    exponent = jax.lax.bitcast_convert_type(n + _ROUNDED, jnp.int32) << 23
    return series * jax.lax.bitcast_convert_type(exponent, jnp.float32)
