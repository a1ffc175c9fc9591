"""Settings of a stretch of a program: interpreters, gradients that repeat to the bit, and who splits over devices."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_INTERPRETING: ContextVar[bool] = ContextVar("ejkernel_interpreting", default=False)
_IMPLICIT: ContextVar[bool | None] = ContextVar("ejkernel_implicit_sharding", default=None)
_DETERMINISTIC: ContextVar[bool | None] = ContextVar("ejkernel_deterministic", default=None)


@contextmanager
def interpret() -> Iterator[None]:
    """Run GPU and TPU kernels in their interpreters on the CPU, for calls made (or traced) inside.

    `platform="triton"` runs in Triton's interpreter, `platform="pallas"` in Pallas's TPU interpreter.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import mean_pooling
    >>> from ejkernel.ops import interpret
    >>> with interpret():
    ...     mean_pooling(jnp.ones((1, 8, 1, 4)), chunk_size=4, platform="triton").shape
    (1, 2, 1, 4)
    """
    token = _INTERPRETING.set(True)
    try:
        yield
    finally:
        _INTERPRETING.reset(token)


def interpreting() -> bool:
    """Whether `interpret()` is active."""
    return _INTERPRETING.get()


@contextmanager
def deterministic(on: bool = True) -> Iterator[None]:
    """Take only kernels that give the same bits every run, for calls made (or traced) inside.

    Every forward does, and every backward but some of NVIDIA's, which add gradients in any order and are faster for it.
    Those are allowed unless this is on, `EJKERNEL_DETERMINISTIC=1`, or XLA was started with
    `--xla_gpu_deterministic_ops`; `deterministic(False)` allows them within. `ejkernel.explain` says what runs.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import flash_attention
    >>> from ejkernel.ops import deterministic
    >>> with deterministic():
    ...     flash_attention(*[jnp.ones((1, 16, 2, 8))] * 3).shape
    (1, 16, 2, 8)
    """
    token = _DETERMINISTIC.set(on)
    try:
        yield
    finally:
        _DETERMINISTIC.reset(token)


def xla_is_deterministic() -> bool:
    """Whether XLA's own flag asks for programs that give the same bits."""
    given = [flag.partition("=")[::2] for flag in os.environ.get("XLA_FLAGS", "").split()]
    names = ("--xla_gpu_deterministic_ops", "--xla_gpu_exclude_nondeterministic_ops")
    last = {name: value for name, value in given if name in names}  # the last of several decides
    return any(value.lower() not in ("false", "0") for value in last.values())


def is_deterministic() -> bool:
    """Whether only gradients that repeat to the bit are wanted."""
    asked = _DETERMINISTIC.get()
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
    token = _IMPLICIT.set(on)
    try:
        yield
    finally:
        _IMPLICIT.reset(token)


def implicitly() -> bool:
    """Whether a plain jit is told how calls split."""
    asked = _IMPLICIT.get()
    return os.environ.get("EJKERNEL_IMPLICIT_SHARDING", "1") not in ("", "0") if asked is None else asked
