"""Range checks of array values: always for host values, on request for device values."""

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core as jax_core
from jax.experimental import checkify


def enabled() -> bool:
    """Whether `EJKERNEL_CHECKS=1` asks for values on the device to be checked."""
    return os.environ.get("EJKERNEL_CHECKS", "0") not in ("", "0")


def check_rows(values: Any, bad: Any, message: str) -> None:
    """Raise `ValueError` naming the first row, by its index along each dimension, where `bad` holds.

    Host values (lists, numpy) are always checked. Arrays on the device are checked with `EJKERNEL_CHECKS=1`:
    directly when concrete, through `checkify` when traced.
    """
    if bad.size == 0:
        return
    bad = bad.reshape(bad.shape or 1)
    if not isinstance(values, jax.Array):
        _raise_if(np.asarray(bad), values, message)
    elif enabled() and not isinstance(bad, jax_core.Tracer):
        _raise_if(np.asarray(bad), np.asarray(values), message)
    elif enabled():
        first = jnp.unravel_index(bad.reshape(-1).argmax(), bad.shape)
        where = {f"n{axis}": number for axis, number in enumerate(first)}
        checkify.debug_check(~bad.any(), f"{message} (row {', '.join(f'{{{name}}}' for name in where)})", **where)


def check(values: Any, bad: Callable[[Any, Any], Any], message: str, involved: tuple[Any, ...]) -> None:
    """`check_rows` of `bad(numpy or jax.numpy, values)`, by where the arrays involved are."""
    on_device = any(isinstance(x, jax.Array) for x in involved)
    if on_device and not enabled():
        return
    xp = jnp if on_device else np
    values = values(xp) if callable(values) else xp.asarray(values)
    check_rows(values, bad(xp, values), message)


def _raise_if(bad: np.ndarray, values: Any, message: str) -> None:
    if bad.any():
        first = int(bad.reshape(-1).argmax())
        value = np.asarray(values).reshape(-1)[min(first, np.size(values) - 1)]
        row = ", ".join(str(number) for number in np.unravel_index(first, bad.shape))
        raise ValueError(f"{message} (row {row}: {value})")
