"""Work spread over fresh processes: one that dies takes nothing with it, and none outlives the deadline."""

import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple


class Lost(NamedTuple):
    """Stands for the outcome of work that came to nothing."""

    reason: str


TOO_LATE = Lost("no time was left")
# the last message of a process; one that ends without it has crashed
_END = "end"


def device_works() -> bool:
    """Whether anything runs any more in this process: after an illegal address nothing does."""
    import jax.numpy as jnp  # not at the top: processes that need no JAX start without it

    try:
        return float(jnp.ones(()) + 1) == 2
    except RuntimeError:
        return False


def _work(task: Callable[[Any], Iterable[Any]], item: Any, answer: Connection) -> None:
    for outcome in task(item):
        answer.send((None, outcome))
    answer.send((_END, None))
    answer.close()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Processes that start meanwhile ignore Ctrl-C: it is for this one, which ends them. It is raised afterwards."""
    if not hasattr(signal, "pthread_sigmask"):  # not on Windows
        yield
        return
    resource_tracker.ensure_running()  # else the first start runs it, which unblocks interrupts for all that follow
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def spread(
    task: Callable[[Any], Iterable[Any]], items: deque[Any], processes: int, deadline: float
) -> Generator[tuple[Any, Any], None, None]:
    """(item, outcome) for each outcome of task(item) as it comes, every item in a process of its own.

    The last is `Lost` where the process died or the deadline came first. Items may be added to the queue meanwhile.
    `deadline` is in terms of `time.monotonic`.
    """
    context = multiprocessing.get_context("spawn")
    running: dict[Connection, tuple[Any, Any]] = {}
    try:
        while (items or running) and time.monotonic() < deadline:
            while items and len(running) < processes:
                item = items.popleft()
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(task, item, sender))
                with _uninterrupted():
                    process.start()
                sender.close()  # the child's copy is then the only one, and its death an end of file
                running[receiver] = item, process
            # at most a minute at a time: the deadline may be infinite
            for receiver in wait(list(running), timeout=min(60.0, max(0.0, deadline - time.monotonic()))):
                assert isinstance(receiver, Connection)
                item, process = running[receiver]
                try:
                    message, outcome = receiver.recv()
                except EOFError:
                    process.join()
                    message, outcome = None, Lost(f"its process ended with exit code {process.exitcode}")
                if message == _END or isinstance(outcome, Lost):
                    del running[receiver]
                    process.join(timeout=10)
                    if process.is_alive():
                        process.kill()
                if message != _END:
                    yield item, outcome
    finally:
        for _, process in running.values():
            process.kill()
    yield from ((item, TOO_LATE) for item in [*(item for item, _ in running.values()), *items])
