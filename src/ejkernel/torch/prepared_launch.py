"""One launch of a Triton kernel with everything but the tensors of a call, which it is given as they lie in memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor

from ejkernel.bridge.launch import Launch, Slot
from ejkernel.kernels.softmax.triton import Tile

# JAX's names of dtypes, which are numpy's
DTYPES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
    torch.int32: "int32",
    torch.bool: "bool",
}


def in_memory(x: Tensor) -> Tensor:
    """A dense tensor with its dimensions in the order of its memory: heads before the length, or behind."""
    return x if x.is_contiguous() else x.transpose(1, 2)


def struct(x: Tensor) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(in_memory(x).shape), jax.numpy.dtype(DTYPES[x.dtype]))


@dataclass
class PreparedLaunch:
    """A kernel with everything but the tensors of a call.

    Attributes:
        arguments: of its parameters before the constants, in order: the name of a tensor, or a scalar.
        outputs: how many of the last of them it writes. One that is an argument before too starts with its contents.
        fixed: the tensors that are the same at every call, by name.
    """

    kernel: Any
    arguments: tuple[str | int | float, ...]
    outputs: int
    grid: tuple[int, int, int]
    tile: Tile
    constants: dict[str, Any]
    fixed: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        filled = [self.fixed.get(a, a) if isinstance(a, str) else a for a in self.arguments]
        self._values = [*filled, *self.constants.values()]
        self._slots = [(i, a) for i, a in enumerate(filled) if isinstance(a, str)]
        self._compiled_launch: Any = None

    def run(self, tensors: Mapping[str, Tensor], compiled: bool, aligned: bool) -> None:
        if not compiled:
            return self._interpret({**self.fixed, **tensors})
        values = self._values.copy()
        for i, name in self._slots:
            values[i] = tensors[name]
        if aligned and self._compiled_launch is not None:
            return self._compiled_launch(*values)
        from ejkernel.bridge.private_triton import launch_and_keep

        options = {"num_warps": self.tile.warps, "num_stages": self.tile.stages, "enable_fp_fusion": True}
        launch = launch_and_keep(self.kernel, self.grid, values, **options)
        if aligned:
            # what Triton would look up again at every call: this kernel, compiled for aligned tensors and these scalars
            self._compiled_launch = launch
        return None

    def described(self, tensors: Mapping[str, Tensor]) -> tuple[Launch, list[str]]:
        """The launch as the bridge knows it, and the names of its arrays: to interpret, or compile for other GPUs."""
        inputs, written = self.arguments[: -self.outputs], self.arguments[-self.outputs :]
        names = [a for a in inputs if isinstance(a, str) and a != "absent"]
        slots = [Slot.ABSENT if a == "absent" else Slot.ARRAY if isinstance(a, str) else _float32(a) for a in inputs]
        launch = Launch(
            kernel=self.kernel,
            arguments=tuple(slots),
            outputs=tuple(struct(tensors[str(a)]) for a in written),
            grid=self.grid,
            num_warps=self.tile.warps,
            num_stages=self.tile.stages,
            aliases=tuple((names.index(a), n) for n, a in enumerate(written) if a in names),
            constexprs=tuple(self.constants.items()),
        )
        return launch, names

    def _interpret(self, tensors: Mapping[str, Tensor]) -> None:
        from ejkernel.bridge.interpreter import interpret_launch

        launch, names = self.described(tensors)
        arrays: list[Any] = [_to_numpy(tensors[name]) for name in names]
        results = interpret_launch(launch, *arrays)
        for name, result in zip(self.arguments[-self.outputs :], results, strict=True):
            in_memory(tensors[str(name)]).copy_(_from_numpy(result, tensors[str(name)].dtype))


def _float32(x: Any) -> int | float:
    return float(np.float32(x)) if isinstance(x, float) else x


# what numpy has no types of its own for
_AS_INTEGERS = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.int8, torch.float8_e5m2: torch.int8}


def _to_numpy(x: Tensor) -> np.ndarray:
    x = in_memory(x.detach())
    assert x.is_contiguous(), f"a kernel would read other memory than that of strides {x.stride()}"
    if x.dtype not in _AS_INTEGERS:
        return x.numpy()
    return x.view(_AS_INTEGERS[x.dtype]).numpy().view(jax.numpy.dtype(DTYPES[x.dtype]))


def _from_numpy(x: np.ndarray, dtype: torch.dtype) -> Tensor:
    x = np.ascontiguousarray(x)
    if dtype not in _AS_INTEGERS:
        return torch.from_numpy(x)
    return torch.from_numpy(x.view(f"i{x.itemsize}")).view(dtype)


def aligned_to_16_bytes(tensors: Mapping[str, Tensor]) -> bool:
    """Whether all lie at multiples of 16 bytes, as what PyTorch allocates does."""
    bits = 0
    for x in tensors.values():
        bits |= x.data_ptr()
    return not bits & 15
