"""What one Triton launch is: everything static about it, and the names of its types."""

import enum
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

TRITON_TYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float64": "fp64",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u8",
    "uint16": "u16",
    "uint32": "u32",
    "uint64": "u64",
    "bool": "i1",
}


class Slot(enum.Enum):
    """A positional argument that is not a scalar."""

    ARRAY = "array"
    ABSENT = "absent"


@dataclass(frozen=True)
class Launch:
    """Everything static about one launch; the arrays travel beside it.

    Attributes:
        kernel: the `@triton.jit` function.
        arguments: its parameters before the outputs, in order: a slot for an array, or a scalar's value.
        outputs: shape and dtype of each output; their pointers follow the arguments.
        grid: three program counts.
        aliases: pairs (array operand, output) that share memory.
        constexprs: the remaining parameters by name.
    """

    # a JITFunction's hash reads its source and triton.language, which an interpreting thread may have patched
    kernel: Any = field(hash=False)
    arguments: tuple[Slot | int | float, ...]
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    grid: tuple[int, int, int]
    num_warps: int
    num_stages: int
    aliases: tuple[tuple[int, int], ...]
    constexprs: tuple[tuple[str, Hashable], ...]

    def fill(self, arrays: Sequence[Any], absent: Any) -> list[Any]:
        """The positional arguments, with `arrays` in their slots and `absent` where None was given."""
        given = iter(arrays)
        values = {Slot.ARRAY: lambda: next(given), Slot.ABSENT: lambda: absent}
        return [values[a]() if isinstance(a, Slot) else a for a in self.arguments]
