"""Range checks of array values: always for host values, on request for device values."""

import os
from typing import Any

import jax
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


def _raise_if(bad: np.ndarray, values: Any, message: str) -> None:
    if bad.any():
        row = int(bad.reshape(-1).argmax())
        value = np.asarray(values).reshape(-1)[min(row, np.size(values) - 1)]
        raise ValueError(f"{message} (row {row}: {value})")
