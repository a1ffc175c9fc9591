"""The names of numpy that the block schedule is written in, for tensors on one device."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Arrays:
    """What `kernels/softmax/schedule.py` calls `xp`; nothing here waits for the device."""

    int32 = torch.int32
    bool_ = torch.bool
    swapaxes = staticmethod(torch.swapaxes)
    broadcast_to = staticmethod(torch.broadcast_to)

    def __init__(self, device: torch.device):
        self.device = device
        self._constants: dict[Any, Tensor] = {}

    def asarray(self, x: Any, dtype: Any = None) -> Tensor:
        if isinstance(x, np.ndarray):
            x = self._constant(x)
        return x if dtype is None else x.to(dtype)

    def _constant(self, x: np.ndarray) -> Tensor:
        """Sent to the device once: a copy from the host would end a capture into a CUDA graph."""
        key = (x.shape, x.dtype, x.tobytes())
        if key not in self._constants:
            if len(self._constants) >= _MOST_CONSTANTS:
                self._constants.clear()
            self._constants[key] = torch.from_numpy(x.copy()).to(self.device)
        return self._constants[key]

    def ones(self, shape: Sequence[int], dtype: Any) -> Tensor:
        return torch.ones(tuple(shape), dtype=dtype, device=self.device)

    def zeros(self, shape: Sequence[int], dtype: Any) -> Tensor:
        return torch.zeros(tuple(shape), dtype=dtype, device=self.device)

    def arange(self, n: int, dtype: Any) -> Tensor:
        return torch.arange(n, dtype=dtype, device=self.device)

    @staticmethod
    def where(condition: Tensor, a: Any, b: Any) -> Tensor:
        a, b = (x.item() if isinstance(x, np.generic) else x for x in (a, b))
        return torch.where(condition, a, b)

    @staticmethod
    def pad(x: Tensor, widths: Sequence[tuple[int, int]]) -> Tensor:
        if not any(n for pair in widths for n in pair):
            return x
        return torch.nn.functional.pad(x, [n for pair in reversed(widths) for n in pair])

    @staticmethod
    def maximum(a: Tensor, b: Tensor) -> Tensor:
        return torch.maximum(a, b)

    @staticmethod
    def minimum(a: Tensor, b: Tensor) -> Tensor:
        return torch.minimum(a, b)

    @staticmethod
    def clip(x: Tensor, low: Any, high: Any) -> Tensor:
        return torch.clamp(x, low, high)

    @staticmethod
    def stack(parts: Sequence[Tensor], axis: int) -> Tensor:
        return torch.stack(list(parts), axis)

    @staticmethod
    def cumsum(x: Tensor, axis: int, dtype: Any = torch.int32) -> Tensor:
        return torch.cumsum(x, axis, dtype=dtype)

    @staticmethod
    def argsort(x: Tensor, axis: int, stable: bool) -> Tensor:
        return torch.argsort(x, dim=axis, stable=stable)

    def take(self, x: Tensor, at: np.ndarray, axis: int) -> Tensor:
        return x.index_select(axis, self._constant(at))

    @staticmethod
    def min(x: Tensor, axis: int) -> Tensor:
        return x.amin(axis)

    @staticmethod
    def max(x: Tensor, axis: int) -> Tensor:
        return x.amax(axis)

    @staticmethod
    def sum(x: Tensor, axis: int) -> Tensor:
        return x.sum(axis)

    @staticmethod
    def any(x: Tensor, axis: int) -> Tensor:
        return x.any(axis)

    @staticmethod
    def all(x: Tensor, axis: int) -> Tensor:
        return x.all(axis)


# small arrays of lengths that come again
_MOST_CONSTANTS = 256


@lru_cache
def arrays_on(device: torch.device) -> Arrays:
    return Arrays(device)
