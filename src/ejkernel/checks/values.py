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
    """Raise `ValueError` naming the first row where `bad` holds.

    Host values (lists, numpy) are always checked. Arrays on the device are checked with `EJKERNEL_CHECKS=1`:
    directly when concrete, through `checkify` when traced.
    """
    if bad.size == 0:
        return
    if not isinstance(values, jax.Array):
        _raise_if(np.asarray(bad), values, message)
    elif enabled() and not isinstance(bad, jax_core.Tracer):
        _raise_if(np.asarray(bad), np.asarray(values), message)
    elif enabled():
        checkify.debug_check(~bad.any(), message + " (row {row})", row=bad.reshape(-1).argmax())


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
        row = int(bad.reshape(-1).argmax())
        value = np.asarray(values).reshape(-1)[min(row, np.size(values) - 1)]
        raise ValueError(f"{message} (row {row}: {value})")
