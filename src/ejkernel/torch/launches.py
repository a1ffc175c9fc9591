"""Calls on CUDA tensors: from what they are given to the launches of a `Program`, and back.

Most calls are launched as they are. With few queries, query heads that share keys become rows of one tile, and keys are
split; both are other shapes of the same call.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ejkernel.kernels.softmax.rules import has_table_gradient
from ejkernel.ops import Call
from ejkernel.torch.calls import (
    Cotangents,
    Gradients,
    Options,
    Tensors,
    are_heads_first,
    canonical,
    layouts_of,
    output_dtype,
)
from ejkernel.torch.cpu import operand_gradients
from ejkernel.torch.few_queries import (
    MOST_ROWS,
    Arrangement,
    arranged_lengths,
    merged_splits,
    splits_for,
    static_lengths_on,
)
from ejkernel.torch.inputs import FLOAT8S
from ejkernel.torch.pattern import Pattern
from ejkernel.torch.programs import MOVED, Kind, Program, program_of, target_of

# A call -----------------------------------------------------------------------------------------------------


def forward(
    tensors: Tensors, options: Options, layouts: Any = None, splits: int | None = None
) -> tuple[Tensor, Tensor]:
    """out and lse. `layouts` are those of q, k and v, where they are known.

    `splits` is into how many the keys are split, by default as many as fill the device.
    """
    query, key, value, *others = tensors
    plain = splits is None and all(x is None for x in others)
    call_key = (layouts or layouts_of(query, key, value), options) if plain else None
    with _current_device(query):
        ready = _READY.get(call_key)
        if ready is not None:
            return ready.forward({"query": query, "key": key, "value": value})
        heads_first, call = _dense(canonical(tensors, options))
        group, splits = _arrangement(call, options, heads_first, splits)
        if (group, splits) != (1, 1):
            return _arranged(call, options, heads_first, group, splits)
        program = _program(call, options, heads_first)
        if plain and all(call[name].data_ptr() == x.data_ptr() for name, x in zip(MOVED, tensors)):
            if len(_READY) >= _MOST_READY:
                _READY.clear()
            _READY[call_key] = program  # the next call like this one has it at once
        return program.forward(dict(call.arrays))


def backward(tensors: Tensors, options: Options, cotangents: Cotangents, needed: Gradients) -> Gradients:
    out, lse, dout, dlse = cotangents
    with _current_device(out):
        heads_first, call = _dense(canonical(tensors, options))
        dense = Cotangents(
            _dense_as(out, heads_first),
            lse.contiguous(),
            _dense_as(dout.to(out.dtype), heads_first),
            None if dlse is None else dlse.float().contiguous(),
        )
        gradients = _program(call, options, heads_first).backward(dict(call.arrays), dense, needed)
        score = call.spec.rules.score
        if score is not None and needed.floats and has_table_gradient(score):
            gradients = gradients._replace(floats=operand_gradients(tensors, options, cotangents, read_values=False))
        return gradients


# programs of plain calls: q, k and v without lengths or sinks, launched on as they lie, neither packed nor split
_READY: dict[Any, Program] = {}
_MOST_READY = 256


_SAME_DEVICE = nullcontext()


def _current_device(x: Tensor) -> Any:
    """Triton launches on the current device, which may be another than a tensor's."""
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return _SAME_DEVICE
    return torch.cuda.device(x.device)


def _dense_as(x: Tensor, heads_first: bool) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2) if heads_first else x.contiguous()


def _dense(call: Any) -> tuple[bool, Any]:
    """Whether heads come first in memory, and the call on dense tensors: others are copied."""
    moved: list[Any] = [call[name] for name in MOVED]
    if moved[1].dtype in FLOAT8S and 0 < target_of(moved[0].device).capability < 89:  # Triton has no float8 there
        wide = torch.bfloat16 if moved[0].dtype in FLOAT8S else moved[0].dtype
        moved = [x.to(wide) for x in moved]
    heads_first = are_heads_first(*moved)
    moved = moved if heads_first else [x.contiguous() for x in moved]
    return heads_first, Call(call.spec, {**call.arrays, **dict(zip(MOVED, moved, strict=True))})


def _program(
    call: Any, options: Options, heads_first: bool, arrangement: Arrangement | None = None, out: Any = None
) -> Program:
    query: Any = call["query"]
    kind = Kind(
        spec=call.spec,
        arrays=tuple((name, x.shape, x.dtype) for name, x in call.arrays.items()),
        pattern=options.pattern,
        tile=(options.block_m, options.block_n),
        heads_first=heads_first,
        device=query.device,
        out=out or output_dtype(query),
        arrangement=arrangement,
        functions=options.functions,
    )
    return program_of(kind)


# Few queries ------------------------------------------------------------------------------------------------


def _arrangement(call: Any, options: Options, heads_first: bool, splits: int | None) -> tuple[int, int]:
    """How many query heads to make rows of, and into how many splits to cut the keys."""
    (B, T, H, _), (_, S, Hkv, _) = call["query"].shape, call["key"].shape
    group = H // Hkv
    pattern = Pattern.known(options.pattern) if options.pattern else None
    by_index = options.functions or "bias" in call or "dropout_seeds" in call
    if by_index or (pattern is not None and pattern.by_index):  # rows and keys of another shape have another index
        return 1, 1
    shared = pattern is None or pattern.shared(Hkv)
    if group == 1 or T * group > MOST_ROWS or "sinks" in call or not shared:
        group = 1
    if heads_first or "sinks" in call:  # a split of the keys is a view only where heads come last
        return group, 1
    if splits is None:
        programs = B * (H // group) * -(-T * group // MOST_ROWS)
        splits = splits_for(programs, S, target_of(call["query"].device).cores)
    return group, splits


def _arranged(call: Any, options: Options, heads_first: bool, group: int, splits: int) -> tuple[Tensor, Tensor]:
    """The same call on (B * splits, T * group, H / group, D) queries and (B * splits, S / splits, Hkv, D) keys."""
    query, key, value = (call[name] for name in MOVED)
    (B, T, H, D), (_, S, Hkv, Dv) = query.shape, value.shape
    static = Arrangement(B, T, S, group, splits) if "q_segments" not in call else None
    lengths: Any = static_lengths_on(static, query.device) if static else arranged_lengths(call, group, splits)
    rows: Any = query.reshape(B, T, H // group, group, D).transpose(2, 3).reshape(B, T * group, H // group, D)
    if splits > 1:
        rows = rows[:, None].expand(-1, splits, -1, -1, -1).reshape(B * splits, *rows.shape[1:])
        key, value = (x.view(B * splits, S // splits, Hkv, -1) for x in (key, value))
    moved: Any = {"query": _dense_as(rows, heads_first), "key": key, "value": value}
    arranged: Any = Call(call.spec, {**moved, **lengths})
    out_dtype = torch.float32 if splits > 1 else output_dtype(rows)
    out, lse = _program(arranged, options, heads_first, static, out_dtype).forward(dict(arranged.arrays))
    if splits > 1:
        out, lse = merged_splits(out.unflatten(0, (B, splits)), lse.unflatten(0, (B, splits)))
    out = out.reshape(B, T, group, H // group, Dv).transpose(2, 3).reshape(B, T, H, Dv)
    lse = lse.reshape(B, H // group, T, group).transpose(2, 3).reshape(B, H, T)
    return _dense_as(out.to(output_dtype(query)), heads_first), lse.contiguous()
