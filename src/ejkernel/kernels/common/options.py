"""Checks of static options that the families share: a number, a flag, a soft cap."""

import math
from typing import Any

import numpy as np
from jax import core as jax_core


def number(name: str, x: Any) -> float:
    """A finite Python number."""
    if isinstance(x, jax_core.Tracer):
        raise TypeError(f"{name} must be a Python number, got a traced value: it is part of the compiled program")
    try:
        value = float(x)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, got {x!r}") from None
    if not math.isfinite(value):
        raise ValueError(f"{name}={value} must be finite")
    return value


def whole(name: str, x: Any, least: int = 1) -> int:
    """A Python int, at least `least`."""
    if isinstance(x, bool) or not isinstance(x, int | np.integer):
        raise TypeError(f"{name} must be an int, got {x!r}")
    if x < least:
        raise ValueError(f"{name}={x} must be at least {least}")
    return int(x)


def flag(name: str, x: Any) -> bool:
    if not isinstance(x, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {x!r}")
    return bool(x)


def soft_cap(cap: Any) -> float | None:
    """`logits_soft_cap`: None or a positive number."""
    if cap is None:
        return None
    value = number("logits_soft_cap", cap)
    if value <= 0:
        raise ValueError(f"logits_soft_cap={value} must be positive")
    return value
