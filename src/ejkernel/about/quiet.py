"""Who may use the device: one process alone, to measure, or several that do not mind each other."""

import importlib
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Quiet:
    """`with quiet:` has the device alone; `with quiet.shared():` has it beside others that have it so.

    Processes agree by a lock on a file, which the system releases when one dies; without a path nobody else is there.
    """

    def __init__(self, path: str | None = None) -> None:
        self._file: int | None = None
        self._depth = 0
        try:
            self._flock: Any = importlib.import_module("fcntl")
        except ImportError:  # Windows, where no peer tunes on a GPU
            path = None
        if path is not None:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT)
            weakref.finalize(self, os.close, self._file)

    def __enter__(self) -> None:
        self._take("LOCK_EX")

    def __exit__(self, *_: object) -> None:
        self._leave()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """For work that disturbs what is measured and measures nothing itself, such as a peer that tunes."""
        self._take("LOCK_SH")
        try:
            yield
        finally:
            self._leave()

    def _take(self, kind: str) -> None:
        if self._file is not None and self._depth == 0:
            self._flock.flock(self._file, getattr(self._flock, kind))
        self._depth += 1

    def _leave(self) -> None:
        self._depth -= 1
        if self._file is not None and self._depth == 0:
            self._flock.flock(self._file, self._flock.LOCK_UN)
