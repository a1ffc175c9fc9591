"""Block patterns as the modules keep them, and as `get_sparse_attn_mask` returns them."""

import hashlib
import weakref
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ejkernel.checks.options import flag, static_int
from ejkernel.types import BlockPattern


class Pattern:
    """A block pattern: position `t` lives in block `t // block_size`. Made by `Pattern.of`; it never changes.

    Equal patterns are one, so that the layers of a model share what is on the device. The `key` says what it holds, so
    that an operation may be told of a pattern by a string: `Pattern.known(key)`.

    Attributes:
        blocks: bool (heads|1, n, n), on the host.
        block_size: tokens per block.
    """

    def __init__(self, blocks: np.ndarray, block_size: int, key: str):
        self.blocks = blocks
        self.block_size = block_size
        self.key = key
        self._on: dict[Any, Tensor] = {}
        self._shared: dict[int, bool] = {}

    @classmethod
    def of(cls, blocks: np.ndarray, block_size: int) -> "Pattern":
        digest = hashlib.blake2b(blocks.tobytes(), digest_size=16)
        digest.update(repr((blocks.shape, block_size)).encode())
        key = digest.hexdigest()
        found = _KNOWN.get(key)
        if found is None:
            copied = np.array(blocks, bool)
            copied.setflags(write=False)
            found = _KNOWN[key] = cls(copied, block_size, key)
        return found

    @classmethod
    def known(cls, key: str) -> "Pattern":
        try:
            return _KNOWN[key]
        except KeyError:
            raise ValueError(
                f"block pattern {key} is not known in this process: make the module it belongs to first, and keep it"
            ) from None

    @property
    def heads(self) -> int:
        return self.blocks.shape[0]

    @property
    def max_length(self) -> int:
        return self.blocks.shape[1] * self.block_size

    def for_heads(self, heads: int) -> np.ndarray:
        """Bool (1, heads|1, n, n): that of a key head serves its group, and one that a group shares its key head."""
        if self.heads in (1, heads):
            return self.blocks[None]
        if heads % self.heads == 0:
            return self.blocks.repeat(heads // self.heads, axis=0)[None]
        return self.blocks[None, :: self.heads // heads]

    def shared(self, groups: int) -> bool:
        """Whether the heads of each of so many groups have one pattern."""
        if groups not in self._shared:
            by_group = self.blocks.reshape(min(groups, self.heads), -1, *self.blocks.shape[1:])
            self._shared[groups] = bool((by_group == by_group[:, :1]).all())
        return self._shared[groups]

    def cells(self, device: torch.device, heads: int) -> Tensor:
        """`for_heads` on a device, sent there once."""
        at = (device, self.heads if self.heads == 1 else heads)
        if at not in self._on:
            self._on[at] = torch.from_numpy(self.for_heads(heads).copy()).to(device)
        return self._on[at]

    def sums(self, device: torch.device) -> Tensor:
        """int32 (heads|1, n + 1, n + 1): how many blocks are set above and left of each corner, sent there once."""
        at = (device, "sums")
        if at not in self._on:
            sums = self.blocks.cumsum(1, dtype=np.int32).cumsum(2, dtype=np.int32)
            self._on[at] = torch.from_numpy(np.pad(sums, ((0, 0), (1, 0), (1, 0)))).to(device)
        return self._on[at]

    def __reduce__(self) -> Any:
        return Pattern.of, (np.array(self.blocks), self.block_size)

    def __copy__(self) -> "Pattern":
        return self

    def __deepcopy__(self, memo: Any) -> "Pattern":
        return self


_KNOWN: "weakref.WeakValueDictionary[str, Pattern]" = weakref.WeakValueDictionary()


def checked_block_size(name: str, size: Any) -> int:
    size = static_int(name, size, 1)
    if size < 16 or size & (size - 1):
        raise ValueError(f"{name}={size} must be a power of two from 16 on")
    return size


def as_blocks(pattern: Any) -> np.ndarray:
    """Bool (heads|1, n, n) of a tensor, an array or a `BlockPattern` (n, n) or (heads, n, n) of bool or 0 and 1."""
    if isinstance(pattern, BlockPattern):
        pattern = pattern.blocks
    # by numpy: a model may be made under `torch.device("meta")`
    blocks = pattern.detach().cpu().float().numpy() if isinstance(pattern, Tensor) else np.asarray(pattern)
    if not ((blocks == 0) | (blocks == 1)).all():
        raise ValueError(f"sparse_pattern must hold only 0 and 1, or bool; it is {blocks.dtype}")
    found = blocks != 0
    if found.ndim not in (2, 3) or found.shape[-1] != found.shape[-2] or 0 in found.shape:
        raise ValueError(f"sparse_pattern must have shape (n, n) or (heads, n, n), got {tuple(found.shape)}")
    return found if found.ndim == 3 else found[None]


@lru_cache(maxsize=32)
def local_stride(
    num_heads: int,
    num_blocks: int,
    local_blocks: int,
    vert_stride: int,
    homo_head: bool,
    num_dense_heads: int,
    num_kv_heads: int | None,
    offset: int,
) -> np.ndarray:
    """The local-stride blocks (heads|1, n, n) of `BlockPattern.local_stride`."""
    made = BlockPattern.local_stride(
        num_heads,
        num_blocks,
        local_blocks,
        vert_stride,
        homo_head=homo_head,
        num_dense_heads=num_dense_heads,
        num_kv_heads=num_kv_heads,
        offset=offset,
    )
    return np.asarray(made.blocks)


def get_sparse_attn_mask(
    num_heads: int,
    seqlen: int,
    block_size: int = 64,
    local_blocks: int = 4,
    vert_stride: int = 4,
    homo_head: bool = False,
    num_kv_heads: int | None = None,
    *,
    dtype: torch.dtype = torch.bool,
    device: Any = None,
    return_dense: bool = False,
    head_sliding_offset: int = 0,
    num_dense_heads: int = 0,
) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor | None]:
    """The local-stride pattern of `LocalStrideSparseAttention`, as tensors.

    Args:
        seqlen: tokens; the last block may be cut off.
        dtype: that of the masks, of which 1 is seen.
        device: where they are put; by default the current CUDA device if there is one, else the CPU.
        return_dense: also the mask of tokens, (heads|1, seqlen, seqlen), causal.

    Returns:
        `((crow, col), block_mask, dense or None)`: the blocks by rows, int32 `(heads|1, n + 1)` and
        `(heads|1, most)`, padded with -1; bool-like `(heads|1, n, n)`.

    >>> (crow, col), blocks, _ = get_sparse_attn_mask(2, 256, 64, local_blocks=1, vert_stride=2, device="cpu")
    >>> crow.tolist()[0], col.tolist()[0]
    ([0, 1, 3, 5, 8], [0, 0, 1, 0, 2, 0, 2, 3])
    """
    seqlen = static_int("seqlen", seqlen, 1)
    block_size = static_int("block_size", block_size, 1)
    blocks = local_stride(
        num_heads,
        -(-seqlen // block_size),
        local_blocks,
        vert_stride,
        flag("homo_head", homo_head),
        num_dense_heads,
        num_kv_heads,
        head_sliding_offset,
    )
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dense = None
    if flag("return_dense", return_dense):
        wide = blocks.repeat(block_size, axis=1).repeat(block_size, axis=2)[:, :seqlen, :seqlen]
        dense = torch.from_numpy(np.tril(wide)).to(device, dtype)
    crow, col = (torch.from_numpy(x).to(device) for x in _by_rows(blocks))
    return (crow, col), torch.from_numpy(blocks.copy()).to(device, dtype), dense


def _by_rows(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    counts = blocks.sum(-1).cumsum(-1)
    crow = np.concatenate([np.zeros((len(blocks), 1), int), counts], axis=1)
    col = np.full((len(blocks), int(counts[:, -1].max())), -1, np.int32)
    for head, seen in enumerate(blocks):
        found = np.nonzero(seen)[1]
        col[head, : len(found)] = found
    return crow.astype(np.int32), col
