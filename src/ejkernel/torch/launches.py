"""Calls on CUDA tensors: from what they are given to a program, and back.

Most calls are a program's own. With few queries, query heads that share keys become rows of one tile, and keys are
split over programs; both are other shapes of the same call.
"""

from typing import Any

import torch
from torch import Tensor

from ejkernel.ops import Call
from ejkernel.torch.calls import Options, Tensors, canonical, heads_first, output_dtype, signature
from ejkernel.torch.inputs import FLOAT8S
from ejkernel.torch.pattern import Pattern
from ejkernel.torch.programs import LENGTHS, MOVED, Kind, Known, Program, known_tensors, program, target_of

# A call -----------------------------------------------------------------------------------------------------


def forward(tensors: Tensors, options: Options, sign: Any = None, splits: int | None = None) -> tuple[Tensor, Tensor]:
    """out and lse. `sign` is the signature of q, k and v, where it is known.

    `splits` is how many parts the keys are split into, by default as many as fill the device.
    """
    query, key, value, sinks, segments, *_ = tensors
    alone = sinks is None and segments is None and splits is None
    known = (sign or signature(query, key, value), options) if alone else None
    with _on(query):
        found = _READY.get(known)
        if found is not None:
            return found.forward({"query": query, "key": key, "value": value})
        first, call = _dense(canonical(tensors, options))
        group, splits = _arrangement(call, options, first, splits)
        if (group, splits) != (1, 1):
            return _rearranged(call, options, first, group, splits)
        found = _program(call, options, first)
        if known is not None and all(call[name].data_ptr() == x.data_ptr() for name, x in zip(MOVED, tensors)):
            _keep(known, found)
        return found.forward(dict(call.arrays))


def backward(
    tensors: Tensors, options: Options, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    with _on(out):
        first, call = _dense(canonical(tensors, options))
        dout = _dense_as(dout.to(out.dtype), first)
        dlse = None if dlse is None else dlse.float().contiguous()
        given: dict[str, Any] = dict(call.arrays)
        return _program(call, options, first).backward(given, _dense_as(out, first), lse.contiguous(), dout, dlse)


# programs of calls that need no thought: q, k and v alone, taken as they are, neither packed nor split
_READY: dict[Any, Program] = {}
_MOST_READY = 256


def _keep(known: Any, found: Program) -> None:
    """So that the next call like this one finds its program at once."""
    if len(_READY) >= _MOST_READY:
        _READY.clear()
    _READY[known] = found


class _Here:
    """Nothing to change."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        pass


_HERE = _Here()


def _on(x: Tensor) -> Any:
    """Triton launches on the current device, which may be another than a tensor's."""
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(x.device)


def _dense_as(x: Tensor, first: bool) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2) if first else x.contiguous()


def _dense(call: Any) -> tuple[bool, Any]:
    """Whether heads come first in memory, and the call on dense tensors: others are copied."""
    moved: list[Any] = [call[name] for name in MOVED]
    if moved[1].dtype in FLOAT8S and 0 < target_of(moved[0].device).capability < 89:  # Triton has no float8 there
        wide = torch.bfloat16 if moved[0].dtype in FLOAT8S else moved[0].dtype
        moved = [x.to(wide) for x in moved]
    first = heads_first(*moved)
    moved = moved if first else [x.contiguous() for x in moved]
    return first, Call(call.spec, {**call.arrays, **dict(zip(MOVED, moved, strict=True))})


def _program(call: Any, options: Options, first: bool, known: Known | None = None, out: Any = None) -> Program:
    query: Any = call["query"]
    kind = Kind(
        spec=call.spec,
        arrays=tuple((name, x.shape, x.dtype) for name, x in call.arrays.items()),
        pattern=options.pattern,
        tile=(options.block_m, options.block_n),
        heads_first=first,
        device=query.device,
        out=out or output_dtype(query),
        known=known,
    )
    return program(kind)


# Few queries: the heads of a group as rows of one tile, and keys split over programs --------------------------

# rows of queries that one tile holds
_MOST_ROWS = 64
# keys that a part has at least
_FEWEST_KEYS = 512


