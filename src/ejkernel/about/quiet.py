"""Who may use the device: one process alone, to measure, or several that do not mind each other."""

import importlib
import importlib.util
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Lock:
    """A lock on a file, which the system releases when a process dies; it may be taken again by who has it."""

    def __init__(self, path: str) -> None:
        self._flock: Any = importlib.import_module("fcntl")
        self._file = os.open(path, os.O_RDWR | os.O_CREAT)
        self._depth = 0
        weakref.finalize(self, os.close, self._file)

    def take(self, kind: str) -> None:
        if self._depth == 0:
            self._flock.flock(self._file, getattr(self._flock, kind))
        self._depth += 1

    def leave(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._flock.flock(self._file, self._flock.LOCK_UN)


class Quiet:
    """`with quiet:` has the device alone; `with quiet.shared():` has it beside others that have it so.

    Processes agree by locks on files; without a path nobody else is there. `early` says that this process will soon
    measure something: nobody has the device shared until it has, or wants to share it as well.
    """

    def __init__(self, path: str | None = None, early: bool = False) -> None:
        alone = path is None or importlib.util.find_spec("fcntl") is None  # Windows, where no peer tunes on a GPU
        self._device = None if alone else _Lock(str(path))
        self._gate = None if alone else _Lock(f"{path}.early")
        self._early = early and self._gate is not None
        if self._early and self._gate is not None:
            self._gate.take("LOCK_SH")

    def __enter__(self) -> None:
        if self._device is not None:
            self._device.take("LOCK_EX")

    def __exit__(self, *_: object) -> None:
        if self._device is not None:
            self._device.leave()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """For work that disturbs what is measured and measures nothing itself, such as a peer that tunes."""
        if self._device is None or self._gate is None:
            yield
            return
        if self._early:
            self._gate.leave()
            self._early = False
        self._gate.take("LOCK_EX")
        self._gate.leave()
        self._device.take("LOCK_SH")
        try:
            yield
        finally:
            self._device.leave()
