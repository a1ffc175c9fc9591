"""Block patterns as the modules keep them, and as `get_sparse_attn_mask` returns them."""

import hashlib
import weakref
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ejkernel.checks.options import flag, static_int
from ejkernel.types import BlockPattern
from ejkernel.types.local_stride import local_stride_blocks


class Pattern:
    """A block pattern. Made by `Pattern.of`; it never changes.

    Equal patterns are one, so that the layers of a model share what is on the device. The `key` says what it holds, so
    that an operation may be told of a pattern by a string: `Pattern.known(key)`.

    Attributes:
        blocks: bool (heads|1, rows, columns), on the host.
        block_size: tokens per block.
        by_index: rows and columns count from the first query and the first key of a call; otherwise both count
            positions, so that row and column `n` are the same tokens.
    """

    def __init__(self, blocks: np.ndarray, block_size: int, by_index: bool, key: str):
        self.blocks = blocks
        self.block_size = block_size
        self.by_index = by_index
        self.key = key
        self._on_device: dict[Any, Tensor] = {}
        self._shared_in_groups: dict[int, bool] = {}
        self._fitted: dict[tuple[int, int], Pattern] = {}

    @classmethod
    def of(cls, blocks: np.ndarray, block_size: int, by_index: bool = False) -> "Pattern":
        digest = hashlib.blake2b(blocks.tobytes(), digest_size=16)
        digest.update(repr((blocks.shape, block_size, by_index)).encode())
        key = digest.hexdigest()
        pattern = _KNOWN.get(key)
        if pattern is None:
            copied = np.array(blocks, bool)
            copied.setflags(write=False)
            pattern = _KNOWN[key] = cls(copied, block_size, by_index, key)
        return pattern

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
    def max_lengths(self) -> tuple[int, int]:
        """How many queries and keys it covers."""
        _, rows, columns = self.blocks.shape
        return rows * self.block_size, columns * self.block_size

    def fitted(self, T: int, S: int) -> "Pattern":
        """What a call of these lengths needs: a pattern by index is cut to the blocks that they touch."""
        if not self.by_index:
            return self
        touched = -(-T // self.block_size), -(-S // self.block_size)
        if touched not in self._fitted:
            cut = self.blocks[:, : touched[0], : touched[1]]
            self._fitted[touched] = Pattern.of(cut, self.block_size, by_index=True)
        return self._fitted[touched]

    def for_heads(self, heads: int) -> np.ndarray:
        """Bool (1, heads|1, ...): that of a key head serves its group, and one that a group shares its key head."""
        if self.heads in (1, heads):
            return self.blocks[None]
        if heads % self.heads == 0:
            return self.blocks.repeat(heads // self.heads, axis=0)[None]
        return self.blocks[None, :: self.heads // heads]

    def shared(self, groups: int) -> bool:
        """Whether the heads of each of so many groups have one pattern."""
        if groups not in self._shared_in_groups:
            by_group = self.blocks.reshape(min(groups, self.heads), -1, *self.blocks.shape[1:])
            self._shared_in_groups[groups] = bool((by_group == by_group[:, :1]).all())
        return self._shared_in_groups[groups]

    def cells(self, device: torch.device, heads: int) -> Tensor:
        """`for_heads` on a device, sent there once."""
        at = (device, self.heads if self.heads == 1 else heads)
        if at not in self._on_device:
            self._on_device[at] = torch.from_numpy(self.for_heads(heads).copy()).to(device)
        return self._on_device[at]

    def sums(self, device: torch.device) -> Tensor:
        """int32 (heads|1, rows + 1, columns + 1): how many blocks are set above and left of each corner, sent once."""
        at = (device, "sums")
        if at not in self._on_device:
            sums = self.blocks.cumsum(1, dtype=np.int32).cumsum(2, dtype=np.int32)
            self._on_device[at] = torch.from_numpy(np.pad(sums, ((0, 0), (1, 0), (1, 0)))).to(device)
        return self._on_device[at]

    def __reduce__(self) -> Any:
        return Pattern.of, (np.array(self.blocks), self.block_size, self.by_index)

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
    """Bool (heads|1, rows, columns) of a tensor, an array or a `BlockPattern` of bool or 0 and 1."""
    if isinstance(pattern, BlockPattern):
        pattern = pattern.blocks
    # by numpy: a model may be made under `torch.device("meta")`
    blocks = pattern.detach().cpu().float().numpy() if isinstance(pattern, Tensor) else np.asarray(pattern)
    if not ((blocks == 0) | (blocks == 1)).all():
        raise ValueError(f"sparse_pattern must hold only 0 and 1, or bool; it is {blocks.dtype}")
    if blocks.ndim not in (2, 3) or 0 in blocks.shape:
        raise ValueError(
            f"sparse_pattern must have shape (rows, columns) or (heads, rows, columns), got {tuple(blocks.shape)}"
        )
    return (blocks if blocks.ndim == 3 else blocks[None]) != 0


def is_kv_cache_efficient(blocks: np.ndarray) -> bool:
    """Whether a causal (heads|1, rows, columns) hides a block for good once it hides it; its last row is the newest."""
    before = max(0, blocks.shape[2] - blocks.shape[1])
    from_the_start = np.pad(blocks, ((0, 0), (before, 0), (0, 0)), constant_values=True)
    return BlockPattern(from_the_start, 1).is_kv_cache_efficient()


# kept, because the layers of a model ask for the same
_local_stride_blocks = lru_cache(maxsize=32)(local_stride_blocks)


def local_stride(
    num_heads: int, rows: range, columns: range, local_blocks: Any, vert_stride: int, *, homo_head: bool, **options: Any
) -> np.ndarray:
    """Bool (heads|1, rows, columns), of arguments as dkernel's callers give them."""
    local_blocks = tuple(local_blocks) if isinstance(local_blocks, list) else local_blocks
    options["offset"] = static_int("head_sliding_offset", options["offset"])
    homo_head = flag("homo_head", homo_head)
    return _local_stride_blocks(num_heads, rows, columns, local_blocks, vert_stride, homo_head=homo_head, **options)


def get_sparse_attn_mask(
    num_heads: int,
    seqlen: int,
    block_size: int = 64,
    local_blocks: int | tuple[int, int] = 4,
    vert_stride: int = 4,
    homo_head: bool = False,
    num_kv_heads: int | None = None,
    past_len: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: Any = None,
    return_dense: bool = False,
    head_sliding_step: int | None = None,
    head_sliding_offset: int = 0,
    num_dense_heads: int = 0,
    kv_seqlen: int | None = None,
    q_start_position: int | None = None,
    kv_start_position: int | None = None,
    vert_position_type: Literal["absolute", "relative"] | None = None,
    causal: bool = True,
) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor | None]:
    """The local-stride pattern of `LocalStrideSparseAttention`, as tensors; or a chunk of it.

    Args:
        seqlen: queries, those of `past_len` included; the last block may be cut off.
        local_blocks: how many blocks up to a token's own are local, its own among them; or (before, after).
        past_len: so many queries are left out, in the masks of blocks by whole blocks from the next one on.
        dtype: that of the masks, in which 1 is seen.
        device: where they are put; by default the current CUDA device if there is one, else the CPU.
        return_dense: also the mask of tokens, (heads|1, seqlen - past_len, kv_seqlen).
        head_sliding_step: how far the columns move from head to head; by default `vert_stride // num_heads`, or 1.
        kv_seqlen: keys, by default as many as queries.
        q_start_position: where the queries start in their sequence, a multiple of `block_size`.
        kv_start_position: where the keys start in it.
        vert_position_type: "absolute": the strided blocks are columns; "relative": they count outward from the local
            ones, in every head. By default absolute where `causal`, which keeps a KV cache small, and else relative.
        causal: a token sees itself and those before it.

    The other arguments are those of `LocalStrideSparseAttention`.

    Returns:
        `((crow, col), block_mask, dense or None)`: the blocks by rows, int32 `(heads|1, rows + 1)` and
        `(heads|1, most)`, padded with -1; the blocks, `(heads|1, rows, columns)`.

    >>> (crow, col), blocks, _ = get_sparse_attn_mask(2, 256, 64, local_blocks=1, vert_stride=2, device="cpu")
    >>> crow.tolist()[0], col.tolist()[0]
    ([0, 1, 3, 5, 8], [0, 0, 1, 0, 2, 0, 2, 3])
    """
    block_size = static_int("block_size", block_size, 1)
    T = static_int("seqlen", seqlen, 1)
    S = T if kv_seqlen is None else static_int("kv_seqlen", kv_seqlen, 1)
    past = 0 if past_len is None else static_int("past_len", past_len, 0)
    if past >= T:
        raise ValueError(f"past_len={past} must be less than {seqlen=}")
    if past and q_start_position is not None:
        raise ValueError(f"past_len={past} and {q_start_position=}: give one of them")
    q_start = _start("q_start_position", q_start_position, block_size)
    kv_start = _start("kv_start_position", kv_start_position, block_size)
    if vert_position_type not in (None, "absolute", "relative"):
        raise ValueError(f'{vert_position_type=} must be None, "absolute" or "relative"')
    causal = flag("causal", causal)
    blocks = local_stride(
        num_heads,
        range(q_start // block_size, -(-(q_start + T) // block_size)),
        range(kv_start // block_size, -(-(kv_start + S) // block_size)),
        local_blocks,
        vert_stride,
        homo_head=homo_head,
        num_dense_heads=num_dense_heads,
        num_kv_heads=num_kv_heads,
        head_step=None if head_sliding_step is None else static_int("head_sliding_step", head_sliding_step),
        offset=head_sliding_offset,
        causal=causal,
        relative=(vert_position_type or ("absolute" if causal else "relative")) == "relative",
    )
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dense = None
    if flag("return_dense", return_dense):
        seen = blocks.repeat(block_size, axis=1)[:, past:T].repeat(block_size, axis=2)[:, :, :S]
        if causal:
            seen &= np.arange(S) + kv_start <= np.arange(past, T)[:, None] + q_start
        dense = torch.from_numpy(seen).to(device, dtype)
    rows = blocks[:, -(-past // block_size) :]
    crow, col = (torch.from_numpy(x).to(device) for x in _by_rows(rows))
    return (crow, col), torch.from_numpy(rows.copy()).to(device, dtype), dense


def _start(name: str, position: int | None, block_size: int) -> int:
    start = 0 if position is None else static_int(name, position, 0)
    if start % block_size:
        raise ValueError(f"{name}={start} must be a multiple of {block_size=}: chunks begin where blocks do")
    return start


def _by_rows(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    counts = blocks.sum(-1).cumsum(-1)
    crow = np.concatenate([np.zeros((len(blocks), 1), int), counts], axis=1)
    col = np.full((len(blocks), int(crow[:, -1].max())), -1, np.int32)
    for head, seen in enumerate(blocks):
        columns = np.nonzero(seen)[1]
        col[head, : len(columns)] = columns
    return crow.astype(np.int32), col
