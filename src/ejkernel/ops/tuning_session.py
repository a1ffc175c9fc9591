"""The `autotune()` that is open around a call, if one is."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from ejkernel.ops.settings import changed, settings


@dataclass(eq=False)
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


@contextmanager
def opened(new: Session | None) -> Iterator[None]:
    """Within, that one is open."""
    with changed(tuning=new):
        yield


def session() -> Session | None:
    return settings().tuning


def paused() -> AbstractContextManager[None]:
    """Within, nothing is measured."""
    return opened(None)


def active() -> bool:
    """Whether an `autotune()` context is open."""
    return session() is not None
