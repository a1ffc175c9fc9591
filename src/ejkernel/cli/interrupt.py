"""Ctrl-C: commands end at once, and with 130."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

INTERRUPTED = 130
# until an interrupt that was swallowed is raised again
AGAIN_SECONDS = 0.01


def end_on_interrupt(command: Callable[[], Any]) -> None:
    """Run a command that exits by `SystemExit`; after Ctrl-C the process ends with 130 as soon as it has cleaned up.

    Python is not taken down then: the computations under way still use what that would free, and crash.
    """
    with _none_swallowed():
        try:
            command()
        except KeyboardInterrupt:
            pass
        except SystemExit as done:
            if done.code != INTERRUPTED:
                raise
        else:
            return
    print("interrupted", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(INTERRUPTED)


@contextmanager
def at_once() -> Iterator[None]:
    """Ctrl-C ends the process where it stands, with nothing to clean up.

    For imports: an exception in the middle of one may be swallowed, or leave half a module behind.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # a shell's background jobs ignore it
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(_: int, __: FrameType | None) -> None:
    os.write(2, b"interrupted\n")  # not by print, which may be what was interrupted
    os._exit(INTERRUPTED)


@contextmanager
def _none_swallowed() -> Iterator[None]:
    """Raise an interrupt again that came where Python ignores exceptions: JAX has code there, which runs often."""
    if not hasattr(signal, "setitimer"):  # not on Windows
        yield
        return
    report = sys.unraisablehook

    def raise_again(ignored: Any) -> None:
        if ignored.exc_type is KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)
        else:
            report(ignored)

    def on_alarm(_: int, frame: FrameType | None) -> None:
        if frame is not None and frame.f_code is raise_again.__code__:
            # a slow machine is still in there, where an exception would be lost
            signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)
        else:
            raise KeyboardInterrupt

    alarm = signal.signal(signal.SIGALRM, on_alarm)
    sys.unraisablehook = raise_again
    try:
        yield
    finally:
        sys.unraisablehook = report
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm)
