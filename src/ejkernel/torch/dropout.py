"""Dropout's bits on tensors: those of `kernels/common/dropout.py`, computed in int64, for lack of uint32."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ejkernel.kernels.common.dropout import MIX_1, MIX_2, STEP_BATCH, STEP_HEAD, STEP_KEY, STEP_QUERY, threshold

_BITS = 2**32 - 1


def _mix(x: Tensor) -> Tensor:
    x = x ^ (x >> 16)
    x = x * int(MIX_1) & _BITS
    x = x ^ (x >> 15)
    x = x * int(MIX_2) & _BITS
    return x ^ (x >> 16)


def head_seeds(seed: Any, B: int, H: int, device: torch.device) -> Tensor:
    """A seed (B, H) for every batch row and head, uint32 as int32, from an int or a tensor of one."""
    if isinstance(seed, Tensor):
        if seed.dim() or seed.dtype.is_floating_point or seed.dtype == torch.bool:
            raise TypeError(
                f"dropout_seed must be an int or a tensor of one integer, got {seed.dtype} {tuple(seed.shape)}"
            )
    elif isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise TypeError(f"dropout_seed must be an int or a tensor of one integer, got {type(seed).__name__}")
    start = torch.as_tensor(seed if isinstance(seed, Tensor) else int(seed) % 2**32).to(device, torch.int64) & _BITS
    b, h = (torch.arange(n, dtype=torch.int64, device=device) for n in (B, H))
    rows = _mix(_mix(start) + b * int(STEP_BATCH) & _BITS)
    seeds = _mix(rows[:, None] + h * int(STEP_HEAD) & _BITS)
    return torch.where(seeds < 2**31, seeds, seeds - 2**32).to(torch.int32)


def kept_pairs(seeds: Tensor, queries: Tensor, keys: Tensor, probability: float) -> Tensor:
    """Factors of the weights of pairs, 0 for what is dropped; seeds, query and key indices broadcast."""
    counter = seeds.long() + queries * int(STEP_QUERY) + keys * int(STEP_KEY)
    return (_mix(counter & _BITS) >= int(threshold(probability))).float() / (1.0 - probability)
