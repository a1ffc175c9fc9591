"""From what a caller gives to the tensors of one canonical call: every check is here.

Inside, queries are (B, T, H, D) whatever their memory, packed sequences are a batch of one, and lengths have become
segments (negative: padding) and positions.
"""

import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ejkernel.checks.options import number

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FLOAT8S = (torch.float8_e4m3fn, torch.float8_e5m2)


class Lengths(NamedTuple):
    """Which tokens are there and where: int32, segments negative where there is padding."""

    q_segments: Tensor | None = None  # (B, T)
    kv_segments: Tensor | None = None  # (B, S)
    q_positions: Tensor | None = None
    kv_positions: Tensor | None = None


class Inputs(NamedTuple):
    """q (B, T, H, D), k (B, S, Hkv, D), v (B, S, Hkv, Dv)."""

    query: Tensor
    key: Tensor
    value: Tensor
    lengths: Lengths


def prepared(names: tuple[str, str, str], q: Any, k: Any, v: Any) -> tuple[Tensor, ...]:
    """The tensors in autocast's dtype, if that is on, once they are known to fit each other but for the layout."""
    for name, x in zip(names, (q, k, v), strict=True):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.dim() not in (3, 4):
            raise ValueError(f"{name} must have 3 or 4 dimensions, got shape {tuple(x.shape)}")
        if x.dim() != q.dim():
            raise ValueError(f"{name} {tuple(x.shape)} must have as many dimensions as {names[0]} {tuple(q.shape)}")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, {names[0]} on {q.device}: they must be on one device")
        if x.dtype not in FLOATS and x.dtype not in FLOAT8S:
            raise TypeError(f"{name} has dtype {x.dtype}; supported: float32, bfloat16, float16; float8 in inference")
        if x.dtype in FLOAT8S and x.requires_grad and torch.is_grad_enabled():
            raise TypeError(f"{name} is {x.dtype}, which has no gradient here: convert it to bfloat16 first")
    if q.device.type in ("cuda", "cpu") and torch.is_autocast_enabled(q.device.type):
        wanted = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x if x.dtype in FLOAT8S else x.to(wanted) for x in (q, k, v))
    if k.dtype != v.dtype:
        raise TypeError(f"{names[2]} has dtype {v.dtype}, {names[1]} has {k.dtype}: they must be the same")
    if q.dtype != k.dtype and not (k.dtype in FLOAT8S and q.dtype in (torch.bfloat16, torch.float16)):
        raise TypeError(
            f"{names[1]} has dtype {k.dtype}, {names[0]} has {q.dtype}: they must be the same, "
            f"or keys and values float8 and queries bfloat16 or float16"
        )
    return q, k, v


def check_shapes(names: tuple[str, str, str], query: Tensor, key: Tensor, value: Tensor, layout: str) -> None:
    """Of (B, length, heads, head_dim) tensors."""
    (B, _, H, D), (Bk, S, Hkv, Dk), (Bv, Sv, Hv, Dv) = query.shape, key.shape, value.shape
    if Bk != B or Bv != B:
        raise ValueError(f"batch sizes of {names[0]}, {names[1]} and {names[2]} differ: {B}, {Bk} and {Bv}; {layout}")
    for name, x in zip(names, (query, key, value), strict=True):
        if 0 in x.shape[2:]:
            raise ValueError(f"{name} has no heads or no features: {tuple(x.shape)}; {layout}")
    if Dk != D:
        raise ValueError(f"head_dim of {names[1]}, {Dk}, must be that of {names[0]}: {D}")
    if (Sv, Hv) != (S, Hkv):
        raise ValueError(
            f"{names[2]} must have the length and heads of {names[1]}, {(S, Hkv)}, and has {(Sv, Hv)}; {layout}"
        )
    if H % Hkv:
        raise ValueError(f"query heads {H} must be a multiple of key heads {Hkv}; {layout}: are they swapped?")
    if max(D, Dv) > 256:
        raise ValueError(f"head dims {D} and {Dv} must be at most 256")


