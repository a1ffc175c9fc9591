"""The `autotune()` that is open around a call, if one is."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Session:
    """What `autotune()` was told, and what has been measured since.

    Attributes:
        save: whether winners go into the user's tuned file.
        progress: whether a bar is shown.
        again: whether what that file has is measured too.
        found: every `Tuned`, in order.
        done: the winners, by operation, bucket and platform.
    """

    save: bool
    progress: bool
    again: bool
    found: list[Any] = field(default_factory=list)
    done: dict[tuple[str, str, str], Any] = field(default_factory=dict)


_SESSION: ContextVar[Session | None] = ContextVar("ejkernel_autotune", default=None)


@contextmanager
def opened(new: Session | None) -> Iterator[None]:
    """Within, that one is open."""
    token = _SESSION.set(new)
    try:
        yield
    finally:
        _SESSION.reset(token)


def session() -> Session | None:
    return _SESSION.get()


def paused() -> AbstractContextManager[None]:
    """Within, nothing is measured."""
    return opened(None)


def active() -> bool:
    """Whether an `autotune()` context is open."""
    return session() is not None