def splits_for(programs: int, S: int, cores: int) -> int:
    """Into how many equal parts to split the keys, where so many programs do not fill the cores."""
    parts = 1
    while programs * parts < cores and S % (2 * parts) == 0 and S // (2 * parts) >= _FEWEST_KEYS:
        parts *= 2
    return parts


def _arrangement(call: Any, options: Options, first: bool, splits: int | None) -> tuple[int, int]:
    """How many query heads to make rows of, and how many parts to split the keys into."""
    (B, T, H, _), (_, S, Hkv, _) = call["query"].shape, call["key"].shape
    group = H // Hkv
    pattern = Pattern.known(options.pattern) if options.pattern else None
    if pattern is not None and pattern.by_index:  # which the rows and keys of another shape would not have
        return 1, 1
    shared = pattern is None or pattern.shared(Hkv)
    if group == 1 or T * group > _MOST_ROWS or "sinks" in call or not shared:
        group = 1
    if first or "sinks" in call:  # a part of the keys is a view only where heads come last
        return group, 1
    if splits is None:
        programs = B * (H // group) * -(-T * group // _MOST_ROWS)
        splits = splits_for(programs, S, target_of(call["query"].device).cores)
    return group, splits


def _rearranged(call: Any, options: Options, first: bool, group: int, splits: int) -> tuple[Tensor, Tensor]:
    """The same call on (B * splits, T * group, H / group, D) queries and (B * splits, S / splits, Hkv, D) keys."""
    query, key, value = (call[name] for name in MOVED)
    (B, T, H, D), (_, S, Hkv, Dv) = query.shape, value.shape
    known = Known(B, T, S, group, splits) if "q_segments" not in call else None
    lengths: Any = known_tensors(known, query.device) if known else _packed_lengths(call, group, splits)
    rows: Any = query.reshape(B, T, H // group, group, D).transpose(2, 3).reshape(B, T * group, H // group, D)
    if splits > 1:
        rows = rows[:, None].expand(-1, splits, -1, -1, -1).reshape(B * splits, *rows.shape[1:])
        key, value = (x.view(B * splits, S // splits, Hkv, -1) for x in (key, value))
    moved: Any = {"query": _dense_as(rows, first), "key": key, "value": value}
    arranged: Any = Call(call.spec, {**moved, **lengths})
    found = _program(arranged, options, first, known, torch.float32 if splits > 1 else output_dtype(rows))
    out, lse = found.forward(dict(arranged.arrays))
    if splits > 1:
        out, lse = _merged(out.unflatten(0, (B, splits)), lse.unflatten(0, (B, splits)))
    out = out.reshape(B, T, group, H // group, Dv).transpose(2, 3).reshape(B, T, H, Dv)
    lse = lse.reshape(B, H // group, T, group).transpose(2, 3).reshape(B, H, T)
    return _dense_as(out.to(output_dtype(query)), first), lse.contiguous()


def _packed_lengths(call: Any, group: int, splits: int) -> dict[str, Tensor]:
    """What the call says of its tokens, for the packed and split one."""
    (B, T), found = call["q_segments"].shape, {}
    for name in LENGTHS:
        x = call[name]
        if name.startswith("q"):
            x = x.view(B, 1, T, 1).expand(-1, splits, -1, group).reshape(B * splits, T * group)
        elif splits > 1:
            x = x.view(B * splits, -1)
        found[name] = x.contiguous()
    return found


def _merged(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Parts (B, splits, T, H, Dv) and (B, splits, H, T) by their log-sum-exp; one that saw nothing weighs nothing."""
    top = lse.amax(1, keepdim=True)
    weights = torch.exp(lse - torch.where(torch.isneginf(top), 0.0, top))
    total = weights.sum(1)  # (B, H, T)
    some = total != 0
    safe = torch.where(some, total, 1.0)
    share = (weights / safe[:, None]).transpose(2, 3)[..., None]
    merged = (torch.where(share == 0, 0.0, out) * share).sum(1)
    return merged, torch.where(some, top[:, 0] + torch.log(safe), -torch.inf)