def scale_of(name: str, scale: Any, D: int) -> float:
    return 1.0 / math.sqrt(D) if scale is None else number(name, scale)


def checks_values(x: Tensor) -> bool:
    """Whether to look at what a tensor holds: on a GPU that waits for it, and needs `EJKERNEL_CHECKS=1`."""
    if torch.compiler.is_compiling() or type(x) not in (Tensor, torch.nn.Parameter):
        return False
    return x.device.type == "cpu" or os.environ.get("EJKERNEL_CHECKS", "0") not in ("", "0")


def integers(name: str, x: Any, shape: tuple[int, ...]) -> Tensor:
    """A tensor of that shape, on its own device; -1 in the shape is any size."""
    if not isinstance(x, Tensor):
        x = torch.as_tensor(x)
    if x.dtype.is_floating_point or x.dtype == torch.bool or x.dtype.is_complex:
        raise TypeError(f"{name} must hold integers, got {x.dtype}")
    if x.dim() != len(shape) or any(n not in (-1, m) for n, m in zip(shape, x.shape, strict=True)):
        wanted = tuple("n" if n == -1 else n for n in shape)
        raise ValueError(f"{name} must have shape {wanted}, got {tuple(x.shape)}".replace("'", ""))
    return x


def on_device(x: Tensor, like: Tensor) -> Tensor:
    return x.to(like.device, torch.int32)


def check_values(name: str, x: Tensor, bad: Callable[[Tensor], Tensor], need: str) -> None:
    """Of integers as a caller gave them: before they are moved to a GPU, and before they wrap around in int32."""
    if not checks_values(x):
        return
    rows = bad(x.long()).nonzero()
    if len(rows):
        raise ValueError(f"{name} must {need} (row {int(rows[0, 0])}: {int(x[int(rows[0, 0])])})")


def padded_lengths(query: Tensor, key: Tensor, left: Tensor | None, seqlens: Tensor | None) -> Lengths:
    """Of a batch in which row b has its tokens in `left[b] <= j < left[b] + seqlens[b]` of the keys.

    With as many queries as keys they are the same tokens; else the queries are the newest ones.
    """
    (B, T, *_), S = query.shape, key.shape[1]
    start: Any = 0 if left is None else left[:, None]
    number = S - start if seqlens is None else seqlens[:, None]  # of a row's tokens
    at = torch.arange(S, dtype=torch.int32, device=key.device).expand(B, S)
    kv_positions = at.contiguous() if left is None else at - start
    kv_segments = _minus_one_where_negative(number - 1 - kv_positions)
    if left is not None:
        kv_segments = kv_segments | _minus_one_where_negative(kv_positions)
    if T == S:
        return Lengths(kv_segments, kv_segments, kv_positions, kv_positions)
    q_positions = number + torch.arange(-T, 0, dtype=torch.int32, device=key.device)
    return Lengths(_minus_one_where_negative(q_positions), kv_segments, q_positions, kv_positions)


def _minus_one_where_negative(x: Tensor) -> Tensor:
    """0, or -1 where an int32 is negative: the segments of tokens that are so far inside of a row."""
    return x >> 31


