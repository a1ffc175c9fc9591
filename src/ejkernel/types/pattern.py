"""Block patterns: which blocks of keys each block of queries sees."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.checks.arrays import ArrayInput, bool_array, concrete
from ejkernel.checks.options import int_pair, static_int
from ejkernel.types.local_stride import local_stride_blocks
from ejkernel.types.visualize import Kind, block_visibility, checked_cells, drawn, has_values, html

# tokens per block of a pattern without a size, where the call has none either
_DEFAULT_BLOCK_SIZE = 64


@functools.partial(jax.tree_util.register_dataclass, data_fields=["blocks"], meta_fields=["block_size", "num_heads"])
@dataclass(frozen=True, eq=False)
class BlockPattern:
    """A block-sparse pattern: query block `i` sees key block `j` where `blocks[..., i, j]`.

    Query `t` lives in block `t // bq` and key `s` in block `s // bk`, by plain index. Inside a seen block
    everything is seen; element-wise causality comes from `MaskInfo.apply_causal`. A pytree, with the size static.

    Fields:
        blocks: bool (H|1, nq, nk) or (B|1, H|1, nq, nk). The static patterns below are numpy arrays, so that
            they stay known while tracing.
        block_size: tokens per block, one number or (bq, bk). None leaves it to `blocksparse_attention(block_size=)`;
            elsewhere it is 64.
        num_heads: how many heads `dense` shows, None for a pattern that has no head axis.

    >>> pattern = BlockPattern.local_stride(2, 4, local_blocks=1, vert_stride=2)
    >>> pattern.dense.astype(int).tolist()[0]
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]
    >>> pattern.is_kv_cache_efficient()
    True
    """

    blocks: Any  # jax.Array | np.ndarray; other leaves (shardings, axes) under tree maps
    block_size: int | tuple[int, int] | None = None
    num_heads: int | None = None

    @classmethod
    def local_stride(
        cls,
        num_heads: int,
        num_blocks: int,
        local_blocks: int,
        vert_stride: int,
        *,
        homo_head: bool = False,
        num_dense_heads: int = 0,
        num_kv_heads: int | None = None,
        offset: int = 0,
        block_size: int | tuple[int, int] | None = None,
    ) -> "BlockPattern":
        """Recent blocks plus every `vert_stride`-th block, shifted from head to head; causal in blocks.

        Head `h` lets query block `q` see key block `k <= q` when `q - k < local_blocks` or
        `(k + h * step + offset) % vert_stride == 0`, with `step = max(1, vert_stride // num_heads)`.

        Args:
            homo_head: every head uses head 0's pattern.
            num_dense_heads: the last so many heads see all blocks up to their own.
            num_kv_heads: `h` and `num_dense_heads` count key heads, and the query heads of a group share its pattern.
            offset: shifts the columns of all heads.

        >>> BlockPattern.local_stride(8, 16, local_blocks=2, vert_stride=4, num_dense_heads=1).dense.shape
        (8, 16, 16)
        """
        numbers = range(static_int("num_blocks", num_blocks, 1))
        blocks = local_stride_blocks(
            num_heads,
            numbers,
            numbers,
            static_int("local_blocks", local_blocks, 1),
            vert_stride,
            homo_head=homo_head,
            num_dense_heads=num_dense_heads,
            num_kv_heads=num_kv_heads,
            offset=offset,
        )
        return cls(blocks, _checked_block_size(block_size), num_heads)

    @classmethod
    def sliding_blocks(
        cls, num_blocks: int, left: int, right: int = 0, *, block_size: int | tuple[int, int] | None = None
    ) -> "BlockPattern":
        """Each query block sees `left` blocks before its own, its own, and `right` after it, in every head.

        >>> BlockPattern.sliding_blocks(4, left=1).dense.astype(int).tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
        """
        num_blocks = static_int("num_blocks", num_blocks, 1)
        left, right = static_int("left", left, 0), static_int("right", right, 0)
        distance = np.arange(num_blocks) - np.arange(num_blocks)[:, None]  # (n, n) key block minus query block
        return cls(((distance >= -left) & (distance <= right))[None], _checked_block_size(block_size))

    @classmethod
    def from_dense(cls, mask: ArrayInput, *, block_size: int | tuple[int, int] | None = None) -> "BlockPattern":
        """A pattern written by hand, one entry per block: bool or 0/1, (nq, nk), (H, nq, nk) or (B, H, nq, nk).

        >>> import numpy as np
        >>> BlockPattern.from_dense(np.eye(3, dtype=bool), block_size=16).dense.shape
        (3, 3)
        """
        blocks = bool_array("mask", mask)
        if blocks.ndim not in (2, 3, 4) or 0 in blocks.shape:
            raise ValueError(f"mask must have shape (nq, nk), (H, nq, nk) or (B, H, nq, nk), got {blocks.shape}")
        if blocks.ndim == 2:
            return cls(blocks[None], _checked_block_size(block_size))
        return cls(blocks, _checked_block_size(block_size), blocks.shape[-3])

    @property
    def dense(self) -> jax.Array:
        """The blocks as given: (nq, nk), (H, nq, nk) or (B, H, nq, nk) bool."""
        if self.num_heads is None:
            return jnp.asarray(self.blocks[..., 0, :, :])
        *batch, _, nq, nk = self.blocks.shape
        return jnp.broadcast_to(self.blocks, (*batch, self.num_heads, nq, nk))

    @property
    def block_shape(self) -> tuple[int, int]:
        """(bq, bk): tokens per query block and per key block."""
        size = _DEFAULT_BLOCK_SIZE if self.block_size is None else self.block_size
        return (size, size) if isinstance(size, int) else size

    def is_kv_cache_efficient(self) -> bool:
        """Whether a key block, once no query block uses it, is never used again (a cache may drop it).

        A key block exists from the first query block whose last index reaches it. Needs concrete blocks.

        >>> BlockPattern.from_dense([[1, 0, 0], [0, 1, 0], [1, 0, 1]]).is_kv_cache_efficient()
        False
        """
        blocks = concrete(self.blocks)
        if blocks is None:
            raise ValueError("is_kv_cache_efficient needs concrete blocks, these are traced")
        bq, bk = self.block_shape
        nq, nk = blocks.shape[-2:]
        exists = np.arange(nk) * bk < (np.arange(nq) + 1)[:, None] * bq  # (nq, nk)
        skipped = exists & ~blocks
        return not (skipped[..., :-1, :] & blocks[..., 1:, :]).any()

    def visualize(self, kind: Kind = "text", *, batch: int = 0, head: int = 0, max_cells: int = 64) -> Any:
        """A picture of one head, a cell per block: "text" and "svg" are a str, "figure" a matplotlib Figure.

        >>> print(BlockPattern.sliding_blocks(3, left=1).visualize())
        BlockPattern(blocks=(1, 3, 3), block_size=None)  batch 0, head 0; rows: queries, columns: keys
        █··
        ██·
        ·██
        """
        blocks = self.blocks if self.blocks.ndim >= 4 else self.blocks[None]
        shared = blocks.shape[1] == 1 and 0 <= head < (self.num_heads or 1)
        cells = block_visibility(blocks, batch, 0 if shared else head, checked_cells(max_cells))
        title = repr(self) if kind == "figure" else f"{self!r}  batch {batch}, head {head}"
        return drawn(kind, cells, title, self.blocks.shape[-2:], " block")

    def _repr_html_(self) -> str | None:
        """For notebooks: up to four heads; None, which shows the repr, where the blocks are not known."""
        if not has_values(self.blocks):
            return None
        heads = range(min(self.blocks.shape[-3], 4))
        return html(repr(self), " ".join(self.visualize("svg", head=head) for head in heads))

    def fitted(self, q_len: int, kv_len: int) -> "BlockPattern":
        """The pattern with a batch axis, cut to the blocks that these lengths touch: (B|1, H|1, nq, nk)."""
        bq, bk = self.block_shape
        nq, nk = self.blocks.shape[-2:]
        if nq * bq < q_len or nk * bk < kv_len:
            raise ValueError(
                f"a pattern of {nq} x {nk} blocks of {bq} x {bk} tokens covers lengths up to ({nq * bq}, {nk * bk}), "
                f"got {q_len=}, {kv_len=}"
            )
        blocks = self.blocks if self.blocks.ndim >= 4 else self.blocks[None]
        return BlockPattern(blocks[..., : -(-q_len // bq), : -(-kv_len // bk)], (bq, bk), self.num_heads)

    def combine(
        self, other: "BlockPattern", q_len: int, kv_len: int, join: Callable[[Any, Any], Any]
    ) -> "BlockPattern | None":
        """Both patterns as one, `join` of their blocks, in the finer of the two; None where the sizes do not nest."""
        block_shape = []
        for a, b in zip(self.block_shape, other.block_shape, strict=True):
            if max(a, b) % min(a, b):
                return None
            block_shape.append(min(a, b))
        bq, bk = block_shape
        heads = {p.blocks.shape[-3] for p in (self, other)} - {1}
        if len(heads) > 1:
            raise ValueError(f"patterns with different numbers of heads cannot be combined: {sorted(heads)}")
        a, b = (p._refined(bq, bk).fitted(q_len, kv_len).blocks for p in (self, other))
        return BlockPattern(join(a, b), (bq, bk), self.num_heads or other.num_heads)

    def _refined(self, bq: int, bk: int) -> "BlockPattern":
        repeat_q, repeat_k = self.block_shape[0] // bq, self.block_shape[1] // bk
        if (repeat_q, repeat_k) == (1, 1):
            return self
        blocks = self.blocks.repeat(repeat_q, axis=-2).repeat(repeat_k, axis=-1)
        return BlockPattern(blocks, (bq, bk), self.num_heads)

    def __repr__(self) -> str:
        shape = getattr(self.blocks, "shape", self.blocks)
        return f"BlockPattern(blocks={shape}, block_size={self.block_size})"


def _checked_block_size(block_size: Any) -> int | tuple[int, int] | None:
    if block_size is None:
        return None
    pair = int_pair("block_size", block_size, 1)
    return pair if isinstance(block_size, tuple | list) else pair[0]
