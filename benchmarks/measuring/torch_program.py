"""Programs of contenders that are written in PyTorch."""

import importlib.util
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.measuring.benchmark import DeviceLock, Program

Tensor = Any
# one pass: its results by name
Step = Callable[[], dict[str, Tensor]]


def missing(backends: tuple[str, ...], package: str, backend: str) -> str | None:
    """Why a package that runs in PyTorch on those backends cannot take part, or None."""
    for needed, name in (("torch", "PyTorch"), (package, package)):
        if importlib.util.find_spec(needed) is None:
            return f"{name} is not installed"
    if backend not in backends:
        return f"needs {' or '.join(backends)}, this is {backend}"
    import torch

    return None if backend == "cpu" or torch.cuda.is_available() else "this PyTorch has no CUDA"


def torch_program(
    make: Callable[[], Step], on_gpu: bool, device_lock: DeviceLock, view: Callable[[Tensor], Tensor] = lambda x: x
) -> Program:
    """The program of a step, which `make` makes first; `view` lays results out as they are judged."""
    import torch

    wait = torch.cuda.synchronize if on_gpu else lambda: None
    start = time.perf_counter()
    with device_lock.shared():
        step = make()

    def seconds(calls: int) -> float:
        start, results = time.perf_counter(), None
        for _ in range(calls):
            results = step()
        wait()
        del results
        return time.perf_counter() - start

    def results() -> dict[str, jax.Array]:
        answer = {name: jnp.from_dlpack(view(x.detach()).contiguous()) for name, x in step().items()}
        wait()
        return answer

    with device_lock.shared():  # compiling and running are one for PyTorch, and some tune meanwhile
        seconds(1)
    first = time.perf_counter() - start
    with device_lock:
        return Program(seconds, results, first, _temporary_bytes(step) if on_gpu else None)


def _temporary_bytes(step: Step) -> int:
    """The peak of a call, beyond what was there before it and what it returns."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = step()
    torch.cuda.synchronize()
    kept = sum(x.untyped_storage().nbytes() for x in results.values())
    return max(0, torch.cuda.max_memory_allocated() - before - kept)
