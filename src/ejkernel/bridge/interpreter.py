"""Triton's interpreter over numpy memory: no torch, no environment variable, and compiling still works afterwards.

`TRITON_INTERPRET=1` turns every `@triton.jit` function of a process into an interpreted one when it is defined.
A launch of this package borrows the interpreter instead: for its duration, under a lock, `triton.language` is patched
and a call of a `@triton.jit` function runs its rewritten source. Afterwards everything is as it was.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import jax
import numpy as np

from ejkernel.bridge.launch import TRITON_TYPES, Launch
from ejkernel.bridge.private_triton import (
    interpreted_language,
    interpreted_pointer,
    interpreted_scalar,
    set_grid,
    set_program,
)

# more than a tile's overhang in any test, so that a stray access lands in poison rather than in the heap
GUARD_BYTES = 1 << 16


class Memory:
    """An array between guard zones; everything not copied in is NaN, or 0x5a bytes for integers."""

    def __init__(self, name: str, shape: Sequence[int], dtype: Any):
        self.name = name
        self.dtype = np.dtype(dtype)
        self.element = TRITON_TYPES[self.dtype.name]
        # all ones is NaN in every floating type
        self.poison = 0xFF if self.element.startswith(("fp", "bf")) else 0x5A
        self.nbytes = int(np.prod(shape)) * self.dtype.itemsize
        self.raw = np.full(self.nbytes + 2 * GUARD_BYTES + 64, self.poison, np.uint8)
        self.start = GUARD_BYTES + -(self.raw.ctypes.data + GUARD_BYTES) % 64
        self.array = self.raw[self.start : self.start + self.nbytes].view(self.dtype).reshape(tuple(shape))

    @property
    def pointer(self) -> Any:
        return interpreted_pointer(self.array.ctypes.data, self.element)

    def check_guards(self, kernel: str) -> None:
        outside = np.concatenate([self.raw[: self.start], self.raw[self.start + self.nbytes :]])
        if (outside != self.poison).any():
            raise RuntimeError(f"{kernel} wrote outside of {self.name} {self.dtype}{self.array.shape}")

    def check_unchanged(self, kernel: str, original: np.ndarray) -> None:
        if self.array.tobytes() != original.tobytes():
            raise RuntimeError(f"{kernel} wrote to its input {self.name}; name it in input_output_aliases")


_ABSENT = Memory("an absent array", (0,), np.int8)


def interpret_launch(launch: Launch, *arrays: jax.Array) -> tuple[np.ndarray, ...]:
    """Run a launch, program by program, and return its outputs."""
    kernel, names = launch.kernel, launch.kernel.arg_names
    originals = [np.asarray(x) for x in arrays]
    inputs = launch.fill(originals, None)
    inputs = [
        Memory(n, x.shape, x.dtype) if isinstance(x, np.ndarray) else x for n, x in zip(names, inputs, strict=False)
    ]
    operands = [m for m in inputs if isinstance(m, Memory)]
    for memory, original in zip(operands, originals, strict=True):
        memory.array[...] = original
    aliased = {output: operands[operand] for operand, output in launch.aliases}
    outputs = [
        aliased.get(i) or Memory(names[len(inputs) + i], struct.shape, struct.dtype)
        for i, struct in enumerate(launch.outputs)
    ]
    with np.errstate(all="ignore"), interpreted_language() as call:
        given = [None if x in aliased.values() else x for x in inputs]
        _run_grid(launch, call, [_as_tensor(x) for x in [*given, *outputs]])
    for memory in {*operands, *outputs}:
        memory.check_guards(kernel.__name__)
    for memory, original in zip(operands, originals, strict=True):
        if memory not in aliased.values():
            memory.check_unchanged(kernel.__name__, original)
    # a poisoned bool is no bool
    return tuple(m.array.view(np.uint8) != 0 if m.dtype == bool else m.array for m in outputs)


def _as_tensor(argument: Memory | int | float | None) -> Any:
    if isinstance(argument, Memory):
        return argument.pointer
    if argument is None:
        return _ABSENT.pointer
    return interpreted_scalar(argument)


def _run_grid(launch: Launch, call: Callable[..., Any], arguments: list[Any]) -> None:
    set_grid(launch.grid)
    for index in product(*map(range, launch.grid)):
        set_program(index)
        with _Located(f"in Triton kernel {launch.kernel.__name__}, program {index} of {launch.grid}"):
            call(launch.kernel, *arguments, **dict(launch.constexprs))


class _Located:
    """Adds to an error where it happened."""

    def __init__(self, location: str):
        self.location = location

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None:
            error.add_note(self.location)
