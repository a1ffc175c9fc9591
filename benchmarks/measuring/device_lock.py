"""A lock on the device for several processes: exclusive to measure, shared for work that disturbs measurements."""

import importlib
import importlib.util
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Lock:
    """A lock on a file, which the system releases when a process dies; without a path it does nothing."""

    def __init__(self, path: str | None) -> None:
        self._file: int | None = None
        if path is not None:
            self._fcntl: Any = importlib.import_module("fcntl")
            self._file = os.open(path, os.O_RDWR | os.O_CREAT)
            weakref.finalize(self, os.close, self._file)

    def set(self, kind: str) -> None:
        """Wait for LOCK_EX, which one process holds, or LOCK_SH, which several do; or release it with LOCK_UN."""
        if self._file is not None:
            self._fcntl.flock(self._file, getattr(self._fcntl, kind))


class DeviceLock:
    """`with lock:` holds the device alone; `with lock.shared():` shares it with others that do. Neither can be nested.

    Processes agree by locks on files; without a path there are no other processes. With `measures_first` this process
    will soon measure: others get the device shared only when it has measured, or asks for the device shared itself.
    """

    def __init__(self, path: str | None = None, measures_first: bool = False) -> None:
        if importlib.util.find_spec("fcntl") is None:  # Windows, where no peer tunes on a GPU
            path = None
        self._device, self._before_sharing = _Lock(path), _Lock(path and f"{path}.first")
        if measures_first:
            self._before_sharing.set("LOCK_SH")

    def __enter__(self) -> None:
        self._device.set("LOCK_EX")

    def __exit__(self, *_: object) -> None:
        self._device.set("LOCK_UN")

    @contextmanager
    def shared(self) -> Iterator[None]:
        """For work that disturbs what is measured and measures nothing itself, such as a peer that tunes."""
        self._before_sharing.set("LOCK_UN")
        self._before_sharing.set("LOCK_EX")  # when no process that measures first holds it any more
        self._before_sharing.set("LOCK_UN")
        self._device.set("LOCK_SH")
        try:
            yield
        finally:
            self._device.set("LOCK_UN")
