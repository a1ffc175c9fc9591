"""Block-sparse attention as modules: dkernel's names and arguments."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ejkernel.checks.options import flag, static_int
from ejkernel.torch.calls import Options, layouts_of
from ejkernel.torch.inputs import (
    FLOATS,
    Inputs,
    Lengths,
    check_shapes,
    check_values,
    checks_values,
    cumulative,
    integers,
    on_device,
    packed_lengths,
    padded_lengths,
    prepared,
    scale_of,
)
from ejkernel.torch.operation import NO_EXTRAS, attend, is_plain
from ejkernel.torch.pattern import Pattern, as_blocks, checked_block_size, is_kv_cache_efficient, local_stride

_QKV = ("q", "k", "v")
_MOST_CHECKED = 64
_NO_LENGTHS = Lengths()


def _plain_layouts(q: Any, k: Any, v: Any) -> Any:
    """The layouts of a call without lengths whose checks depend on nothing else; None where they do."""
    if not is_plain(q, k, v) or q.dtype not in FLOATS or q.is_meta or torch.is_autocast_enabled(q.device.type):
        return None
    return layouts_of(q, k, v) if q.dim() == 4 and q.numel() and k.numel() else None


class SparseAttention(torch.nn.Module):
    """Attention over the blocks that a pattern shows: what it does not is neither read nor computed.

    The pattern is data: it has no parameters, is not in `state_dict`, and follows the tensors to their device. On CUDA
    the kernels are the Triton ones of JAX's `blocksparse_attention`, on the memory of the tensors; on a CPU, products
    of PyTorch over the visited tiles. Both give gradients of q, k, v, and of what is done with lse.

    Args:
        block_size: tokens per block, a power of two from 16 on.
        sparse_pattern: bool or 0/1 `(n, n)`, or `(heads, n, n)` with as many heads as q or as k has. The token at
            position `t` lives in block `t // block_size`. Where there are more, or fewer, columns than rows, as for a
            chunk of the queries and the keys of several, rows count from the first query and columns from the first
            key; such a pattern takes neither lengths nor paddings.
        causal: a token sees itself and those before it, of what the pattern shows.
        seq_dim: which dimension of q, k, v is the length: 1 (or None) for `(B, T, H, D)`, 2 for `(B, H, T, D)`.
        block_m: queries of a kernel's tile; by default those measured best.
        block_n: keys of it.

    >>> import torch
    >>> from ejkernel.torch import SparseAttention
    >>> attention = SparseAttention(16, torch.ones(4, 4).tril().bool())
    >>> q, k, v = (torch.randn(1, 50, 2, 8) for _ in range(3))
    >>> attention(q, k, v).shape
    torch.Size([1, 50, 2, 8])
    """

    def __init__(
        self,
        block_size: int,
        sparse_pattern: Any,
        *,
        causal: bool = True,
        seq_dim: int | None = None,
        block_m: int | None = None,
        block_n: int | None = None,
    ):
        super().__init__()
        if seq_dim not in (None, 1, 2):
            raise ValueError(f"seq_dim={seq_dim} must be None, 1 or 2")
        self.block_size = checked_block_size("block_size", block_size)
        self.block_m = None if block_m is None else checked_block_size("block_m", block_m)
        self.block_n = None if block_n is None else checked_block_size("block_n", block_n)
        self.causal = flag("causal", causal)
        self.seq_dim = seq_dim
        blocks = as_blocks(sparse_pattern)
        self.pattern = Pattern.of(blocks, self.block_size, by_index=blocks.shape[1] != blocks.shape[2])
        self._checked: dict[Any, Options] = {}  # by what the checks of a call depend on
        if self.causal and not is_kv_cache_efficient(blocks):
            warnings.warn(
                "sparse_pattern is not efficient for a KV cache: it shows later tokens blocks that it hid from earlier "
                "ones, which a KV cache cannot drop in between; it grows larger than the pattern suggests",
                stacklevel=2,
            )

    @property
    def max_seqlen(self) -> int:
        return max(self.pattern.max_lengths)

    def forward(
        self,
        q: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        sm_scale: float | None = None,
        *,
        cu_seqlen_k: Tensor | None = None,
        cu_seqlen_q: Tensor | None = None,
        left_paddings: Tensor | None = None,
        seqlens: Tensor | None = None,
        return_lse: bool = False,
        split_qkv: Callable[[Tensor], Sequence[Tensor]] | None = None,
    ) -> Any:
        """Attention of q over k and v.

        With fewer queries than keys, the queries are the newest tokens: decoding, and prefilling in chunks. Rows that
        are padding, or that see nothing, give zeros, lse -inf and no gradient; what padding holds, even nan, reaches
        nothing.

        Args:
            q: `(B, T, H, D)`, or `(B, H, T, D)` by `seq_dim`; or packed, `(tokens, H, D)`, with `cu_seqlen_k`.
                float32, bfloat16, float16; or float8, without gradients: computed in bfloat16, which comes back.
            k: `(B, S, Hkv, D)` and so on; `Hkv` divides `H`. May be float8 where q is bfloat16 or float16.
            v: like k, with a head dim of its own.
            sm_scale: of the logits; by default `D ** -0.5`.
            cu_seqlen_k: `(N + 1,)`: sequence i has the keys from `cu_seqlen_k[i]` to `cu_seqlen_k[i + 1]`; positions
                start again in each. Tokens past the last are padding.
            cu_seqlen_q: the same for q, whose tokens are the newest of each sequence; by default that of the keys, or
                one token each where there are as many as sequences.
            left_paddings: `(B,)`: how many tokens before the first real one; positions start there.
            seqlens: `(B,)`: how many real tokens a row has behind its left padding, those of the cache when decoding.
            return_lse: also return the log-sum-exp of the logits, float32 `(B, H, T)`, or `(H, tokens)`.
            split_qkv: for packed projections: with q alone, `q, k, v = split_qkv(q)`; with q and k,
                `k, v = split_qkv(k)`. Gradients are those of the packed tensors.
        """
        if v is None or split_qkv is not None:
            q, k, v = _split(q, k, v, split_qkv)
        no_lengths = cu_seqlen_k is cu_seqlen_q is left_paddings is seqlens is None
        layouts = _plain_layouts(q, k, v) if no_lengths and not torch.compiler.is_compiling() else None
        call_key = (layouts, sm_scale) if layouts and (sm_scale is None or sm_scale.__class__ is float) else None
        checked = self._checked.get(call_key)
        if checked is not None:  # the checks below passed for a call like this
            query, key, value = self._by_length(q, k, v)
            layouts = layouts if query is q else layouts_of(query, key, value)
            return self._finished(Inputs(query, key, value, _NO_LENGTHS), checked, False, return_lse, layouts)
        q, k, v = prepared(_QKV, q, k, v)
        packed = q.dim() == 3
        if packed != (cu_seqlen_k is not None):
            need = "need cu_seqlen_k" if packed else "take no cu_seqlen_k: packed ones are (tokens, heads, head_dim)"
            raise ValueError(f"q, k, v of {q.dim()} dimensions {need}; q has shape {tuple(q.shape)}")
        if cu_seqlen_q is not None and not packed:
            raise ValueError("cu_seqlen_q needs cu_seqlen_k")
        if packed and (left_paddings is not None or seqlens is not None):
            raise ValueError("packed sequences have no padding: left_paddings and seqlens need q, k, v of 4 dimensions")
        query, key, value = (q[None], k[None], v[None]) if packed else self._by_length(q, k, v)
        heads_first = self.seq_dim == 2 and not packed
        layout = "the layout is " + ("(batch, heads, length, dim)" if heads_first else "(batch, length, heads, dim)")
        check_shapes(_QKV, query, key, value, layout)
        self._check_pattern(query, key, packed)
        if packed:
            lengths = self._packed(query, key, cu_seqlen_q, cu_seqlen_k)
        else:
            lengths = self._padded(query, key, left_paddings, seqlens)
        options = Options(
            scale=scale_of("sm_scale", sm_scale, query.shape[3]),
            hi=0 if self.causal else None,
            pattern=self.pattern.fitted(query.shape[1], key.shape[1]).key,
            block_m=self.block_m or 0,
            block_n=self.block_n or 0,
        )
        if call_key is not None:
            kept = self._checked if len(self._checked) < _MOST_CHECKED else {}
            self._checked = {**kept, call_key: options}
        return self._finished(Inputs(query, key, value, lengths), options, packed, return_lse)

    def _by_length(self, q: Tensor, k: Any, v: Any) -> tuple[Tensor, Tensor, Tensor]:
        """(batch, length, heads, dim)."""
        return (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)) if self.seq_dim == 2 else (q, k, v)

    def _finished(self, inputs: Inputs, options: Options, packed: bool, return_lse: bool, layouts: Any = None) -> Any:
        out, lse = attend(inputs, NO_EXTRAS, options, layouts)
        if packed:
            out, lse = out[0], lse[0]
        elif self.seq_dim == 2:
            out = out.transpose(1, 2)
        return (out, lse) if flag("return_lse", return_lse) else out

    def _check_pattern(self, query: Tensor, key: Tensor, packed: bool) -> None:
        H, Hkv = query.shape[2], key.shape[2]
        heads = self.pattern.heads
        if heads != 1 and heads != Hkv and heads != H:  # one by one: sizes may be symbols, under torch.compile
            raise ValueError(f"the pattern has {heads} heads; q has {H} and k has {Hkv}")
        rows, columns = self.pattern.blocks.shape[1:]
        of = f"blocks of {self.block_size} tokens cover"
        if not packed and key.shape[1] > columns * self.block_size:
            raise ValueError(f"k has length {key.shape[1]}; {columns} {of} {columns * self.block_size}")
        if self.pattern.by_index and query.shape[1] > rows * self.block_size:
            raise ValueError(f"q has length {query.shape[1]}; {rows} {of} {rows * self.block_size}")

    def _check_takes_lengths(self) -> None:
        if self.pattern.by_index:
            raise ValueError(
                f"a pattern of {self.pattern.blocks.shape[1]} x {self.pattern.blocks.shape[2]} blocks counts from the "
                "first query and the first key: lengths, paddings and packed sequences need a square one"
            )

    def _padded(self, query: Tensor, key: Tensor, left_paddings: Any, seqlens: Any) -> Lengths:
        if left_paddings is None and seqlens is None:
            return Lengths()
        self._check_takes_lengths()
        (B, *_), S = query.shape, key.shape[1]
        left = lengths = None
        most: Any = S
        if left_paddings is not None:
            given = integers("left_paddings", left_paddings, (B,))
            check_values("left_paddings", given, lambda x: (x < 0) | (x > S), f"lie in [0, {S}]")
            left = on_device(given, query).clamp(0, S)
            most = S - (given if checks_values(given) else 0)
        if seqlens is not None:
            given = integers("seqlens", seqlens, (B,))
            need = f"lie within the {S} keys, left padding included"
            check_values("seqlens", given, lambda x: (x < 0) | (x > most), need)
            lengths = on_device(given, query)
            lengths = lengths.clamp(0, S) if left is None else lengths.clamp(min=0).minimum(S - left)
        return padded_lengths(query, key, left, lengths)

    def _packed(self, query: Tensor, key: Tensor, cu_q: Any, cu_k: Any) -> Lengths:
        self._check_takes_lengths()
        T, S = query.shape[1], key.shape[1]
        keys = cumulative("cu_seqlen_k", cu_k, S, query, most=self.max_seqlen)
        sequences = keys.shape[0] - 1
        if cu_q is not None:
            queries = cumulative("cu_seqlen_q", cu_q, T, query)
        elif T == S:
            queries = keys
        elif sequences == T:  # decoding: one token each
            queries = torch.arange(sequences + 1, dtype=torch.int32, device=query.device)
        else:
            raise ValueError(f"cu_seqlen_q is needed: q has {T} tokens, k {S}, and there are {sequences} sequences")
        return packed_lengths(query, key, queries, keys, ("cu_seqlen_q", "cu_seqlen_k"))

    def extra_repr(self) -> str:
        heads, rows, columns = self.pattern.blocks.shape
        blocks = rows if rows == columns else f"{rows} x {columns}"
        sizes = f"block_size={self.block_size}, heads={heads}, blocks={blocks}"
        return f"{sizes}, causal={self.causal}, seq_dim={self.seq_dim}"


def _split(q: Any, k: Any, v: Any, split_qkv: Any) -> tuple[Any, Any, Any]:
    """q, k and v of packed tensors."""
    if v is not None:
        raise ValueError("split_qkv is for packed tensors: give q alone, or q and k, and not v")
    if split_qkv is None:
        missing = "k and v" if k is None else "v"
        raise ValueError(f"{missing} not given: tensors that are packed in {'q' if k is None else 'k'} need split_qkv")
    tensors = tuple(split_qkv(q)) if k is None else (q, *split_qkv(k))
    if len(tensors) != 3:
        wanted, number = (("q, k and v"), len(tensors)) if k is None else ("k and v", len(tensors) - 1)
        raise ValueError(f"split_qkv must give {wanted}, and gave {number} tensors")
    return tensors


class LocalStrideSparseAttention(SparseAttention):
    """Attention to recent blocks and to every `vert_stride`-th one before, shifted from head to head.

    Head `h` lets query block `q` see key block `k <= q` when `q - k < local_blocks` or
    `(k + h * step + head_sliding_offset) % vert_stride == 0`, with `step = max(1, vert_stride // num_heads)`. Without
    `causal` blocks behind are seen as those before: `abs(q - k) < local_blocks`, and outward from these, in every head,
    each `vert_stride`-th one.

    Args:
        num_heads: query heads.
        max_seq_len: the longest sequence.
        block_size: tokens per block, a power of two from 16 on.
        local_blocks: how many recent blocks are seen, a token's own among them; or (before, after).
        vert_stride: of the blocks before these, one in so many is seen; 1 is dense.
        homo_head: every head uses head 0's pattern.
        num_dense_heads: the last so many heads see everything.
        num_kv_heads: key heads; then `h` and `num_dense_heads` count these, and a group shares its pattern.
        active_head_range: `(start, end)` of the query heads that q has here, where heads are split over devices.
        head_sliding_offset: shifts the columns of all heads.
        causal: as in `SparseAttention`; so are `seq_dim`, `block_m` and `block_n`.
        d_splits: None, 1 or 2: into how many splits dkernel's kernels cut a head. It changes no result. These hold a
            head in one, whatever its size; 2 gives a warning.

    >>> import torch
    >>> from ejkernel.torch import LocalStrideSparseAttention
    >>> attention = LocalStrideSparseAttention(4, 256, 16, local_blocks=2, vert_stride=4, seq_dim=2)
    >>> q, k, v = (torch.randn(1, 4, 200, 8) for _ in range(3))
    >>> attention(q, k, v).shape
    torch.Size([1, 4, 200, 8])
    """

    def __init__(
        self,
        num_heads: int,
        max_seq_len: int,
        block_size: int,
        local_blocks: int | tuple[int, int],
        vert_stride: int,
        *,
        homo_head: bool = False,
        num_dense_heads: int = 0,
        num_kv_heads: int | None = None,
        active_head_range: tuple[int, int] | None = None,
        head_sliding_offset: int = 0,
        causal: bool = True,
        seq_dim: int | None = None,
        block_m: int | None = None,
        block_n: int | None = None,
        d_splits: int | None = None,
    ):
        block_size = checked_block_size("block_size", block_size)
        if d_splits not in (None, 1, 2):
            raise ValueError(f"d_splits={d_splits!r} must be None, 1 or 2")
        if d_splits == 2:
            warnings.warn("d_splits=2 splits nothing: these kernels hold a head in one, as with 1", stacklevel=2)
        blocks_of_keys = range(-(-static_int("max_seq_len", max_seq_len, 1) // block_size))
        blocks = local_stride(
            num_heads,
            blocks_of_keys,
            blocks_of_keys,
            local_blocks,
            vert_stride,
            homo_head=homo_head,
            num_dense_heads=num_dense_heads,
            num_kv_heads=num_kv_heads,
            offset=head_sliding_offset,
            causal=flag("causal", causal),
            relative=not causal,
        )
        if active_head_range is not None:
            start, end = _checked_range(active_head_range, num_heads, num_kv_heads)
            blocks = blocks if blocks.shape[0] == 1 else blocks[start:end]
        super().__init__(block_size, blocks, causal=causal, seq_dim=seq_dim, block_m=block_m, block_n=block_n)
        self.num_heads = num_heads
        self.max_seq_len = max_seq_len
        self.local_blocks = local_blocks
        self.vert_stride = vert_stride
        self.homo_head = homo_head
        self.num_dense_heads = num_dense_heads
        self.num_kv_heads = num_kv_heads
        self.active_head_range = active_head_range


def _checked_range(active: Any, num_heads: int, num_kv_heads: int | None) -> tuple[int, int]:
    if not isinstance(active, tuple | list) or len(active) != 2:
        raise TypeError(f"active_head_range={active!r} must be a pair (start, end)")
    start, end = (static_int("active_head_range", x, 0) for x in active)
    if not start < end <= num_heads:
        raise ValueError(f"active_head_range={(start, end)} must be heads within [0, {num_heads})")
    group = num_heads // (num_kv_heads or num_heads)
    if start % group or end % group:
        raise ValueError(f"active_head_range={(start, end)} must be whole groups of {group} heads: {num_kv_heads=}")
    return start, end
