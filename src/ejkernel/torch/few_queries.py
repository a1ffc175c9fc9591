"""Calls of few queries in another shape: query heads that share keys are rows of one tile; keys are split (split-K).

One token after a long cache is the case: a program for each head would leave tiles and most of the GPU empty.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ejkernel.torch.inputs import Lengths

# rows of queries that one tile holds
MOST_ROWS = 64
# keys that a split has at least
_FEWEST_KEYS = 512


class Arrangement(NamedTuple):
    """The sizes of a call without lengths, and how it is arranged: `group` query heads as rows, and split keys."""

    B: int
    T: int
    S: int
    group: int
    splits: int


def static_lengths(arrangement: Arrangement) -> dict[str, np.ndarray]:
    """Segments and positions, int32 (B * splits, length), of the arranged call."""
    B, T, S, group, splits = arrangement
    q = np.tile((np.arange(T, dtype=np.int32) + (S - T)).repeat(group), (B * splits, 1))
    k = np.tile(np.arange(S, dtype=np.int32).reshape(splits, -1), (B, 1))
    return dict(zip(Lengths._fields, (q * 0, k * 0, q, k), strict=True))


@lru_cache(maxsize=64)
def static_lengths_on(arrangement: Arrangement, device: torch.device) -> dict[str, Tensor]:
    return {name: torch.from_numpy(x).to(device) for name, x in static_lengths(arrangement).items()}


def splits_for(programs: int, S: int, cores: int) -> int:
    """Into how many equal splits to cut the keys, where so many programs do not fill the cores."""
    splits = 1
    while programs * splits < cores and S % (2 * splits) == 0 and S // (2 * splits) >= _FEWEST_KEYS:
        splits *= 2
    return splits


def arranged_lengths(call: Any, group: int, splits: int) -> dict[str, Tensor]:
    """The segments and positions of a call that has some, for the arranged one."""
    B, T = call["q_segments"].shape
    lengths = {}
    for name in Lengths._fields:
        x = call[name]
        if name.startswith("q"):
            x = x.view(B, 1, T, 1).expand(-1, splits, -1, group).reshape(B * splits, T * group)
        elif splits > 1:
            x = x.view(B * splits, -1)
        lengths[name] = x.contiguous()
    return lengths


def merged_splits(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """(B, splits, T, H, Dv) and (B, splits, H, T) as one, by log-sum-exp; a split that saw nothing weighs nothing."""
    largest = lse.amax(1, keepdim=True)
    weights = torch.exp(lse - torch.where(torch.isneginf(largest), 0.0, largest))
    weight_sum = weights.sum(1)  # (B, H, T)
    seen = weight_sum != 0
    divisor = torch.where(seen, weight_sum, 1.0)
    share = (weights / divisor[:, None]).transpose(2, 3)[..., None]
    merged = (torch.where(share == 0, 0.0, out) * share).sum(1)
    return merged, torch.where(seen, largest[:, 0] + torch.log(divisor), -torch.inf)
