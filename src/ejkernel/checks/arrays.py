"""Checks and conversions of arrays that a caller hands over."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from ejkernel.checks.values import check_rows, enabled

ArrayInput = ArrayLike | Sequence[Any]
# dtypes of queries, keys and values
FLOATS = ("float32", "bfloat16", "float16")
INT32_MIN, INT32_MAX = np.iinfo(np.int32).min, np.iinfo(np.int32).max


def concrete(x: Any) -> np.ndarray | None:
    """The values of `x` as numpy, or None where they are traced or live on another host."""
    if isinstance(x, Tracer) or not getattr(x, "is_fully_addressable", True):
        return None
    # fetched on purpose, which `jax.transfer_guard("disallow")` lets pass
    return np.asarray(jax.device_get(x) if isinstance(x, jax.Array) else x)


def as_array(name: str, x: ArrayInput) -> jax.Array | np.ndarray:
    """`x` with a shape and a dtype; lists become numpy arrays."""
    if isinstance(x, (jax.Array, np.ndarray)):
        return x
    array = np.asarray(x)
    if array.dtype == object:
        raise TypeError(f"{name} must be an array, got {type(x).__name__}: {x!r:.80}")
    return array


def float_array(name: str, x: Any) -> jax.Array:
    """An array of one of the dtypes that queries, keys and values have."""
    check_has_numbers(name, x)
    check_sizes_known(name, x)
    if str(x.dtype) not in FLOATS:
        raise TypeError(f"{name} has dtype {x.dtype}; supported: {', '.join(FLOATS)}")
    return jnp.asarray(x)


def float_dtype(name: str, dtype: Any) -> np.dtype:
    """One of the dtypes that queries, keys and values have."""
    try:
        resolved = jnp.dtype(dtype)
    except TypeError:
        resolved = None
    if resolved is None or resolved.name not in FLOATS:
        shown = repr(dtype) if resolved is None else resolved.name
        raise TypeError(f"{name}={shown:.80} is not supported; use one of {', '.join(FLOATS)}")
    return resolved


def check_has_numbers(name: str, x: Any) -> None:
    """TypeError unless it is an array; a shape with a dtype is none outside of `explain` and `jax.eval_shape`."""
    if any(base.__module__.partition(".")[0] == "torch" for base in type(x).__mro__):
        raise TypeError(f"{name} is a PyTorch tensor, and must be a JAX array; ejkernel.torch has functions of tensors")
    if not hasattr(x, "dtype") or isinstance(x, type | jax.ShapeDtypeStruct):
        raise TypeError(f"{name} must be an array, got {type(x).__name__}")


def check_sizes_known(name: str, x: Any) -> None:
    """NotImplementedError where `jax.export` leaves a dimension open: tiles are chosen by the lengths."""
    for axis, size in enumerate(x.shape):
        if not isinstance(size, int | np.integer):
            raise NotImplementedError(
                f"dimension {axis} of {name} {x.shape} is symbolic, and its size must be known: export one for each"
            )


def number_array(name: str, x: Any) -> jax.Array:
    """`x` as an array of numbers of any kind, from whatever can be one."""
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"{name} must be an array of numbers, got {type(x).__name__}: {x!r:.80}") from None


def traced_number(name: str, x: jax.Array) -> jax.Array:
    """A traced scalar as float32."""
    if x.shape != () or not (jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)):
        raise TypeError(f"{name} must be a number, got {x.dtype} of shape {x.shape}")
    return x.astype(jnp.float32)


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


def integers(name: str, x: Any, *ranks: int) -> Any:
    """A signed integer array of one of the ranks; host values stay on the host."""
    if x is None:
        raise TypeError(f"{name} is needed, got None")
    try:
        given, x = x, x if isinstance(x, jax.Array) else np.asarray(x)
    except ValueError:
        raise ValueError(f"{name} must have rows of one length, got {x!r:.80}") from None
    except TypeError as error:  # a tensor on a GPU, say
        raise TypeError(f"{name} must be an array of integers, got {type(x).__name__}: {error}") from None
    if x.size == 0 and not hasattr(given, "dtype"):  # numpy takes an empty list for floats
        x = x.astype(np.int64)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} must hold integers, got {x.dtype}")
    if x.ndim not in ranks:
        raise ValueError(f"{name} must have {' or '.join(map(str, ranks))} dimensions, got shape {x.shape}")
    # checks subtract, which narrow or unsigned numbers do not survive
    if isinstance(x, np.ndarray):
        return x.astype(np.int64)
    return x if x.dtype in (jnp.int32, jnp.int64) else x.astype(jnp.int32)


def lengths_array(name: str, x: ArrayInput, most: int, *, least: int = 0) -> jax.Array:
    """(B,) int32 lengths from `least` to `most`; those on a device are fetched to see, unless they are traced."""
    lengths = integers(name, x, 0, 1)
    values = concrete(lengths)
    given = lengths if values is None else values
    check_rows(given, (given < least) | (given > most), f"{name} must lie in [{least}, {most}]")
    return jnp.asarray(lengths, jnp.int32).reshape(-1)


def cumulative_lengths(name: str, x: ArrayInput, total: int, *, fewest: int = 1) -> jax.Array:
    """(N + 1,) int32 cumulative lengths of at least `fewest` sequences, in order and inside the tokens there are.

    Bad ones raise, also those on a device, which are fetched to see; traced ones are put in order.
    """
    cumulative = integers(name, x, 1)
    check_sizes_known(name, cumulative)
    if cumulative.shape[0] <= fewest:
        raise ValueError(f"{name} must have shape (sequences + 1,), got {cumulative.shape}")
    check_cumulative(name, cumulative, total)
    return _in_order(jnp.asarray(cumulative, jnp.int32), total)


@partial(jax.jit, static_argnums=1)
def _in_order(cumulative: jax.Array, total: int) -> jax.Array:
    return jnp.clip(jax.lax.cummax(cumulative), 0, total)


def check_cumulative(name: str, cumulative: Any, total: int, *, of: str = "tokens", sequences: Any = None) -> None:
    """ValueError unless cumulative lengths (N + 1,) start at 0, never decrease, and end within `total` tokens.

    Traced ones are checked with `EJKERNEL_CHECKS=1`. Entries past the first `sequences` sequences are not looked at.
    """
    message = f"{name} must start at 0, never decrease, and end within the {total} {of}"
    values, count = concrete(cumulative), None if sequences is None else concrete(sequences)
    if values is not None and (sequences is None) == (count is None):
        check_rows(values, _out_of_order(np, values, total, count), message)
    elif enabled():
        bad = _out_of_order(jnp, jnp.asarray(cumulative), total, sequences)
        check_rows(jnp.asarray(cumulative), bad, message)


def _out_of_order(xp: Any, cumulative: Any, total: int, sequences: Any) -> Any:
    """Which entries are out of order or range; `xp` is numpy or jax.numpy."""
    index = xp.arange(cumulative.shape[0], dtype=np.int32)
    before = xp.concatenate([xp.zeros(1, cumulative.dtype), cumulative[:-1]])
    bad = (cumulative < before) | (cumulative > total) | ((index == 0) & (cumulative != 0))
    return bad if sequences is None else bad & (index <= xp.asarray(sequences).astype(np.int32))


def rows(name: str, x: ArrayInput, length: int | None = None) -> jax.Array:
    """(L,) or (B, L) integers as (B, L); checks L against `length` where given."""
    array = int_array(name, x)
    if array.ndim not in (1, 2):
        raise ValueError(f"{name} must have shape (L,) or (B, L), got {array.shape}")
    if length is not None and array.shape[-1] != length:
        raise ValueError(f"{name} must have length {length}, got shape {array.shape}")
    return array if array.ndim == 2 else array[None]


def limits(name: str, x: ArrayInput, length: int, most: int) -> jax.Array:
    """Integers (B|1, length) or (B|1, H|1, length); those that int32 does not hold are as far as it goes.

    With `EJKERNEL_CHECKS=1` they must lie in [0, most].
    """
    if isinstance(x, jax.Array) and x.dtype == jnp.uint32:
        x = jnp.minimum(x, np.uint32(INT32_MAX))
    array = integers(name, x, 1, 2, 3)
    array = np.clip(array, INT32_MIN, INT32_MAX) if isinstance(array, np.ndarray) else array
    if array.shape[-1] != length:
        raise ValueError(f"{name} {array.shape} must have one number for each of {length} tokens in its last dimension")
    array = jnp.asarray(array[None] if array.ndim == 1 else array, jnp.int32)
    if enabled():
        check_rows(array, (array < 0) | (array > most), f"{name} must lie in [0, {most}]")
    return array


def common_batch(sizes: dict[str, int]) -> int:
    """The batch size that all parts broadcast to; sizes are that or 1."""
    batch = 0 if 0 in sizes.values() else max(sizes.values(), default=1)
    if any(size not in (1, batch) for size in sizes.values()):
        raise ValueError(f"batch sizes must agree or be 1, got {sizes}")
    return batch
