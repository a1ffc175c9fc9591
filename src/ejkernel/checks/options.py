"""Checks of static options: numbers, ints, flags, and the fields of configs."""

import math
import operator
from collections.abc import Sequence
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
        value = None
    if value is None or isinstance(x, bool | np.bool_):
        raise TypeError(f"{name} must be a number, got {x!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name}={value} must be finite")
    return value


def static_int(name: str, x: Any, least: int | None = None) -> int:
    """A Python int, known while tracing and not below `least`."""
    if isinstance(x, jax_core.Tracer):
        raise TypeError(f"{name} must be an int, got a traced value: it is part of the compiled program")
    if isinstance(x, bool | np.bool_):
        raise TypeError(f"{name} must be an int, got {x!r}")
    try:
        value = operator.index(x)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {type(x).__name__}: {x!r:.80}") from None
    if least is not None and value < least:
        raise ValueError(f"{name}={value} must be at least {least}")
    return value


def int_pair(name: str, x: Any, least: int | None = None) -> tuple[int, int]:
    """A pair of Python ints, from a pair or from one that stands for both."""
    pair = tuple(x) if isinstance(x, tuple | list) else (x, x)
    if len(pair) != 2:
        raise ValueError(f"{name}={x!r} must be an int or a pair of them")
    return static_int(name, pair[0], least), static_int(name, pair[1], least)


def config_ints(
    config: Any, names: Sequence[str], least: int = 1, *, multiple: int = 1, power_of_two: bool = False
) -> None:
    """ValueError unless these fields of a config are ints from `least` on."""
    what = "a power of two" if power_of_two else f"a multiple of {multiple}" if multiple > 1 else "an int"
    for name in names:
        x = getattr(config, name)
        if type(x) is not int or x < least or x % multiple or (power_of_two and x & (x - 1)):
            raise ValueError(f"{name}={x!r} must be {what} from {least} on")


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
