"""Who may use the device: one process alone, to measure, or several that do not mind each other."""

import importlib
import importlib.util
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Lock:
    """A lock on a file, which the system releases when a process dies; without a path there is nobody to lock out."""

    def __init__(self, path: str | None) -> None:
        self._file: int | None = None
        if path is not None:
            self._fcntl: Any = importlib.import_module("fcntl")
            self._file = os.open(path, os.O_RDWR | os.O_CREAT)
            weakref.finalize(self, os.close, self._file)

    def turn(self, kind: str) -> None:
        """To LOCK_EX, which one has, LOCK_SH, which several have, or LOCK_UN."""
        if self._file is not None:
            self._fcntl.flock(self._file, getattr(self._fcntl, kind))


class DeviceLock:
    """`with lock:` has the device alone; `with lock.shared():` has it beside others that have it so. Not within.

    Processes agree by locks on files; without a path nobody else is there. `early` says that this process will soon
    measure something: nobody has the device shared until it has, or wants to share it as well.
    """

    def __init__(self, path: str | None = None, early: bool = False) -> None:
        if importlib.util.find_spec("fcntl") is None:  # Windows, where no peer tunes on a GPU
            path = None
        self._device, self._early = _Lock(path), _Lock(path and f"{path}.early")
        if early:
            self._early.turn("LOCK_SH")

    def __enter__(self) -> None:
        self._device.turn("LOCK_EX")

    def __exit__(self, *_: object) -> None:
        self._device.turn("LOCK_UN")

    @contextmanager
    def shared(self) -> Iterator[None]:
        """For work that disturbs what is measured and measures nothing itself, such as a peer that tunes."""
        self._early.turn("LOCK_UN")
        self._early.turn("LOCK_EX")  # when nobody is early any more
        self._early.turn("LOCK_UN")
        self._device.turn("LOCK_SH")
        try:
            yield
        finally:
            self._device.turn("LOCK_UN")