def packed_lengths(
    query: Tensor, key: Tensor, cu_q: Tensor, cu_k: Tensor, names: tuple[str, str] = ("cu_q", "cu_k")
) -> Lengths:
    """Of sequences one after the other; tokens past the last are padding. The queries of one are its newest tokens."""
    if cu_q.shape != cu_k.shape:
        q_name, k_name = names
        raise ValueError(f"{q_name} {tuple(cu_q.shape)} and {k_name} {tuple(cu_k.shape)} must have one length")
    last = cu_q.shape[0] - 2

    def numbered(cu: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
        """The segments and positions of tokens, and which sequence to look up for each."""
        at = torch.arange(total, dtype=torch.int32, device=cu.device)
        which = torch.searchsorted(cu[1:], at, out_int32=True, right=True)
        safe = which.clamp(max=last)
        return torch.where(which <= last, which, -1)[None], (at - cu.index_select(0, safe))[None], safe

    kv_segments, kv_positions, _ = numbered(cu_k, key.shape[1])
    if cu_q is cu_k:
        return Lengths(kv_segments, kv_segments, kv_positions, kv_positions)
    q_segments, q_positions, safe = numbered(cu_q, query.shape[1])
    extra = cu_k.diff() - cu_q.diff()  # keys before the first query
    return Lengths(q_segments, kv_segments, q_positions + extra.index_select(0, safe), kv_positions)


def cumulative(name: str, x: Any, total: int, like: Tensor, most: int | None = None) -> Tensor:
    """(sequences + 1,) int32 from 0 on, never decreasing, at most `total`, and at most `most` apart."""
    given = integers(name, x, (-1,))
    if given.shape[0] < 2:
        raise ValueError(f"{name} must have shape (sequences + 1,), got {tuple(given.shape)}")
    need = f"start at 0, never decrease, and end within the {total} tokens"
    check_values(name, given[:1], lambda c: c != 0, need)
    check_values(name, given, lambda c: (c.diff(prepend=c[:1]) < 0) | (c > total), need)
    if most is not None:
        longest = f"be at most {most} apart, what the pattern covers"
        check_values(name, given, lambda c: c.diff(append=c[-1:]) > most, longest)
    # nothing outside is read, whatever it holds
    return on_device(given, like).cummax(0).values.clamp(0, total).to(torch.int32)


def segment_ids(query: Tensor, key: Tensor, q_ids: Any, kv_ids: Any) -> tuple[Tensor, Tensor] | None:
    """int32 (B, T) and (B, S), of which a negative one is padding."""
    if q_ids is None:
        if kv_ids is not None:
            raise ValueError("kv_segment_ids needs q_segment_ids")
        return None
    (B, T, *_), S = query.shape, key.shape[1]
    if kv_ids is None and S != T:
        raise ValueError(f"keys have {S} tokens and queries {T}: give kv_segment_ids")
    q = _rows("q_segment_ids", q_ids, (B, T), query)
    return q, q if kv_ids is None else _rows("kv_segment_ids", kv_ids, (B, S), query)


def _rows(name: str, x: Any, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """int32 of that shape on the device of another, where the leading dimensions broadcast."""
    x = x if isinstance(x, Tensor) else torch.as_tensor(x)
    x = integers(name, x, tuple(x.shape))
    sizes = (1,) * (len(shape) - x.dim()) + tuple(x.shape)
    leading = zip(sizes[:-1], shape, strict=False)
    if len(sizes) != len(shape) or sizes[-1] != shape[-1] or any(n != 1 and n != m for n, m in leading):
        raise ValueError(f"{name} must have shape {shape}, got {tuple(x.shape)}")
    if x.dtype == torch.int64:
        x = x.clamp(-(2**31), 2**31 - 1)
    return on_device(x, like).expand(shape).contiguous()


def limits(name: str, x: Any, heads: tuple[int, int, int], like: Tensor) -> Tensor | None:
    """int32 (B, length), or (B, H, length) for three dimensions, of `heads` = (B, H, length); None is open."""
    if x is None:
        return None
    B, H, length = heads
    dims = x.dim() if isinstance(x, Tensor) else torch.as_tensor(x).dim()
    return _rows(name, x, (B, H, length) if dims == 3 else (B, length), like)


def aligned_lengths(q_ids: Tensor, kv_ids: Tensor) -> Lengths:
    """Of segments, with the positions of tokens whose ends are aligned."""
    (B, T), S = q_ids.shape, kv_ids.shape[1]
    at = [torch.arange(*ends, dtype=torch.int32, device=q_ids.device) for ends in ((S - T, S), (0, S))]
    return Lengths(q_ids, kv_ids, *(x.expand(B, -1).contiguous() for x in at))
