"""Settings of a stretch of a program: interpreters, reproducible gradients, configs, the device, tuning, recording.

All of them are one value of a context that JAX's caches know (`jax.make_user_context`): a function that was traced
under other settings is traced again.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import jax

from ejkernel.ops.private_jax import count_up


# compared by identity, which is fast: `_interned` gives equal settings as one object
@dataclass(frozen=True, eq=False)
class Settings:
    """What the context managers of this package have set.

    Attributes:
        interpret: whether kernels of absent hardware run in their interpreters.
        deterministic: whether gradients must repeat to the bit; None where nobody said.
        implicit_sharding: whether a plain jit is told how calls split; None where nobody said.
        configs: the `use_config`s, by operation.
        device: the `Target` that calls are planned for, wherever they are made.
        tuning: the open `autotune()`.
        recorder: the open `explain()`.
    """

    interpret: bool = False
    deterministic: bool | None = None
    implicit_sharding: bool | None = None
    configs: tuple[tuple[str, Any], ...] = ()
    device: Any = None
    tuning: Any = None
    recorder: Any = None


_DEFAULT = Settings()
_CONTEXT = jax.make_user_context(None)
# how often `autotune` found new winners: programs that were traced before know none of them
_TUNINGS = jax.make_user_context(0)


def settings() -> Settings:
    """The settings here and now, in this thread."""
    return _CONTEXT.value or _DEFAULT


@lru_cache(maxsize=256)
def _interned(*values: Any) -> Settings:
    return Settings(*values)


@contextmanager
def changed(**values: Any) -> Iterator[None]:
    """Within, these settings have other values."""
    new = replace(settings(), **values)
    # an open `autotune` or `explain` is of one stretch alone: kept in a cache it would outlive that
    if new.tuning is None and new.recorder is None:
        new = _interned(*(getattr(new, field.name) for field in fields(new)))
    with _CONTEXT(new):
        yield


def with_these_settings(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under the settings of this thread, for another one to call."""
    given = settings()

    def called(*args: Any) -> Any:
        with _CONTEXT(given):
            return function(*args)

    return called


def forget_traced_configs() -> None:
    """Have every program traced again when it is next called, in all threads: there are new tuned configs."""
    count_up(_TUNINGS)


@contextmanager
def interpret() -> Iterator[None]:
    """Run GPU and TPU kernels in their interpreters on the CPU, for calls made inside.

    `platform="triton"` runs in Triton's interpreter, `platform="pallas"` in Pallas's TPU interpreter.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import mean_pooling
    >>> from ejkernel.ops import interpret
    >>> with interpret():
    ...     mean_pooling(jnp.ones((1, 8, 1, 4)), chunk_size=4, platform="triton").shape
    (1, 2, 1, 4)
    """
    with changed(interpret=True):
        yield


def interpreting() -> bool:
    """Whether `interpret()` is active."""
    return settings().interpret


@contextmanager
def deterministic(on: bool = True) -> Iterator[None]:
    """Take only kernels that give the same bits every run, for calls made inside.

    Every forward does, and every backward but some of NVIDIA's, which add gradients in any order and are faster for it.
    Those are allowed unless this is on, `EJKERNEL_DETERMINISTIC=1`, or XLA was started with
    `--xla_gpu_deterministic_ops`; `deterministic(False)` allows them within. `ejkernel.explain` says what runs.
    A gradient follows its forward: what was called inside stays deterministic where it is differentiated later.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import flash_attention
    >>> from ejkernel.ops import deterministic
    >>> with deterministic():
    ...     flash_attention(*[jnp.ones((1, 16, 2, 8))] * 3).shape
    (1, 16, 2, 8)
    """
    with changed(deterministic=on):
        yield


def xla_is_deterministic() -> bool:
    """Whether XLA's own flag asks for programs that give the same bits."""
    given = [flag.partition("=")[::2] for flag in os.environ.get("XLA_FLAGS", "").split()]
    names = ("--xla_gpu_deterministic_ops", "--xla_gpu_exclude_nondeterministic_ops")
    last = {name: value for name, value in given if name in names}  # the last of several decides
    return any(value.lower() not in ("false", "0") for value in last.values())


def is_deterministic() -> bool:
    """Whether only gradients that repeat to the bit are wanted."""
    asked = settings().deterministic
    if asked is not None:
        return asked
    return os.environ.get("EJKERNEL_DETERMINISTIC", "0") not in ("", "0") or xla_is_deterministic()


@contextmanager
def implicit_sharding(on: bool = True) -> Iterator[None]:
    """Whether arrays that lie split over Auto mesh axes stay so through the kernels of a plain jit; they do.

    JAX has no other way for this than `custom_partitioning`. A program for several devices that has one cannot be
    exported, nor lowered for an `AbstractMesh`, nor hold arrays of meshes with different shapes: for such a program
    switch it off, here or with `EJKERNEL_IMPLICIT_SHARDING=0`, and give `mesh=` and `in_specs=` where arrays are split.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import flash_attention
    >>> from ejkernel.ops import implicit_sharding
    >>> with implicit_sharding(False):
    ...     flash_attention(*[jnp.ones((1, 16, 2, 8))] * 3).shape
    (1, 16, 2, 8)
    """
    with changed(implicit_sharding=on):
        yield


def shards_implicitly() -> bool:
    """Whether a plain jit is told how calls split."""
    asked = settings().implicit_sharding
    return os.environ.get("EJKERNEL_IMPLICIT_SHARDING", "1") not in ("", "0") if asked is None else asked
