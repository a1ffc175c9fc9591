"""Checks and conversions of what a caller hands to the mask constructors."""

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from ejkernel.ops.checks import check_rows

ArrayInput = ArrayLike | Sequence[Any]
INT32_MIN, INT32_MAX = np.iinfo(np.int32).min, np.iinfo(np.int32).max


def concrete(x: Any) -> np.ndarray | None:
    """The values of `x` as numpy, or None where they are traced or live on another host."""
    if isinstance(x, Tracer) or not getattr(x, "is_fully_addressable", True):
        return None
    return np.asarray(x)


def as_array(name: str, x: ArrayInput) -> jax.Array | np.ndarray:
    """`x` with a shape and a dtype; lists become numpy arrays."""
    if isinstance(x, (jax.Array, np.ndarray)):
        return x
    array = np.asarray(x)
    if array.dtype == object:
        raise TypeError(f"{name} must be an array, got {type(x).__name__}: {x!r:.80}")
    return array


def int_array(name: str, x: ArrayInput) -> jax.Array:
    """`x` as int32; refuses other kinds of numbers and values that int32 cannot hold."""
    array = as_array(name, x)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} must hold integers, got dtype {array.dtype}")
    if array.dtype.itemsize > 4 or array.dtype == np.uint32:
        values = concrete(array)
        if values is not None and values.size and (values.min() < INT32_MIN or values.max() > INT32_MAX):
            raise ValueError(f"{name} must fit in int32, got values in [{values.min()}, {values.max()}]")
    return jnp.asarray(array).astype(jnp.int32)


def bool_array(name: str, x: ArrayInput) -> jax.Array | np.ndarray:
    """`x` as bool, in numpy if it came so; 0/1 integers are accepted, other values are not."""
    array = as_array(name, x)
    if array.dtype == np.bool_:
        return array
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} must be bool or 0/1 integers, got dtype {array.dtype}")
    values = concrete(array)
    if values is not None and values.size and (values.min() < 0 or values.max() > 1):
        raise ValueError(f"{name} must hold only 0 and 1, got values in [{values.min()}, {values.max()}]")
    return array != 0


def static_int(name: str, value: Any, minimum: int | None = None) -> int:
    """`value` as a Python int, known while tracing and not below `minimum`."""
    if isinstance(value, (bool, np.bool_, Tracer)):
        raise TypeError(f"{name} must be a static int, got {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a static int, got {type(value).__name__}: {value!r:.80}") from None
    if minimum is not None and number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {number}")
    return number


def lengths_array(name: str, x: ArrayInput, maximum: int) -> jax.Array:
    """(B,) int32 lengths; concrete values must lie in [0, maximum]."""
    lengths = int_array(name, x)
    if lengths.ndim > 1:
        raise ValueError(f"{name} must have shape (B,), got {lengths.shape}")
    values = concrete(x)
    if values is not None and values.size and (values.min() < 0 or values.max() > maximum):
        raise ValueError(f"{name} must lie in [0, {maximum}], got values in [{values.min()}, {values.max()}]")
    if values is None:
        check_rows(lengths, (lengths < 0) | (lengths > maximum), f"{name} must lie in [0, {maximum}]")
    return lengths.reshape(-1)


def cu_seqlens_array(name: str, x: ArrayInput, maximum: int) -> jax.Array:
    """(N+1,) int32 cumulative lengths; concrete values must start at 0, not decrease and end by `maximum`."""
    cu = int_array(name, x)
    if cu.ndim != 1 or cu.shape[0] < 2:
        raise ValueError(f"{name} must have shape (N+1,) with N >= 1, got {cu.shape}")
    values = concrete(x)
    if values is None:
        bad = (cu < 0) | (cu > maximum) | (jnp.diff(cu, prepend=0) < 0) | ((jnp.arange(len(cu)) == 0) & (cu != 0))
        check_rows(cu, bad, f"{name} must start at 0, never decrease and end by {maximum}")
        return cu
    if values[0] != 0 or (np.diff(values) < 0).any():
        raise ValueError(f"{name} must start at 0 and never decrease, got {values.tolist()!s:.120}")
    if values[-1] > maximum:
        raise ValueError(f"{name} ends at {values[-1]}, past the packed length {maximum}")
    return cu


def rows(name: str, x: ArrayInput, length: int | None = None) -> jax.Array:
    """(L,) or (B, L) integers as (B, L); checks L against `length` where given."""
    array = int_array(name, x)
    if array.ndim not in (1, 2):
        raise ValueError(f"{name} must have shape (L,) or (B, L), got {array.shape}")
    if length is not None and array.shape[-1] != length:
        raise ValueError(f"{name} must have length {length}, got shape {array.shape}")
    return array.reshape(-1, array.shape[-1])


def common_batch(sizes: dict[str, int]) -> int:
    """The batch size that all parts broadcast to; sizes are that or 1."""
    batch = 0 if 0 in sizes.values() else max(sizes.values(), default=1)
    if any(size not in (1, batch) for size in sizes.values()):
        raise ValueError(f"batch sizes must agree or be 1, got {sizes}")
    return batch
